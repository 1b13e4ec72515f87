"""Where the tokens of a launch lie in a pool of keys and values."""

from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate

import torch

from .adapters import LoopAdapter

__all__ = ["PACK_BYTES", "SHORT_BYTES", "Places", "Segment", "Span", "first_tokens", "last_tokens", "part_of"]

# Measured on the CPU, of the keys and values of a row and layer: up to PACK_BYTES copying them costs less than a call
# of their own; a request of up to SHORT_BYTES in all lies in memory as copying needs it.
PACK_BYTES = 160 * 1024
SHORT_BYTES = 4 * PACK_BYTES


@dataclass
class Span:
    """Consecutive new positions of one request in a launch.

    Attributes:
        key: the request.
        start, end: positions `[start, end)`.
        loop: for the core: the loop they run, from 1.
    """

    key: int
    start: int
    end: int
    loop: int = 1


def part_of(tensor: torch.Tensor, span: Span) -> torch.Tensor:
    """The rows of a request's tensor that a span covers."""
    length = span.end - span.start
    return tensor if length == len(tensor) else tensor[span.start : span.end]


def first_tokens(spans: list[Span], indices: list[int]) -> list[int]:
    """Where in the launch the spans `indices` begin."""
    offsets = [0]
    for span in spans:
        offsets.append(offsets[-1] + span.end - span.start)
    return [offsets[index] for index in indices]


def last_tokens(spans: list[Span], indices: list[int]) -> list[int]:
    """Where in the launch the spans `indices` end."""
    lengths = [spans[index].end - spans[index].start for index in indices]
    return [first + length - 1 for first, length in zip(first_tokens(spans, indices), lengths, strict=True)]


@dataclass
class Segment:
    """A request's share of the pools: `slots * capacity` rows from `core` and `capacity` rows from `outer` on, each as
    wide as all keys and values of a position.

    In a short request a row is a position, `[2, kv heads, head dim]`, which copying needs. In others the memory of a
    slot is `[2, kv heads, capacity, head dim]`: a head is one stretch, which long reads need.
    """

    capacity: int
    core: int
    outer: int
    short: bool


class Places:
    """Where in a pool the spans of a launch lie, the same in every layer, and how their attention is shared out.

    Attributes:
        firsts: by span the first row of the slot of its loop.
        segments: by span the segment of its request.
        by_position: int64 `[tokens of short segments]`, the rows where their new entries go; None without such tokens.
        by_head: int64 `[tokens of other segments * 2 * kv heads]`, where their new entries go in a view of the pool
            with a row for each head; None without such tokens.
        position_tokens, head_tokens: int64, the tokens of the launch that these two store.
        packed: spans of one position that are attended to together, on a packed copy; fewer than two are not.
        packed_tokens: int64 `[packed spans]`, their tokens in the launch, or None where they are all of it.
    """

    def __init__(self, spans: list[Span], firsts: list[int], segments: list[Segment], adapter: LoopAdapter):
        self.firsts, self.segments = firsts, segments
        self._device, self._dtype = adapter.device, adapter.dtype
        self._spans, self._heads = spans, 2 * adapter.kv_heads
        self.by_position, self.position_tokens = self._written_by_position()
        self.by_head, self.head_tokens = self._written_by_head()

        most = PACK_BYTES // (self._heads * adapter.head_dim * adapter.dtype.itemsize)
        pairs = enumerate(zip(spans, segments, strict=True))
        self.packed = [i for i, (span, own) in pairs if own.short and span.end - span.start == 1 and span.end <= most]
        self.packed = self.packed if len(self.packed) > 1 else []
        self.packed_tokens = None
        if len(self.packed) < len(spans):
            self.packed_tokens = self._tensor([self._starts()[i] for i in self.packed])
        self._ends = [spans[i].end for i in self.packed]
        self._masks: dict[int | None, torch.Tensor | None] = {}

    @cached_property
    def packed_rows(self) -> torch.Tensor:
        """int64 `[packed spans, longest]`: the rows of everything that the packed spans read."""
        first = self._tensor([self.firsts[i] for i in self.packed])[:, None]
        last = self._tensor(self._ends)[:, None] - 1
        return first + torch.minimum(torch.arange(max(self._ends), device=self._device), last)

    def packed_mask(self, window: int | None) -> torch.Tensor | None:
        """`[packed spans, 1, 1, longest]`, 0 at what each reads and -inf elsewhere; None where that is everything.

        Args:
            window: the last so many positions only.
        """
        if window not in self._masks:
            self._masks[window] = None
            longest = max(self._ends)
            if min(self._ends) < longest or (window is not None and window < longest):
                end = torch.tensor(self._ends, device=self._device)[:, None]
                position = torch.arange(longest, device=self._device)
                seen = position < end
                seen = seen if window is None else seen & (position >= end - window)
                mask = torch.zeros(seen.shape, dtype=self._dtype, device=self._device)
                self._masks[window] = mask.masked_fill(~seen, -torch.inf)[:, None, None]
        return self._masks[window]

    def _written_by_position(self) -> tuple[torch.Tensor | None, torch.Tensor]:
        rows, tokens = [], []
        for span, first, segment, token in zip(self._spans, self.firsts, self.segments, self._starts(), strict=True):
            if segment.short:
                rows += range(first + span.start, first + span.end)
                tokens += range(token, token + span.end - span.start)
        return self._tensor(rows) if rows else None, self._tensor(tokens)

    def _written_by_head(self) -> tuple[torch.Tensor | None, torch.Tensor]:
        places, tokens = [], []
        for span, first, segment, token in zip(self._spans, self.firsts, self.segments, self._starts(), strict=True):
            if not segment.short:
                begin = first * self._heads
                places += [(begin + position, segment.capacity) for position in range(span.start, span.end)]
                tokens += range(token, token + span.end - span.start)
        if not places:
            return None, self._tensor(tokens)
        row, capacity = self._tensor(places).T
        heads = torch.arange(self._heads, device=self._device)
        return (row[:, None] + heads * capacity[:, None]).flatten(), self._tensor(tokens)

    def _starts(self) -> list[int]:
        """By span the first of its tokens in the launch."""
        return [0, *accumulate(span.end - span.start for span in self._spans)][:-1]

    def _tensor(self, values: list) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.long, device=self._device)
