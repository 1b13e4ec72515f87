"""Where the tokens of a launch lie in a pool of keys and values."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import numpy
import torch

from .adapters import LoopAdapter
from .flash import PageTable
from .kv_policy import KVPolicy
from .spans import Spans
from .transfer import to_device

__all__ = ["PACK_BYTES", "SHORT_BYTES", "Pack", "Places", "Segment"]

# Measured, on the CPU, of the keys and values of a layer: reading a request of up to SHORT_BYTES in a call of its own
# costs more than copying it beside others, of which PACK_BYTES at once stay in the processor's caches; and one call
# less is worth SPLIT_BYTES of padding.
SHORT_BYTES = 1 << 20
PACK_BYTES = 6 << 20
SPLIT_BYTES = 320 << 10
# Elsewhere, not measured: requests of any length are packed, since calls of their own would cost most; the copy is
# bounded by the memory that it takes, and ten microseconds of a call are worth what is read in them.
DEVICE_PACK_BYTES = 1 << 30
DEVICE_SPLIT_BYTES = 16 << 20


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


class Pack:
    """Spans of one position, of short requests, that are attended to together on a copy of what they read.

    Attributes:
        tokens: int64 `[spans]`, their tokens in the launch; None where they are all of it, in order.
        rows: int64 `[spans, longest]`, the rows of the pool that they read, padded.
        recorded: gives the positions `[spans, longest]` that lie in these rows; None where they are in order.
    """

    def __init__(
        self,
        rows: torch.Tensor,
        ends: numpy.ndarray,
        tokens: torch.Tensor | None,
        dtype: torch.dtype,
        recorded: Callable[[], numpy.ndarray] | None = None,
    ):
        self.rows, self.tokens, self.recorded = rows, tokens, recorded
        self._ends, self._dtype = ends, dtype
        self._masks: dict[int | None, torch.Tensor | None] = {}

    def mask(self, window: int | None) -> torch.Tensor | None:
        """`[spans, 1, 1, longest]`, 0 at what each reads and -inf elsewhere; None where that is everything.

        Args:
            window: the last so many positions only.
        """
        if window not in self._masks:
            self._masks[window] = None
            longest, end = self.rows.shape[1], self._ends[:, None]
            if self._ends.min() < longest or (window is not None and window < longest):
                index = numpy.arange(longest)
                seen = index < end
                if window is not None:
                    seen &= (index if self.recorded is None else self.recorded()) >= end - window
                mask = torch.from_numpy(numpy.where(seen, numpy.float32(0), numpy.float32(-numpy.inf)))
                self._masks[window] = to_device(mask.to(self._dtype), self.rows.device)[:, None, None]
        return self._masks[window]


class Places:
    """Where in a pool the spans of a launch lie, the same in every layer, and how their attention is shared out.

    Args:
        spans: of the launch.
        segments: by span the segment of its request.
        kind: "core", or "outer" for the layers before and after the loop, which have one slot.
        policy: slot arithmetic of the core.
        written: int16 `[rows of the core's pool]`, at the first `capacity` rows of a short request: the last slot that
            each of its positions has written. Reading copies anyway, so it takes the entry of a token that left early
            from there, and nothing is filled.
        paged: attention reads the pool by pages, see `table`, and `packs` and `single` are empty.

    Attributes:
        firsts: int64 `[spans]`, the first row of the slot of its loop.
        segments: as given.
        by_position: int64 `[tokens of short segments]`, the rows where their new entries go; None without such tokens.
        by_head: int64 `[tokens of other segments * 2 * kv heads]`, where their new entries go in a view of the pool
            with a row for each head; None without such tokens.
        position_tokens, head_tokens: int64, the tokens of the launch that these two store; None where that is all.
        packs: the spans of one position of short requests.
        single: the others, which are attended to one by one.
        split: spans of one position that read two stretches of the pool; none in this layout.
    """

    def __init__(
        self,
        spans: Spans,
        segments: list[Segment],
        kind: str,
        policy: KVPolicy,
        written: numpy.ndarray,
        adapter: LoopAdapter,
        paged: bool = False,
    ):
        self._spans, self.segments, self._kind, self._written = spans, segments, kind, written
        self._device, self._dtype = adapter.device, adapter.dtype
        self._heads = 2 * adapter.kv_heads
        self._row_bytes = self._heads * adapter.head_dim * adapter.dtype.itemsize
        self._origins = numpy.array([getattr(own, kind) for own in segments])
        self._capacities = numpy.array([own.capacity for own in segments])
        self._slots = policy.slot(spans.loop) if kind == "core" else numpy.zeros_like(spans.loop)
        self.firsts = self._origins + self._slots * self._capacities
        short = numpy.array([own.short for own in segments])
        self._address_writes(short, spans.positions())
        self.packs, self.single, self.split = [], [], []
        if not paged:
            self._share_out(short)

    @cached_property
    def table(self) -> PageTable:
        """What the spans read, by pages of the pool."""
        runs, of = self._spans.runs()
        return PageTable.create(runs, self.firsts[of], self._device)

    def _share_out(self, short: numpy.ndarray) -> None:
        """Spans of one position of short requests are packed, the others attended to one by one."""
        packable = short & (self._spans.lengths == 1)
        self.single = [] if packable.all() else numpy.flatnonzero(~packable).tolist()
        self.packs = [self._pack(indices) for indices in self._groups(numpy.flatnonzero(packable))]

    def _address_writes(self, short: numpy.ndarray, places: numpy.ndarray) -> None:
        """Where every token goes: `[tokens]` places in the slot that `firsts` names."""
        self.by_position = self.by_head = self.position_tokens = self.head_tokens = None
        spans, short = self._spans, self._spans.by_token(short)
        rows = spans.by_token(self.firsts)
        if short.all():
            self.by_position = self._tensor(rows + places)
            return
        capacities = spans.by_token(self._capacities)[~short, None]
        heads = (rows[~short, None]) * self._heads + numpy.arange(self._heads) * capacities
        self.by_head = self._tensor((heads + places[~short, None]).ravel())
        if short.any():
            self.by_position = self._tensor((rows + places)[short])
            self.position_tokens = self._tensor(numpy.flatnonzero(short))
            self.head_tokens = self._tensor(numpy.flatnonzero(~short))

    def _groups(self, together: numpy.ndarray) -> list[numpy.ndarray]:
        """Share spans out so that little is padded and the copies stay small."""
        if not len(together):
            return []
        ends = self._spans.end[together]
        on_cpu = self._device.type == "cpu"
        pack, split = (PACK_BYTES, SPLIT_BYTES) if on_cpu else (DEVICE_PACK_BYTES, DEVICE_SPLIT_BYTES)
        longest, most = ends.max(), pack // self._row_bytes
        padding = len(ends) * longest - ends.sum()
        if padding * self._row_bytes <= split and len(ends) * longest <= most:
            return [together]
        order = numpy.argsort(-ends, kind="stable")
        groups = []
        for first, last in _split(ends[order], max(1, split // self._row_bytes)):
            step = max(1, int(most // ends[order[first]]))
            groups += [together[numpy.sort(order[at : min(at + step, last)])] for at in range(first, last, step)]
        return groups

    def _pack(self, indices: numpy.ndarray) -> Pack:
        ends = self._spans.end[indices]
        # What pads is masked; it only has to be memory that has been written.
        places = numpy.minimum(numpy.arange(int(ends.max())), ends[:, None] - 1)
        rows, recorded = self._read(indices, places)
        everything = len(indices) == len(self._spans)  # then in order
        tokens = None if everything else self._tensor(self._spans.first[indices])
        return Pack(self._tensor(rows), ends, tokens, self._dtype, recorded)

    def _read(
        self, indices: numpy.ndarray, places: numpy.ndarray
    ) -> tuple[numpy.ndarray, Callable[[], numpy.ndarray] | None]:
        """The rows of the pool with the entries `places` of what the spans `indices` read, and what gives their
        positions where these are others."""
        rows = self._origins[indices, None] + places
        if self._kind == "core":
            slots = numpy.minimum(self._written[rows], self._slots[indices, None])
            rows += slots * self._capacities[indices, None]
        return rows, None

    def _tensor(self, values: numpy.ndarray) -> torch.Tensor:
        return to_device(torch.from_numpy(values), self._device)


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
