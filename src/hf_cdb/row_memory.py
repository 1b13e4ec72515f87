"""Room for the keys and values of rows, from their start to their end."""

from collections.abc import Iterable, Sequence

from .cache import DepthCache
from .request import Request
from .scheduler import Scheduler
from .stats import CDBStats

__all__ = ["PREEMPTIONS", "RowMemory"]

PREEMPTIONS = ("offload", "recompute")


class RowMemory:
    """Gives rows their room when they start, grow and come back, and takes it from those that are preempted.

    Without a budget a row gets at once what it may ever need. With one it gets what it needs now, and a step ahead; the
    scheduler says who may grow and who is preempted. How a row that was preempted comes back is decided here alone:

    * `offload`: its keys and values wait in the memory of the host, and it goes on with its next token;
    * `recompute`: they are dropped. Its prompt runs again, then the tokens that it has, each at the depth that it had,
      and the last of them is its next token. No rule is asked and nothing is chosen meanwhile.

    Args:
        cache: of the rows.
        scheduler, stats: of the engine.
        preemption: one of the two.

    Attributes:
        bounded: whether there is a budget.
        again: keys of the rows that run again what they had.
    """

    def __init__(self, cache: DepthCache, scheduler: Scheduler, stats: CDBStats, preemption: str):
        self._cache, self._scheduler, self._stats = cache, scheduler, stats
        self._offloads = preemption == "offload"
        self.bounded = scheduler.budget is not None
        self.again: set[int] = set()
        if self.bounded:
            cache.bound_memory(scheduler.budget)

    def needed(self, row: Request) -> int:
        """Bytes that a row holds which starts or comes back now."""
        return self._cache.need(row.key, row.length, row.capacity)

    def costs(self, rows: Sequence[Request]) -> list[int]:
        """Bytes that rows hold with the token under way."""
        return [self._cache.need(row.key, row.end, row.capacity) for row in rows]

    def start(self, rows: Sequence[Request]) -> None:
        """Without a budget: all the room that rows need which start."""
        if not rows:
            return
        self._cache.reserve([row.capacity for row in rows])
        for row in rows:
            row.status = "running"
            self._cache.allocate(row.key, row.capacity)
        self._note_peak()

    def make_room(self, rows: Iterable[Request]) -> None:
        """With a budget: what rows need that enter the prelude. They start, grow, come back, or have enough."""
        changed = False
        for row in rows:
            if row.status == "waiting":
                row.status = "running"
                changed |= self._cache.make_room(row.key, row.length, row.capacity)
                if row.saved is not None:
                    self._cache.restore(row.key, row.saved)
                    row.saved = None
                elif row.tokens:
                    self.again.add(row.key)
            else:
                changed |= self._cache.make_room(row.key, row.end, row.capacity)
        if changed:
            self._note_peak()

    def preempt(self, rows: Sequence[Request]) -> None:
        """Take their room from rows at a token boundary."""
        for row in rows:
            row.status = "waiting"
            row.preemptions += 1
            prompt = 0
            if self._offloads:
                # All but the last token has been cached.
                row.saved = self._cache.save(row.key, row.length - 1).to_host()
                self._stats.pressure["offloaded_bytes"] += row.saved.nbytes
            else:
                prompt = row.prompt_length
                row.in_prompt, row.start, row.entering = True, 0, -1
                self.again.discard(row.key)
            self._cache.free(row.key)
            self._scheduler.comes_back(row.key, self.needed(row), prompt)
        self._stats.pressure["preemptions"] += len(rows)

    def pass_on(self, row: Request) -> None:
        """A row that runs again what it had is through its prompt or one of its tokens; `start` and `end` are those of
        the next one."""
        self._stats.pressure["recomputed_positions"] += 1 if row.entering >= 0 else row.prompt_length
        row.entering = row.entering + 1
        if row.entering == len(row.tokens) - 1:  # the last token has never run
            row.entering = -1
            self.again.discard(row.key)

    def end(self, row: Request) -> None:
        """Take back all that a row holds, in whatever state it is."""
        row.saved = None
        self.again.discard(row.key)
        self._cache.free(row.key)

    def _note_peak(self) -> None:
        self._stats.kv_bytes = max(self._stats.kv_bytes, self._cache.core_bytes)
        self._stats.kv_bytes_outer = max(self._stats.kv_bytes_outer, self._cache.outer_bytes)
