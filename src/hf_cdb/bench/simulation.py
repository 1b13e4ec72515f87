"""The real scheduler against a cost table: what a run would do and how long it would take. Runs no model."""

from collections.abc import Sequence
from dataclasses import dataclass

from ..scheduler import Launch, Scheduler
from ..trace import Trace
from .costs import CostTable
from .served import Served

__all__ = ["Settings", "simulate"]


@dataclass(frozen=True)
class Settings:
    """Settings of cdb that the schedule depends on; see `CDBConfig`.

    Attributes:
        late_signal: with lookahead the signal after loop t says whether t loops are enough, and so every token runs
            one loop too many. False: it comes from a head trained for lookahead, which says whether t + 1 are.
    """

    max_num_seqs: int
    refill: bool = True
    min_coda_batch: int = 1
    lookahead: int = 0
    prefill_chunk_size: int | None = None
    late_signal: bool = False


def simulate(
    costs: CostTable,
    settings: Settings,
    prompts: Sequence[int],
    depths: Sequence[Sequence[int]],
    arrivals: Sequence[float],
    trace: Trace | None = None,
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
    """
    scheduler = Scheduler(
        settings.max_num_seqs,
        refill=settings.refill,
        min_coda_batch=settings.min_coda_batch,
        lookahead=settings.lookahead,
    )
    ahead = 0 if settings.late_signal else settings.lookahead
    rows = _Rows(prompts, depths, settings.prefill_chunk_size)
    served = Served(settings.max_num_seqs, arrivals, [len(row) for row in depths])
    now, coming = 0.0, 0
    while True:
        while coming < len(arrivals) and arrivals[coming] <= now:
            scheduler.add(coming, costs.full_depth, pieces=rows.pieces(coming))
            coming += 1
        launch = scheduler.next()
        if launch is None:
            if coming == len(arrivals):
                return served
            now = arrivals[coming]
            continue
        tokens, context, ending = rows.work(launch)
        width = len(ending) if launch.stage == "coda" else tokens
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

    def __init__(self, prompts: Sequence[int], depths: Sequence[Sequence[int]], chunk: int | None):
        self.prompts, self.depths, self.chunk = prompts, depths, chunk
        self._ends = list(prompts)  # positions that the row attends to
        self._index = [0] * len(prompts)  # of the token under way
        self._wanted = [row[0] for row in depths]
        self._in_prompt: set[int] = set()

    def pieces(self, key: int) -> int:
        """Launches that a stage of its prompt takes; called when the request comes."""
        self._in_prompt.add(key)
        return 1 if self.chunk is None else -(-self.prompts[key] // self.chunk)

    def wanted(self, launch: Launch) -> list[int]:
        """By row the depth of the token under way."""
        return [self._wanted[key] for key in launch.keys]

    def work(self, launch: Launch) -> tuple[int, int, Sequence[int]]:
        """Tokens that a launch runs, positions that its rows attend to, and the rows with the last of their pieces."""
        keys = launch.keys
        prompts = self._in_prompt.intersection(keys) if self._in_prompt else ()
        if not prompts or self.chunk is None:
            tokens = len(keys) + sum(self.prompts[key] - 1 for key in prompts)
            return tokens, sum([self._ends[key] for key in keys]), keys
        tokens, context, ending = 0, 0, []
        for key, piece in zip(keys, launch.chunks, strict=True):
            end, start = self._ends[key], self._ends[key] - 1
            if key in prompts:
                start, end = piece * self.chunk, min((piece + 1) * self.chunk, end)
            tokens, context = tokens + end - start, context + end
            if end == self._ends[key]:
                ending.append(key)
        return tokens, context, ending

    def advance(self, keys: Sequence[int]) -> set[int]:
        """These rows got a token; those whose last one it was."""
        self._in_prompt.difference_update(keys)
        finished = set()
        for key in keys:
            self._index[key] += 1
            self._ends[key] += 1
            if self._index[key] == len(self.depths[key]):
                finished.add(key)
            else:
                self._wanted[key] = self.depths[key][self._index[key]]
        return finished
