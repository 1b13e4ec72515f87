"""Replicas of the server behind one endpoint, by Ray Serve:

    serve run hf_cdb.ray_serving:application model=tiny-ouro replicas=2

Needs the packages of `pip install 'hf-cdb[ray]'`; nothing else imports this.
"""

import asyncio
import json
from collections import deque
from collections.abc import AsyncIterator
from typing import Annotated, Any

import torch
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, NonNegativeFloat, PositiveFloat, PositiveInt
from ray import serve
from ray.exceptions import RayActorError
from ray.serve import Application
from ray.serve.handle import DeploymentHandle
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse

from .config import CDBConfig
from .evaluation.run import load_model_to_evaluate
from .manager import CDBManager
from .serving.answers import error_content
from .serving.app import build_app
from .serving.service import Service

__all__ = ["ReplicaSettings", "application"]

_ATTEMPTS = 3  # replicas that a request may cost


def _from_json(value: Any) -> Any:
    """`serve run` hands over texts, a Serve config file whatever YAML has."""
    return json.loads(value) if isinstance(value, str) else value


class ReplicaSettings(BaseModel):
    """What `serve run` may be given, as NAME=VALUE, and a Serve config file as `args`.

    Attributes:
        model: "tiny-ouro", "tiny-huginn", a folder or a Hub id; every machine has to have it.
        revision, dtype, device: of the model.
        name: what clients call it; default `model`.
        cdb: settings of cdb, over the saved ones of the model; JSON.
        replicas: processes, each with a model and a manager.
        num_cpus, num_gpus: that Ray keeps for a replica.
        threads: torch threads of a replica.
        max_queue: sequences of a replica at most; more are refused with status 429.
        max_body: bytes of a request at most.
        restarts: how often a replica goes on after an error of the model; then Ray starts another in its place.
        health_check_period: seconds between two looks at whether a replica lives.
    """

    model_config = ConfigDict(extra="forbid")

    model: str
    revision: str | None = None
    dtype: str = "float32"
    device: str = "cpu"
    name: str | None = None
    cdb: Annotated[dict[str, Any], BeforeValidator(_from_json)] = Field(default_factory=dict)
    replicas: PositiveInt = 1
    num_cpus: NonNegativeFloat = 1.0
    num_gpus: NonNegativeFloat = 0.0
    threads: PositiveInt = 1
    max_queue: PositiveInt = 1024
    max_body: PositiveInt = 4 * 2**20
    restarts: int = Field(default=3, ge=0)
    health_check_period: PositiveFloat = 1.0


class _Replica:
    """A model, its manager and the server's application, in a process of their own."""

    def __init__(self, settings: ReplicaSettings):
        torch.set_num_threads(settings.threads)
        model, tokenizer = load_model_to_evaluate(settings.model, settings.revision, settings.dtype, settings.device)
        manager = CDBManager(model, cdb=settings.cdb or True)
        name = settings.name or settings.model
        self._service = Service(model, tokenizer, name, manager, settings.max_queue, settings.restarts)
        self._app = build_app(self._service, settings.max_body)
        self._service.start()

    def check_health(self) -> None:
        """Asked by Ray again and again; it ends a replica that raises, and starts another.

        Raises:
            RuntimeError: the model has failed too often.
        """
        if self._service.fatal_error is not None and not self._service.restarts:
            raise RuntimeError(f"the model has failed: {self._service.fatal_error!r}.")

    async def answer(self, scope: dict[str, Any], body: bytes) -> AsyncIterator[dict[str, Any]]:
        """What the application sends for a request, in the form of ASGI. To stop reading is to disconnect."""
        given = deque([{"type": "http.request", "body": body}])
        messages: asyncio.Queue = asyncio.Queue()

        async def receive() -> dict[str, Any]:
            return given.popleft() if given else await asyncio.Future()  # a disconnect cancels what follows

        async def work() -> None:
            try:
                await self._app(scope, receive, messages.put)
            finally:
                messages.put_nowait(None)

        working = asyncio.create_task(work())
        try:
            while (message := await messages.get()) is not None:
                yield message
        finally:
            working.cancel()


class _Endpoint:
    """Hands requests to replicas, and those that a replica died of before it had begun to answer to another.

    That is safe: a request changes nothing, and its seed decides what is drawn.
    """

    def __init__(self, replicas: DeploymentHandle, max_body: int):
        self._replicas, self._max_body = replicas.options(stream=True), max_body

    async def __call__(self, request: Request) -> Response:
        body = bytearray()
        async for piece in request.stream():
            body += piece
            if len(body) > self._max_body:
                return JSONResponse(
                    error_content(413, f"the request is longer than max_body={self._max_body} bytes."), 413
                )
        known = ("type", "method", "path", "query_string", "headers", "http_version", "scheme")
        scope = {name: request.scope[name] for name in known}
        for _ in range(_ATTEMPTS):
            messages = self._replicas.answer.remote(scope, bytes(body))
            try:
                start = await anext(messages)
            except RayActorError as error:
                cause = error
                continue
            response = StreamingResponse(self._content(messages, start), start["status"])
            response.raw_headers = start["headers"]
            return response
        return JSONResponse(error_content(503, f"{_ATTEMPTS} replicas have died of this request: {cause}"), 503)

    async def _content(self, messages: AsyncIterator[dict[str, Any]], start: dict[str, Any]) -> AsyncIterator[bytes]:
        try:
            async for message in messages:
                yield message.get("body", b"")
        except RayActorError as error:
            if not any(name == b"content-type" and b"event-stream" in value for name, value in start["headers"]):
                raise
            reason = f"the replica that answered has died: {error}"
            yield f"data: {json.dumps(error_content(503, reason))}\n\n".encode()


def application(settings: ReplicaSettings) -> Application:
    """The server of `hf_cdb.serving` in as many processes as are asked for, for `ray.serve.run` and `serve run`.

    Raises:
        ValueError: settings of cdb that do not exist, are out of their range or contradict each other.
    """
    CDBConfig.create(settings.cdb)
    replicas = serve.deployment(
        _Replica,
        name="replica",
        num_replicas=settings.replicas,
        max_ongoing_requests=settings.max_queue,
        health_check_period_s=settings.health_check_period,
        ray_actor_options={"num_cpus": settings.num_cpus, "num_gpus": settings.num_gpus},
    )
    endpoint = serve.deployment(
        _Endpoint,
        name="endpoint",
        max_ongoing_requests=settings.replicas * settings.max_queue,
        ray_actor_options={"num_cpus": 0},
    )
    return endpoint.bind(replicas.bind(settings), settings.max_body)
