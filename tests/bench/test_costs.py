"""Cost tables: values by hand, fits of known lines, and files."""

import dataclasses
import itertools
import json

import numpy
import pytest

from hf_cdb.bench.cost_fit import fit_costs
from hf_cdb.bench.costs import CostTable, StageCost
from hf_cdb.trace import TracedLaunch

STAGE = StageCost((4, 8, 16), (1.0, 1.5, 3.5))


KEYS = itertools.count()


def launch(stage, rows, tokens, context, duration):
    """A launch of requests of its own, so that every coda gives each row a token."""
    keys = tuple(itertools.islice(KEYS, rows))
    return TracedLaunch(stage, keys, (1,) * rows, tokens, context, 0, 0, 0, 0, 0.0, duration)


def launches_of(seconds, widths, contexts, stages=("prelude", "loop", "coda")):
    """Rows that decode over so many old positions each; `seconds` by width and positions in all."""
    return [
        launch(stage, width, width, width * (context + 1), seconds(width, width * (context + 1)))
        for stage in stages
        for width in widths
        for context in contexts
    ]


@pytest.mark.parametrize(
    ("width", "seconds"), [(1, 1.0), (4, 1.0), (6, 1.25), (8, 1.5), (12, 2.5), (16, 3.5), (20, 4.5)]
)
def test_seconds_by_hand(width, seconds):
    assert STAGE(width) == pytest.approx(seconds)


def test_the_context_comes_on_top():
    assert StageCost((1, 2), (1.0, 2.0), per_context=0.01)(1, 50) == pytest.approx(1.5)


def test_the_host_is_hidden_where_the_device_takes_longer():
    costs = CostTable(4, STAGE, STAGE, STAGE, host_per_launch=0.1, host_per_row=0.2)
    assert costs("loop", 8, 6, 0) == pytest.approx(1.5 + 1.3)
    assert costs("loop", 8, 6, 0, overlapped=True) == pytest.approx(1.5)
    assert costs("loop", 8, 20, 0, overlapped=True) == pytest.approx(4.1)


def test_layers_after_the_loop_go_by_tokens_and_the_head_by_rows():
    """Two prompts of 20 tokens, of which one ends; a quarter of the coda is its layers."""
    costs = CostTable(4, STAGE, STAGE, STAGE, coda_layers_share=0.25)
    assert costs.width("coda", 40, 1) == pytest.approx(0.25 * 40 + 0.75 * 1)
    assert costs.width("coda", 2, 2) == 2
    assert costs.width("loop", 40, 1) == costs.width("prelude", 40, 1) == 40
    assert CostTable(4, STAGE, STAGE, STAGE).width("coda", 40, 1) == 1  # the head alone


@pytest.mark.parametrize("share", [0.0, 0.3, 1.0])
@pytest.mark.parametrize("known", [True, False])
def test_a_fit_finds_what_a_prompt_costs_after_the_loop(share, known):
    """A millisecond for each row of a launch of the head, and one for each token of one of the layers."""

    def coda(tokens, rows):
        return launch("coda", rows, tokens, 0, 1e-3 * (share * tokens + (1 - share) * rows))

    launches = launches_of(lambda width, _: 1e-3 * width, (1, 4, 16), (8, 64), ("prelude", "loop"))
    launches += [coda(tokens, rows) for rows in (1, 2, 3, 4, 6) for tokens in (rows, *range(20, 320, 60))]
    costs = fit_costs(launches, 4, coda_layers_share=share if known else None)
    assert costs.coda_layers_share == pytest.approx(share)
    assert costs.coda(costs.width("coda", 40, 1)) == pytest.approx(1e-3 * (40 * share + 1 - share))
    assert costs.coda(costs.width("coda", 3, 3)) == pytest.approx(3e-3)


def test_pieces_before_a_bare_head_do_not_lower_its_floor():
    """A prompt in three pieces: the head runs for the last one, for the others nothing does."""
    pieces = [launch("coda", 1, 8, 8 * piece, seconds) for piece, seconds in ((1, 1e-6), (2, 1e-6), (3, 1e-3))]
    pieces = [dataclasses.replace(piece, rows=(-1,)) for piece in pieces]
    launches = launches_of(lambda width, _: 1e-3, (1, 2), (8,), ("prelude", "loop"))
    wide = launch("coda", 2, 2, 50, 1e-3)
    assert fit_costs([*launches, *pieces, wide], 4, coda_layers_share=0.0).coda.seconds == pytest.approx((1e-3, 1e-3))


@pytest.mark.parametrize("widths", [(1, 4, 16), (1, 2, 3, 4, 6, 8, 10, 12, 16)])
def test_one_context_tells_nothing_of_its_cost(widths):
    """5 ms and half a millisecond for a row, whatever it attends to: a sum of rows and of positions alike."""
    costs = fit_costs(launches_of(lambda width, _: 5e-3 + 5e-4 * width, widths, (72,)), 4)
    assert costs.loop.per_context == 0
    for width in range(1, 17):
        assert costs("loop", width, width, width * 73) == pytest.approx(5e-3 + 5e-4 * width)
    assert not costs.tells_context("loop")
    assert "Costs of prelude, loop, coda: the context rose with the width" in costs.caveat


