"""A stopwatch that always runs for exactly one part of the work."""

import functools
import time
from collections import defaultdict
from collections.abc import Callable
from typing import Any

__all__ = ["PartClock"]


class PartClock:
    """Shares out the time between `start` and `stop` among parts; every moment belongs to the innermost one.

    Args:
        now: the clock, in seconds; by default the processor time of the thread, in which other processes do not show.
            What reading it takes is found out here and taken off every part.
    """

    def __init__(self, now: Callable[[], float] = time.thread_time) -> None:
        self.now = now
        self._read = min(-now() + now() for _ in range(100))
        self._seconds: dict[str, float] = defaultdict(float)
        self._stack: list[str] = []
        self._since = 0.0

    def start(self, part: str) -> None:
        """Begin; what nobody else claims falls to `part`."""
        self._seconds.clear()
        self._stack = [part]
        self._since = self.now()

    def stop(self) -> dict[str, float]:
        """End; seconds by part. They add up to the time since `start`."""
        self._switch()
        self._stack = []
        return dict(self._seconds)

    def enter(self, part: str) -> None:
        """From now on time is spent by `part`."""
        self._switch()
        self._stack.append(part)

    def leave(self, then: str | None = None) -> None:
        """The part entered last is done; the one before it goes on, by the name `then` where one is given."""
        self._switch()
        self._stack.pop()
        if then is not None:
            self._stack[-1] = then

    def watch(self, owner: Any, name: str, part: str, then: str | None = None) -> None:
        """Have every call of the method `name` of this object count as `part`; see `leave` for `then`.

        Raises:
            AttributeError: the object has no such method.
        """
        method = getattr(owner, name)

        @functools.wraps(method)
        def watched(*args, **kwargs):
            if not self._stack:
                return method(*args, **kwargs)
            self.enter(part)
            try:
                return method(*args, **kwargs)
            finally:
                self.leave(then)

        setattr(owner, name, watched)

    def _switch(self) -> None:
        now = self.now()
        if self._stack:
            self._seconds[self._stack[-1]] += now - self._since - self._read
        self._since = now
