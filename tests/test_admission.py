"""Who is admitted when: priority, age, deadline, and who may go past a request that waits for room."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hf_cdb.scheduler import Scheduler


def admitted_in_order(scheduler):
    """Run everything to its end, one loop and one token a request; the order in which they started."""
    order = []
    while (launch := scheduler.next()) is not None:
        order += launch.keys if launch.stage == "prelude" else ()
        scheduler.commit(launch, [launch.stage == "coda"] * len(launch))
    return order


def order_of(requests, **options):
    """Requests of (priority, deadline), one at a time in flight."""
    scheduler = Scheduler(1, **options)
    for key, (priority, deadline) in enumerate(requests):
        scheduler.add(key, 1, priority=priority, deadline=deadline)
    return admitted_in_order(scheduler)


@pytest.mark.parametrize(
    ("requests", "ageing", "expected"),
    [
        ([(0, None), (2, None), (1, None), (2, None), (-1, None)], 64, [1, 3, 2, 0, 4]),
        ([(0, None), (0, 9.0), (0, 3.0), (1, 100.0)], 64, [3, 2, 1, 0]),  # the deadline orders one priority
        ([(0, None)] * 4, 2, [0, 1, 2, 3]),
        # Rounds of two. Priority 1 of the second round goes before the first round, that of the third does not.
        ([(0, None), (0, None), (0, None), (1, None), (1, None), (0, None)], 2, [3, 0, 1, 4, 2, 5]),
        ([(0, 5.0), (0, 4.0), (0, 1.0), (0, 2.0)], 2, [1, 0, 2, 3]),  # deadlines count within a round
        ([(1, 5.0), (9, 1.0), (0, 0.0)], 1, [1, 0, 2]),
    ],
)
def test_the_order_by_hand(requests, ageing, expected):
    assert order_of(requests, ageing=ageing) == expected


@given(
    st.lists(st.tuples(st.integers(-2, 2), st.sampled_from([None, 1.0, 2.0, 3.0])), max_size=30),
    st.integers(1, 8),
)
def test_no_more_go_past_a_request_than_the_bound_says(requests, ageing):
    order = order_of(requests, ageing=ageing)
    assert sorted(order) == list(range(len(requests)))
    most = max((priority for priority, _ in requests), default=0)
    for position, key in enumerate(order):
        priority, deadline = requests[key]
        passed_by = [other for other in order[:position] if other > key]
        assert len(passed_by) < (most - priority + 1) * ageing
        for other in passed_by:
            its_priority, its_deadline = requests[other]
            sooner = its_deadline is not None and (deadline is None or its_deadline < deadline)
            assert its_priority > priority or (its_priority == priority and sooner)
        # And a priority is worth something: all of a lower one that came with it or in the round before go after it.
        lower = [other for other in range(max(0, key - ageing), key) if requests[other][0] < priority]
        assert not set(lower) & set(order[:position])


@given(
    ahead=st.lists(st.integers(-3, 3), max_size=10),
    priority=st.integers(-3, 3),
    cost=st.integers(0, 10),
    storm=st.lists(st.tuples(st.integers(-3, 3), st.integers(0, 10)), min_size=1, max_size=5),
    ageing=st.integers(1, 5),
    max_overtakes=st.integers(0, 3),
    width=st.integers(1, 4),
    refill=st.booleans(),
)
def test_nobody_starves(ahead, priority, cost, storm, ageing, max_overtakes, width, refill):
    """Before every launch several more come, for ever: of higher priority, and some that fit where others do not."""
    scheduler = Scheduler(width, refill=refill, budget=10, ageing=ageing, max_overtakes=max_overtakes)
    for key, other in enumerate(ahead):
        scheduler.add(key, 1, priority=other, cost=10)
    victim = key = len(ahead)
    scheduler.add(victim, 1, priority=priority, cost=cost)
    # Those that stand before it, and as many again as may go past each of them and past itself.
    before = len(ahead) + (3 - priority + 1) * ageing - 1
    most = before + (before + 1) * max_overtakes
    admitted, launches = 0, 0
    while True:
        for other, its_cost in storm:
            key += 1
            scheduler.add(key, 1, priority=other, cost=its_cost)
        launch = scheduler.next()
        if launch.stage == "prelude":
            if victim in launch.keys:
                # of its own launch only those before it count, and at most `width` are in one
                admitted += launch.keys.index(victim)
                break
            admitted += len(launch)
        launches += 1
        assert admitted <= most
        assert launches <= 3 * (most + 1)  # a prelude, a loop and a coda for each, one after the other at worst
        scheduler.commit(launch, [launch.stage == "coda"] * len(launch))
    assert admitted <= most


def test_a_short_request_goes_past_a_long_one_that_finds_no_room():
    """A budget of 10: one of cost 6 runs, one of 8 waits; two of the small ones may pass it, the third may not."""
    scheduler = Scheduler(9, budget=10, max_overtakes=2)
    scheduler.add(0, 2, cost=6)
    scheduler.add(1, 1, cost=8)
    for key in range(2, 6):
        scheduler.add(key, 1, cost=2)
    launch = scheduler.next()
    assert launch.keys == (0, 2, 3)
    order = list(launch.keys)
    scheduler.commit(launch)
    while (launch := scheduler.next()) is not None:
        if launch.stage == "prelude":
            order += launch.keys
        scheduler.commit(launch, [launch.stage == "coda"] * len(launch))
    assert order == [0, 2, 3, 1, 4, 5]


def test_one_that_fits_is_found_when_it_comes_late():
    """That nobody fitted before is no reason to pass over one that came since."""
    scheduler = Scheduler(9, budget=10, max_overtakes=1)
    for key, cost in enumerate((8, 9, 9)):
        scheduler.add(key, 1, cost=cost)
    launch = scheduler.next()
    scheduler.commit(launch)
    scheduler.commit(scheduler.next())  # two launches in which nobody fits
    scheduler.add(3, 1, cost=2)
    assert scheduler.next().stage == "prelude"
    assert scheduler.waiting == 2


def test_in_order_where_nobody_may_overtake():
    scheduler = Scheduler(9, budget=10)
    for key, cost in enumerate((6, 8, 2)):
        scheduler.add(key, 1, cost=cost)
    assert admitted_in_order(scheduler) == [0, 1, 2]


def test_deadlines_are_told_once_and_only_of_unfinished_requests():
    scheduler = Scheduler(1)
    for key, deadline in enumerate((5.0, 3.0, None, 4.0, math.inf, 3.0)):
        scheduler.add(key, 1, deadline=deadline)
    assert scheduler.overdue(2.9) == []
    assert scheduler.overdue(3.0) == [1, 5]
    assert scheduler.overdue(3.5) == []
    scheduler.cancel(3)
    scheduler.add(3, 1, deadline=7.0)  # the key again: its old deadline is gone
    assert scheduler.overdue(6.0) == [0]
    for key in (1, 5, 0):
        scheduler.cancel(key)
    assert sorted(admitted_in_order(scheduler)) == [2, 3, 4]
    assert scheduler.overdue(math.inf) == []


def test_the_deadline_of_a_row_in_flight_passes_too():
    scheduler = Scheduler(1)
    scheduler.add(7, 3, deadline=1.0)
    launch = scheduler.next()
    assert scheduler.overdue(1.5) == [7]
    scheduler.cancel(7)
    scheduler.commit(launch)
    assert scheduler.next() is None
    assert len(scheduler) == scheduler.in_flight == 0


def test_a_deadline_that_is_no_time_is_refused():
    scheduler = Scheduler(1)
    with pytest.raises(ValueError, match="deadline=nan of request 4 is no time"):
        scheduler.add(4, 1, deadline=math.nan)
    assert len(scheduler) == 0
    scheduler.add(4, 1, deadline=-1.0)
    assert scheduler.overdue(0.0) == [4]
