"""Who copies from whom, who waits, and what is kept: against brute force, without a model."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hf_cdb.prefixes import LEAST, WAIT, Copy, Prefixes
from hf_cdb.scheduler import Scheduler

FULL_DEPTH = 2


def encoded(ids):
    return b"".join(one.to_bytes(4, "little") for one in ids)


def prefixes(most=10**9):
    return Prefixes(lambda positions: positions, most)


def prompt(*parts):
    """Ids of parts (id, positions): `(7, 3)` is 7 7 7."""
    return [one for one, positions in parts for _ in range(positions)]


def test_a_prompt_waits_for_one_under_way_and_then_copies():
    known = prefixes()
    for key in range(3):
        known.add(key, encoded(prompt((7, 100), (key, 5))))
    assert [known.start(key) for key in range(3)] == [0, None, None]
    assert known.start(1) is None
    known.through(0)
    assert [known.start(1), known.start(2)] == [100, 100]
    assert known.copies == [Copy(0, 1, 100), Copy(0, 2, 100)]


@pytest.mark.parametrize("positions", [LEAST - 1, LEAST, LEAST + 1, 2 * LEAST])
def test_the_same_prompt_twice(positions):
    """I-02: the last position of a prompt runs in any case."""
    known = prefixes()
    for key in range(2):
        known.add(key, encoded(prompt((7, positions))))
    assert known.start(0) == 0
    known.through(0)
    assert known.start(1) == (positions - 1 if positions > LEAST else 0)


@pytest.mark.parametrize("shared", [LEAST - 1, LEAST])
def test_the_least_that_is_shared(shared):
    known = prefixes()
    known.add(0, encoded(prompt((7, shared), (1, 9))))
    known.add(1, encoded(prompt((7, shared), (2, 9))))
    assert known.start(0) == 0
    assert known.start(1) == (0 if shared < LEAST else None)


def test_other_kinds_share_nothing():
    known = prefixes()
    for key, kind in enumerate([(4,), (3,), (4, ("init_seed", 1)), (4,)]):
        known.add(key, encoded(prompt((7, 100), (key, 5))), kind)
    assert [known.start(key) for key in range(4)] == [0, 0, 0, None]


def test_nobody_waits_for_a_prompt_far_longer():
    known = prefixes()
    known.add(0, encoded(prompt((7, 100), (1, WAIT * 110 - 99))))
    known.add(1, encoded(prompt((7, 100), (2, 10))))
    known.add(2, encoded(prompt((7, 100), (3, 10))))
    assert [known.start(key) for key in range(3)] == [0, 0, None]  # but for another short one


@pytest.mark.parametrize("lose", [lambda known: known.end(0, through=False), lambda known: known.withdraw(0)])
def test_who_waits_goes_on_without_a_donor(lose):
    known = prefixes()
    for key in range(3):
        known.add(key, encoded(prompt((7, 100), (key, 5))))
    assert [known.start(key) for key in range(3)] == [0, None, None]
    lose(known)
    assert [known.start(1), known.start(2)] == [0, None]  # the first one is the donor now
    known.through(1)
    assert known.start(2) == 100


def run_one(known, key, ids):
    """A request that comes, runs and ends; where it began."""
    known.add(key, encoded(ids))
    first = known.start(key)
    known.copies.clear()
    known.through(key)
    return first, known.end(key, through=True)


def test_what_was_asked_for_twice_is_kept():
    known = prefixes()
    assert run_one(known, 0, prompt((7, 100), (1, 5))) == (0, None)
    assert run_one(known, 1, prompt((7, 100), (2, 5))) == (0, Copy(1, "prefix 1", 100))
    assert run_one(known, 2, prompt((7, 100), (3, 5))) == (100, None)
    assert known.kept_bytes == 100
    known.clear()
    assert (known.kept_bytes, known.dropped) == (0, ["prefix 1"])
    assert run_one(known, 3, prompt((7, 100), (4, 5))) == (0, Copy(3, "prefix 2", 100))


def test_a_longer_prefix_takes_the_place_of_a_shorter_one():
    known = prefixes()
    for key in range(2):
        run_one(known, key, prompt((7, 100), (key, 5)))
    for key in range(2, 4):
        run_one(known, key, prompt((7, 200), (key, 5)))
    assert (known.kept_bytes, known.dropped) == (200, ["prefix 1"])


def test_the_least_recently_used_one_is_dropped():
    known = prefixes(most=300)
    for key, first in enumerate([1, 1, 2, 2, 3, 3]):
        run_one(known, key, prompt((first, 100), (key + 10, 5)))
    assert (known.kept_bytes, known.dropped) == (300, [])
    assert run_one(known, 6, prompt((1, 100), (20, 5)))[0] == 100
    for key in (7, 8):
        run_one(known, key, prompt((4, 100), (key + 20, 5)))
    assert (known.kept_bytes, known.dropped) == (300, ["prefix 2"])
    assert known.start(9, room=100) == 0  # a short prompt needs the room
    assert (known.kept_bytes, known.dropped[1:]) == (100, ["prefix 3", "prefix 1"])


def test_room_is_made_but_not_of_what_is_copied_next():
    known = prefixes()
    for key, first in enumerate([1, 1, 2, 2]):
        run_one(known, key, prompt((first, 100), (key + 10, 5)))
    known.add(4, encoded(prompt((1, 100), (20, 5))))
    assert known.start(4, room=100) == 100  # the one it copies goes last
    assert (known.pinned, known.dropped) == (100, ["prefix 2"])
    known.start(5, room=0)
    assert known.kept_bytes == 100
    known.copies.clear()
    known.start(6, room=0)
    assert known.kept_bytes == 0


ids_of = st.lists(st.tuples(st.integers(1, 2), st.sampled_from([1, 3, LEAST - 1, LEAST, LEAST + 1, 90])), max_size=4)
arrivals = st.lists(
    st.tuples(
        st.integers(0, 12),  # launch before which it comes
        ids_of.map(lambda parts: [*prompt(*parts), 3]),
        st.integers(0, 4),  # tokens after the first
        st.integers(0, 2),  # priority
    ),
    min_size=1,
    max_size=14,
)


@given(
    arrivals,
    st.dictionaries(st.integers(0, 30), st.integers(0, 13), max_size=4),
    st.fixed_dictionaries(
        {
            "max_num_seqs": st.integers(1, 6),
            "refill": st.booleans(),
            "min_coda_batch": st.integers(1, 3),
            "lookahead": st.integers(0, 1),
            "prefill_chunk_size": st.sampled_from([None, 50]),
            "max_prefill_tokens": st.sampled_from([None, 70]),
            "budget": st.sampled_from([None, 400, 600]),
            "max_overtakes": st.integers(0, 2),
        }
    ),
)
def test_any_load_ends_and_every_copy_is_of_equal_ids(arrivals, cancelled, options):
    """An engine without a model: what it holds is written down by ids, and copies are looked at."""
    known = prefixes(most=options["budget"] or 500)
    scheduler = Scheduler(prefixes=known, **options)
    held, first, tokens, ended = {}, {}, [0] * len(arrivals), set()
    cost_of = [len(ids) + more for _, ids, more, _ in arrivals]

    def end(key, through):
        ended.add(key)
        kept = known.end(key, through)
        entries = held.pop(key, None)
        free()
        if kept is not None:
            assert through
            held[kept.target] = entries[: kept.positions]

    def free():
        for dropped in known.dropped:
            del held[dropped]
        known.dropped.clear()

    number = 0
    while True:
        for key, (comes, ids, _, priority) in enumerate(arrivals):
            if comes == number and (options["budget"] is None or cost_of[key] <= options["budget"]):
                scheduler.add(key, FULL_DEPTH, prompt=len(ids), cost=cost_of[key], priority=priority)
                known.add(key, encoded(ids))
            elif comes == number:
                ended.add(key)
        launch = scheduler.next()
        free()
        for copy in known.copies:
            assert LEAST <= copy.positions < len(arrivals[copy.target][1])
            assert held[copy.source][: copy.positions] == arrivals[copy.target][1][: copy.positions]
            first[copy.target] = copy.positions
        known.copies.clear()
        in_flight = [key for key in scheduler._unfinished if scheduler._unfinished[key].place >= 0]
        if options["budget"] is not None:
            assert sum(cost_of[key] for key in in_flight) + known.kept_bytes <= options["budget"]
        assert known.kept_bytes == sum(len(entries) for key, entries in held.items() if isinstance(key, str))
        number += 1
        assert number < 3000, "the schedule does not end"
        if launch is None:
            if number > 12:
                break
            continue
        key = cancelled.get(number)
        if key is not None and key in scheduler._unfinished:
            end(key, through=tokens[key] > 0)
            scheduler.cancel(key)
        flags = [False] * len(launch)
        for index, key in enumerate(launch.keys):
            _, ids, more, _ = arrivals[key]
            start, stop = launch.pieces.get(key, (0, len(ids)))
            if key in ended:
                continue
            if key in launch.pieces:
                assert start >= first.get(key, 0)
            if launch.stage == "coda" and stop == len(ids):
                held.setdefault(key, ids)
                tokens[key] += 1
                flags[index] = tokens[key] > more
                if flags[index]:
                    end(key, through=True)
        scheduler.commit(launch, flags)
    assert ended == set(range(len(arrivals)))
    assert len(scheduler) == 0


@given(st.lists(ids_of.map(lambda parts: prompt(*parts)), min_size=2, max_size=10))
def test_the_longest_is_found(prompts):
    known = prefixes()
    for key, ids in enumerate(prompts[:-1]):
        known.add(key, encoded(ids))
        known.start(key)
        known.through(key)
    known.add("last", encoded(prompts[-1]))
    ready = [prompts[key] for key in range(len(prompts) - 1) if known._prompts[key].index is known._ready]
    most = 0
    for ids in ready:
        pairs = zip(ids, prompts[-1], strict=False)
        most = max(most, len(list(itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))))
    assert known._ready.longest(known._prompts["last"])[0] == most
