"""Which positions of which requests a launch runs."""

from collections.abc import Mapping, Sequence

import numpy

__all__ = ["Spans"]


class Spans:
    """Consecutive new positions of every request in a launch; their tokens lie one after the other.

    Of a prompt whose positions leave the loop by themselves a span may be empty, or have gaps.

    Args:
        keys: the requests.
        start, end: int64 `[spans]`, positions `[start, end)`.
        loop: int64 `[spans]`, for the core: the loop that they run, from 1.
        gaps: None where no span is empty or has gaps; else the positions, int64 and rising from `start` to `end - 1`,
            of those that have gaps, by index of the span.

    Attributes:
        lengths: int64 `[spans]`.
        first, last: int64 `[spans]`, their first and last tokens in the launch.
        tokens: of the launch.
        single: every span is one position; always False beside `gaps`.
    """

    def __init__(
        self,
        keys: Sequence[int],
        start: numpy.ndarray,
        end: numpy.ndarray,
        loop: numpy.ndarray,
        gaps: Mapping[int, numpy.ndarray] | None = None,
    ):
        self.keys, self.start, self.end, self.loop, self.gaps = keys, start, end, loop, gaps
        self.lengths = end - start
        for index, own in (gaps or {}).items():
            self.lengths[index] = len(own)
        self.tokens = int(self.lengths.sum())
        self.single = gaps is None and self.tokens == len(keys)
        self.last = numpy.arange(len(keys)) if self.single else self.lengths.cumsum() - 1
        self.first = self.last if self.single else self.last - self.lengths + 1

    def __len__(self) -> int:
        return len(self.keys)

    def take(self, indices: Sequence[int]) -> "Spans":
        """Some of them."""
        keys = [self.keys[index] for index in indices]
        gaps = None
        if self.gaps is not None:
            gaps = {new: self.gaps[old] for new, old in enumerate(indices) if old in self.gaps}
        return Spans(keys, self.start[indices], self.end[indices], self.loop[indices], gaps)

    def runs(self) -> tuple["Spans", numpy.ndarray]:
        """The same tokens in spans without gaps, none of them empty, and the span that each is a part of."""
        if self.gaps is None:
            return self, numpy.arange(len(self))
        of, positions = self.by_token(numpy.arange(len(self))), self.positions()
        first = numpy.flatnonzero(numpy.diff(of, prepend=-1) | (numpy.diff(positions, prepend=-1) != 1))
        last = numpy.append(first[1:], self.tokens) - 1
        of = of[first]
        keys = [self.keys[index] for index in of]
        return Spans(keys, positions[first], positions[last] + 1, self.loop[of]), of

    def by_token(self, values: numpy.ndarray) -> numpy.ndarray:
        """`[tokens]`: a value for each span, repeated for each of its tokens."""
        return values if self.single else values.repeat(self.lengths)

    def positions(self) -> numpy.ndarray:
        """int64 `[tokens]`."""
        if self.single:
            return self.start
        positions = self.by_token(self.start - self.first) + numpy.arange(self.tokens)
        for index, own in (self.gaps or {}).items():
            positions[self.first[index] : self.first[index] + len(own)] = own
        return positions

    def where(self, index: int) -> slice | numpy.ndarray:
        """The positions of one span, as an index: a slice where it has no gaps."""
        if self.gaps and index in self.gaps:
            return self.gaps[index]
        return slice(int(self.start[index]), int(self.end[index]))
