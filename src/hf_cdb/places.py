"""Where the tokens of a launch lie in a pool of keys and values."""

from dataclasses import dataclass
from itertools import accumulate

import numpy
import torch

from .adapters import LoopAdapter

__all__ = ["PACK_BYTES", "SHORT_BYTES", "Pack", "Places", "Segment", "Span", "first_tokens", "last_tokens", "part_of"]

# Measured on the CPU, of the keys and values of a layer: reading a request of up to SHORT_BYTES in a call of its own
# costs more than copying it beside others, of which PACK_BYTES at once stay in the processor's caches; and one call
# less is worth SPLIT_BYTES of padding.
SHORT_BYTES = 1 << 20
PACK_BYTES = 6 << 20
SPLIT_BYTES = 320 << 10


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

    Attributes:
        written: int64 `[capacity]` of a short request: the last core slot that each position has written. Reading
            copies anyway, so it takes the entry of a token that left early from there, and nothing is filled.
    """

    capacity: int
    core: int
    outer: int
    short: bool
    written: numpy.ndarray | None = None


class Pack:
    """Spans of one position, of short requests, that are attended to together on a copy of what they read.

    Attributes:
        tokens: int64 `[spans]`, their tokens in the launch; None where they are all of it, in order.
        rows: int64 `[spans, longest]`, the rows of the pool that they read, padded.
    """

    def __init__(self, rows: torch.Tensor, ends: numpy.ndarray, tokens: torch.Tensor | None, dtype: torch.dtype):
        self.rows, self.tokens = rows, tokens
        self._ends, self._dtype = ends, dtype
        self._masks: dict[int | None, torch.Tensor | None] = {}

    def mask(self, window: int | None) -> torch.Tensor | None:
        """`[spans, 1, 1, longest]`, 0 at what each reads and -inf elsewhere; None where that is everything.

        Args:
            window: the last so many positions only.
        """
        if window not in self._masks:
            self._masks[window] = None
            longest, device = self.rows.shape[1], self.rows.device
            if self._ends.min() < longest or (window is not None and window < longest):
                end = torch.from_numpy(self._ends).to(device)[:, None]
                position = torch.arange(longest, device=device)
                seen = position < end
                seen = seen if window is None else seen & (position >= end - window)
                mask = torch.zeros(seen.shape, dtype=self._dtype, device=device)
                self._masks[window] = mask.masked_fill(~seen, -torch.inf)[:, None, None]
        return self._masks[window]


class Places:
    """Where in a pool the spans of a launch lie, the same in every layer, and how their attention is shared out.

    Args:
        spans: of the launch.
        origins: by span the first row of its request.
        slots: by span the slot of its loop.
        segments: by span the segment of its request.
        layered: whether the rows are those of the core, which has slots.

    Attributes:
        firsts: by span the first row of the slot of its loop.
        segments: as given.
        starts: by span the first of its tokens in the launch.
        by_position: int64 `[tokens of short segments]`, the rows where their new entries go; None without such tokens.
        by_head: int64 `[tokens of other segments * 2 * kv heads]`, where their new entries go in a view of the pool
            with a row for each head; None without such tokens.
        position_tokens, head_tokens: int64, the tokens of the launch that these two store.
        packs: the spans of one position of short requests.
        single: the others, which are attended to one by one.
    """

    def __init__(
        self,
        spans: list[Span],
        origins: list[int],
        slots: list[int],
        segments: list[Segment],
        layered: bool,
        adapter: LoopAdapter,
    ):
        self._spans, self._slots, self.segments = spans, slots, segments
        self._origins, self._layered = origins, layered
        self.firsts = [o + slot * own.capacity for o, slot, own in zip(origins, slots, segments, strict=True)]
        self._device, self._dtype = adapter.device, adapter.dtype
        self._heads = 2 * adapter.kv_heads
        self._row_bytes = self._heads * adapter.head_dim * adapter.dtype.itemsize
        self.starts = [0, *accumulate(span.end - span.start for span in spans)][:-1]
        self.by_position, self.position_tokens = self._written_by_position()
        self.by_head, self.head_tokens = self._written_by_head()

        packable = [own.short and span.end - span.start == 1 for span, own in zip(spans, segments, strict=True)]
        self.single = [index for index, packed in enumerate(packable) if not packed]
        together = [index for index, packed in enumerate(packable) if packed]
        self.packs = [self._pack(indices) for indices in self._groups(together)]

    def _groups(self, together: list[int]) -> list[list[int]]:
        """Share spans out so that little is padded and the copies stay small."""
        if not together:
            return []
        ends = numpy.array([self._spans[index].end for index in together])
        padding = len(ends) * ends.max() - ends.sum()
        most = PACK_BYTES // self._row_bytes
        if padding * self._row_bytes <= SPLIT_BYTES and len(ends) * ends.max() <= most:
            return [together]
        order = numpy.argsort(-ends, kind="stable")
        groups = []
        for first, last in _split(ends[order], max(1, SPLIT_BYTES // self._row_bytes)):
            step = max(1, int(most // ends[order[first]]))
            groups += [order[at : min(at + step, last)] for at in range(first, last, step)]
        return [sorted(together[i] for i in group) for group in groups]

    def _pack(self, indices: list[int]) -> Pack:
        ends = numpy.array([self._spans[index].end for index in indices])
        longest = int(ends.max())
        slots = numpy.zeros((len(indices), longest), dtype=numpy.int64)
        if self._layered:
            for line, index in enumerate(indices):
                end = self._spans[index].end
                numpy.minimum(self.segments[index].written[:end], self._slots[index], out=slots[line, :end])
        capacity = numpy.array([self.segments[index].capacity for index in indices])[:, None]
        origin = numpy.array([self._origins[index] for index in indices])[:, None]
        # What pads is masked; it only has to be memory that has been written.
        position = numpy.minimum(numpy.arange(longest), ends[:, None] - 1)
        rows = torch.from_numpy(origin + slots * capacity + position).to(self._device)
        everything = len(indices) == len(self._spans)  # then in order
        tokens = None if everything else self._tensor([self.starts[index] for index in indices])
        return Pack(rows, ends, tokens, self._dtype)

    def _written_by_position(self) -> tuple[torch.Tensor | None, torch.Tensor]:
        rows, tokens = [], []
        for span, first, segment, token in zip(self._spans, self.firsts, self.segments, self.starts, strict=True):
            if segment.short:
                rows += range(first + span.start, first + span.end)
                tokens += range(token, token + span.end - span.start)
        return self._tensor(rows) if rows else None, self._tensor(tokens)

    def _written_by_head(self) -> tuple[torch.Tensor | None, torch.Tensor]:
        places, tokens = [], []
        for span, first, segment, token in zip(self._spans, self.firsts, self.segments, self.starts, strict=True):
            if not segment.short:
                begin = first * self._heads
                places += [(begin + position, segment.capacity) for position in range(span.start, span.end)]
                tokens += range(token, token + span.end - span.start)
        if not places:
            return None, self._tensor(tokens)
        row, capacity = self._tensor(places).T
        heads = torch.arange(self._heads, device=self._device)
        return (row[:, None] + heads * capacity[:, None]).flatten(), self._tensor(tokens)

    def _tensor(self, values: list) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.long, device=self._device)


def _split(ends: numpy.ndarray, worth: int) -> list[tuple[int, int]]:
    """Ranges of `ends`, which fall, cut wherever a cut saves more than `worth` padded positions."""
    ranges, open_ranges = [], [(0, len(ends))]
    while open_ranges:
        first, last = open_ranges.pop()
        cut = numpy.arange(first + 1, last)
        saved = (last - cut) * (ends[first] - ends[cut])
        best = int(saved.argmax()) if len(cut) else 0
        if len(cut) and saved[best] > worth:
            open_ranges += [(int(cut[best]), last), (first, int(cut[best]))]
        else:
            ranges.append((first, last))
    return ranges
