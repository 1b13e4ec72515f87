"""Keys and values with a depth, of all requests in flight.

Every request holds one stretch of a pool: for each core layer and position as many entries as the KV policy has slots.
"""

from collections.abc import Callable, Hashable, Sequence

import numpy
import torch
from transformers.cache_utils import Cache

from .adapters import LoopAdapter
from .flash import PAGE
from .kv_policy import KVPolicy
from .places import SHORT_BYTES, Pack, Places, Segment
from .pool import Pool
from .precision import attention_dtype
from .saved_kv import SavedKV
from .spans import Spans

__all__ = ["DepthCache"]

STEP = 32  # positions by which a request's share grows at least


class DepthCache(Cache):
    """Keys and values of all requests in flight, addressed by the launch that is bound.

    The layers of a model call `update` as they would on any cache; where the entries go and what the queries read
    comes from `bind`. Every request holds one stretch of a pool, sized to its own prompt and new tokens; or, where
    memory is bounded, to what it has so far and a step ahead (`need`, `make_room`).

    Args:
        adapter: gives sizes, dtype and device.
        policy: slot arithmetic.
        flash: `flash_attn_varlen_func`, which reads whole pages; None: rows are packed or read one by one.

    Attributes:
        grows: whether requests take memory as they go on, and not when they start.
    """

    grows = False

    def __init__(self, adapter: LoopAdapter, policy: KVPolicy, flash: Callable | None = None):
        super().__init__(layers=[])
        self.adapter, self.policy, self.flash = adapter, policy, flash
        self._heads = 2 * adapter.kv_heads  # of keys and of values
        self._segments: dict[Hashable, Segment] = {}
        self._most: int | None = None  # positions that the pools grow to
        self.release()

    def release(self) -> None:
        """Give all memory back, when no request holds any."""
        adapter = self.adapter
        like = (self._heads * adapter.head_dim, adapter.dtype, adapter.device)
        layers = {"core": adapter.core_layers, "outer": adapter.prelude_layers + adapter.coda_layers}
        self._pools = {kind: Pool(count, *like) for kind, count in layers.items()}
        self._bound_pools()
        self._places: dict[str, Places] = {}
        self.bound: Spans | None = None
        self._written = numpy.empty(0, dtype=numpy.int16)  # see `Places`
        # One for all layers and launches: getting so much memory again each time costs a page fault for every 4 KiB.
        self._copy: torch.Tensor | None = None
        # On a CPU attention computes in float32; see there.
        self._widened: torch.Tensor | None = None

    def bound_memory(self, nbytes: int) -> None:
        """Let the pools grow to `nbytes` in all, as long as what requests hold at once stays within that."""
        self._most = nbytes // self.bytes_per_position()
        self._bound_pools()

    def _bound_pools(self) -> None:
        for kind, pool in self._pools.items():
            pool.most = None if self._most is None else self._rows(kind, self._most)

    def bytes_per_position(self) -> int:
        """Bytes that one position of one request takes, all layers and slots together."""
        return sum(self._rows(kind, 1) * pool.row_bytes for kind, pool in self._pools.items())

    def positions(self, capacity: int) -> int:
        """Positions that a request of this capacity holds: whole pages, where attention reads such."""
        return capacity if self.flash is None else -(-capacity // PAGE) * PAGE

    @property
    def core_bytes(self) -> int:
        """Bytes that the requests in flight hold for the core layers."""
        return self._held("core")

    @property
    def outer_bytes(self) -> int:
        """Bytes that they hold for the layers before and after the loop."""
        return self._held("outer")

    @property
    def reserved_bytes(self) -> int:
        """Bytes of the pools: gaps between requests, and what these may still grow into, included."""
        return sum(pool.reserved_bytes for pool in self._pools.values())

    def _held(self, kind: str) -> int:
        segments = list(self._segments.values())  # in one step: a manager is asked while its thread serves
        rows = sum(self._rows(kind, segment.capacity) for segment in segments)
        return rows * self._pools[kind].row_bytes

    def _rows(self, kind: str, capacity: int) -> int:
        return (self.policy.slots if kind == "core" else 1) * capacity

    def reserve(self, capacities: list[int]) -> None:
        """Make room for requests of these capacities at once."""
        for kind, pool in self._pools.items():
            pool.reserve(sum(self._rows(kind, self.positions(capacity)) for capacity in capacities))

    def allocate(self, key: Hashable, capacity: int) -> None:
        """Give request `key` room for `capacity` positions."""
        capacity = self.positions(capacity)
        core = self._take("core", self._rows("core", capacity))
        try:
            outer = self._take("outer", self._rows("outer", capacity))
        except BaseException:  # out of memory; nobody else would give these rows back
            self._pools["core"].release(core, self._rows("core", capacity))
            raise
        self._segments[key] = Segment(capacity, core, outer, self._is_short(capacity))
        missing = self._pools["core"].tensor.shape[1] - len(self._written)
        if missing > 0:
            self._written = numpy.concatenate((self._written, numpy.empty(missing, dtype=numpy.int16)))
        self._written[core : core + capacity] = self.policy.slots - 1

    def need(self, key: Hashable, positions: int, most: int, saved: SavedKV | None = None) -> int:
        """Bytes that request `key` holds after `make_room` with the same arguments, and `restore` of what was saved."""
        return self._positions_held(key, positions, most) * self.bytes_per_position()

    def make_room(self, key: Hashable, positions: int, most: int) -> bool:
        """Let request `key` hold room for `positions` positions at least, and for a step ahead where it gets more than
        it had: an eighth, so that copying is rare however long it becomes.

        Args:
            most: positions that it can ever use.

        Returns:
            Whether it had less.
        """
        segment = self._segments.get(key)
        if segment is not None and positions <= segment.capacity:
            return False
        if segment is None:
            self.allocate(key, self._positions_held(key, positions, most))
        else:
            saved = self.save(key, segment.capacity)
            self.free(key)
            self.allocate(key, self._positions_held(key, positions, most))
            self.restore(key, saved)
        return True

    def _positions_held(self, key: Hashable, positions: int, most: int) -> int:
        segment = self._segments.get(key)
        if segment is not None and positions <= segment.capacity:
            return segment.capacity
        return self.positions(min(most, positions + max(STEP, positions // 8)))

    def save(self, key: Hashable, positions: int) -> SavedKV:
        """A copy of what request `key` has at its first `positions` positions."""
        segment = self._segments[key]
        core, outer = (self._entries(kind, segment)[:, :, :positions].clone() for kind in self._pools)
        return SavedKV(core, outer, self._written[segment.core : segment.core + positions].copy())

    def restore(self, key: Hashable, saved: SavedKV) -> None:
        """Put a copy back, into room for as many positions or more."""
        segment = self._segments[key]
        if not segment.short:
            saved = saved.filled()
        for kind, entries in (("core", saved.core), ("outer", saved.outer)):
            self._entries(kind, segment)[:, :, : saved.positions].copy_(entries, non_blocking=True)
        self._written[segment.core : segment.core + saved.positions] = saved.written

    def _take(self, kind: str, rows: int) -> int:
        pool = self._pools[kind]
        if not pool.has_room(rows):
            self._close_gaps(kind)
        return pool.allocate(rows)

    def _close_gaps(self, kind: str) -> None:
        segments = sorted(self._segments.values(), key=lambda segment: getattr(segment, kind))
        held = [(getattr(segment, kind), self._rows(kind, segment.capacity)) for segment in segments]
        for segment, first in zip(segments, self._pools[kind].close_gaps(held), strict=True):
            if kind == "core":
                before = slice(segment.core, segment.core + segment.capacity)
                self._written[first : first + segment.capacity] = self._written[before].copy()
            setattr(segment, kind, first)

    def _is_short(self, capacity: int) -> bool:
        row_bytes = self._heads * self.adapter.head_dim * self.adapter.dtype.itemsize
        return capacity * row_bytes <= SHORT_BYTES or self.flash is not None or self.adapter.device.type != "cpu"

    def free(self, key: Hashable) -> None:
        """Take back what request `key` holds; nothing happens where it holds nothing."""
        segment = self._segments.pop(key, None)
        if segment is not None:
            self._pools["core"].release(segment.core, self._rows("core", segment.capacity))
            self._pools["outer"].release(segment.outer, self._rows("outer", segment.capacity))

    def copy_prefix(self, source: Hashable, target: Hashable, positions: int) -> None:
        """Copy the entries of the first `positions` positions, of all layers and slots, from one request to another.

        They have to be those of a prompt: what leaves early is noted elsewhere.
        """
        own, others = self._segments[target], self._segments[source]
        for kind in self._pools:
            self._entries(kind, own)[:, :, :positions].copy_(self._entries(kind, others)[:, :, :positions])

    def keep_prefix(self, key: Hashable, kept: Hashable, positions: int) -> None:
        """Free request `key` but for its first `positions` positions, which stay under the key `kept`.

        Layer by layer, so that it takes no more memory than the request had.
        """
        segment = self._segments[key]
        self.free(key)
        self.allocate(kept, positions)  # into a gap: there is one as large as the request's
        for kind in self._pools:
            self._shift(kind, segment, self._segments[kept])

    def _shift(self, kind: str, source: Segment, target: Segment) -> None:
        """Copy what `target` has room for within a pool, layer by layer, since they may overlap."""
        new = self._entries(kind, target)
        old = self._entries(kind, source)[:, :, : target.capacity]
        for layer in range(len(old)):
            new[layer] = old[layer].clone()

    def _entries(self, kind: str, segment: Segment) -> torch.Tensor:
        """All that a request holds: a view `[layers, slots, capacity, 2 * kv heads, head dim]`."""
        rows = self._pools[kind].tensor.narrow(1, getattr(segment, kind), self._rows(kind, segment.capacity))
        slots, capacity, size = self._rows(kind, 1), segment.capacity, self.adapter.head_dim
        if segment.short:
            return rows.view(len(rows), slots, capacity, self._heads, size)
        return rows.view(len(rows), slots, self._heads, capacity, size).transpose(2, 3)

    def bind(self, spans: Spans) -> None:
        """Address the coming calls of `update`: the tokens of the launch are these spans, one after the other."""
        self.bound = spans
        self._places = {}

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args, **kwargs
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Store the new entries `[1, kv heads, tokens, head dim]` of the bound launch.

        Returns:
            The new states themselves; the attention that follows asks `views` or `packed` for what it reads.
        """
        section, layer = self.adapter.section(layer_idx)
        kind = "core" if section == "core" else "outer"
        if section == "coda":
            layer += self.adapter.prelude_layers
        self._reading = kind, layer
        places, pool = self.bound_places(kind), self._pools[kind].tensor[layer]
        key, value = key_states[0].transpose(0, 1), value_states[0].transpose(0, 1)
        # Under autocast they come in another dtype than the model's. [tokens, 2, kv heads, head dim]
        new = torch.stack((key, value), dim=1).to(pool.dtype)
        if places.by_position is not None:
            chosen = new if places.position_tokens is None else new[places.position_tokens]
            pool.index_copy_(0, places.by_position, chosen.flatten(1))
        if places.by_head is not None:
            chosen = new if places.head_tokens is None else new[places.head_tokens]
            pool.view(-1, new.shape[-1]).index_copy_(0, places.by_head, chosen.flatten(0, -2))
        return key_states, value_states

    @property
    def places(self) -> "Places":
        """Where the spans of the launch lie in the pool of the layer that was updated last."""
        kind, _ = self._reading
        return self._places[kind]

    def views(self, index: int, window: int | None = None) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values `[1, kv heads, positions, head dim]` that span `index` reads: views, nothing is copied.

        For prompts, and for requests that are not short: only there every slot holds what is to be read.

        Args:
            index: of the span.
            window: what lies before the last so many positions of a query is of no use; it may be there all the same.
        """
        kind, layer = self._reading
        first, segment, heads = int(self.places.firsts[index]), self.places.segments[index], self.adapter.kv_heads
        rows = self._pools[kind].tensor[layer].narrow(0, first, segment.capacity)
        if segment.short:
            both = rows.view(segment.capacity, 2, heads, -1).permute(1, 2, 0, 3)
        else:
            both = rows.view(2, heads, segment.capacity, -1)
        both = both.narrow(2, 0, int(self.bound.end[index]))
        return both[:1], both[1:]

    def packed(self, pack: Pack) -> torch.Tensor:
        """Keys and values of a pack's spans side by side, `[2, spans, kv heads, longest, head dim]`: a copy, good
        until the next one is made, and on a CPU in at least float32.

        Entries beyond a span's end are any and have to be masked.
        """
        kind, layer = self._reading
        pool, rows = self._pools[kind].tensor[layer], pack.rows.flatten()
        if self._copy is None or len(self._copy) < len(rows):
            self._copy = pool.new_empty(len(rows), pool.shape[1])
            wide = attention_dtype(pool)
            self._widened = None if wide == pool.dtype else torch.empty_like(self._copy, dtype=wide)
        copied = torch.index_select(pool, 0, rows, out=self._copy[: len(rows)])
        if self._widened is not None:
            copied = self._widened[: len(rows)].copy_(copied)
        return copied.view(*pack.rows.shape, 2, self.adapter.kv_heads, -1).permute(2, 0, 3, 1, 4)

    def pages(self) -> tuple[torch.Tensor, torch.Tensor]:
        """The pool of keys and that of values by pages, `[pages, PAGE, kv heads, head dim]`: views."""
        kind, layer = self._reading
        pool = self._pools[kind].tensor[layer]
        pages = pool[: len(pool) // PAGE * PAGE].view(-1, PAGE, 2, self.adapter.kv_heads, self.adapter.head_dim)
        return pages[:, :, 0], pages[:, :, 1]

    def bound_places(self, kind: str) -> "Places":
        """Where the bound spans lie in the pool "core" or "outer": computed once a launch."""
        if kind not in self._places:
            segments = [self._segments[key] for key in self.bound.keys]
            paged = self.flash is not None
            self._places[kind] = Places(self.bound, segments, kind, self.policy, self._written, self.adapter, paged)
        return self._places[kind]

    def _fill(self, key: Hashable, position: int, depth: int) -> None:
        """Let the slots that the token at `position` never wrote read as the entry of loop `depth`, where it left.

        In long requests, and where pages are read, by one broadcast copy for all layers; measured faster than one
        indexed copy for several tokens.
        """
        unwritten = self.policy.unwritten(depth)
        if not unwritten:
            return
        segment = self._segments[key]
        if segment.short and self.flash is None:
            self._written[segment.core + position] = unwritten[0] - 1
            return
        entries = self._core_entries(segment)[..., position, :]
        entries[:, unwritten[0] :] = entries[:, self.policy.slot(depth), None]

    def leave(self, keys: Sequence[Hashable], positions: Sequence[int], depths: Sequence[int]) -> None:
        """The tokens at these positions of these requests have left after these loops; see `fill`."""
        for key, position, depth in zip(keys, positions, depths, strict=True):
            self._fill(key, position, depth)

    def fill_prompt(self, key: Hashable, positions: torch.Tensor, depth: int) -> None:
        """The same for several positions (int64, on the device) of a prompt, by copies also in short requests: a span
        of many positions reads views."""
        unwritten = self.policy.unwritten(depth)
        if unwritten and len(positions):
            entries = self._core_entries(self._segments[key])
            kept = entries[:, self.policy.slot(depth)].index_select(2, positions)
            for slot in unwritten:
                entries[:, slot].index_copy_(2, positions, kept)

    def _core_entries(self, segment: Segment) -> torch.Tensor:
        """What a request holds for the core, `[layers, slots, heads, capacity, width]`: a view. In short requests the
        heads are one, as wide as all of them."""
        rows = self._pools["core"].tensor.narrow(1, segment.core, self._rows("core", segment.capacity))
        return rows.view(rows.shape[0], self.policy.slots, 1 if segment.short else self._heads, segment.capacity, -1)

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Always 0: lengths differ by request, and positions come from the launch."""
        return 0
