"""Which positions of which requests a launch runs."""

from collections.abc import Sequence

import numpy

__all__ = ["Spans"]


class Spans:
    """Consecutive new positions of every request in a launch; their tokens lie one after the other.

    Args:
        keys: the requests.
        start, end: int64 `[spans]`, positions `[start, end)`.
        loop: int64 `[spans]`, for the core: the loop that they run, from 1.

    Attributes:
        lengths: int64 `[spans]`.
        first, last: int64 `[spans]`, their first and last tokens in the launch.
        tokens: of the launch.
        single: whether every span is one position.
    """

    def __init__(self, keys: Sequence[int], start: numpy.ndarray, end: numpy.ndarray, loop: numpy.ndarray):
        self.keys, self.start, self.end, self.loop = keys, start, end, loop
        self.lengths = end - start
        self.tokens = int(self.lengths.sum())
        self.single = self.tokens == len(keys)
        self.last = numpy.arange(len(keys)) if self.single else self.lengths.cumsum() - 1
        self.first = self.last if self.single else self.last - self.lengths + 1

    def __len__(self) -> int:
        return len(self.keys)

    def take(self, indices: Sequence[int]) -> "Spans":
        """Some of them."""
        keys = [self.keys[index] for index in indices]
        return Spans(keys, self.start[indices], self.end[indices], self.loop[indices])

    def by_token(self, values: numpy.ndarray) -> numpy.ndarray:
        """`[tokens]`: a value for each span, repeated for each of its tokens."""
        return values if self.single else values.repeat(self.lengths)

    def positions(self) -> numpy.ndarray:
        """int64 `[tokens]`."""
        return self.start if self.single else self.by_token(self.start - self.first) + numpy.arange(self.tokens)
