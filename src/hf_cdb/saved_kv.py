"""Keys and values of one request outside of the pool."""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy
import torch

__all__ = ["SavedArrays", "SavedKV"]


@dataclass(frozen=True)
class SavedKV:
    """What one request has cached of its first positions in the dense layout, short or long (`Segment`).

    Attributes:
        core: `[core layers, slots, positions, 2 * kv heads, head dim]`; a slot that a position never wrote holds
            anything, where `written` says so.
        outer: `[layers before and after the loop, 1, positions, 2 * kv heads, head dim]`.
        written: int16 `[positions]`, the last slot that each has written.
    """

    core: torch.Tensor
    outer: torch.Tensor
    written: numpy.ndarray

    @property
    def positions(self) -> int:
        return len(self.written)

    @property
    def nbytes(self) -> int:
        return self.core.nbytes + self.outer.nbytes

    def to_host(self) -> "SavedKV":
        """The same in the memory of the host; from CUDA into pinned memory, without waiting: what is given to the
        device later comes after it in any case."""
        return SavedKV(_to_host(self.core), _to_host(self.outer), self.written)

    def filled(self) -> "SavedKV":
        """The same with an entry in every slot: those that a position never wrote hold the last one that it wrote."""
        slots = self.core.shape[1]
        if (self.written == slots - 1).all():
            return self
        read = numpy.minimum(self.written, numpy.arange(slots)[:, None])  # [slots, positions]
        device = self.core.device
        positions = torch.arange(self.positions, device=device)
        core = self.core[:, torch.from_numpy(read.astype(numpy.int64)).to(device), positions]
        return SavedKV(core, self.outer, numpy.full_like(self.written, slots - 1))


@dataclass(frozen=True)
class SavedArrays:
    """What one request has cached in the compact layout, see `SlotArrays.save`.

    Attributes:
        core: by array that has entries, `[core layers, 2 * kv heads, entries, head dim]`.
        placed: by array their positions, int32 `[entries]`.
        early: int64 `[R + 1]`.
        outer: `[layers before and after the loop, 1, positions, 2 * kv heads, head dim]`.
    """

    core: Mapping[int, torch.Tensor]
    placed: Mapping[int, numpy.ndarray]
    early: numpy.ndarray
    outer: torch.Tensor

    @property
    def positions(self) -> int:
        return self.outer.shape[2]

    @property
    def entries(self) -> int:
        return sum(map(len, self.placed.values()))

    @property
    def nbytes(self) -> int:
        return self.outer.nbytes + sum(own.nbytes for own in self.core.values())

    def to_host(self) -> "SavedArrays":
        """See `SavedKV.to_host`."""
        core = {column: _to_host(own) for column, own in self.core.items()}
        return SavedArrays(core, self.placed, self.early, _to_host(self.outer))


def _to_host(entries: torch.Tensor) -> torch.Tensor:
    if entries.device.type == "cpu":
        return entries
    host = torch.empty(entries.shape, dtype=entries.dtype, pin_memory=entries.is_cuda)
    return host.copy_(entries, non_blocking=True)
