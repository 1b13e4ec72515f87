"""The real scheduler against a cost table: what a run would do and how long it would take. Runs no model."""

from collections.abc import Sequence
from dataclasses import dataclass

from ..scheduler import AGEING, Launch, Scheduler
from ..trace import Trace
from .costs import CostTable
from .served import Served

__all__ = ["Settings", "simulate"]


@dataclass(frozen=True)
class Settings:
    """Settings of cdb that the schedule depends on; see `CDBConfig`.

    Attributes:
        max_kv_positions: positions that the rows in flight may hold, in place of bytes.
        ageing: see `WaitingRows`.
        late_signal: with lookahead the signal after loop t says whether t loops are enough, and so every token runs
            one loop too many. False: it comes from a head trained for lookahead, which says whether t + 1 are.
    """

    max_num_seqs: int
    refill: bool = True
    min_coda_batch: int = 1
    lookahead: int = 0
    prefill_chunk_size: int | None = None
    max_prefill_tokens: int | None = None
    max_kv_positions: int | None = None
    max_overtakes: int = 0
    ageing: int = AGEING
    late_signal: bool = False


def simulate(
    costs: CostTable,
    settings: Settings,
    prompts: Sequence[int],
    depths: Sequence[Sequence[int]],
    arrivals: Sequence[float],
    trace: Trace | None = None,
    priorities: Sequence[int] | None = None,
    deadlines: Sequence[float | None] | None = None,
) -> Served:
    """Serve requests on a clock that the cost table moves.

    As in the engine, a prompt runs at full depth, every row is asked after every loop, and what the rule says is
    whether the depth that was given for the token is reached.

    Args:
        costs: says what a launch takes.
        settings: of the scheduler.
        prompts: tokens of each prompt.
        depths: for each request a depth per new token, the first of them full depth.
        arrivals: seconds, in order.
        trace: gets every launch.
        priorities, deadlines: by request, the latter in seconds on the clock of the arrivals. A request whose deadline
            has passed is dropped before the next launch.
    """
    scheduler = Scheduler(
        settings.max_num_seqs,
        refill=settings.refill,
        min_coda_batch=settings.min_coda_batch,
        lookahead=settings.lookahead,
        budget=settings.max_kv_positions,
        prefill_chunk_size=settings.prefill_chunk_size,
        max_prefill_tokens=settings.max_prefill_tokens,
        max_overtakes=settings.max_overtakes,
        ageing=settings.ageing,
    )
    ahead = 0 if settings.late_signal else settings.lookahead
    rows = _Rows(prompts, depths)
    served = Served(settings.max_num_seqs, arrivals, [len(row) for row in depths])
    now, coming = 0.0, 0
    while True:
        while coming < len(arrivals) and arrivals[coming] <= now:
            scheduler.add(
                coming,
                costs.full_depth,
                prompt=prompts[coming],
                cost=prompts[coming] + len(depths[coming]) - 1,
                priority=0 if priorities is None else priorities[coming],
                deadline=None if deadlines is None else deadlines[coming],
            )
            coming += 1
        for key in scheduler.overdue(now):
            scheduler.cancel(key)
        launch = scheduler.next()
        if launch is None:
            if coming == len(arrivals):
                return served
            now = arrivals[coming]
            continue
        tokens, context, ending = rows.work(launch)
        width = costs.width(launch.stage, tokens, len(ending))
        ended = now + costs(launch.stage, width, len(launch), context, overlapped=bool(settings.lookahead))
        if trace is not None:
            trace.record(launch, scheduler.queues, tokens, context, now, ended)
        if launch.stage == "loop":
            flags = [depth + ahead >= wanted for depth, wanted in zip(launch.depths, rows.wanted(launch), strict=True)]
            scheduler.commit(launch, flags)
            served.record(launch, now, ended, (), ())
        elif launch.stage == "coda":
            finished = rows.advance(ending)
            scheduler.commit(launch, [key in finished for key in launch.keys])
            served.record(launch, now, ended, ending, finished)
        else:
            scheduler.commit(launch)
            served.record(launch, now, ended, (), ())
        now = ended


class _Rows:
    """Where every request is: what its tokens' places in it and in its prompt come to."""

    def __init__(self, prompts: Sequence[int], depths: Sequence[Sequence[int]]):
        self.depths = depths
        self._ends = list(prompts)  # positions that the row attends to
        self._index = [0] * len(prompts)  # of the token under way
        self._wanted = [row[0] for row in depths]

    def wanted(self, launch: Launch) -> list[int]:
        """By row the depth of the token under way."""
        return [self._wanted[key] for key in launch.keys]

    def work(self, launch: Launch) -> tuple[int, int, Sequence[int]]:
        """Tokens that a launch runs, positions that its rows attend to, and the rows that it takes to their ends."""
        keys, ends, pieces = launch.keys, self._ends, launch.pieces
        tokens, context = len(keys), sum([ends[key] for key in keys])
        for key, (start, end) in pieces.items():
            tokens, context = tokens + end - start - 1, context + end - ends[key]
        if any(end < ends[key] for key, (_, end) in pieces.items()):
            keys = [key for key in keys if key not in pieces or pieces[key][1] == ends[key]]
        return tokens, context, keys

    def advance(self, keys: Sequence[int]) -> set[int]:
        """These rows got a token; those whose last one it was."""
        finished = set()
        for key in keys:
            self._index[key] += 1
            self._ends[key] += 1
            if self._index[key] == len(self.depths[key]):
                finished.add(key)
            else:
                self._wanted[key] = self.depths[key][self._index[key]]
        return finished
