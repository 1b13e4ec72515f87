"""A bound on prompt positions: who gets how many of them, and that rows which decode never wait for more."""

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hf_cdb import CDBConfig
from hf_cdb.adapters import adapter_for
from hf_cdb.engine import Engine
from hf_cdb.prefill import share_out
from hf_cdb.reference import reference_generate
from hf_cdb.request import Request
from hf_cdb.sampling import Sampler
from hf_cdb.scheduler import Scheduler

from .dory import random_dory
from .tiny import prompts
from .toy import ToyModel, predict, toy_prompt

FULL_DEPTH = 3
STAGES = [("prelude", 0), *(("loop", depth) for depth in range(1, FULL_DEPTH + 1)), ("coda", FULL_DEPTH)]


@pytest.mark.parametrize(
    ("most", "wanted", "remaining", "given"),
    [
        (8, [20], [80], [8]),  # alone it has all
        (8, [20, 20], [80, 60], [4, 4]),
        (8, [20, 20], [60, 80], [8, 0]),  # the first is also the shortest
        (8, [20, 3, 2], [80, 12, 8], [4, 2, 2]),  # half for the first, then the shortest
        (8, [20, 1, 1], [80, 4, 4], [6, 1, 1]),  # and what nobody else wants
        (7, [20, 20], [80, 60], [4, 3]),
        (1, [20, 1], [80, 4], [1, 0]),
        (0, [20, 1], [80, 4], [0, 0]),
        (8, [2, 20, 20], [8, 70, 60], [2, 0, 6]),
        (8, [], [], []),
    ],
)
def test_shares_by_hand(most, wanted, remaining, given):
    assert share_out(most, wanted, remaining) == given


@given(st.integers(0, 30), st.lists(st.tuples(st.integers(1, 20), st.integers(0, 20)), max_size=8))
def test_shares(most, prompts):
    wanted, remaining = [one for one, _ in prompts], [one + more for one, more in prompts]
    given = share_out(most, wanted, remaining)
    assert sum(given) == min(most, sum(wanted))  # nothing is wasted, and nothing beyond the bound
    assert all(0 <= one <= most for one, most in zip(given, wanted, strict=True))
    if wanted:
        assert given[0] >= min(wanted[0], most / 2)


def run(requests, scheduler, cancelled=()):
    """Requests of (launch before which it comes, prompt, depths of the later tokens).

    Args:
        cancelled: keys by the number of the launch during which each is cancelled.

    Returns:
        Tokens by request, and the launches that ran, with the number of rows that were ready for the loop.
    """
    cancelled = dict(cancelled)
    tokens, launches = Counter(), []
    while True:
        for key, (comes, prompt, _) in enumerate(requests):
            if comes == len(launches):
                scheduler.add(key, FULL_DEPTH, prompt=prompt)
        launch = scheduler.next()
        if len(launches) in cancelled:
            scheduler.cancel(cancelled[len(launches)])
        if launch is None and len(launches) > max(comes for comes, *_ in requests):
            return tokens, [(launch, looping) for launch, looping in launches if launch is not None]
        launches.append((launch, scheduler.queues["looping"]))
        if launch is None:
            continue
        assert len(launches) < 20_000, "the schedule does not end"
        flags = [False] * len(launch)
        for index, (key, depth) in enumerate(zip(launch.keys, launch.depths, strict=True)):
            _, prompt, depths = requests[key]
            if launch.stage == "loop":
                flags[index] = depth >= [FULL_DEPTH, *depths][tokens[key]]
            elif launch.stage == "coda" and launch.pieces.get(key, (0, prompt))[1] == prompt:
                tokens[key] += 1
                flags[index] = tokens[key] > len(depths)
        scheduler.commit(launch, flags)


def prompt_positions(launch):
    return sum(end - start for start, end in launch.pieces.values())


