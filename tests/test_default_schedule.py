"""Without priorities, deadlines and bounds the launches are those of the schedule written once more, slowly."""

from collections import Counter
from dataclasses import dataclass

from hypothesis import given
from hypothesis import strategies as st

from hf_cdb.scheduler import Scheduler

FULL_DEPTH = 4


@dataclass
class PlainRow:
    key: int
    prompt: int
    cost: int
    came: int  # when it came to where it is
    at: str = "waiting"
    depth: int = 0
    done: int = 0
    tokens: int = 0
    leaving: bool = False
    waited: int = 0


class PlainSchedule:
    """No queues: every row knows where it is, and since when. Strictly in order; prompts in pieces of one size."""

    def __init__(self, max_num_seqs, refill, min_coda_batch, lookahead, budget, chunk, min_depth):
        self.width, self.refill, self.least = max_num_seqs, refill, min_coda_batch
        self.lookahead, self.budget, self.chunk, self.min_depth = lookahead, budget, chunk, min_depth
        self.rows, self.time = [], 0
        self.ending = False  # a cohort is in the coda of one token until all of its rows are through

    def add(self, key, prompt, cost):
        self.rows.append(PlainRow(key, prompt, cost, 0))
        self.move(self.rows[-1], "waiting")

    def cancel(self, key):
        self.rows = [row for row in self.rows if row.key != key]

    def move(self, row, where):
        self.time += 1
        row.at, row.came = where, self.time

    def standing(self, where):
        return sorted((row for row in self.rows if row.at == where), key=lambda row: row.came)

    def admit(self):
        if self.refill or len(self.standing("waiting")) == len(self.rows):
            for row in self.standing("waiting"):
                flying = [other for other in self.rows if other.at != "waiting"]
                spent = sum(other.cost for other in flying)
                if len(flying) == self.width or (self.budget is not None and spent + row.cost > self.budget):
                    return
                self.move(row, "prelude")

    def coda_is_due(self):
        left, looping = self.standing("coda"), self.standing("loop")
        if not left or not looping or not self.refill:
            return bool(left) and not looping
        return len(left) >= self.least or len(looping) <= len(left) or left[0].waited > FULL_DEPTH

    def next(self):
        """(stage, keys, depths, pieces), or None."""
        self.admit()
        self.ending = self.ending and bool(self.standing("coda"))
        if self.standing("prelude") and not self.ending:
            stage = "prelude"
        elif self.ending or self.coda_is_due():
            stage, self.ending = "coda", not self.refill
        elif self.standing("loop"):
            stage = "loop"
        else:
            return None
        rows = self.standing(stage)
        pieces = {
            row.key: (row.done, row.prompt if self.chunk is None else min(row.done + self.chunk, row.prompt))
            for row in rows
            if row.tokens == 0
        }
        return stage, tuple(row.key for row in rows), tuple(row.depth + (stage == "loop") for row in rows), pieces

    def commit(self, launch, flags):
        stage, keys, _, pieces = launch
        for key, flag in zip(keys, flags, strict=True):
            row = next((row for row in self.rows if row.key == key), None)
            if row is None:
                continue
            if row.tokens == 0:
                row.done = pieces[key][1]
                if row.done < row.prompt:
                    continue
                row.done = 0
            self.move_on(row, stage, flag)
        if stage == "loop":
            for row in self.standing("coda"):
                row.waited += 1

    def move_on(self, row, stage, flag):
        if stage == "prelude":
            self.move(row, "loop")
        elif stage == "loop":
            row.depth += 1
            leaves = row.leaving if self.lookahead else flag and row.depth >= self.min_depth
            if row.depth == FULL_DEPTH or (row.tokens > 0 and leaves):
                self.move(row, "coda")
            row.leaving = flag and row.depth + 1 >= self.min_depth
        elif flag:
            self.cancel(row.key)
        else:
            row.tokens += 1
            row.depth, row.waited, row.leaving = 0, 0, False
            self.move(row, "prelude")


traffic = st.lists(
    st.tuples(
        st.integers(0, 20),  # comes before this launch
        st.lists(st.integers(1, FULL_DEPTH), max_size=6),  # depths after the first token
        st.integers(1, 7),  # positions of the prompt
        st.integers(0, 10),  # cost
    ),
    min_size=1,
    max_size=20,
)


@given(
    traffic,
    st.dictionaries(st.integers(0, 40), st.integers(0, 19), max_size=4),
    st.fixed_dictionaries(
        {
            "max_num_seqs": st.integers(1, 7),
            "refill": st.booleans(),
            "min_coda_batch": st.integers(1, 4),
            "lookahead": st.integers(0, 1),
            "budget": st.sampled_from([None, 10, 25]),
        }
    ),
    st.sampled_from([None, 1, 3]),
    st.integers(1, FULL_DEPTH),
)
def test_the_default_launches_what_it_always_did(traffic, cancelled, settings, chunk, min_depth):
    scheduler = Scheduler(prefill_chunk_size=chunk, **settings)
    plain = PlainSchedule(chunk=chunk, min_depth=min_depth, **settings)
    tokens, number = Counter(), 0
    while True:
        for key, (comes, _, prompt, cost) in enumerate(traffic):
            if comes == number:
                scheduler.add(key, FULL_DEPTH, min_depth=min_depth, prompt=prompt, cost=cost)
                plain.add(key, prompt, cost)
        launch, expected = scheduler.next(), plain.next()
        assert launch is None or expected == (launch.stage, launch.keys, launch.depths, launch.pieces)
        if number in cancelled:
            for schedule in (scheduler, plain):
                schedule.cancel(cancelled[number])
        number += 1
        if launch is None:
            assert expected is None
            if number > 20:
                return
            continue
        flags = [False] * len(launch)
        for index, (key, depth) in enumerate(zip(launch.keys, launch.depths, strict=True)):
            _, depths, prompt, _ = traffic[key]
            if launch.stage == "loop":
                flags[index] = depth >= [FULL_DEPTH, *depths][tokens[key]]
            elif launch.stage == "coda" and launch.pieces.get(key, (0, prompt))[1] == prompt:
                tokens[key] += 1
                flags[index] = tokens[key] > len(depths)
        scheduler.commit(launch, flags)
        plain.commit(expected, flags)
