"""Properties of the schedule, for any mix of depths and settings, without a model."""

import math
import subprocess
import sys
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hf_cdb.scheduler import Scheduler

FULL_DEPTH = 4

depth_lists = st.lists(st.integers(1, FULL_DEPTH), min_size=0, max_size=8)
workloads = st.lists(depth_lists, min_size=1, max_size=25)


def simulate(workload, lookahead=0, min_depth=1, prompts=None, **options):
    """Run requests whose k-th token after the first leaves at `workload[request][k]`; the launches that ran."""
    scheduler = Scheduler(lookahead=lookahead, **options)
    tokens = {key: [] for key in range(len(workload))}
    prompts = prompts or [1] * len(workload)
    wanted = [[FULL_DEPTH, *depths] for depths in workload]
    finished, launches = [], []
    for key in range(len(workload)):
        scheduler.add(key, FULL_DEPTH, min_depth=min_depth, prompt=prompts[key])
    while (launch := scheduler.next()) is not None:
        launches.append(launch)
        assert scheduler.in_flight <= options["max_num_seqs"]
        assert len(launches) < 10_000, "the schedule does not end"
        flags = []
        for key, depth in zip(launch.keys, launch.depths, strict=True):
            assert (key in launch.pieces) == (not tokens[key])
            if launch.stage == "loop":
                flags.append(depth + lookahead >= wanted[key][len(tokens[key])])
            elif launch.stage == "coda" and launch.pieces.get(key, (0, prompts[key]))[1] == prompts[key]:
                tokens[key].append(depth)
                done = len(tokens[key]) == len(wanted[key])
                if done:
                    finished.append(key)
                flags.append(done)
            else:
                flags.append(False)
        scheduler.commit(launch, flags)
    assert len(scheduler) == 0
    return tokens, wanted, finished, launches


options = st.fixed_dictionaries(
    {
        "max_num_seqs": st.integers(1, 9),
        "refill": st.booleans(),
        "min_coda_batch": st.integers(1, 5),
    }
)


@given(workloads, options, st.integers(0, 1), st.integers(1, FULL_DEPTH))
def test_every_request_finishes_once_with_the_depths_it_asked_for(workload, options, lookahead, min_depth):
    tokens, wanted, finished, launches = simulate(workload, lookahead, min_depth, **options)
    assert sorted(finished) == list(range(len(workload)))
    for key, depths in tokens.items():
        first, *others = wanted[key]
        least = max(min_depth, 2 if lookahead else 1)
        assert depths == [first, *(max(depth, least) for depth in others)]
    # work is conserved
    row_loops = sum(len(launch) for launch in launches if launch.stage == "loop")
    assert row_loops == sum(map(sum, tokens.values()))
    for stage in ("prelude", "coda"):
        assert sum(len(launch) for launch in launches if launch.stage == stage) == sum(map(len, tokens.values()))


@given(workloads, options)
def test_no_row_is_twice_in_a_launch_and_no_place_is_shared(workload, options):
    *_, launches = simulate(workload, **options)
    for launch in launches:
        assert len(set(launch.keys)) == len(launch)
        assert len(set(launch.places)) == len(launch)
        assert all(0 <= place < options["max_num_seqs"] for place in launch.places)


@given(workloads, options)
def test_a_row_keeps_its_place(workload, options):
    *_, launches = simulate(workload, **options)
    places = {}
    for launch in launches:
        for key, place in zip(launch.keys, launch.places, strict=True):
            assert places.setdefault(key, place) == place


@given(workloads, st.integers(1, 9))
def test_launches_of_the_core_are_near_the_least_possible(workload, width):
    tokens, _, _, launches = simulate(workload, max_num_seqs=width, refill=True, min_coda_batch=1)
    cores = [launch for launch in launches if launch.stage == "loop"]
    row_loops = sum(map(sum, tokens.values()))
    longest = max(map(sum, tokens.values()))
    assert len(cores) <= math.ceil(row_loops / width) + FULL_DEPTH + longest
    # while somebody waits for a place, every launch of the core is full
    started = Counter()
    for launch in launches:
        if launch.stage == "prelude":
            started.update(launch.keys)
        if launch.stage == "loop" and len(started) < len(workload):
            assert len(launch) == width


@given(workloads, options)
def test_requests_start_in_the_order_they_came(workload, options):
    *_, launches = simulate(workload, **options)
    seen = []
    for launch in launches:
        seen += [key for key in launch.keys if launch.stage == "prelude" and key not in seen]
    assert seen == sorted(seen)