requests_of = st.lists(
    st.tuples(st.integers(0, 30), st.integers(1, 40), st.lists(st.integers(1, FULL_DEPTH), max_size=6)),
    min_size=1,
    max_size=12,
)
settings_of = st.fixed_dictionaries(
    {
        "max_num_seqs": st.integers(1, 8),
        "refill": st.booleans(),
        "min_coda_batch": st.integers(1, 4),
        "lookahead": st.integers(0, 1),
        "prefill_chunk_size": st.sampled_from([None, 1, 5, 9]),
        "max_prefill_tokens": st.integers(1, 20),
    }
)


@given(requests_of, settings_of)
def test_the_bound_holds_and_everything_ends(requests, settings):
    bound, chunk = settings["max_prefill_tokens"], settings["prefill_chunk_size"]
    tokens, launches = run(requests, Scheduler(**settings))
    assert tokens == Counter({key: len(depths) + 1 for key, (*_, depths) in enumerate(requests)})
    positions = Counter()
    for launch, looping in launches:
        if launch.stage == "loop" or not looping:  # beyond the bound only where no loop could run
            positions.clear()
        positions[launch.stage] += prompt_positions(launch)
        assert positions[launch.stage] <= bound
    for key, (_, prompt, _) in enumerate(requests):
        ran = [
            (launch.stage, launch.depths[launch.keys.index(key)], position)
            for launch, _ in launches
            if key in launch.pieces
            for position in range(*launch.pieces[key])
        ]
        assert ran == [(*stage, position) for stage in STAGES for position in range(prompt)]  # depth-major, once each
        if chunk is not None:
            assert all(end - start <= chunk for launch, _ in launches for start, end in launch.pieces.values())


@given(st.integers(1, 20), st.integers(1, 60), st.integers(1, 5), st.integers(1, 6))
def test_a_row_that_decodes_never_waits_for_more_than_the_bound(bound, prompt, others, min_coda_batch):
    """While it is in flight, prompts take at most the bound in a launch of the loop, and from one to the next at most
    the bound in the prelude and in the coda, whatever comes."""
    requests = [(0, 1, [FULL_DEPTH] * 60), *((8 + 3 * index, prompt, [1]) for index in range(others))]
    _, launches = run(requests, Scheduler(9, max_prefill_tokens=bound, min_coda_batch=min_coda_batch))
    launches = [launch for launch, _ in launches]
    last = max(number for number, launch in enumerate(launches) if 0 in launch.keys)
    positions = Counter()
    for launch in launches[:last]:
        if launch.stage == "loop":
            positions.clear()
        positions[launch.stage] += prompt_positions(launch)
        assert positions[launch.stage] <= bound


