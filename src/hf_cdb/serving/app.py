"""The routes of the server."""

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable
from contextlib import asynccontextmanager

from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, StreamingResponse
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from .answers import Answer, error_content
from .bodies import Body, ChatBody, CompletionBody
from .generation import Generation, RefusedError
from .service import Service

__all__ = ["build_app"]

_GONE = 499  # nobody reads it; nginx logs a client that has gone so


def build_app(service: Service, max_body: int = 4 * 2**20) -> FastAPI:
    """The application, to be run by an ASGI server. It starts the service and stops it.

    Args:
        service: what answers.
        max_body: bytes of a request at most.
    """

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        service.start()
        yield
        await asyncio.to_thread(service.stop)

    app = FastAPI(title="hf-cdb", lifespan=lifespan)
    app.add_middleware(_Arrivals, max_body=max_body)
    app.add_exception_handler(RefusedError, lambda _, error: _error(error.status, str(error)))

    @app.exception_handler(HTTPException)
    async def refuse(_: Request, error: HTTPException) -> Response:
        if error.status_code != _GONE:
            service.metrics.refused()
        if isinstance(error.__cause__, ValueError | RecursionError):  # of what reads the body, which FastAPI hides
            return _error(422, f"body: this is no JSON that can be read: {error.__cause__}.")
        return _error(error.status_code, str(error.detail))

    @app.exception_handler(RequestValidationError)
    async def explain(_: Request, error: RequestValidationError) -> Response:
        service.metrics.refused()
        return _error(422, _reasons(error))

    app.add_exception_handler(Exception, lambda _, error: _error(500, f"the server failed with {error!r}."))

    @app.post("/v1/completions")
    async def completions(request: Request, body: CompletionBody) -> Response:
        return await _answer(service, request, body)

    @app.post("/v1/chat/completions")
    async def chat_completions(request: Request, body: ChatBody) -> Response:
        return await _answer(service, request, body)

    @app.get("/v1/models")
    async def models() -> dict:
        return {
            "object": "list",
            "data": [{"id": service.name, "object": "model", "created": 0, "owned_by": "hf-cdb"}],
        }

    @app.get("/health")
    async def health() -> Response:
        if service.fatal_error is None:
            return JSONResponse({"status": "ok"})
        after = "The next request starts it again." if service.restarts else "Restart the server."
        return JSONResponse(
            {"status": "unhealthy", "reason": f"the model has failed: {service.fatal_error!r}. {after}"}, 503
        )

    @app.get("/metrics")
    async def metrics() -> Response:
        return Response(service.metrics.text(), media_type=CONTENT_TYPE_LATEST)

    return app


async def _answer(service: Service, request: Request, body: Body) -> Response:
    generating = service.generate(body, request.state.arrived)
    if body.stream:
        return _Events(await _while_connected(request, generating))
    return JSONResponse(await _while_connected(request, _whole(generating)))


async def _whole(generating: Awaitable[Generation]) -> dict:
    generation = await generating
    try:
        return await Answer(generation).whole()
    finally:
        generation.close()


async def _while_connected(request: Request, work):
    """What a coroutine returns; it is cancelled when the client goes away."""
    working, gone = asyncio.ensure_future(work), asyncio.ensure_future(_disconnect(request))
    try:
        await asyncio.wait({working, gone}, return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            return working.result()
        raise HTTPException(_GONE, "the client has gone")
    finally:
        working.cancel()
        gone.cancel()


async def _disconnect(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        continue


class _Events(StreamingResponse):
    """A stream that ends its sequences however it ends itself, also before it has begun."""

    def __init__(self, generation: Generation):
        super().__init__(Answer(generation).events(), media_type="text/event-stream")
        self._generation = generation

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._generation.close()


def _error(status: int, message: str) -> JSONResponse:
    # OpenAI's client tries again after many kinds of error, and a deadline would only pass a second time.
    headers = {"x-should-retry": "false"} if status == 504 else {"retry-after": "1"} if status == 429 else None
    return JSONResponse(error_content(status, message), status, headers)


def _reasons(error: RequestValidationError) -> str:
    """Where in the request what is wrong."""
    reasons = []
    for problem in error.errors():
        place = ".".join(str(part) for part in problem["loc"] if part != "body")
        if problem["type"] == "json_invalid":
            reasons.append(f"body: this is no JSON: {problem['ctx']['error']} at character {place}.")
            continue
        given = "" if problem["type"] == "missing" else f" (got {str(problem['input'])[:100]})"
        reasons.append(f"{place or 'body'}: {problem['msg']}{given}")
    return "; ".join(dict.fromkeys(reasons))


class _Arrivals:
    """Notes when all of a request is there, and refuses those that are too long before they are held in memory."""

    def __init__(self, app: ASGIApp, max_body: int):
        self.app, self.max_body = app, max_body

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        read, state = 0, scope.setdefault("state", {})

        async def counted() -> Message:
            nonlocal read
            message = await receive()
            if message["type"] == "http.request":
                state["arrived"] = time.perf_counter()
            read += len(message.get("body", b""))
            if read > self.max_body:
                raise HTTPException(413, f"the request is longer than max_body={self.max_body} bytes.")
            return message

        await self.app(scope, counted if scope["type"] == "http" else receive, send)
