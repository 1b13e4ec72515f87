"""Who is admitted next, and whose time is up. Pure Python, without a clock."""

import math
from bisect import insort
from dataclasses import dataclass

__all__ = ["Deadlines", "Row", "WaitingRows"]


@dataclass(slots=True, eq=False)
class Row:
    """A request as the scheduler sees it; see `Scheduler.add` for what it is given."""

    key: int
    min_depth: int
    max_depth: int
    prompt: int
    cost: int
    priority: int
    deadline: float
    rank: tuple = ()  # among those that wait; the smallest is admitted first
    overtakings: int = 0  # requests admitted past it while it was first and found no room
    place: int = -1
    depth: int = 0
    done: int = 0  # positions of the prompt that have passed the stage
    in_prompt: bool = True
    leaving: bool = False  # with lookahead: a signal said so, and the next loop is the last
    waited: int = 0  # launches of the core that went by while the row waited for the coda
    first: int = 0  # position at which its prompt begins to run; the entries before it are copied


class WaitingRows:
    """Requests that wait for a place, in the order in which they are to be admitted.

    Requests are numbered as they come, and every `ageing` of them make a round. One of priority p stands with those of
    priority 0 that came p rounds before it. Of those that stand together the higher priority comes first, then the
    earlier deadline, then who came first. So of all that come after a request of priority p, fewer than
    `(P - p + 1) * ageing` are admitted before it in this order, where P is the highest priority that comes.

    Args:
        ageing: requests of a round.
        max_overtakes: requests that may be admitted past the first one while there is no room for its cost.
    """

    def __init__(self, ageing: int, max_overtakes: int):
        self.ageing, self.max_overtakes = ageing, max_overtakes
        self._rows: list[Row] = []  # by rank
        self._came = 0
        self._too_little = -1  # room in which nobody fitted, since the last one came

    def __len__(self) -> int:
        return len(self._rows)

    def add(self, row: Row) -> None:
        """Let a request wait."""
        round_ = self._came // self.ageing
        row.rank = (round_ - row.priority, -row.priority, row.deadline, self._came)
        self._came += 1
        self._too_little = -1
        insort(self._rows, row, key=lambda other: other.rank)

    def remove(self, row: Row) -> None:
        """Let it wait no more."""
        self._rows.remove(row)

    def take(self, room: float) -> Row | None:
        """Remove and return who is admitted next, given room for costs that sum up to `room`.

        That is the first one; where its cost does not fit, the next one whose cost does, unless `max_overtakes` have
        gone past the first one already: then the room is kept for it.
        """
        if not self._rows or room <= self._too_little:
            return None
        first = self._rows[0]
        if first.cost <= room:
            return self._rows.pop(0)
        if first.overtakings >= self.max_overtakes:
            return None
        for index, row in enumerate(self._rows):
            if row.cost <= room:
                first.overtakings += 1
                return self._rows.pop(index)
        self._too_little = room
        return None


class Deadlines:
    """Deadlines of unfinished requests, on a clock of the caller's."""

    def __init__(self):
        self._of: dict[int, float] = {}
        self._soonest = math.inf  # none is earlier

    def add(self, key: int, deadline: float) -> None:
        self._of[key] = deadline
        self._soonest = min(self._soonest, deadline)

    def discard(self, key: int) -> None:
        self._of.pop(key, None)

    def passed(self, now: float) -> list[int]:
        """Keys whose deadline has come, the earliest first; each is told once."""
        if now < self._soonest:
            return []
        passed = sorted([key for key, deadline in self._of.items() if deadline <= now], key=self._of.get)
        for key in passed:
            del self._of[key]
        self._soonest = min(self._of.values(), default=math.inf)
        return passed