@given(st.integers(2, 30), st.integers(1, 80), st.integers(1, 3))
def test_a_long_prompt_ends_beside_endless_short_ones(bound, prompt, width):
    """The first prompt of a stage has half of the bound: its stages take no more launches than that."""
    scheduler = Scheduler(width + 1, max_prefill_tokens=bound)
    scheduler.add(0, FULL_DEPTH, prompt=prompt)
    key, loops = 0, 0
    while True:
        while scheduler.waiting + scheduler.in_flight <= width:
            key += 1
            scheduler.add(key, FULL_DEPTH, prompt=bound)
        launch = scheduler.next()
        loops += launch.stage == "loop"
        if launch.stage == "coda" and launch.pieces.get(0, (0, 0))[1] == prompt:
            break
        if 0 in launch.pieces or launch.stage == "loop":
            half = -(-prompt // ((bound + 1) // 2))
            # In every stage those before it come first, `width` at most, each as long as two halves.
            assert loops <= (FULL_DEPTH + 2) * (half + 2 * width * FULL_DEPTH)
        scheduler.commit(launch, [launch.stage == "coda" and len(launch.pieces) == len(launch)] * len(launch))


def test_a_short_prompt_is_not_held_up_by_a_long_one():
    """The long one came first, and its 40 positions take five launches a stage; the short one takes one each."""
    _, launches = run([(0, 40, []), (0, 4, [])], Scheduler(2, max_prefill_tokens=8))
    assert [(launch.stage, launch.pieces) for launch, _ in launches[:9]] == [
        ("prelude", {0: (0, 4), 1: (0, 4)}),
        ("loop", {1: (0, 4)}),
        ("prelude", {0: (4, 12)}),
        ("loop", {1: (0, 4)}),
        ("prelude", {0: (12, 20)}),
        ("loop", {1: (0, 4)}),
        ("prelude", {0: (20, 28)}),
        ("coda", {1: (0, 4)}),
        ("prelude", {0: (28, 36)}),  # no loop can run
    ]
    assert len(launches) == 9 + 1 + 5 * FULL_DEPTH + 5


@given(requests_of, settings_of, st.dictionaries(st.integers(0, 60), st.integers(0, 11), min_size=1, max_size=6))
def test_cancelling_at_any_moment_loses_nobody(requests, settings, cancelled):
    tokens, _ = run(requests, Scheduler(**settings), cancelled)
    for key, (*_, depths) in enumerate(requests):
        if key not in cancelled.values():
            assert tokens[key] == len(depths) + 1


def test_without_refill_a_short_prompt_waits_for_the_long_one_of_its_cohort():
    _, launches = run([(0, 12, []), (0, 2, [])], Scheduler(2, refill=False, max_prefill_tokens=4))
    stages = [launch.stage for launch, _ in launches]
    assert "loop" not in stages[stages.index("coda") :]


@pytest.mark.parametrize("victim", range(4))
@pytest.mark.parametrize("moment", range(0, 30, 5))
def test_the_engine_cancels_a_prompt_between_its_pieces(victim, moment):
    """Prompts of 7, 1, 5 and 4 in pieces: the other rows' tokens are those by hand, and nothing stays behind."""
    model = ToyModel()
    adapter = adapter_for(model)
    engine = Engine(adapter, CDBConfig(max_num_seqs=3, max_prefill_tokens=3).resolve(adapter))
    prompts = [toy_prompt(row + 1, *range(row, row + length)) for row, length in enumerate((7, 1, 5, 4))]
    sampler = Sampler([()] * 4, prompts, do_sample=False)
    requests = [
        Request(key=row, row=row, max_new_tokens=4, sampler=sampler, prompt_ids=prompt)
        for row, prompt in enumerate(prompts)
    ]
    for request in requests:
        engine.add_request(request)
    for _ in range(moment):
        engine.step()
    if not requests[victim].ended:
        engine.cancel(victim)
    engine.run()
    for request, prompt in zip(requests, prompts, strict=True):
        expected = predict(model.config, prompt.tolist(), 4)
        assert request.status in ("finished", "cancelled" if request.key == victim else "finished")
        tokens, depths = expected.tokens, expected.exit_depths
        assert (request.tokens, request.exit_depths) == (tokens[: len(request.tokens)], depths[: len(request.tokens)])
        assert request.status == "cancelled" or request.tokens == tokens
    assert engine.cache.core_bytes == engine.cache.outer_bytes == len(engine.scheduler) == 0


def test_pieces_of_the_loop_leave_the_preludes_output_alone():
    """Dory's loop begins with that output and reads it again. A prompt that came whole through the prelude is cut in
    the loop, because another one is there."""
    model, rows = random_dory().double(), prompts(6, 6)
    adapter = adapter_for(model)
    engine = Engine(adapter, CDBConfig(exit_rule="never", max_prefill_tokens=8).resolve(adapter))
    sampler = Sampler([(), ()], rows, do_sample=False)
    requests = [Request(key, 5, sampler, prompt_ids=row) for key, row in enumerate(rows)]
    engine.add_request(requests[0])
    engine.step()
    engine.step()
    engine.add_request(requests[1])
    engine.run()
    for request, row in zip(requests, rows, strict=True):
        assert request.tokens == reference_generate(model, row, 5, exit_rule="never").tokens
