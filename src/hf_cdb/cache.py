"""Keys and values with a depth: which entry does a query at loop t read of a token that left at loop d?

Every request owns one tensor of `slots` entries per core layer and position. A policy maps loops to slots; a token
that leaves early fills the slots it never wrote from the slot of the loop it left at, so a later query finds an entry
at every depth.
"""

from dataclasses import dataclass

import torch
from transformers.cache_utils import Cache

from .adapters import LoopAdapter

__all__ = ["POLICIES", "DepthCache", "KVPolicy", "Span"]

POLICIES = ("last_exited", "shared", "first_then_shared", "modular")


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


class _Storage:
    """One request's keys and values.

    `core` is `[slots, core layers, 2, 1, kv heads, capacity, head dim]`, keys before values; `outer` is the same with
    one slot for the layers before and after the loop.
    """

    def __init__(self, adapter: LoopAdapter, policy: KVPolicy, capacity: int):
        shape = (2, 1, adapter.kv_heads, capacity, adapter.head_dim)
        like = {"dtype": adapter.dtype, "device": adapter.device}
        outer = adapter.prelude_layers + adapter.coda_layers
        self.core = torch.empty(policy.slots, adapter.core_layers, *shape, **like)
        self.outer = torch.empty(1, outer, *shape, **like)


class DepthCache(Cache):
    """Keys and values of all requests in flight, addressed by the launch that is bound.

    The layers of a model call `update` as they would on any cache; where the entries go and what the queries read
    comes from `bind`. Reading copies nothing: `reads` are views of the requests' tensors.

    Args:
        adapter: gives sizes, dtype and device.
        policy: slot arithmetic.
    """

    def __init__(self, adapter: LoopAdapter, policy: KVPolicy):
        super().__init__(layers=[])
        self.adapter, self.policy = adapter, policy
        self._storage: dict[int, _Storage] = {}
        self._spans: list[Span] = []
        self._lengths: list[int] = []
        self._views: dict[str, tuple[list, list]] = {}
        self.reads: list[tuple[torch.Tensor, torch.Tensor, int]] = []

    def bytes_per_position(self) -> int:
        """Bytes that one position of one request takes, all layers and slots together."""
        adapter = self.adapter
        layers = adapter.core_layers * self.policy.slots + adapter.prelude_layers + adapter.coda_layers
        return 2 * layers * adapter.kv_heads * adapter.head_dim * adapter.dtype.itemsize

    @property
    def core_bytes(self) -> int:
        """Bytes reserved for the core layers of the requests in flight."""
        return sum(storage.core.nbytes for storage in self._storage.values())

    @property
    def outer_bytes(self) -> int:
        """Bytes reserved for the layers before and after the loop."""
        return sum(storage.outer.nbytes for storage in self._storage.values())

    def allocate(self, key: int, capacity: int) -> None:
        """Reserve `capacity` positions for request `key`."""
        self._storage[key] = _Storage(self.adapter, self.policy, capacity)

    def free(self, key: int) -> None:
        """Give up what request `key` holds; nothing happens where it holds nothing."""
        self._storage.pop(key, None)

    def bind(self, spans: list[Span]) -> None:
        """Address the coming calls of `update`: the tokens of the launch are these spans, one after the other."""
        self._spans = spans
        self._lengths = [span.end - span.start for span in spans]
        self._views = {}

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args, **kwargs
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Store `[1, kv heads, tokens, head dim]` of the bound launch and set `reads` for the attention that follows.

        Returns:
            The new states themselves; what is to be read is in `reads`, for every span (keys, values, new
            positions), each of keys and values `[1, kv heads, positions, head dim]`.
        """
        section, layer = self.adapter.section(layer_idx)
        if section == "coda":
            layer += self.adapter.prelude_layers
        reads, writes = self._bound(section)
        lengths = self._lengths
        # One copy per span: keys and values lie beside each other on both sides.
        new = torch.stack((key_states, value_states)).split(lengths, dim=3)
        torch._foreach_copy_([write[layer] for write in writes], list(new))
        key, value = 2 * layer, 2 * layer + 1
        self.reads = [(read[key], read[value], length) for read, length in zip(reads, lengths, strict=True)]
        return key_states, value_states

    def _bound(self, section: str) -> tuple[list, list]:
        """For every span the views of all layers of a section: what is read, and the new positions to write."""
        kind = "core" if section == "core" else "outer"
        if kind not in self._views:
            reads, writes = [], []
            for span in self._spans:
                storage = self._storage[span.key]
                layers = storage.core[self.policy.slot(span.loop)] if kind == "core" else storage.outer[0]
                reads.append(layers.flatten(0, 1).narrow(-2, 0, span.end).unbind(0))
                writes.append(layers.narrow(-2, span.start, span.end - span.start).unbind(0))
            self._views[kind] = reads, writes
        return self._views[kind]

    def fill(self, key: int, position: int, depth: int) -> None:
        """Give the slots that the token at `position` never wrote the entry of loop `depth`, where it left."""
        unwritten = self.policy.unwritten(depth)
        if not unwritten:
            return
        entries = self._storage[key].core[..., position, :]
        source = entries[self.policy.slot(depth)]
        if unwritten[-1] - unwritten[0] + 1 == len(unwritten):
            entries[unwritten[0] : unwritten[-1] + 1] = source
        else:
            entries[unwritten] = source

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Always 0: lengths differ by request, and positions come from the launch."""
        return 0