def test_two_contexts_tell_their_cost():
    costs = fit_costs(launches_of(lambda width, read: 5e-3 + 1e-6 * read, (1, 4, 16), (40, 72)), 4)
    assert costs.loop.per_context == pytest.approx(1e-6)
    assert costs.caveat is None
    assert costs.tells_context("loop")


def test_a_fit_finds_the_table_again_in_spite_of_outliers():
    """Launches made up from a table whose knots are among the widths, one in twelve ten times too slow."""
    true = {
        "prelude": StageCost((1, 32), (1e-4, 2e-3)),
        "loop": StageCost((1, 8, 32), (2e-3, 2e-3, 8e-3), per_context=1e-6),
        "coda": StageCost((1, 32), (5e-4, 1e-3)),
    }
    rng = numpy.random.default_rng(0)
    launches = []
    for stage, cost in true.items():
        for index in range(600):
            width = (1, 4, 8, 8, 8, 16, 20, 32)[index % 8]
            context = int(rng.integers(10, 100)) * width
            duration = cost(width, context) * (1 + 0.01 * rng.standard_normal()) * (10 if index % 12 == 5 else 1)
            launches.append(launch(stage, width, width, context, duration))
    found = fit_costs(launches, full_depth=4)
    for stage, cost in true.items():
        own = getattr(found, stage)
        for width in (1, 4, 8, 16, 24, 32):
            assert own(width, 50 * width) == pytest.approx(cost(width, 50 * width), rel=0.03), (stage, width)
    assert found.loop.per_context == pytest.approx(1e-6, rel=0.1)


def test_a_fit_is_as_good_for_short_launches_as_for_long_ones():
    """One launch a width and context, from 1 ms to 1 s, gives the table itself."""
    true = StageCost((1, 4, 16, 64, 256), (1e-3, 1.1e-3, 2e-3, 9e-3, 4e-2), per_context=1e-6)
    launches = [
        launch(stage, width, width, context * width, true(width, context * width))
        for stage in ("prelude", "loop", "coda")
        for width in true.widths
        for context in (128, 512, 4096)
    ]
    found = fit_costs(launches, 4).loop
    assert found.widths == true.widths
    assert found.seconds == pytest.approx(true.seconds)
    assert found.per_context == pytest.approx(true.per_context)


def test_a_fit_needs_two_widths():
    launches = [launch(stage, 4, 4, 8, 1.0) for stage in ("prelude", "loop", "coda")]
    with pytest.raises(ValueError, match="prelude: launches of 1 different widths"):
        fit_costs(launches, 4)


def test_noise_never_makes_a_wider_launch_cheaper():
    launches = [
        launch(stage, width, width, 0, seconds)
        for stage in ("prelude", "loop", "coda")
        for width, seconds in ((1, 2.0), (2, 1.0), (3, 3.0))
    ]
    assert fit_costs(launches, 4).loop.seconds == pytest.approx((2.0, 2.0, 3.0))


def test_files(tmp_path):
    costs = CostTable(4, STAGE, StageCost((1, 9), (0.5, 0.5), 1e-6), STAGE, 1e-4, 1e-6, {"model": "made up"})
    costs.save(tmp_path / "deep" / "costs.json")
    assert CostTable.load(tmp_path / "deep" / "costs.json") == costs


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"full_depth": 0}, "full_depth=0"),
        ({"full_depth": None}, "full_depth=None"),
        ({"host_per_row": -1}, "host_per_row=-1"),
        ({"coda_layers_share": 1.5}, "coda_layers_share=1.5"),
        ({"about": "a laptop"}, "about='a laptop'"),
        ({"loop": {"widths": [1], "seconds": [1]}}, "at least two widths"),
        ({"loop": {"widths": [2, 1], "seconds": [1, 2]}}, r"widths=\[2, 1\]: give increasing"),
        ({"loop": {"widths": [0, 1], "seconds": [1, 2]}}, r"widths=\[0, 1\]"),
        ({"loop": {"widths": [1, 2], "seconds": [2, 1]}}, "a wider launch is never cheaper"),
        ({"loop": {"widths": [1, 2], "seconds": [0, 1]}}, "give positive numbers"),
        ({"loop": {"widths": [1, 2], "seconds": [1, float("nan")]}}, "give positive numbers"),
        ({"loop": {"widths": [1, 2], "seconds": [1, 2], "per_context": "much"}}, "per_context='much'"),
        ({"loop": {"widths": [1, 2]}}, "holds no cost table"),
        ({"loop": 3}, "holds no cost table"),
        ({"speed": 3}, "'speed'"),
    ],
)
def test_other_tables_are_refused(change, words, tmp_path):
    stage = {"widths": [1, 2], "seconds": [1.0, 2.0]}
    path = tmp_path / "costs.json"
    path.write_text(json.dumps({"full_depth": 4, "prelude": stage, "loop": stage, "coda": stage, **change}))
    with pytest.raises(ValueError, match=words) as error:
        CostTable.load(path)
    assert "costs.json" in str(error.value)
