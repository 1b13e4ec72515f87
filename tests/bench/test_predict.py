"""Predictions from rooflines: times and bytes worked by hand, the limits of the speed-up, and the command."""

import json

import pytest

from hf_cdb.adapters import adapter_for
from hf_cdb.bench.models import load_model
from hf_cdb.bench.roofline import CARDS, PUBLISHED, Card, Shape
from hf_cdb.cache import DepthCache
from hf_cdb.checkpoints import EMBEDDED
from hf_cdb.cli import main
from hf_cdb.kv_policy import KVPolicy
from hf_cdb.stats import flop_bound

# 100 parameters are read in 10 s, and computed in 5 s a row: the ridge is two rows.
SLOW = Card(rate=40.0, bandwidth=20.0, memory=1e6)
TINY = Shape(
    kv_policy="last_exited",
    full_depth=4,
    weights=1000,
    prelude=0,
    loop=100,
    coda=50,
    hidden=5,
    kv_loop=40,
    kv_prelude=0,
    kv_coda=20,
    kv_position=180,
    coda_layers_share=0.5,
)


def test_published_sizes_by_hand():
    """FACTS of the papers: layers, heads, hidden and intermediate sizes, vocabulary."""
    shape = Shape.of("ouro-1.4b")
    attention, mlp, norms = 4 * 2048**2, 3 * 2048 * 5632, 4 * 2048
    assert shape.loop == 24 * (attention + mlp + norms) + 2048  # the norm after every loop
    assert shape.coda == 49152 * 2048 + 2049  # the head and the gate
    assert shape.prelude == 0
    assert shape.kv_loop == 24 * 2 * 16 * 128 * 2
    assert shape.kv_position == 4 * shape.kv_loop == 768 * 1024
    assert Shape.of("ouro-2.6b").kv_position == 2 * shape.kv_position
    assert flop_bound(shape.prelude + shape.coda, shape.loop, 4, 2.5) == pytest.approx(1.581, abs=1e-3)
    huginn = Shape.of("huginn-0125", max_depth=16)
    layer = 2 * 55 * 96 * 2
    assert (huginn.kv_prelude, huginn.kv_loop, huginn.kv_coda) == (2 * layer, 4 * layer, 2 * layer)
    assert huginn.kv_position == (16 * 4 + 4) * layer
    assert (huginn.prelude + huginn.coda) / huginn.loop == pytest.approx(1.177, abs=2e-3)


@pytest.mark.parametrize(
    ("policy", "slots", "kept"),
    [
        ("auto", None, 16),
        ("last_exited", None, 16),
        ("shared", None, 1),
        ("first_then_shared", None, 2),
        ("modular", 3, 3),
    ],
)
def test_bytes_follow_the_policy(policy, slots, kept):
    shape = Shape.of("huginn-0125", policy, slots, max_depth=16)
    assert shape.kv_position == kept * shape.kv_loop + shape.kv_prelude + shape.kv_coda


@pytest.mark.parametrize("name", EMBEDDED)
def test_sizes_are_those_of_the_loaded_model(name):
    adapter, shape = adapter_for(load_model(name)), Shape.of(name)
    once, loop = adapter.parameter_counts()
    assert (shape.prelude + shape.coda, shape.loop, shape.full_depth) == (once, loop, adapter.full_depth)
    cache = DepthCache(adapter, KVPolicy.create("last_exited", adapter.full_depth))
    assert shape.kv_position == cache.bytes_per_position() // 2  # float32 there


def test_seconds_by_hand():
    costs = TINY.costs(SLOW)
    # Weights 10 s or arithmetic 5 s a row; a state of 10 bytes is read and written, 1 s a row; 2 s a position.
    assert costs("loop", 1, 1, 0) == pytest.approx(10 + 1)
    assert costs("loop", 8, 8, 6) == pytest.approx(40 + 8 + 12)
    assert costs("coda", 4, 4, 6) == pytest.approx(10 + 4 + 6)
    assert costs("prelude", 3, 3, 6) == pytest.approx(3)
    assert costs.width("coda", 11, 1) == 6
    assert [costs.loop(rows) - rows for rows in (1, 2, 4)] == pytest.approx([10, 10, 20])
    half = TINY.costs(SLOW, reached=0.5, per_launch=3.0, per_row=0.25)
    assert half("loop", 8, 8, 6) == pytest.approx(2 * 60 + 3 + 2)


def test_cards():
    assert CARDS["h100"].ridge == pytest.approx(989 / 3.35)
    assert CARDS["h200"].ridge == pytest.approx(989 / 4.8)
    assert TINY.positions_that_fit(Card(1.0, 1.0, 10_000.0), 0.5) == (5000 - 2000) // 180
    assert TINY.positions_that_fit(Card(1.0, 1.0, 1000.0), 1.0) == 0


@pytest.mark.parametrize("name", PUBLISHED)
@pytest.mark.parametrize("card", CARDS)
def test_wider_launches_cost_more_and_rows_less(name, card):
    costs = Shape.of(name).costs(CARDS[card])
    for stage in (costs.prelude, costs.loop, costs.coda):
        seconds = [stage(width) for width in (1, 16, 64, 256, 512, 4096)]
        assert seconds == sorted(seconds)
        each = [stage(width) / width for width in (1, 16, 64, 256, 512, 4096)]
        assert each == pytest.approx(sorted(each, reverse=True))


