"""Which entry does a query at loop t read of a token that left at loop d?

A policy maps loops to slots; a token that leaves early fills the slots it never wrote from the slot of the loop it
left at, so a later query finds an entry at every depth.
"""

from dataclasses import dataclass
from functools import cache

import numpy

__all__ = ["POLICIES", "KVPolicy"]

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

    def slot(self, loop: int | numpy.ndarray) -> int | numpy.ndarray:
        """Slot that loop `loop`, from 1, writes and reads; for an integer array the slot of each."""
        if self.name == "modular":
            return (loop - 1) % self.slots
        return (numpy.minimum if isinstance(loop, numpy.ndarray) else min)(loop - 1, self.slots - 1)

    @cache  # noqa: B019 (policies are few and small)
    def unwritten(self, depth: int) -> tuple[int, ...]:
        """Slots that a token which left after loop `depth` never wrote: under every policy the last ones."""
        written = {self.slot(loop) for loop in range(1, depth + 1)}
        return tuple(slot for slot in range(self.slots) if slot not in written)
