"""Requests that come over time: arrivals and figures by hand, every system on a small model, the command."""

import json

import numpy
import pytest

from hf_cdb.bench.arrivals import make_arrivals
from hf_cdb.bench.models import load_model
from hf_cdb.bench.online import ONLINE, serve_online
from hf_cdb.bench.serve import _in_time, _served_rate
from hf_cdb.bench.served import Served
from hf_cdb.bench.simulation import Settings
from hf_cdb.bench.workloads import Workload
from hf_cdb.cli import main

SMALL = ["--width", "2", "--requests", "6", "--prompt", "2-5", "--new", "2-6", "--model", "tiny-ouro"]


@pytest.fixture(scope="module")
def model():
    return load_model("tiny-ouro")


def test_poisson_arrivals_scale_with_the_rate():
    slow, fast = (make_arrivals("poisson", 4000, rate, seed=3) for rate in (2.0, 8.0))
    assert numpy.allclose(slow, 4 * numpy.array(fast))
    gaps = numpy.diff(slow)
    assert gaps.mean() == pytest.approx(0.5, rel=0.05)
    assert gaps.std() == pytest.approx(0.5, rel=0.1)  # as an exponential's
    assert make_arrivals("poisson", 9, 2.0, 3) != make_arrivals("poisson", 9, 2.0, 4)


def test_bursts_keep_the_rate():
    times = make_arrivals("burst:5", 4003, 10.0, seed=1)
    groups, sizes = numpy.unique(times, return_counts=True)
    assert set(sizes[:-1]) == {5}
    assert sizes[-1] == 3
    assert len(times) / groups[-1] == pytest.approx(10, rel=0.1)


def test_recorded_arrivals_are_stretched(tmp_path):
    file = tmp_path / "arrivals.json"
    file.write_text("[10, 11, 11.5, 14, 99]")
    # Four requests at two a second take two seconds, in the recorded proportions.
    assert make_arrivals(str(file), 4, 2.0, seed=0) == [0.0, 0.5, 0.75, 2.0]
    assert make_arrivals(str(file), 1, 2.0, seed=0) == [0.0]
    with pytest.raises(ValueError, match=r"holds 5 times, but there are 6 requests"):
        make_arrivals(str(file), 6, 2.0, seed=0)


@pytest.mark.parametrize("content", ["[]", "[2, 1]", "[-1]", '["a"]', "{}", "[1, NaN]", "[true]"])
def test_files_that_hold_no_arrivals(tmp_path, content):
    file = tmp_path / "arrivals.json"
    file.write_text(content)
    with pytest.raises(ValueError, match="JSON list of seconds in order"):
        make_arrivals(str(file), 1, 1.0, seed=0)


def hand_served():
    """Two requests: three tokens at 2, 3 and 6 s after arriving at 1, one at 9 s after arriving at 4."""
    return Served.from_tokens(2, [1.0, 4.0], [1.5, 7.0], [[2.0, 3.0, 6.0], [9.0]])


def test_figures_from_the_times_of_tokens_by_hand():
    found = hand_served().figures()
    assert found["tokens_per_second"] == pytest.approx(4 / 9)
    means = {name: found[name]["mean"] for name in ("queue", "ttft", "tpot", "normalised_latency", "inter_token")}
    wanted = {"queue": (0.5 + 3) / 2, "ttft": (1 + 5) / 2, "tpot": (6 - 2) / 2, "inter_token": (1 + 3) / 2}
    assert means == pytest.approx({**wanted, "normalised_latency": (5 / 3 + 5) / 2})
    assert (found["inter_token"]["max"], found["occupancy"]) == (3.0, None)


def test_requests_in_time_by_hand():
    served = hand_served()
    for (ttft, tpot), share in {(1, 2): 0.5, (5, 2): 1, (5, 1.9): 0.5, (0.9, 2): 0}.items():
        assert _in_time(served, ttft, tpot) == share
    rows = [
        {"system": "refill", "rate": rate, "in_time": share}
        for rate, share in ((0.5, 1), (0.9, 0.9), (1.1, 0.8), (1.3, 0.95))
    ]
    assert _served_rate(rows, "refill") == 0.9
    assert _served_rate(rows[2:], "refill") is None