def predict(tmp_path, *arguments):
    path = tmp_path / "figures.json"
    assert main(["bench", "predict", *arguments, "--json", str(path)]) == 0
    return json.loads(path.read_text())["predicted"]


SHORT = ("--prompt", "1", "--new", "16", "--mix", "1:.5,3:.5")  # little to attend to


def test_one_row_reaches_the_flop_bound(tmp_path):
    """It reads all weights of a stage as often as it runs the stage, and parameters are what the bound counts."""
    (row,) = predict(tmp_path, *SHORT, "--width", "1", "--requests", "40")
    assert row["decode_share"] == pytest.approx(1, abs=0.003)


def test_few_rows_share_a_loop_and_half_of_them_a_coda(tmp_path):
    """Below the ridge launches cost the same whatever their width, and of tokens of two loops in the mean half leave
    after each: so (4 Fr + F0) / (2 Fr + 2 F0), with F0 / Fr = 0.0816."""
    (row,) = predict(tmp_path, *SHORT, "--width", "16", "--requests", "128")
    lost = 2 - row["mean_depth"]  # the draw is not quite even
    assert row["decode_speedup"] == pytest.approx(4.0816 / (2 * 1.0816) * (1 + lost / 2), rel=0.015)
    assert row["decode_share"] < 0.98


def test_many_rows_compute_and_reach_the_flop_bound(tmp_path):
    (row,) = predict(tmp_path, *SHORT, "--width", "2048", "--requests", "2048")
    assert 0.99 < row["decode_share"] < 1.06  # what is saved of attention comes on top


def test_the_simulator_says_the_same_of_the_same_costs(tmp_path):
    costs, figures = tmp_path / "costs.json", tmp_path / "simulated.json"
    Shape.of("ouro-1.4b").costs(CARDS["h200"], 0.7, 1e-4).save(costs)
    work = ["--prompt", "4-40", "--new", "8", "--requests", "24", "--width", "8"]
    assert main(["bench", "simulate", "--costs", str(costs), *work, "--json", str(figures)]) == 0
    simulated = {row["system"]: row for row in json.loads(figures.read_text())["systems"]}
    (row,) = predict(tmp_path, *work, "--card", "h200", "--reached", "0.7", "--launch-us", "100")
    for own, name in ((row["full_depth"], "full depth"), (row["cdb"], "refill")):
        assert own == {figure: simulated[name][figure] for figure in own}
    assert row["speedup"] == pytest.approx(row["cdb"]["tokens_per_second"] / row["full_depth"]["tokens_per_second"])


def test_memory_bounds_the_rows(tmp_path):
    """Three requests of 16 positions and 768 KiB a position beside 2 x 1,434,652,673 bytes."""
    share = (2 * 1_434_652_673 + 3.5 * 16 * 768 * 1024) / 80e9
    work = ["--prompt", "9", "--new", "8", "--requests", "12", "--width", "6", "--memory-share", str(share)]
    (row,) = predict(tmp_path, *work)
    assert row["rows_that_fit"] == 3
    assert row["cdb"]["occupancy"] <= 0.5
    assert row["decode_share"] is None  # six places were never busy
    (shared,) = predict(tmp_path, *work, "--kv-policy", "shared")
    assert shared["rows_that_fit"] == 14
    assert shared["cdb"]["occupancy"] > 0.5


def test_requests_by_default(tmp_path):
    """Eight for each row of the widest run: tables of the docs rest on that."""
    path = tmp_path / "figures.json"
    assert main(["bench", "predict", "--prompt", "3", "--new", "2", "--width", "5", "3", "--json", str(path)]) == 0
    assert json.loads(path.read_text())["workload"]["requests"] == 8 * 5


def test_table_and_picture(tmp_path, capsys):
    pytest.importorskip("matplotlib")
    picture = tmp_path / "predicted.png"
    command = [
        "bench",
        "predict",
        "--model",
        "tiny-huginn",
        "--card",
        "h100",
        "h200",
        "--width",
        "2",
        "4",
        "--coda",
        "2",
    ]
    assert main([*command, "--prompt", "3", "--new", "2-4", "--requests", "9", "--plot", str(picture)]) == 0
    printed = capsys.readouterr().out
    assert "nothing was measured" in printed
    assert printed.count("| h200 |") == 2
    assert picture.stat().st_size > 1000


def test_requests_of_one_token_have_no_time_between_tokens(tmp_path):
    (row,) = predict(tmp_path, "--prompt", "3", "--new", "1", "--width", "2", "--requests", "4")
    assert row["cdb"]["tpot"] is None
    assert row["flop_bound"] is None
    assert row["speedup"] == 1


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--width", "0"], "width=0"),
        (["--coda", "0"], "coda=0"),
        (["--reached", "0"], "reached=0"),
        (["--reached", "nan"], "reached=nan"),
        (["--memory-share", "1.5"], "memory_share=1.5"),
        (["--launch-us", "-1"], "launch_us=-1"),
        (["--row-us", "inf"], "row_us=inf"),
        (["--mix", "live"], "Name a mix"),
        (["--data", "texts.jsonl"], "--lengths"),
        (["--kv-slots", "3"], "kv_slots=3"),
        (["--max-depth", "5"], "max_depth=5"),
        (["--max-depth", "0"], "max_depth=0"),
        (["--prompt", "100000"], "100127"),
        (["--memory-share", "0.01"], "0 positions"),
    ],
)
def test_what_is_refused(arguments, words, capsys):
    assert main(["bench", "predict", *arguments]) == 2
    assert words in capsys.readouterr().err
