"""Keys and values with a depth: which entry does a query at loop t read of a token that left at loop d?

Every request owns one tensor of `slots` entries per core layer and position. A policy maps loops to slots; a token
that leaves early fills the slots it never wrote from the slot of the loop it left at, so a later query finds an entry
at every depth.
"""

from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate

import torch
from transformers.cache_utils import Cache

from .adapters import LoopAdapter
from .pool import Pool

__all__ = ["POLICIES", "DepthCache", "KVPolicy", "Places", "Span"]

POLICIES = ("last_exited", "shared", "first_then_shared", "modular")

# Keys and values of a row and layer up to which copying them costs less than a call of their own, on the CPU.
PACK_BYTES = 160 * 1024


@dataclass(frozen=True)
class KVPolicy:
    """Slot arithmetic. Loops count from 1, slots from 0.

    * `last_exited`: a slot for every loop. Exact when nothing leaves early.
    * `shared`: one slot, overwritten by every loop.
    * `first_then_shared`: a slot for each of the first `slots - 1` loops, the last one for all others.
    * `modular`: loop t uses slot `(t - 1) mod slots`.

    Args:
        name: one of the four.
        slots: entries kept per position and core layer.
    """

    name: str
    slots: int

    @classmethod
    def create(cls, name: str, max_depth: int, kv_slots: int | None = None) -> "KVPolicy":
        """The policy `name` for rows of at most `max_depth` loops; `kv_slots` for the two that have a choice."""
        slots = {"last_exited": max_depth, "shared": 1}.get(name, kv_slots or 2)
        return cls(name, slots)

    def slot(self, loop: int) -> int:
        """Slot that loop `loop`, from 1, writes and reads."""
        if self.name == "modular":
            return (loop - 1) % self.slots
        return min(loop - 1, self.slots - 1)

    def unwritten(self, depth: int) -> list[int]:
        """Slots that a token which left after loop `depth` never wrote."""
        written = {self.slot(loop) for loop in range(1, depth + 1)}
        return [slot for slot in range(self.slots) if slot not in written]


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


@dataclass
class _Segment:
    """A request's share of the pools: `[slots, 2, kv heads, capacity]` rows, keys before values, one head after the
    other. The pool of the outer layers has one slot."""

    capacity: int
    core: int
    outer: int


