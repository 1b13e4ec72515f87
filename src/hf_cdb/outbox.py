"""Outputs of requests on their way from the thread that makes them to whoever asks for them."""

import asyncio
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable
from typing import Any

from transformers.generation.continuous_batching.requests import GenerationOutput

__all__ = ["Outbox"]


class Outbox:
    """Hands every output to the handler of its request, or keeps it until somebody fetches it.

    Outputs of a request hold all of its tokens so far, so one that nobody has fetched is replaced by the next: a slow
    reader misses no token and costs no memory.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._outputs: OrderedDict[str, GenerationOutput] = OrderedDict()  # by request, the oldest waiting first
        self._handlers: dict[str, _Handler] = {}
        self._more = False

    def open(self) -> None:
        """From now on outputs may come."""
        with self._changed:
            self._more = True

    def close(self) -> None:
        """No more outputs come: who waits for one is woken."""
        with self._changed:
            self._more = False
            self._changed.notify_all()

    def __len__(self) -> int:
        """Requests with an output that waits."""
        return len(self._outputs)

    def put(self, output: GenerationOutput) -> None:
        """Hand an output on.

        Raises:
            Exception: what the request's handler raised, or that its event loop is closed; the handler is gone then.
        """
        name = output.request_id
        with self._changed:
            handler = self._handlers.get(name)
            if handler is None:
                self._outputs[name] = output
                self._changed.notify_all()
                return
            if output.is_finished():
                del self._handlers[name]
        try:
            handler.put(output)
        except Exception:
            self._forget(name)
            raise

    def get(self, request_id: str | None = None, timeout: float | None = None) -> GenerationOutput | None:
        """Take the output that waits longest, of this request or of any; None where none comes.

        Args:
            request_id: of one request only.
            timeout: seconds to wait at most; None waits for as long as outputs may come.
        """
        ends = None if timeout is None else time.monotonic() + timeout
        with self._changed:
            while True:
                if request_id is None and self._outputs:
                    return self._outputs.popitem(last=False)[1]
                if request_id in self._outputs:
                    return self._outputs.pop(request_id)
                left = None if ends is None else ends - time.monotonic()
                if not self._more or (left is not None and left <= 0):
                    return None
                self._changed.wait(left)

    def register(
        self, request_id: str, callback: Callable[[GenerationOutput], Any], failed: Callable[[str, Exception], Any]
    ) -> None:
        """Have the outputs of a request handed to `callback`, beginning with one that waits.

        Args:
            callback: called in the event loop that is running where this is called; without one in the thread that
                makes outputs.
            failed: told when the callback has raised in its event loop; it is not called again then.
        """
        try:
            loop = asyncio.get_running_loop()
        except RuntimeError:
            loop = None

        def gone(error: Exception) -> None:
            self._forget(request_id)
            failed(request_id, error)

        handler = _Handler(callback, loop, gone)
        with self._changed:
            waiting = self._outputs.pop(request_id, None)
            if waiting is None or not waiting.is_finished():
                self._handlers[request_id] = handler
            if waiting is not None:  # within the lock, before any newer one
                handler.put(waiting)

    def _forget(self, request_id: str) -> None:
        with self._changed:
            self._handlers.pop(request_id, None)


class _Handler:
    """A callback, and the event loop that it is called in; None is the calling thread."""

    def __init__(
        self,
        callback: Callable[[GenerationOutput], Any],
        loop: asyncio.AbstractEventLoop | None,
        gone: Callable[[Exception], Any],
    ):
        self._callback, self._loop, self._gone = callback, loop, gone
        # Of one output at most, as the outbox itself.
        self._waiting: deque[GenerationOutput] = deque(maxlen=1)

    def put(self, output: GenerationOutput) -> None:
        if self._loop is None:
            self._callback(output)
            return
        self._waiting.append(output)
        self._loop.call_soon_threadsafe(self._call)

    def _call(self) -> None:
        if not self._waiting:
            return
        try:
            self._callback(self._waiting.pop())
        except Exception as error:
            self._gone(error)
            raise  # for the event loop to report