@given(workloads, st.integers(1, 9), st.integers(1, 5))
def test_without_refill_cohorts_move_in_step(workload, width, min_coda_batch):
    *_, launches = simulate(workload, max_num_seqs=width, refill=False, min_coda_batch=min_coda_batch)
    produced = Counter()
    for launch in launches:
        cohorts = {key // width for key in launch.keys}
        assert len(cohorts) == 1, "rows of two cohorts in flight"
        if launch.stage == "coda":
            produced.update(launch.keys)
            assert len({produced[key] for key in launch.keys}) == 1, "a row ran ahead of its cohort"


pieces = st.fixed_dictionaries(
    {
        "prefill_chunk_size": st.none() | st.integers(1, 3),
        "max_prefill_tokens": st.none() | st.integers(1, 6),
        "lookahead": st.integers(0, 1),
    }
)


@given(workloads, st.integers(1, 9), pieces, st.data())
def test_no_row_of_a_cohort_starts_a_token_before_all_have_the_last_one(workload, width, pieces, data):
    """Also where a prompt passes the coda in more pieces than another."""
    prompts = [data.draw(st.integers(1, 9)) for _ in workload]
    tokens, _, _, launches = simulate(workload, prompts=prompts, max_num_seqs=width, refill=False, **pieces)
    produced = Counter()
    for launch in launches:
        cohort = {key // width for key in launch.keys}.pop()
        if launch.stage == "coda":
            produced.update(k for k in launch.keys if launch.pieces.get(k, (0, prompts[k]))[1] == prompts[k])
            continue
        for key in range(cohort * width, min((cohort + 1) * width, len(workload))):
            assert produced[key] >= min(len(tokens[key]), max(produced[k] for k in launch.keys)), launch


@given(workloads, st.integers(1, 9), st.integers(2, 5))
def test_waiting_for_the_coda_ends(workload, width, min_coda_batch):
    """A coda is large enough, or one of the three reasons to flush holds; nobody waits longer than full depth."""
    scheduler = Scheduler(width, min_coda_batch=min_coda_batch)
    for key in range(len(workload)):
        scheduler.add(key, FULL_DEPTH)
    tokens, waited = Counter(), {}
    while (launch := scheduler.next()) is not None:
        flags = []
        for key, depth in zip(launch.keys, launch.depths, strict=True):
            wanted = [FULL_DEPTH, *workload[key]]
            if launch.stage == "coda":
                tokens[key] += 1
            flags.append(tokens[key] == len(wanted) if launch.stage == "coda" else depth >= wanted[tokens[key]])
        if launch.stage == "coda":
            looping = scheduler.in_flight - len(launch)
            longest = max(waited.pop(key) for key in launch.keys)
            assert len(launch) >= min_coda_batch or looping <= len(launch) or longest >= FULL_DEPTH
        if launch.stage == "loop":
            for key in waited:
                waited[key] += 1
                assert waited[key] <= FULL_DEPTH
            for key, flag, depth in zip(launch.keys, flags, launch.depths, strict=True):
                if (flag and tokens[key]) or depth == FULL_DEPTH:
                    waited[key] = 0
        scheduler.commit(launch, flags)


@given(workloads, options, st.data())
def test_prompts_in_pieces_go_depth_major(workload, options, data):
    """Every piece passes a loop before any piece of the prompt starts the next one."""
    prompts = [data.draw(st.integers(1, 5)) for _ in workload]
    tokens, _, finished, launches = simulate(workload, prompts=prompts, prefill_chunk_size=2, **options)
    assert sorted(finished) == list(range(len(workload)))
    for key, prompt in enumerate(prompts):
        ran = []
        for launch in launches:
            if key in launch.pieces:
                ran.append((launch.stage, launch.depths[launch.keys.index(key)], launch.pieces[key]))
        cut = [(start, min(start + 2, prompt)) for start in range(0, prompt, 2)]
        stages = [("prelude", 0), *(("loop", depth) for depth in range(1, FULL_DEPTH + 1)), ("coda", FULL_DEPTH)]
        assert ran == [(*stage, piece) for stage in stages for piece in cut]
        assert tokens[key][1:] == workload[key]


@given(st.lists(st.integers(1, 10), min_size=1, max_size=20), st.integers(1, 9), st.booleans())
def test_the_budget_holds_and_starves_nobody(costs, width, refill):
    scheduler = Scheduler(width, refill=refill, budget=10)
    for key, cost in enumerate(costs):
        scheduler.add(key, 1, cost=cost)
    served = []
    while (launch := scheduler.next()) is not None:
        assert sum(costs[key] for key in launch.keys) <= 10
        finished = launch.stage == "coda"
        served += launch.keys if finished else ()
        scheduler.commit(launch, [finished] * len(launch))
    assert sorted(served) == list(range(len(costs)))


@given(workloads, options, st.data())
def test_cancelling_at_any_moment_harms_nobody_else(workload, options, data):
    victim = data.draw(st.integers(0, len(workload) - 1))
    moment = data.draw(st.integers(0, 30))
    scheduler = Scheduler(**options)
    for key in range(len(workload)):
        scheduler.add(key, FULL_DEPTH)
    tokens = Counter()
    number, cancelled = 0, False
    while (launch := scheduler.next()) is not None:
        if number == moment:
            scheduler.cancel(victim)
            cancelled = True
        number += 1
        if launch.stage == "coda":
            tokens.update(launch.keys)
        flags = [
            tokens[key] > len(workload[key]) if launch.stage == "coda" else depth >= 2
            for key, depth in zip(launch.keys, launch.depths, strict=True)
        ]
        scheduler.commit(launch, flags)
    assert len(scheduler) == 0
    for key, depths in enumerate(workload):
        if key != victim or not cancelled:
            assert tokens[key] == len(depths) + 1


def answers(launch, tokens, workload, lookahead):
    """What the rule says after a loop, and who is finished after a coda: the next depth of `workload` is reached."""
    if launch.stage == "loop":
        wanted = [[FULL_DEPTH, *workload[key]] for key in launch.keys]
        depths = zip(launch.keys, launch.depths, wanted, strict=True)
        return [depth + lookahead >= row[tokens[key]] for key, depth, row in depths]
    if launch.stage == "coda":
        tokens.update(launch.keys)
        return [tokens[key] > len(workload[key]) for key in launch.keys]
    return None


@given(workloads, options, st.integers(1, FULL_DEPTH), st.data())
def test_signals_may_come_when_the_next_launch_is_under_way(workload, options, min_depth, data):
    """With lookahead the launches are the same as with signals at once; also where requests are cancelled between a
    launch and its signals, and their keys used again."""
    cancelled = data.draw(st.dictionaries(st.integers(0, 40), st.integers(0, len(workload) - 1), max_size=4))
    again = data.draw(st.booleans())
    at_once, late = (Scheduler(lookahead=1, **options) for _ in range(2))
    for key in range(len(workload)):
        for scheduler in (at_once, late):
            scheduler.add(key, FULL_DEPTH, min_depth=min_depth)
    tokens, pending, number = Counter(), None, 0
    while (launch := at_once.next()) is not None:
        assert late.next() == launch
        if number in cancelled:
            key = cancelled[number]
            known = key in at_once._unfinished
            for scheduler in (at_once, late):
                scheduler.cancel(key)
                if again and known:
                    scheduler.add(key, FULL_DEPTH, min_depth=min_depth)
        number += 1
        flags = answers(launch, tokens, workload, lookahead=1)
        if number - 1 in cancelled and again and known:
            tokens[cancelled[number - 1]] = 0
        at_once.commit(launch, flags)
        if pending is not None:
            late.signal(*pending)
        mine = late._launched
        late.commit(mine, None if launch.stage == "loop" else flags)
        pending = (mine, flags) if launch.stage == "loop" else None
    assert late.next() is None
    assert len(late) == len(at_once) == 0


def test_a_signal_by_hand():
    """Two rows decode: what the rule says after loop 1 takes effect after loop 2, and is known during loop 2."""
    scheduler = Scheduler(2, lookahead=1)
    for key in range(2):
        scheduler.add(key, 3)
    for _ in range(6):  # their prompts, and the next prelude
        scheduler.commit(scheduler.next())
    first = scheduler.next()
    scheduler.commit(first)
    second = scheduler.next()
    assert (second.stage, second.keys, second.depths) == ("loop", (0, 1), (2, 2))
    scheduler.signal(first, [True, False])
    scheduler.commit(second)
    launch = scheduler.next()
    assert (launch.stage, launch.keys, launch.depths) == ("coda", (0,), (2,))
    scheduler.signal(second, [False, True])
    scheduler.commit(launch, [True])
    last = scheduler.next()
    assert (last.stage, last.keys, last.depths) == ("loop", (1,), (3,))


def test_a_schedule_by_hand():
    """Two places, three requests: a leaves at 1, b at 3, c waits for a's place."""
    *_, launches = simulate([[1], [3], []], max_num_seqs=2, refill=True, min_coda_batch=1)
    shown = [(launch.stage, launch.keys, launch.depths) for launch in launches]
    assert shown == [
        ("prelude", (0, 1), (0, 0)),
        ("loop", (0, 1), (1, 1)),
        ("loop", (0, 1), (2, 2)),
        ("loop", (0, 1), (3, 3)),
        ("loop", (0, 1), (4, 4)),
        ("coda", (0, 1), (4, 4)),
        ("prelude", (0, 1), (0, 0)),
        ("loop", (0, 1), (1, 1)),
        ("coda", (0,), (1,)),
        ("prelude", (2,), (0,)),
        ("loop", (1, 2), (2, 1)),
        ("loop", (1, 2), (3, 2)),
        ("coda", (1,), (3,)),
        ("loop", (2,), (3,)),
        ("loop", (2,), (4,)),
        ("coda", (2,), (4,)),
    ]


def test_the_coda_does_not_wait_where_no_more_rows_than_wait_could_join():
    scheduler = Scheduler(4, min_coda_batch=4)
    for key in range(4):
        scheduler.add(key, max_depth=2)
    for stage in ("prelude", "loop", "loop", "coda", "prelude"):
        launch = scheduler.next()
        assert (launch.stage, len(launch)) == (stage, 4)
        scheduler.commit(launch)
    launch = scheduler.next()
    scheduler.commit(launch, [True, True, False, False])
    launch = scheduler.next()
    assert (launch.stage, launch.keys) == ("coda", (0, 1))


def test_a_cancelled_key_is_free_again_wherever_the_request_was():
    scheduler = Scheduler(1)
    scheduler.add(0, max_depth=2)
    scheduler.add(1, max_depth=2)
    scheduler.commit(scheduler.next())
    for key in (1, 0):  # waiting, in flight
        scheduler.cancel(key)
        scheduler.add(key, max_depth=2)
    assert len(scheduler) == 2


def test_misuse_is_refused():
    scheduler = Scheduler(2, budget=5)
    scheduler.add(1, 4)
    with pytest.raises(ValueError, match="key=1"):
        scheduler.add(1, 4)
    with pytest.raises(ValueError, match="request 2 may come to cost 6, more than the whole budget of 5"):
        scheduler.add(2, 4, cost=6)
    launch = scheduler.next()
    with pytest.raises(RuntimeError, match="commit the launch"):
        scheduler.next()
    scheduler.commit(launch)
    with pytest.raises(RuntimeError, match="only once"):
        scheduler.commit(launch)


@pytest.mark.parametrize("lookahead", [0, 1])
def test_signals_that_nobody_waits_for_are_refused(lookahead):
    """Without lookahead, twice, of a launch that has its own, of another stage, and when the next one is committed."""
    scheduler = Scheduler(1, lookahead=lookahead)
    scheduler.add(1, 4)
    prelude = scheduler.next()
    scheduler.commit(prelude)
    loop = scheduler.next()
    scheduler.commit(loop, [False])
    for launch in (prelude, loop):
        with pytest.raises(RuntimeError, match="signals can be given"):
            scheduler.signal(launch, [True])
    late = scheduler.next()
    scheduler.commit(late)
    if lookahead:
        scheduler.signal(late, [False])
    with pytest.raises(RuntimeError, match="signals can be given"):
        scheduler.signal(late, [True])
    late = scheduler.next()
    scheduler.commit(late)
    scheduler.commit(scheduler.next())
    with pytest.raises(RuntimeError, match="signals can be given"):
        scheduler.signal(late, [True])


def test_the_scheduler_needs_no_torch():
    code = (
        "import importlib, importlib.util, sys, types\n"
        "package = types.ModuleType('hf_cdb')\n"
        "package.__path__ = importlib.util.find_spec('hf_cdb').submodule_search_locations\n"
        "sys.modules['hf_cdb'] = package  # its own __init__ imports torch\n"
        "importlib.import_module('hf_cdb.scheduler')\n"
        "print('torch' in sys.modules)\n"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "False"
