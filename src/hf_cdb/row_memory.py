"""Room for the keys and values of rows, from their start to their end."""

from collections.abc import Sequence

from .cache import DepthCache
from .config import CDBConfig
from .request import Request
from .scheduler import Scheduler
from .stats import CDBStats

__all__ = ["RowMemory"]


class RowMemory:
    """Gives rows their room when they start, grow and come back, and takes it from those that are preempted.

    Without a budget a row gets at once what it may ever need. With one it gets what it needs now, and a step ahead; the
    scheduler says who may grow and who is preempted. How a row that was preempted comes back is decided here alone:

    * `offload`: its keys and values wait in the memory of the host, and it goes on with its next token;
    * `recompute`: they are dropped. Its prompt and all tokens but the last run again, each position at the depth that
      it had. No rule is asked and nothing is chosen meanwhile. Under `last_exited` all of them run in one pass, like a
      prompt; under the other policies what a token reads depends on when it runs, so they run one by one.

    Args:
        cache: of the rows.
        scheduler, stats, config: of the engine.

    Attributes:
        bounded: whether there is a budget.
        one_by_one: whether there may be rows whose tokens run again one by one.
    """

    def __init__(self, cache: DepthCache, scheduler: Scheduler, stats: CDBStats, config: CDBConfig):
        self._cache, self._scheduler, self._stats = cache, scheduler, stats
        self._offloads = config.preemption == "offload"
        self.bounded = scheduler.budget is not None
        self.one_by_one = self.bounded and not self._offloads and config.kv_policy != "last_exited"
        if self.bounded:
            cache.bound_memory(scheduler.budget)

    def needed(self, row: Request) -> int:
        """Bytes that a row holds which starts or comes back now."""
        return self._cache.need(row.key, row.length, row.capacity, row.saved)

    def costs(self, rows: Sequence[Request]) -> list[int]:
        """Bytes that rows hold with the token under way."""
        return [self._cache.need(row.key, row.end, row.capacity) for row in rows]

    def enter(self, rows: Sequence[Request]) -> list[Request]:
        """Room for rows that enter the prelude: they start, come back, grow, or have enough.

        Returns:
            Those whose prompt begins, for the first time or again.
        """
        waiting = [row for row in rows if row.status == "waiting"]
        grew = self._grow(rows) if self.bounded else self._start(waiting)
        for row in waiting:
            row.status = "running"
        started = [row for row in waiting if not self._restore(row)]
        if grew:
            self.measure()
        return started

    def measure(self) -> None:
        """Keep the most memory that keys and values took so far."""
        stats, cache = self._stats, self._cache
        core, outer = cache.core_bytes, cache.outer_bytes
        stats.kv_bytes = max(stats.kv_bytes, core)
        stats.kv_bytes_outer = max(stats.kv_bytes_outer, outer)
        stats.kv_bytes_peak = max(stats.kv_bytes_peak, core + outer)
        stats.kv_bytes_reserved = max(stats.kv_bytes_reserved, cache.reserved_bytes)

    def preempt(self, rows: Sequence[Request]) -> None:
        """Take their room from rows at a token boundary."""
        for row in rows:
            row.status = "waiting"
            row.preemptions += 1
            cached = row.length - 1  # all but the last token
            if self._offloads:
                row.saved = self._cache.save(row.key, cached).to_host()
                self._stats.pressure["offloaded_bytes"] += row.saved.nbytes
            else:
                row.start, row.again = 0, self.one_by_one
                self._stats.pressure["recomputed_positions"] += cached
            self._cache.free(row.key)
            self._scheduler.comes_back(row.key, self.needed(row), 0 if self._offloads else row.prefill_length)
        self._stats.pressure["preemptions"] += len(rows)

    def end(self, row: Request) -> None:
        """Take back all that a row holds, in whatever state it is."""
        row.saved = None
        self._cache.free(row.key)

    def _start(self, rows: Sequence[Request]) -> bool:
        """All the room that rows need; whether there are any."""
        if rows:
            self._cache.reserve([row.capacity for row in rows])
        for row in rows:
            self._cache.allocate(row.key, row.capacity)
        return bool(rows)

    def _grow(self, rows: Sequence[Request]) -> bool:
        """The room that rows need now; whether any had less."""
        grew = False
        for row in rows:
            positions = row.length if row.status == "waiting" else row.end
            grew |= self._cache.make_room(row.key, positions, row.capacity)
        return grew

    def _restore(self, row: Request) -> bool:
        """Put the keys and values back that a row has on the host; whether it has some."""
        if row.saved is None:
            return False
        self._cache.restore(row.key, row.saved)
        row.saved = None
        return True
