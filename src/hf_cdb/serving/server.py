"""The HTTP server around the application."""

import asyncio
import signal
from types import FrameType
from typing import Any

import uvicorn

from .app import build_app
from .service import Service

__all__ = ["Server"]

_LAST_WORDS = 5  # seconds for answers to tell that they were ended, before they are cut


class Server(uvicorn.Server):
    """Stops listening when it is told to end, gives the answers under way some time to finish, and then ends them, of
    which they still tell.

    Args:
        service: what answers.
        max_body: bytes of a request at most.
        grace: seconds to finish.
        **options: of `uvicorn.Config`.
    """

    def __init__(self, service: Service, max_body: int, grace: int, **options: Any):
        application = build_app(service, max_body)
        super().__init__(uvicorn.Config(application, timeout_graceful_shutdown=grace + _LAST_WORDS, **options))
        self._service, self._grace = service, grace

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """As uvicorn calls it at SIGTERM and SIGINT; a second SIGINT ends at once. uvicorn's own would raise them once
        more when all is done, so that an end that was asked for would look like a failure."""
        self.force_exit = self.should_exit and sig == signal.SIGINT
        self.should_exit = True

    async def shutdown(self, sockets: list | None = None) -> None:
        """As uvicorn calls it when it is told to end."""
        loop = asyncio.get_running_loop()
        ending = loop.call_later(self._grace, loop.run_in_executor, None, self._service.stop)
        await super().shutdown(sockets)
        ending.cancel()
