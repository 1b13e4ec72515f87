"""Outputs of requests on their way from the thread that makes them to whoever asks for them."""

import asyncio
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any

from transformers.generation.continuous_batching.requests import GenerationOutput

from .jobs import parent_of

__all__ = ["Outbox"]


class Outbox:
    """Hands every output to the handler of its sequence, or keeps it until somebody fetches it.

    Outputs of a sequence hold all of its tokens so far, so one that nobody has fetched is replaced by the next: a slow
    reader misses no token and costs no memory.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._outputs: OrderedDict[str, GenerationOutput] = OrderedDict()  # by sequence, the oldest waiting first
        self._handlers: dict[str, _Handler] = {}
        self._coming: set[str] = set()  # sequences whose last output is still to come
        self._open = False

    def open(self) -> None:
        """From now on outputs may come."""
        with self._changed:
            self._open = True

    def close(self) -> None:
        """No more outputs come: who waits for one is woken."""
        with self._changed:
            self._open = False
            self._changed.notify_all()

    def __len__(self) -> int:
        """Sequences with an output that waits."""
        return len(self._outputs)

    def expect(self, names: Sequence[str]) -> None:
        """Outputs of these sequences will come, up to a last one of each.

        Raises:
            ValueError: one has the name of an older one whose last output is still to come, or to be fetched.
        """
        with self._changed:
            for name in names:
                if self.knows(name):
                    raise ValueError(
                        f"request_id={name!r} names a request whose output is still to come, or to be fetched. Fetch "
                        "it, choose another name, or leave it out."
                    )
            self._coming.update(names)

    def knows(self, name: str) -> bool:
        """Whether an output of this sequence is still to come, or to be fetched."""
        return name in self._coming or name in self._outputs

    def put(self, output: GenerationOutput) -> None:
        """Hand an output on.

        Raises:
            BaseException: what the sequence's handler raised, or that its event loop is closed.
        """
        name, last = output.request_id, output.is_finished()
        with self._changed:
            handler = self._handlers.get(name)
            if handler is None:
                self._outputs[name] = output
            elif last:
                del self._handlers[name]
            if last:
                self._coming.discard(name)
            self._changed.notify_all()
        if handler is None:
            return
        try:
            handler.put(output)
        except BaseException:
            if handler.loop is None:  # else nobody is left who could fetch what comes
                self.forget(name)
            raise

    def get(self, request_id: str | None = None, timeout: float | None = None) -> GenerationOutput | None:
        """Take the output that waits longest, of this sequence or of any; None where none comes.

        Args:
            request_id: of one sequence only.
            timeout: seconds to wait at most; None waits for as long as outputs may come.
        """
        ends = None if timeout is None else time.monotonic() + timeout
        with self._changed:
            while True:
                if request_id is None and self._outputs:
                    return self._outputs.popitem(last=False)[1]
                if request_id in self._outputs:
                    return self._outputs.pop(request_id)
                coming = self._open and (request_id is None or request_id in self._coming)
                left = None if ends is None else ends - time.monotonic()
                if not coming or (left is not None and left <= 0):
                    return None
                self._changed.wait(left)

    def register(
        self, name: str, callback: Callable[[GenerationOutput], Any], failed: Callable[[str, BaseException], Any]
    ) -> None:
        """Have the outputs of a sequence handed to `callback`, beginning with one that waits, which is handed over
        before this returns.

        Args:
            callback: called in the event loop that is running where this is called; without one in the thread that
                makes outputs.
            failed: told when the callback has raised in its event loop; it is not called again then.

        Raises:
            ValueError: the sequence has a handler.
            BaseException: what the callback raises for the output that waits; `failed` has been told.
        """
        try:
            loop = asyncio.get_running_loop()
        except RuntimeError:
            loop = None

        def gone(error: BaseException) -> None:
            self.forget(name)
            failed(name, error)

        handler = _Handler(callback, loop, gone)
        while True:
            with self._changed:
                if name in self._handlers:
                    raise ValueError(f"request_id={name!r} has a result handler: its outputs go there. Choose another.")
                waiting = self._outputs.pop(name, None)
                if waiting is None:
                    self._handlers[name] = handler
                    return
            try:
                handler.put(waiting)  # outside of the lock: it may do anything
            except BaseException as error:
                failed(name, error)
                raise
            if waiting.is_finished():
                return

    def forget(self, name: str) -> None:
        """Drop the handler of a sequence; its outputs wait from now on."""
        with self._changed:
            self._handlers.pop(name, None)

    def forget_all_of(self, request_id: str) -> None:
        """Drop the handlers of a request and of its children, where none of their outputs is to come."""
        with self._changed:
            for name in [name for name in self._handlers if parent_of(name) == request_id]:
                if name not in self._coming:
                    del self._handlers[name]


class _Handler:
    """A callback, and the event loop that it is called in; None is the calling thread."""

    def __init__(
        self,
        callback: Callable[[GenerationOutput], Any],
        loop: asyncio.AbstractEventLoop | None,
        gone: Callable[[BaseException], Any],
    ):
        self.loop = loop
        self._callback, self._gone = callback, gone
        self._lock = threading.Lock()
        self._waiting: GenerationOutput | None = None  # for a loop that is busy: the newest only, as in the outbox

    def put(self, output: GenerationOutput) -> None:
        if self.loop is None:
            self._callback(output)
            return
        with self._lock:
            called = self._waiting is not None
            self._waiting = output
        if not called:
            self.loop.call_soon_threadsafe(self._call)

    def _call(self) -> None:
        with self._lock:
            output, self._waiting = self._waiting, None
        try:
            self._callback(output)
        except BaseException as error:
            self._gone(error)
            raise  # for the event loop to report
