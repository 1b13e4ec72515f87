"""Costs that grow within a budget: who waits, who is preempted, and that all finish. Without a model."""

import random
from collections import Counter

import pytest

from hf_cdb.scheduler import Scheduler

DEPTH = 3


class Load:
    """Requests that hold `prompt + 1` at first and one more for every token, and what became of them.

    Args:
        lengths: by request its prompt and its tokens.
        seed: of the depths.
        again: preempted requests run their prompt and their tokens again.
    """

    def __init__(self, lengths, budget, seed, again=False, **options):
        self.lengths, self.budget, self.again = lengths, budget, again
        self.scheduler = Scheduler(budget=budget, **options)
        self._random = random.Random(seed)
        self.done, self.waits, self.preemptions = Counter(), Counter(), Counter()
        self.held, self.finished = {}, []
        self.left_again = {}  # tokens that a request runs again before it gets new ones
        for key, (prompt, tokens) in enumerate(lengths):
            priority = self._random.choice((0, 0, 1)) if seed % 3 == 0 else 0
            self.scheduler.add(key, DEPTH, prompt=prompt, cost=prompt + 1, most=prompt + tokens, priority=priority)

    def ranks(self):
        """Of the rows in flight, by key."""
        scheduler = self.scheduler
        return {key: row.rank for key, row in scheduler._unfinished.items() if row.place >= 0}

    def step(self):
        before = self.ranks()
        launch = self.scheduler.next()
        if launch is None:
            return False
        if launch.preempted:
            assert min(before, key=before.get) not in launch.preempted, "the first in the line was preempted"
            staying = [before[key] for key in before if key not in launch.preempted]
            assert all(before[key] > max(staying) for key in launch.preempted), "not the last ones"
            assert not set(launch.keys) & set(launch.preempted)
        for key in launch.preempted:
            self.preemptions[key] += 1
            prompt, _ = self.lengths[key]
            self.held.pop(key)
            if self.again:
                self.left_again[key] = self.done[key]
            self.scheduler.comes_back(key, self._cost(key), prompt if self.again else 0)
        for key in launch.keys:
            self.held[key] = max(self.held.get(key, 0), self._cost(key))
        assert sum(self.held.values()) <= self.budget
        flags, costs = self._outcome(launch)
        self.scheduler.commit(launch, flags, costs)
        for key in self.finished:
            self.held.pop(key, None)
        return True

    def _cost(self, key):
        prompt, tokens = self.lengths[key]
        return prompt + min(tokens, self.done[key] + 1)

    def _outcome(self, launch):
        if launch.stage != "coda":
            return [self._random.random() < 0.5 for _ in launch.keys], None
        flags = []
        for key in launch.keys:
            prompt, tokens = self.lengths[key]
            through = launch.pieces.get(key, (0, prompt))[1] == prompt
            if through and self.left_again.get(key, 0):
                self.left_again[key] -= 1
            elif through:
                self.done[key] += 1
            flags.append(through and self.done[key] == tokens)
            if flags[-1]:
                self.finished.append(key)
        return flags, [self._cost(key) for key in launch.keys]


def load(seed, **changes):
    generator = random.Random(seed)
    lengths = [(generator.randint(1, 12), generator.randint(1, 20)) for _ in range(generator.randint(1, 14))]
    longest = max(map(sum, lengths))
    options = {
        "budget": generator.randint(longest, 3 * longest),
        "again": generator.random() < 0.5,
        "max_num_seqs": generator.randint(1, 9),
        "refill": generator.random() < 0.7,
        "min_coda_batch": generator.randint(1, 4),
        "lookahead": generator.randint(0, 1),
        "prefill_chunk_size": generator.choice((None, 3)),
        "max_prefill_tokens": generator.choice((None, 4)),
        "max_overtakes": generator.choice((0, 2)),
    }
    return Load(lengths, seed=seed, **{**options, **changes})


@pytest.mark.parametrize("first", range(0, 400, 50))
def test_all_finish_within_the_budget_and_the_first_is_never_preempted(first):
    preempted = 0
    for seed in range(first, first + 50):
        one = load(seed)
        most = 60 * sum(prompt + DEPTH * tokens + 10 for prompt, tokens in one.lengths) * len(one.lengths)
        launches = 0
        while one.step():
            launches += 1
            assert launches < most, f"seed {seed} does not end"
        assert sorted(one.finished) == list(range(len(one.lengths)))
        assert all(one.done[key] == tokens for key, (_, tokens) in enumerate(one.lengths))
        room = one.scheduler._room
        assert room.spent == 0
        assert not room.growing
        assert len(one.scheduler) == one.scheduler.in_flight == 0
        assert sorted(one.scheduler._free_places) == list(range(one.scheduler.max_num_seqs))
        preempted += sum(one.preemptions.values())
    assert preempted > 50, "the loads are too light to test anything"


