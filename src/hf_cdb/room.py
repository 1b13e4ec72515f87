"""The budget that rows in flight share, and who makes room where it is short. Pure Python."""

import math
from collections.abc import Iterable, Mapping

from .admission import Row

__all__ = ["PREEMPTIONS", "Room"]

PREEMPTIONS = ("offload", "recompute")  # how rows come back, see `RowMemory`


class Room:
    """Costs of the rows in flight, within a budget.

    A row that needs more for its next token waits for it at its token boundary. Rows that wait get what they need in
    the order of the line (`Row.rank`), the first one first. Where there is not enough, the last one in flight gives up
    all that it holds, once it is at a token boundary itself; the others wait so long. The last one itself just waits.
    So nothing is ever taken from the first one, which therefore finishes, and every row becomes the first one.

    Who is admitted leaves a sixteenth of what rows hold that may still grow: else one that was preempted would be back
    just to be preempted by the next row that grows.

    Args:
        budget: sum of the costs at most; None is no limit.

    Attributes:
        spent: sum of the costs.
        ahead: kept free for the rows in flight when others are admitted.
        growing: the rows that wait, by key.
    """

    def __init__(self, budget: int | None):
        self.budget = budget
        self.spent = self.ahead = 0
        self.growing: dict[int, Row] = {}

    @property
    def left(self) -> float:
        """What the rows in flight leave."""
        return math.inf if self.budget is None else self.budget - self.spent

    def enter(self, row: Row) -> None:
        """A row is in flight from now on."""
        self._count(row, 1)

    def leave(self, row: Row) -> None:
        """A row is in flight no more."""
        self.growing.pop(row.key, None)
        self._count(row, -1)

    def claim(self, row: Row, cost: int) -> bool:
        """A row at its token boundary will hold this cost; whether it has to wait for that.

        Raises:
            ValueError: more than it said that it may hold, for which there might never be room.
        """
        if cost > row.most:
            raise ValueError(
                f"cost={cost} of request {row.key} exceeds most={row.most}. Add it with all that it may need."
            )
        if cost > row.cost:
            row.wanted = cost
            self.growing[row.key] = row
            return True
        if cost < row.cost:
            self._set(row, cost)
        return False

    def settle(self, entering: Mapping[int, Row], busy: Iterable[Row]) -> tuple[list[Row], list[Row]]:
        """Let rows grow.

        Args:
            entering: the rows that are ready for the prelude, by key: their prompts, or at a token boundary.
            busy: the other rows in flight but those that wait to grow.

        Returns:
            The rows that have what they need now, and those that have to leave, which hold nothing any more.
        """
        line = sorted([*entering.values(), *busy, *self.growing.values()], key=lambda row: row.rank)
        grown, preempted = [], []
        for row in sorted(self.growing.values(), key=lambda row: row.rank):
            while line[-1] is not row and row.wanted - row.cost > self.left:
                last = line[-1]
                if last.in_prompt or (last.key not in self.growing and last.key not in entering):
                    return grown, preempted  # until it comes to its boundary
                line.pop()
                self.leave(last)
                preempted.append(last)
            if row.key not in self.growing:
                break  # preempted, and so are all behind it
            if row.wanted - row.cost > self.left:
                break
            self._set(row, row.wanted)
            grown.append(self.growing.pop(row.key))
        return grown, preempted

    def _set(self, row: Row, cost: int) -> None:
        self._count(row, -1)
        row.cost = cost
        self._count(row, 1)

    def _count(self, row: Row, sign: int) -> None:
        self.spent += sign * row.cost
        self.ahead += sign * min(row.most - row.cost, row.cost // 16)
