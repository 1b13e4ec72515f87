"""Which rows run what next. Pure Python: no tensors, no model, so that it can be tested and simulated at scale.

A row is a request in flight. For every token it passes three stages: the prelude once, the core once per loop, the
coda once. The prompt is the row's first token in this sense: many positions wide, always at full depth. Each launch
runs one stage for every row that is ready for it; rows in a launch of the core may be at different depths, and
prompts loop beside rows that decode.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

__all__ = ["Launch", "Scheduler"]


@dataclass(frozen=True)
class Launch:
    """Rows that run one stage together.

    Attributes:
        stage: "prelude", "loop" or "coda".
        keys: the rows, by the keys they were added under.
        places: their places, each in `range(max_num_seqs)` and held for as long as the row is in flight.
        depths: for "loop" the loop that each row runs, from 1; else the loops it has run.
        chunks: the piece of the prompt that each row runs, from 0.
    """

    stage: str
    keys: tuple[int, ...]
    places: tuple[int, ...]
    depths: tuple[int, ...]
    chunks: tuple[int, ...]

    def __len__(self) -> int:
        return len(self.keys)


@dataclass(slots=True)
class _Row:
    key: int
    min_depth: int
    max_depth: int
    cost: int
    pieces: int  # pieces of the prompt; 1 for every later token
    place: int = -1
    depth: int = 0
    chunk: int = 0
    in_prompt: bool = True
    leaving: bool = False  # with lookahead: a signal said so, and the next loop is the last
    waited: int = 0  # launches of the core that went by while the row waited for the coda


class Scheduler:
    """Continuous depth batching (arXiv 2608.09444): schedules single loop iterations.

    Use: `add` requests; then `next`, run the launch, `commit` it, until `next` returns None. With lookahead a launch of
    the core can be committed before its signals are known: `signal` brings them when the launch after it is under way.

    Args:
        max_num_seqs: rows in flight at most, W.
        refill: admit a waiting request as soon as a place is free. Without it rows form cohorts: the next cohort
            starts when the last row of this one has finished, and rows that leave a token early wait for the others.
        min_coda_batch: rows that must have left before a coda runs. Waiting ends all the same when no core or
            prelude can run, when no more rows than wait could still join, and after as many launches of the core as
            the oldest waiting row has loops at most. Without refill the cohort waits for all of its rows anyway.
        lookahead: 1: a signal takes effect one loop later.
        budget: sum of the costs of the rows in flight at most; None is no limit.

    All decisions are deterministic: rows are served in the order they were added.
    """

    def __init__(
        self,
        max_num_seqs: int,
        refill: bool = True,
        min_coda_batch: int = 1,
        lookahead: int = 0,
        budget: int | None = None,
    ):
        self.max_num_seqs = max_num_seqs
        self.refill = refill
        self.min_coda_batch = min_coda_batch
        self.lookahead = lookahead
        self.budget = budget
        self._waiting: deque[_Row] = deque()
        self._entering: dict[int, _Row] = {}  # ready for the prelude
        self._looping: dict[int, _Row] = {}
        self._left: dict[int, _Row] = {}  # ready for the coda
        self._free_places = list(range(max_num_seqs))[::-1]
        self._keys: set[int] = set()
        self._spent = 0
        self._launched: Launch | None = None
        self._unsignalled: Launch | None = None  # committed, its signals still to come

    def __len__(self) -> int:
        """Requests that are not finished."""
        return len(self._waiting) + self.in_flight

    @property
    def in_flight(self) -> int:
        """Rows that hold a place."""
        return len(self._entering) + len(self._looping) + len(self._left)

    @property
    def waiting(self) -> int:
        """Requests that hold none yet."""
        return len(self._waiting)

    @property
    def queues(self) -> dict[str, int]:
        """How many requests wait for a place, and how many rows are ready for the prelude, the loop and the coda."""
        return {
            "waiting": len(self._waiting),
            "entering": len(self._entering),
            "looping": len(self._looping),
            "left": len(self._left),
        }

    def add(self, key: int, max_depth: int, min_depth: int = 1, pieces: int = 1, cost: int = 0) -> None:
        """Queue a request.

        Args:
            key: names the row in launches; not in use by another unfinished request.
            max_depth: full depth of the row: of its prompt, and at most of every token.
            min_depth: loops that every token runs at least.
            pieces: launches that one stage of the prompt takes.
            cost: counted against the budget while the row is in flight.

        Raises:
            ValueError: the key is in use, or the cost alone exceeds the budget.
        """
        if key in self._keys:
            raise ValueError(f"key={key} names an unfinished request already. Use another key.")
        if self.budget is not None and cost > self.budget:
            raise ValueError(
                f"cost={cost} of request {key} exceeds the whole budget of {self.budget}: it could never start."
            )
        self._keys.add(key)
        self._waiting.append(_Row(key, min_depth, max_depth, cost, pieces))

    def cancel(self, key: int) -> None:
        """Drop a request, wherever it is. A launch that is running may still name it; committing skips it."""
        for row in self._waiting:
            if row.key == key:
                self._waiting.remove(row)
                self._keys.discard(key)
                return
        for rows in (self._entering, self._looping, self._left):
            if key in rows:
                self._release(rows.pop(key))
                return

    def next(self) -> Launch | None:
        """The next launch, or None when every request is finished.

        Raises:
            RuntimeError: the launch before has not been committed.
        """
        if self._launched is not None:
            raise RuntimeError("commit the launch before asking for the next one.")
        self._admit()
        if self._entering:
            stage, rows = "prelude", self._entering
        elif self._coda_is_due():
            stage, rows = "coda", self._left
        elif self._looping:
            stage, rows = "loop", self._looping
        else:
            return None
        step = 1 if stage == "loop" else 0
        self._launched = Launch(
            stage,
            keys=tuple(rows),
            places=tuple([row.place for row in rows.values()]),
            depths=tuple([row.depth + step for row in rows.values()]),
            chunks=tuple([row.chunk for row in rows.values()]),
        )
        return self._launched

    def commit(self, launch: Launch, flags: Sequence[bool] | None = None) -> None:
        """Record that `launch` has run.

        Args:
            launch: what `next` returned.
            flags: by row; after a loop: the exit rule says "leave" (not read for prompts and at full depth); after a
                coda: the request is finished. None is all False; after a loop with lookahead, `signal` may follow.

        Raises:
            RuntimeError: another launch, or one that has been committed.
        """
        if launch is not self._launched:
            raise RuntimeError("only the launch that `next` returned last can be committed, and only once.")
        self._launched, self._unsignalled = None, None
        said = flags if flags is not None else (False,) * len(launch)
        commit = {"prelude": self._entered, "loop": self._looped, "coda": self._chosen}[launch.stage]
        for key, flag in zip(launch.keys, said, strict=True):
            commit(key, flag)
        if launch.stage == "loop":
            for row in self._left.values():
                row.waited += 1
            if self.lookahead:
                self._unsignalled = launch
                if flags is not None:
                    self.signal(launch, flags)

    def signal(self, launch: Launch, flags: Sequence[bool]) -> None:
        """With lookahead: what the exit rule said after a launch of the core that was committed without flags.

        Its rows take part in one loop more in any case, so it is early enough until the launch after it is committed.

        Args:
            launch: the one committed last.
            flags: by row: "leave". Rows that have left or were cancelled since are passed over.

        Raises:
            RuntimeError: no signals of this launch are awaited: there is no lookahead, it is no launch of the core,
                they have come, or the next launch has been committed.
        """
        if launch is not self._unsignalled:
            raise RuntimeError(
                "signals can be given for a launch of the core with lookahead, once, and before the launch after it is "
                "committed."
            )
        self._unsignalled = None
        for key, leave in zip(launch.keys, flags, strict=True):
            row = self._looping.get(key)
            if row is not None and not row.in_prompt:
                row.leaving = leave and row.depth + 1 >= row.min_depth

    def _admit(self) -> None:
        if not self.refill and self.in_flight:
            return
        while self._waiting and self._free_places:
            row = self._waiting[0]
            if self.budget is not None and self._spent + row.cost > self.budget:
                return  # in order: a smaller request behind it must not starve it
            self._waiting.popleft()
            row.place = self._free_places.pop()
            self._spent += row.cost
            self._entering[row.key] = row

    def _coda_is_due(self) -> bool:
        if not self._left:
            return False
        if not self.refill or not self._looping:
            return not self._looping  # the barrier of a cohort, or nothing else to run
        oldest = next(iter(self._left.values()))
        return (
            len(self._left) >= self.min_coda_batch
            or len(self._looping) <= len(self._left)
            or oldest.waited > oldest.max_depth
        )

    def _entered(self, key: int, _: bool) -> None:
        row = self._entering.get(key)
        if row is not None and self._piece_done(row):
            self._looping[key] = self._entering.pop(key)

    def _looped(self, key: int, leave: bool) -> None:
        row = self._looping.get(key)
        if row is None or not self._piece_done(row):
            return
        row.depth += 1
        now = leave and not row.in_prompt and row.depth >= row.min_depth
        exits = row.leaving if self.lookahead else now
        if exits or row.depth >= row.max_depth:
            self._left[key] = self._looping.pop(key)

    def _chosen(self, key: int, finished: bool) -> None:
        row = self._left.get(key)
        if row is None or not self._piece_done(row):
            return
        del self._left[key]
        if finished:
            self._release(row)
            return
        row.depth, row.waited, row.pieces, row.in_prompt, row.leaving = 0, 0, 1, False, False
        self._entering[key] = row

    def _piece_done(self, row: _Row) -> bool:
        """Advance to the next piece of the prompt; True when the stage is through all of them."""
        row.chunk = (row.chunk + 1) % row.pieces
        return row.chunk == 0

    def _release(self, row: _Row) -> None:
        self._keys.discard(row.key)
        self._free_places.append(row.place)
        self._spent -= row.cost
