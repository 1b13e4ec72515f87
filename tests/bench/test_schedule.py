"""Traffic of several classes, and the table of what they wait."""

import json

import pytest

from hf_cdb.bench.costs import CostTable, StageCost
from hf_cdb.bench.traffic import TrafficClass, draw_traffic
from hf_cdb.cli import main

# A launch takes 1 s, and the loop beyond its first position 1 s for every one more.
COSTS = CostTable(2, StageCost((1, 2), (1.0, 1.0)), StageCost((1, 2), (1.0, 2.0)), StageCost((1, 2), (1.0, 1.0)))


@pytest.fixture
def command(tmp_path):
    COSTS.save(tmp_path / "costs.json")

    def run(*arguments):
        path = tmp_path / "figures.json"
        path.unlink(missing_ok=True)
        status = main(["bench", "schedule", "--costs", str(tmp_path / "costs.json"), "--json", str(path), *arguments])
        return status, json.loads(path.read_text())["classes"] if path.exists() else None

    return run


def test_a_class_is_read():
    assert TrafficClass.parse(
        "chat,share=.5,prompt=4-8,new=lognormal:8:.5:20,priority=-1,deadline=2.5"
    ) == TrafficClass("chat", 0.5, "4-8", "lognormal:8:.5:20", -1, 2.5)
    assert TrafficClass.parse("x,new=1,prompt=2,share=3") == TrafficClass("x", 3.0, "2", "1")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("chat", "share, prompt and new are needed"),
        ("share=1,prompt=1,new=1", "NAME"),
        ("chat,share=1,prompt=1,new=1,urgency=2", "urgency=2"),
        ("chat,share=1,share=2,prompt=1,new=1", "write NAME"),
        ("chat,share=x,prompt=1,new=1", "share=x"),
        ("chat,share=0,prompt=1,new=1", "share=0.0 is no positive number"),
        ("chat,share=nan,prompt=1,new=1", "share=nan is no positive number"),
        ("chat,share=1,prompt=1,new=1,deadline=-1", "deadline=-1.0 is no positive number"),
        ("chat,share=1,prompt=0,new=1", "length '0'"),
    ],
)
def test_what_is_no_class_is_refused(text, words):
    with pytest.raises(ValueError, match=words.replace(".", "[.]")):
        TrafficClass.parse(text)


def test_traffic_follows_its_classes():
    short, long = TrafficClass("short", 3, "1-4", "2"), TrafficClass("long", 1, "50", "1-9", 2, 7.0)
    arrivals = [float(second) for second in range(2000)]
    traffic = draw_traffic([short, long], arrivals, "full", 4, seed=1)
    assert traffic == draw_traffic([short, long], arrivals, "full", 4, seed=1)
    own = traffic.of_class(1)
    assert len(own) == pytest.approx(500, rel=0.15)
    assert sorted([*own, *traffic.of_class(0)]) == list(range(2000))
    for key in range(2000):
        if key in set(own):
            assert (traffic.prompts[key], traffic.priorities[key], traffic.deadlines[key]) == (50, 2, key + 7.0)
            assert 1 <= len(traffic.depths[key]) <= 9
        else:
            assert 1 <= traffic.prompts[key] <= 4
            assert (traffic.priorities[key], traffic.deadlines[key], traffic.depths[key]) == (0, None, [4, 4])
    # Another class beside it leaves its requests as they are, but for how many there are.
    other = draw_traffic([short, TrafficClass("x", 1, "9", "9")], arrivals, "full", 4, seed=1)
    assert [other.prompts[key] for key in other.of_class(0)] == [traffic.prompts[key] for key in traffic.of_class(0)]


def test_a_table_by_hand(command, capsys):
    """One at a time, all at once: a request of one token takes a prelude, two loops and a coda, 4 s."""
    status, rows = command("--class", "only,share=1,prompt=1,new=1,deadline=9", "--requests", "3", "--width", "1")
    assert status == 0
    (row,) = rows
    assert (row["class"], row["requests"], row["missed"]) == ("only", 3, pytest.approx(1 / 3))
    # The third one is dropped at 12 s.
    assert row["ttft"] == pytest.approx({"p50": 6.0, "p90": 7.6, "p99": 7.96, "mean": 6.0, "max": 8.0})
    assert row["tpot"] is row["inter_token"] is None
    assert "| 0 | 0 | priority | only | 3 | 33.3% | 6000.0 |" in capsys.readouterr().out


def test_priorities_reach_the_scheduler(command):
    classes = ("--class", "low,share=1,prompt=1,new=1", "--class", "high,share=1,prompt=1,new=1,priority=1")
    status, rows = command(*classes, "--requests", "40", "--width", "1", "--order", "arrival", "priority")
    assert status == 0
    waited = {(row["order"], row["class"]): row["queue"]["p50"] for row in rows}
    assert waited["priority", "high"] < waited["arrival", "high"] < waited["priority", "low"]


def test_the_bound_and_overtaking_reach_the_scheduler(command):
    classes = ("--class", "short,share=9,prompt=1,new=4", "--class", "long,share=1,prompt=40,new=1")
    status, rows = command(
        *classes, "--requests", "60", "--width", "4", "--max-prefill-tokens", "0", "8", "--mix", "full"
    )
    assert status == 0
    gaps = {row["bound"]: row["inter_token"]["max"] for row in rows if row["class"] == "short"}
    # Two loops of all 40 positions beside one to three other rows, with prelude and coda before; or of 8 in each.
    assert gaps[0] >= 2 * 40 > gaps[8]
    status, rows = command(*classes, "--requests", "60", "--kv-positions", "44", "--max-overtakes", "0", "9")
    assert status == 0
    short = {row["overtakes"]: row["queue"]["p50"] for row in rows if row["class"] == "short"}
    assert short[9] < short[0]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--requests", "0"], "requests=0: choose at least 1"),
        (["--width", "0"], "width=0"),
        (["--max-prefill-tokens", "5", "-1"], "max_prefill_tokens=[5, -1]: choose at least 0"),
        (["--rate", "nan"], "rate=nan: choose a positive"),
        (["--max-overtakes", "3"], "without --kv-positions"),
        (["--kv-positions", "3"], "kv_positions=3: a request holds 4 positions"),
        (["--ageing", "0"], "ageing=0"),
        (["--mix", "bimodel"], "Did you mean bimodal"),
        (["--class", "x"], "class 'x': write NAME"),
        (["--costs", "missing.json"], "No such file or directory: 'missing.json'"),
    ],
)
def test_what_cannot_be_simulated_is_refused(command, arguments, words, capsys):
    status, _ = command("--class", "only,share=1,prompt=3,new=2", *arguments)
    assert status == 2
    assert words in capsys.readouterr().err