class DepthCache(Cache):
    """Keys and values of all requests in flight, addressed by the launch that is bound.

    The layers of a model call `update` as they would on any cache; where the entries go and what the queries read
    comes from `bind`. Every request holds one stretch of a pool, sized to its own prompt and new tokens.

    Args:
        adapter: gives sizes, dtype and device.
        policy: slot arithmetic.
    """

    def __init__(self, adapter: LoopAdapter, policy: KVPolicy):
        super().__init__(layers=[])
        self.adapter, self.policy = adapter, policy
        like = (adapter.head_dim, adapter.dtype, adapter.device)
        outer_layers = adapter.prelude_layers + adapter.coda_layers
        self._pools = {"core": Pool(adapter.core_layers, *like), "outer": Pool(outer_layers, *like)}
        self._segments: dict[int, _Segment] = {}
        self._places: dict[str, Places] = {}
        self.bound: list[Span] = []

    def bytes_per_position(self) -> int:
        """Bytes that one position of one request takes, all layers and slots together."""
        return sum(self._rows(kind, 1) * pool.row_bytes for kind, pool in self._pools.items())

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
        """Bytes of the pools, gaps between requests included."""
        return sum(pool.reserved_bytes for pool in self._pools.values())

    def _held(self, kind: str) -> int:
        rows = sum(self._rows(kind, segment.capacity) for segment in self._segments.values())
        return rows * self._pools[kind].row_bytes

    def _rows(self, kind: str, capacity: int) -> int:
        return (self.policy.slots if kind == "core" else 1) * 2 * self.adapter.kv_heads * capacity

    def reserve(self, capacities: list[int]) -> None:
        """Make room for requests of these capacities at once."""
        for kind, pool in self._pools.items():
            pool.reserve(sum(self._rows(kind, capacity) for capacity in capacities))

    def allocate(self, key: int, capacity: int) -> None:
        """Give request `key` room for `capacity` positions."""
        core, outer = (pool.allocate(self._rows(kind, capacity)) for kind, pool in self._pools.items())
        self._segments[key] = _Segment(capacity, core, outer)

    def free(self, key: int) -> None:
        """Take back what request `key` holds; nothing happens where it holds nothing."""
        segment = self._segments.pop(key, None)
        if segment is not None:
            self._pools["core"].release(segment.core, self._rows("core", segment.capacity))
            self._pools["outer"].release(segment.outer, self._rows("outer", segment.capacity))

    def bind(self, spans: list[Span]) -> None:
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
        new = torch.stack((key_states, value_states)).flatten(0, -2)
        self._pools[kind].tensor[layer].index_copy_(0, self._bound_places(kind).written, new)
        return key_states, value_states

    @property
    def places(self) -> "Places":
        """Where the spans of the launch lie in the pool of the layer that was updated last."""
        kind, _ = self._reading
        return self._places[kind]

    def views(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values `[1, kv heads, positions, head dim]` that span `index` reads: views, nothing is copied."""
        kind, layer = self._reading
        first, capacity, heads = self.places.firsts[index], self.places.capacities[index], self.adapter.kv_heads
        rows = self._pools[kind].tensor[layer].narrow(0, first, 2 * heads * capacity)
        both = rows.view(2, 1, heads, capacity, -1).narrow(3, 0, self.bound[index].end)
        return both[0], both[1]

    def packed(self) -> torch.Tensor:
        """Keys and values of the spans `places.short` side by side, `[2, spans, kv heads, longest, head dim]`, a copy.

        Entries beyond a span's end repeat its last one and have to be masked.
        """
        kind, layer = self._reading
        rows = self.places.packed_rows
        return self._pools[kind].tensor[layer].index_select(0, rows.flatten()).view(*rows.shape, -1)

    def _bound_places(self, kind: str) -> "Places":
        if kind not in self._places:
            firsts, capacities = [], []
            for span in self.bound:
                segment = self._segments[span.key]
                slot = self.policy.slot(span.loop) if kind == "core" else 0
                capacities.append(segment.capacity)
                firsts.append(getattr(segment, kind) + slot * 2 * self.adapter.kv_heads * segment.capacity)
            self._places[kind] = Places(self.bound, firsts, capacities, self.adapter)
        return self._places[kind]

    def fill(self, key: int, position: int, depth: int) -> None:
        """Give the slots that the token at `position` never wrote the entry of loop `depth`, where it left.

        One broadcast copy for all layers; measured faster than one indexed copy for several tokens.
        """
        unwritten = self.policy.unwritten(depth)
        if not unwritten:
            return
        segment, heads = self._segments[key], self.adapter.kv_heads
        rows = self._pools["core"].tensor.narrow(1, segment.core, self._rows("core", segment.capacity))
        entries = rows.view(rows.shape[0], self.policy.slots, 2 * heads, segment.capacity, -1)[:, :, :, position]
        source = entries[:, self.policy.slot(depth), None]
        if unwritten[-1] - unwritten[0] + 1 == len(unwritten):
            entries[:, unwritten[0] : unwritten[-1] + 1] = source
        else:
            entries[:, unwritten] = source

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Always 0: lengths differ by request, and positions come from the launch."""
        return 0


class Places:
    """Where in a pool the spans of a launch lie, the same in every layer, and how their attention is shared out.

    Attributes:
        firsts: by span the row of its first key of the first head, in the slot of its loop.
        capacities: by span the rows from one head to the next.
        written: int64 `[2 * kv heads * tokens]`, where the new keys and values go.
        short: spans of one position that are attended to together, on a packed copy; fewer than two are not.
        short_tokens: int64 `[short spans]`, their tokens in the launch, or None where they are all of it.
    """

    def __init__(self, spans: list[Span], firsts: list[int], capacities: list[int], adapter: LoopAdapter):
        self.firsts, self.capacities = firsts, capacities
        self._device, self._dtype = adapter.device, adapter.dtype
        self._heads = torch.arange(2 * adapter.kv_heads, device=self._device)[:, None]
        tokens = [(f + p, c) for s, f, c in zip(spans, firsts, capacities, strict=True) for p in range(s.start, s.end)]
        first, capacity = torch.tensor(tokens, device=self._device).T
        self.written = (first + self._heads * capacity).flatten()

        position_bytes = 2 * adapter.kv_heads * adapter.head_dim * adapter.dtype.itemsize
        most = PACK_BYTES // position_bytes
        self.short = [i for i, span in enumerate(spans) if span.end - span.start == 1 and span.end <= most]
        self.short = self.short if len(self.short) > 1 else []
        self.short_tokens = None
        if len(self.short) < len(spans):
            starts = [0, *accumulate(span.end - span.start for span in spans)]
            self.short_tokens = torch.tensor([starts[i] for i in self.short], dtype=torch.long, device=self._device)
        self._ends = [spans[i].end for i in self.short]
        self._masks: dict[int | None, torch.Tensor | None] = {}

    @cached_property
    def packed_rows(self) -> torch.Tensor:
        """int64 `[2, short spans, kv heads, longest]`: the rows of everything that the short spans read."""
        first = torch.tensor([self.firsts[i] for i in self.short], device=self._device)
        capacity = torch.tensor([self.capacities[i] for i in self.short], device=self._device)
        last = torch.tensor(self._ends, device=self._device)[:, None] - 1
        position = torch.minimum(torch.arange(max(self._ends), device=self._device), last)
        heads = self._heads.view(2, 1, -1, 1) * capacity[:, None, None]
        return first[:, None, None] + heads + position[:, None]

    def packed_mask(self, window: int | None) -> torch.Tensor | None:
        """`[short spans, 1, 1, longest]`, 0 at what each reads and -inf elsewhere; None where that is everything.

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
