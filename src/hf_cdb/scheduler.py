"""Which rows run what next. Pure Python: no tensors, no model, so that it can be tested and simulated at scale.

A row is a request in flight. For every token it passes three stages: the prelude once, the core once per loop, the
coda once. The prompt is the row's first token in this sense: many positions wide, always at full depth. Each launch
runs one stage for every row that is ready for it; rows in a launch of the core may be at different depths, and
prompts loop beside rows that decode.
"""

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from itertools import chain

from .admission import Deadlines, Row, WaitingRows
from .launch import Launch
from .prefill import Prefill
from .prefixes import Prefixes
from .room import Room

__all__ = ["AGEING", "Launch", "Scheduler"]

AGEING = 64  # requests that make a round of the waiting line


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
        budget: sum of the costs of the rows in flight at most; None is no limit. Costs may grow from token to token,
            and where they find no room rows are preempted, see `Room`.
        prefill_chunk_size, max_prefill_tokens: positions of one prompt, and of all of them, in a launch; see `Prefill`.
        max_overtakes, ageing: who is admitted next; see `WaitingRows`.
        prefixes: tells where a prompt begins to run, and which rows wait with a place for another's prompt. Its copies
            are to be made before a launch that `next` returns. What it keeps leaves the budget to rows; None: prompts
            share nothing.

    All decisions are deterministic: there is no clock and no chance. Without priorities and deadlines requests are
    admitted in the order they were added.
    """

    def __init__(
        self,
        max_num_seqs: int,
        refill: bool = True,
        min_coda_batch: int = 1,
        lookahead: int = 0,
        budget: int | None = None,
        prefill_chunk_size: int | None = None,
        max_prefill_tokens: int | None = None,
        max_overtakes: int = 0,
        ageing: int = AGEING,
        prefixes: Prefixes | None = None,
    ):
        self.max_num_seqs = max_num_seqs
        self.refill = refill
        self.min_coda_batch = min_coda_batch
        self.lookahead = lookahead
        self.budget = budget
        self._room = Room(budget)
        self._prefill = Prefill(prefill_chunk_size, max_prefill_tokens)
        self._waiting = WaitingRows(ageing, max_overtakes)
        self._prefixes = prefixes
        self._following: dict[int, Row] = {}  # wait for another one's prompt
        self._entering: dict[int, Row] = {}  # ready for the prelude
        self._looping: dict[int, Row] = {}
        self._left: dict[int, Row] = {}  # ready for the coda
        self._ending = False  # without refill: the coda of the cohort's token has begun
        self._free_places = list(range(max_num_seqs))[::-1]
        self._unfinished: dict[int, Row] = {}
        self._deadlines = Deadlines()
        self._launched: Launch | None = None
        self._unsignalled: Launch | None = None  # committed, its signals still to come

    def __len__(self) -> int:
        """Requests that are not finished."""
        return len(self._waiting) + self.in_flight

    @property
    def in_flight(self) -> int:
        """Rows that hold a place."""
        return (
            len(self._following) + len(self._entering) + len(self._looping) + len(self._left) + len(self._room.growing)
        )

    @property
    def waiting(self) -> int:
        """Requests that hold none yet."""
        return len(self._waiting)

    @property
    def queues(self) -> dict[str, int]:
        """How many requests wait for a place or another one's prompt, and how many rows are ready for the prelude (or
        stand before it, without room for their next token), the loop and the coda."""
        return {
            "waiting": len(self._waiting) + len(self._following),
            "entering": len(self._entering) + len(self._room.growing),
            "looping": len(self._looping),
            "left": len(self._left),
        }

    def add(
        self,
        key: int,
        max_depth: int,
        min_depth: int = 1,
        prompt: int = 1,
        cost: int = 0,
        priority: int = 0,
        deadline: float | None = None,
        most: int | None = None,
    ) -> None:
        """Queue a request.

        Args:
            key: names the row in launches; not in use by another unfinished request.
            max_depth: full depth of the row: of its prompt, and at most of every token.
            min_depth: loops that every token runs at least.
            prompt: its positions.
            cost: counted against the budget while the row is in flight, see also `commit`.
            priority: higher ones are admitted first, within the bounds of `WaitingRows`.
            deadline: when the request should have ended, on a clock of the caller's. It orders requests of one priority
                that came together, and `overdue` tells when it has passed.
            most: what the cost may grow to; None is no more than it is.

        Raises:
            ValueError: the key is in use, what the cost may grow to exceeds the budget by itself, or the deadline is
                not a number.
        """
        if key in self._unfinished:
            raise ValueError(f"key={key} names an unfinished request already. Use another key.")
        most = cost if most is None else most
        if self.budget is not None and most > self.budget:
            raise ValueError(
                f"request {key} may come to cost {most}, more than the whole budget of {self.budget}: it could never "
                "end. Raise the budget, or let it need less."
            )
        if deadline is not None and math.isnan(deadline):
            raise ValueError(f"deadline={deadline} of request {key} is no time. Give seconds of your clock, or None.")
        row = Row(key, min_depth, max_depth, prompt, cost, priority, math.inf if deadline is None else deadline, most)
        self._unfinished[key] = row
        self._waiting.add(row)
        if deadline is not None:
            self._deadlines.add(key, deadline)

    def cancel(self, key: int) -> None:
        """Drop a request, wherever it is. A launch that is running may still name it; committing skips it."""
        row = self._unfinished.get(key)
        if row is None:
            return
        if row.place < 0:
            self._waiting.remove(row)
            self._forget(key)
            return
        self._stop(row)
        self._forget(key)

    def overdue(self, now: float) -> list[int]:
        """Unfinished requests whose deadline has come, the earliest first, each told once. They go on until `cancel`.

        Args:
            now: on the clock of the deadlines.
        """
        return self._deadlines.passed(now)

    def next(self) -> Launch | None:
        """The next launch, or None when every request is finished.

        Raises:
            RuntimeError: the launch before has not been committed.
        """
        if self._launched is not None:
            raise RuntimeError("commit the launch before asking for the next one.")
        preempted = self._make_room() if self._room.growing else ()
        if self._following:
            self._resume()
        if not self._room.growing and not preempted:
            self._admit()
        self._launched = self._choose()
        if self._launched is None and self.in_flight:
            self._prefill.renew()
            self._launched = self._choose()
        if preempted or self._room.growing:
            self._launched = replace(self._launched, preempted=preempted, growing=len(self._room.growing))
        return self._launched

    def comes_back(self, key: int, cost: int, prompt: int = 0) -> None:
        """How a request that was preempted runs on when it is its turn again. To be called before the next `next`;
        else it goes on with its next token, at the cost that it had.

        Args:
            key: one of `preempted` of the launch that is running.
            cost: counted from then on; not less than it was.
            prompt: positions that it runs again, at full depth and as its prompt; 0: it goes on with its next token.
        """
        row = self._unfinished[key]
        row.cost = cost
        if prompt:
            row.in_prompt, row.prompt = True, prompt

    def commit(self, launch: Launch, flags: Sequence[bool] | None = None, costs: Sequence[int] | None = None) -> None:
        """Record that `launch` has run.

        Args:
            launch: what `next` returned.
            flags: by row; after a loop: the exit rule says "leave" (not read for prompts and at full depth); after a
                coda: the request is finished. None is all False; after a loop with lookahead, `signal` may follow.
            costs: after a coda, by row: its cost from its next token on; not read for prompts that have pieces left and
                for requests that are finished. None: no cost changes.

        Raises:
            RuntimeError: another launch, or one that has been committed.
        """
        if launch is not self._launched:
            raise RuntimeError("only the launch that `next` returned last can be committed, and only once.")
        self._launched, self._unsignalled = None, None
        said = flags if flags is not None else (False,) * len(launch)
        ready, commit = {
            "prelude": (self._entering, self._entered),
            "loop": (self._looping, self._looped),
            "coda": (self._left, self._chosen),
        }[launch.stage]
        for key, flag in zip(launch.keys, said, strict=True):
            row = ready.get(key)  # None: cancelled meanwhile
            if row is not None and _is_through(row, launch):
                commit(row, flag)
        if costs is not None:
            self._claim(launch, costs)
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
        while self._free_places:
            room = self._room.left - self._room.ahead
            if self._prefixes is not None:
                room -= self._prefixes.pinned
            row = self._waiting.take(room)
            if row is None:
                return
            row.place = self._free_places.pop()
            self._room.enter(row)
            self._start(row)

    def _start(self, row: Row) -> None:
        """Let a row that has a place begin with its prompt, or wait for another one's; or go on, if it is through."""
        first: int | None = 0
        if self._prefixes is not None and row.in_prompt:
            first = self._prefixes.start(row.key, self._room.left)
        elif self._prefixes is not None:
            self._prefixes.drop(self._room.left)
        if first is None:
            self._following[row.key] = row
        else:
            row.first = row.done = first
            self._entering[row.key] = row

    def _resume(self) -> None:
        """Let rows go on that wait for no other prompt any more."""
        following, self._following = self._following, {}
        for row in following.values():
            self._start(row)

    def _claim(self, launch: Launch, costs: Sequence[int]) -> None:
        for key, cost in zip(launch.keys, costs, strict=True):
            row = self._entering.get(key)
            if row is not None and self._room.claim(row, cost):
                del self._entering[key]

    def _make_room(self) -> tuple[int, ...]:
        """Let rows grow; those that were preempted for it, by key."""
        busy = chain(self._following.values(), self._looping.values(), self._left.values())
        grown, preempted = self._room.settle(self._entering, busy)
        for row in preempted:
            self._entering.pop(row.key, None)
            self._free_places.append(row.place)
            row.place = -1
            self._waiting.put_back(row)
        self._entering.update((row.key, row) for row in grown)
        if self._prefixes is not None:
            for row in preempted:
                self._prefixes.withdraw(row.key)
            self._prefixes.drop(self._room.left)
        return tuple([row.key for row in preempted])

    def _choose(self) -> Launch | None:
        """The next launch; None where only prompts could run that have used up what they may until the next loop."""
        launch = None
        self._ending = self._ending and bool(self._left)
        if self._entering and not self._ending:
            launch = self._launch("prelude", self._entering)
        if launch is None and self._coda_is_due():
            self._ending = not self.refill
            launch = self._launch("coda", self._left)
        if launch is None and self._looping:
            self._prefill.renew()
            launch = self._launch("loop", self._looping)
        return launch

    def _launch(self, stage: str, ready: Mapping[int, Row]) -> Launch | None:
        """Rows that are ready for a stage and may run; None where there are none."""
        rows: Collection[Row] = ready.values()
        prompts = [row for row in rows if row.in_prompt]
        pieces = self._prefill.cut(stage, prompts) if prompts else {}
        if len(pieces) < len(prompts):
            rows = [row for row in rows if not row.in_prompt or row.key in pieces]
            if not rows:
                return None
        step = 1 if stage == "loop" else 0
        return Launch(
            stage,
            keys=tuple([row.key for row in rows]),
            places=tuple([row.place for row in rows]),
            depths=tuple([row.depth + step for row in rows]),
            pieces=pieces,
            continued=sum(row.done > row.first for row in prompts if row.key in pieces) if prompts else 0,
        )

    def _coda_is_due(self) -> bool:
        if not self._left:
            return False
        if not self.refill:
            # The barrier of a cohort; with prompts in pieces some of its rows pass the coda before others.
            return self._ending or (not self._looping and not self._entering)
        if not self._looping:
            return True  # nothing else to run
        oldest = next(iter(self._left.values()))
        return (
            len(self._left) >= self.min_coda_batch
            or len(self._looping) <= len(self._left)
            or oldest.waited > oldest.max_depth
        )

    def _entered(self, row: Row, _: bool) -> None:
        self._looping[row.key] = self._entering.pop(row.key)

    def _looped(self, row: Row, leave: bool) -> None:
        row.depth += 1
        now = leave and not row.in_prompt and row.depth >= row.min_depth
        exits = row.leaving if self.lookahead else now
        if exits or row.depth >= row.max_depth:
            self._left[row.key] = self._looping.pop(row.key)

    def _chosen(self, row: Row, finished: bool) -> None:
        del self._left[row.key]
        if finished:
            self._stop(row)
            self._forget(row.key)
            return
        if row.in_prompt and self._prefixes is not None:
            self._prefixes.through(row.key)
        row.depth, row.waited, row.in_prompt, row.leaving = 0, 0, False, False
        self._entering[row.key] = row

    def _stop(self, row: Row) -> None:
        """Take a row that is in flight out of wherever it is."""
        for rows in (self._following, self._entering, self._looping, self._left):
            rows.pop(row.key, None)
        self._free_places.append(row.place)
        self._room.leave(row)

    def _forget(self, key: int) -> None:
        del self._unfinished[key]
        self._deadlines.discard(key)


def _is_through(row: Row, launch: Launch) -> bool:
    """Whether the row is through the stage: a prompt may have pieces left."""
    if row.in_prompt:
        _, row.done = launch.pieces[row.key]
        if row.done < row.prompt:
            return False
        row.done = row.first
    return True