@pytest.mark.parametrize("name", ONLINE)
def test_every_system_serves_requests_when_they_are_due(model, name):
    workload = Workload([[5, 6, 7], [8], [9, 4], [3]], [3, 1, 4, 2], [[4, 1, 2], [4], [4, 4, 1, 1], [4, 2]])
    arrivals = [0.0, 0.0, 0.05, 0.1]
    served = serve_online(name, model, Settings(2), workload, arrivals)
    assert list(served.new_tokens) == workload.new_tokens
    assert sum(map(len, served.gaps)) == 2 + 0 + 3 + 1
    for times in zip(arrivals, served.admitted, served.first, served.finished, strict=True):
        assert list(times) == sorted(times)
    loops = {"full": 4 * 10, "no-refill": sum(map(sum, workload.depths)), "refill": sum(map(sum, workload.depths))}
    assert served.row_loops == loops.get(name, 0)  # launches of other threads do not show


def test_the_command(tmp_path, capsys):
    out, plot = tmp_path / "serve.json", tmp_path / "serve.png"
    rest = ["--rates", "0.5", "2", "--systems", "no-refill", "refill", "--processor-time", "--arrivals", "burst:2"]
    assert main(["bench", "serve", *SMALL, *rest, "--json", str(out), "--plot", str(plot)]) == 0
    printed, content = capsys.readouterr().out, json.loads(out.read_text())
    assert "| 2.00 | refill |" in printed
    rows = content["rates"]
    assert [(row["rate"], row["system"]) for row in rows] == [
        (rate, system) for rate in (0.5, 2.0) for system in ("full", "no-refill", "refill")
    ]
    assert content["settings"]["capacity"] > 0
    assert {row["tokens"] for row in rows} == {rows[0]["tokens"]}
    means = [row["normalised_latency"]["mean"] for row in rows]
    assert rows[2]["lower_than_full"] == pytest.approx(1 - means[2] / means[0])
    assert plot.read_bytes().startswith(b"\x89PNG")


def test_targets_and_capacity_may_be_given(tmp_path):
    out = tmp_path / "serve.json"
    rest = ["--rates", "1", "--systems", "full", "--processor-time", "--capacity", "1e-3", "--json", str(out)]
    assert main(["bench", "serve", *SMALL, *rest, "--ttft-target", "1e3", "--tpot-target", "1e-9"]) == 0
    content = json.loads(out.read_text())
    assert content["settings"]["targets"] == {"ttft": 1e3, "tpot": 1e-9}
    assert (content["rates"][0]["requests_per_second"], content["rates"][0]["in_time"]) == (1e-3, 0)
    assert content["served_rate"] == {"full": None}


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["--rates", "0"], "rates=0.0"),
        (["--capacity", "-1"], "capacity=-1.0"),
        (["--ttft-target", "nan"], "ttft_target=nan"),
        (["--width", "0"], "width=0"),
        (["--arrivals", "burst:0"], "arrivals='burst:0'"),
        (["--arrivals", "nowhere.json"], "nowhere.json"),
        (["--mix", "live"], "depths are replayed"),
        (["--processor-time"], "Leave out stock and manager"),
        (["--plot", "a.svg"], "ends in .png"),
    ],
)
def test_wrong_arguments(arguments, reason, capsys):
    assert main(["bench", "serve", *arguments]) == 2
    assert reason in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--device", "foo"], "device='foo' cannot be used here"),
        (["--json", "."], "json='.' is a folder"),
        (["--longest", "5"], "longest='5' has no effect without --data"),
    ],
)
def test_what_cannot_be_served_is_refused(words, message, capsys):
    assert main(["bench", "serve", *words]) == 2
    assert message in capsys.readouterr().err
