"""The cache whose memory follows depth: `kv_layout="compact"`."""

from collections.abc import Callable, Hashable, Sequence
from dataclasses import replace
from functools import partial

import numpy
import torch

from .adapters import LoopAdapter
from .cache import DepthCache
from .lazy_pool import LazyPool
from .places import Places, Segment
from .saved_kv import SavedArrays
from .slot_arrays import SlotArrays
from .spans import Spans
from .transfer import to_device

__all__ = ["CompactCache"]


class CompactCache(DepthCache):
    """A `DepthCache` for `last_exited` that keeps, of every position, only the entries of the loops it ran.

    The layers of the core lie in `SlotArrays`; those before and after the loop, which every token runs once, as in any
    other cache. `Segment.core` is the number of a request's arrays.

    Rows are packed or read one by one; see `DepthCache` for what it takes.
    """

    grows = True

    def release(self) -> None:
        super().release()
        if LazyPool.serves(self.adapter.device):
            adapter = self.adapter
            like = (self._heads * adapter.head_dim, adapter.dtype, adapter.device)
            self._pools["core"] = LazyPool(adapter.core_layers, *like)
        self.arrays = SlotArrays(self._pools["core"], self.policy.slots, self._heads)

    @property
    def core_bytes(self) -> int:
        """Bytes of the entries of the requests in flight in the core layers."""
        return self.arrays.entries * self._pools["core"].row_bytes

    @property
    def reserved_bytes(self) -> int:
        """Bytes of memory that is taken: pages that have entries, where memory is mapped by the page; else the pools,
        gaps and what requests may still grow into included."""
        return self.arrays.reserved_bytes + self._pools["outer"].reserved_bytes

    def reserve(self, capacities: list[int]) -> None:
        """Make room in the layers around the loop; that in the core is made as it is needed."""
        self._pools["outer"].reserve(sum(capacities))

    def allocate(self, key: Hashable, capacity: int, most: int | None = None) -> None:
        most = capacity if most is None else most
        outer, short = self._take("outer", capacity), self._is_short(most)
        self._segments[key] = Segment(capacity, self.arrays.add(most, short), outer, short)

    def need(self, key: Hashable, positions: int, most: int, saved: SavedArrays | None = None) -> int:
        """Bytes of the entries that request `key` has at most until it asks for room again: those that it has, and one
        for every loop and position that it has room for beside them."""
        held = entries = 0
        if saved is not None:
            held, entries = saved.positions, saved.entries
        elif key in self._segments:
            held, entries = self.arrays.held_by(self._segments[key].core)
        capacity = self._positions_held(key, positions, most)
        entries += (capacity - held) * self.policy.slots
        return entries * self._pools["core"].row_bytes + capacity * self._pools["outer"].row_bytes

    def make_room(self, key: Hashable, positions: int, most: int) -> bool:
        segment = self._segments.get(key)
        if segment is not None and positions <= segment.capacity:
            return False
        capacity = self._positions_held(key, positions, most)
        if segment is None:
            self.allocate(key, capacity, most)
            return True
        self._segments[key] = grown = replace(segment, capacity=capacity, outer=self._take("outer", capacity))
        self._entries("outer", grown)[:, :, : segment.capacity] = self._entries("outer", segment)
        self._pools["outer"].release(segment.outer, segment.capacity)
        return True

    def save(self, key: Hashable, positions: int) -> SavedArrays:
        segment = self._segments[key]
        entries, placed, early = self.arrays.save(segment.core)
        return SavedArrays(entries, placed, early, self._entries("outer", segment)[:, :, :positions].clone())

    def restore(self, key: Hashable, saved: SavedArrays) -> None:
        segment = self._segments[key]
        self.arrays.restore(segment.core, saved.core, saved.placed, saved.early)
        self._entries("outer", segment)[:, :, : saved.positions].copy_(saved.outer, non_blocking=True)

    def free(self, key: Hashable) -> None:
        segment = self._segments.pop(key, None)
        if segment is not None:
            self.arrays.drop(segment.core)
            self._pools["outer"].release(segment.outer, segment.capacity)

    def copy_prefix(self, source: Hashable, target: Hashable, positions: int) -> None:
        own, others = self._segments[target], self._segments[source]
        self.arrays.copy_front(others.core, own.core, positions)
        entries = self._entries("outer", own)
        entries[:, :, :positions].copy_(self._entries("outer", others)[:, :, :positions])

    def keep_prefix(self, key: Hashable, kept: Hashable, positions: int) -> None:
        segment, outer = self._segments.pop(key), self._pools["outer"]
        self.arrays.keep_front(segment.core, positions)
        outer.release(segment.outer, segment.capacity)
        own = Segment(positions, segment.core, outer.allocate(positions), segment.short)
        self._shift("outer", segment, own)
        self._segments[kept] = own

    def leave(self, keys: Sequence[Hashable], positions: Sequence[int], depths: Sequence[int]) -> None:
        """The tokens at these positions of these requests have left after these loops; see `SlotArrays.leave`."""
        numbers = numpy.array([self._segments[key].core for key in keys])
        self.arrays.leave(numbers, numpy.array(positions), numpy.array(depths))

    def fill_prompt(self, key: Hashable, positions: torch.Tensor, depth: int) -> None:
        left = positions.cpu().numpy()
        self.arrays.leave(numpy.full_like(left, self._segments[key].core), left, numpy.full_like(left, depth))

    def bound_places(self, kind: str) -> Places:
        if kind == "core" and kind not in self._places:
            numbers = numpy.array([self._segments[key].core for key in self.bound.keys])
            begin = self.arrays.extend(numbers, self.bound)
            self._places[kind] = _CompactPlaces(self.bound, numbers, begin, self.arrays, self.adapter)
        return super().bound_places(kind)

    def views(self, index: int, window: int | None = None) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values that span `index` reads, see `DepthCache.views`: a copy in order, without what lies before
        the window, where tokens have left before its loop."""
        kind, layer = self._reading
        if kind == "outer":
            return super().views(index, window)
        places = self.places
        number, column = int(places.numbers[index]), int(places.columns[index])
        if not places.early[index]:
            both = self.arrays.array(number, column)[layer]
        else:
            least = 0 if window is None else int(self.bound.start[index]) + 1 - window
            rows = torch.from_numpy(self.arrays.head_rows(*places.sorted_entries(index, least)).T.ravel())
            pool = self._pools[kind].tensor[layer]
            both = pool.view(-1, self.adapter.head_dim)[to_device(rows, pool.device)].unflatten(0, (self._heads, -1))
        keys, values = both.unflatten(0, (2, -1))
        return keys[None], values[None]

    def stretches(self, index: int) -> list[list[torch.Tensor]]:
        """Keys and values `[1, kv heads, positions, head dim]` that span `index` of `split` reads: of the tokens that
        left before, and of the slot of its loop. Views, nothing is copied."""
        _, layer = self._reading
        return [[both[layer] for both in stretch] for stretch in self.places.stretches(index)]


class _CompactPlaces(Places):
    """Where the spans of a launch lie in the arrays of their requests.

    Args:
        spans: of the launch, for which the arrays have been extended.
        numbers: int64 `[spans]`, of the requests' arrays.
        begin: int64 `[spans]`, see `SlotArrays.extend`.
        arrays, adapter: of the cache.

    Attributes:
        numbers: as given.
        columns: int64 `[spans]`, the array of the slot that they write.
        early: int64 `[spans]`, how many entries they read in the early array.
    """

    def __init__(
        self, spans: Spans, numbers: numpy.ndarray, begin: numpy.ndarray, arrays: SlotArrays, adapter: LoopAdapter
    ):
        self._spans, self._arrays, self.numbers = spans, arrays, numbers
        self._stretches: dict[int, tuple[tuple[torch.Tensor, ...], ...]] = {}
        self._device, self._dtype, self._heads = adapter.device, adapter.dtype, arrays.heads
        self._row_bytes = self._heads * adapter.head_dim * adapter.dtype.itemsize
        self.columns, self.early = spans.loop - 1, arrays.early[numbers, spans.loop]
        self.firsts = arrays.first[numbers, self.columns]
        self._capacities = arrays.room[numbers, self.columns]
        self._lefts = arrays.first[numbers, -1]
        short = arrays.short[numbers]
        self._address_writes(short, spans.by_token(begin - spans.first) + numpy.arange(spans.tokens))
        self.packs, self.single, self.split = [], [], []
        # Of a prompt whose positions leave by themselves the early array has later positions too.
        whole = self.early + begin + spans.lengths == spans.end
        self._share_out(short & whole)
        if self.single and self.early.any():
            single = numpy.array(self.single)
            split = (~short & whole & (self.early > 0) & (spans.lengths == 1))[single]
            self.single, self.split = single[~split].tolist(), single[split].tolist()

    def _read(
        self, indices: numpy.ndarray, places: numpy.ndarray
    ) -> tuple[numpy.ndarray, Callable[[], numpy.ndarray] | None]:
        early = self.early[indices, None]
        if not early.any():
            return self.firsts[indices, None] + places, None
        shifts = self.firsts[indices, None] - early
        rows = numpy.where(places < early, self._lefts[indices, None], shifts) + places
        return rows, partial(numpy.take, self._arrays.positions, rows)

    def stretches(self, index: int) -> tuple[tuple[torch.Tensor, ...], ...]:
        """The same for all layers, `[layers, 1, kv heads, positions, head dim]`, made once a launch."""
        if index not in self._stretches:
            number, column = int(self.numbers[index]), int(self.columns[index])
            left = self._arrays.array(number, self._arrays.loops)[:, :, : int(self.early[index])]
            slot = self._arrays.array(number, column)
            self._stretches[index] = tuple(x.unflatten(1, (2, 1, -1)).unbind(1) for x in (left, slot))
        return self._stretches[index]

    def sorted_entries(self, index: int, least: int) -> tuple[numpy.ndarray, numpy.ndarray, numpy.ndarray]:
        """What span `index` reads from position `least` on, in the order of positions, as `SlotArrays.rows` takes
        it."""
        number, column = self.numbers[index], self.columns[index]
        early, size, end = self.early[index], self._arrays.used[number, column], self._spans.end[index]
        columns = numpy.repeat((self._arrays.loops, column), (early, size))
        indices = numpy.concatenate((numpy.arange(early), numpy.arange(size)))
        numbers = numpy.full_like(indices, number)
        positions = self._arrays.positions[self._arrays.rows(numbers, columns, indices)]
        order = positions.argsort()
        order = order[(positions[order] >= least) & (positions[order] < end)]
        return numbers[order], columns[order], indices[order]