@pytest.mark.parametrize("seed", range(40))
def test_cancels_at_any_time_leave_nothing_behind(seed):
    one, generator = load(seed), random.Random(seed)
    while True:
        if generator.random() < 0.1 and one.scheduler._unfinished:
            key = generator.choice(sorted(one.scheduler._unfinished))
            one.scheduler.cancel(key)
            one.held.pop(key, None)
            one.finished.append(key)
        if not one.step():
            break
    assert sorted(one.finished) == list(range(len(one.lengths)))
    assert one.scheduler._room.spent == 0
    assert not one.scheduler._room.growing


def run(scheduler, costs, tokens, launches=200):
    """Step until all are finished; for every launch its stage, keys, those preempted, and how many stand still."""
    done, seen = Counter(), []
    while (launch := scheduler.next()) is not None and len(seen) < launches:
        seen.append((launch.stage, launch.keys, launch.preempted, launch.growing))
        flags = None
        if launch.stage == "coda":
            done.update(launch.keys)
            flags = [done[key] == tokens[key] for key in launch.keys]
            scheduler.commit(launch, flags, [costs(key, done[key]) for key in launch.keys])
        else:
            scheduler.commit(launch)
    return seen


def test_the_last_one_makes_room_and_comes_back_first_by_hand():
    """A budget of 6, three rows of 2, one loop a token; each holds one more for its second token. Row 0 grows into what
    row 2 gives up, row 1 finds no room for both and waits, and row 2 is back before row 3 starts."""
    scheduler = Scheduler(4, budget=6)
    for key in range(4):
        scheduler.add(key, 1, cost=2, most=3)
    seen = run(scheduler, lambda key, done: 2 + (done > 0), {0: 2, 1: 2, 2: 2, 3: 1})
    assert seen[:3] == [("prelude", (0, 1, 2), (), 0), ("loop", (0, 1, 2), (), 0), ("coda", (0, 1, 2), (), 0)]
    # 6 of 6 are held: row 2 gives up its 2, which serves rows 0 and 1.
    assert seen[3] == ("prelude", (0, 1), (2,), 0)
    assert seen[4:6] == [("loop", (0, 1), (), 0), ("coda", (0, 1), (), 0)]
    assert seen[6][1] == (2, 3)
    assert {key for _, keys, _, _ in seen for key in keys} == {0, 1, 2, 3}


def test_the_last_row_waits_and_is_not_preempted_for_itself():
    """Row 1 needs more than there is while row 0 runs on: it stands still, and nobody is admitted past it."""
    scheduler = Scheduler(4, budget=5)
    scheduler.add(0, 4, cost=3)
    scheduler.add(1, 1, cost=2, most=3)
    scheduler.add(2, 1, cost=1)
    seen = run(scheduler, lambda key, done: {0: 3, 1: 2 + (done > 0), 2: 1}[key], {0: 2, 1: 2, 2: 1})
    assert not any(preempted for _, _, preempted, _ in seen)
    waited = [keys for _, keys, _, growing in seen if growing]
    assert waited
    assert all(keys == (0,) for keys in waited)
    assert scheduler._room.spent == 0


def test_nobody_starts_in_the_launch_that_preempts():
    """What was given up is for those that wait for it: a small request further back may not take it."""
    scheduler = Scheduler(4, budget=6, max_overtakes=9)
    for key, cost in enumerate((2, 2, 2, 1)):
        scheduler.add(key, 1, cost=cost, most=3)
    seen = run(scheduler, lambda key, done: min(3, 2 + (done > 0)), {0: 2, 1: 2, 2: 2, 3: 1})
    at = next(index for index, launch in enumerate(seen) if launch[2])
    assert seen[at][1:3] == ((0, 1), (2,))


@pytest.mark.parametrize(("most", "admitted"), [(200, (0,)), (160, (0, 1)), (163, (0, 1))])
def test_a_sixteenth_is_kept_for_rows_that_may_grow(most, admitted):
    """Of 200, 160 are held: 40 are left, and 10 of them, or what row 0 may still need, are kept."""
    scheduler = Scheduler(4, budget=200)
    scheduler.add(0, 1, cost=160, most=most)
    scheduler.add(1, 1, cost=35)
    assert scheduler.next().keys == admitted


def test_what_could_never_end_is_refused_though_it_could_start():
    scheduler = Scheduler(2, budget=9)
    with pytest.raises(ValueError, match="request 0 may come to cost 10, more than the whole budget of 9"):
        scheduler.add(0, 1, cost=3, most=10)
    scheduler.add(1, 1, cost=3, most=9)
    launch = scheduler.next()
    assert launch.keys == (1,)
    scheduler.commit(launch)
    scheduler.commit(scheduler.next())
    with pytest.raises(ValueError, match="cost=10 of request 1 exceeds most=9"):
        scheduler.commit(scheduler.next(), [False], [10])


def test_rows_without_a_budget_never_stand_still():
    scheduler = Scheduler(3)
    for key in range(3):
        scheduler.add(key, 1, cost=1, most=10**10)
    seen = run(scheduler, lambda key, done: 10**9 * done + 1, dict.fromkeys(range(3), 3))
    assert not any(preempted or growing for *_, preempted, growing in seen)
