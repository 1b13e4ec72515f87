"""The bench of too little memory: what it prints holds, and odd arguments are refused."""

import json
from types import SimpleNamespace

import pytest

from hf_cdb.bench import pressure
from hf_cdb.cli import build_parser, main
from hf_cdb.stats import CDBStats

SMALL = ["--requests", "7", "--prompt", "1-30", "--new", "20-60", "--check", "2"]


def test_every_system_gives_the_same_and_stays_within_the_budget(tmp_path, monkeypatch):
    monkeypatch.setattr("hf_cdb.cache.STEP", 4)
    file = tmp_path / "figures.json"
    assert main(["bench", "pressure", *SMALL, "--json", str(file)]) == 0
    found = json.loads(file.read_text())
    free, *pressed = found["systems"]
    assert free["preemptions"] == 0
    assert free["peak MiB"] * 2**20 == found["needed_bytes"]
    assert found["checked_alone"] == 2
    for row in pressed:
        assert row["preemptions"] > 0
        assert row["peak MiB"] * 2**20 <= found["budget_bytes"] < found["needed_bytes"]
        assert "compact" in row["system"] or row["pool MiB"] * 2**20 <= found["budget_bytes"]
    assert [row["system"] for row in pressed] == ["offload", "recompute", "offload, compact", "recompute, compact"]
    for row in pressed[::2]:
        assert row["offloaded MiB"] > 0 == row["run again"]
    for row in pressed[1::2]:
        assert row["run again"] > 0 == row["offloaded MiB"]


def test_a_rule_may_decide(tmp_path, monkeypatch):
    monkeypatch.setattr("hf_cdb.cache.STEP", 4)
    file = tmp_path / "figures.json"
    rule = ["--exit-rule", "latent-diff", "--exit-threshold", "1.0"]
    assert main(["bench", "pressure", *SMALL, *rule, "--check", "7", "--json", str(file)]) == 0
    found = json.loads(file.read_text())
    assert found["checked_alone"] == 7
    depths = [row["depths"] for row in found["systems"]]
    assert len({tuple(each.items()) for each in depths}) == 1
    assert sum(count > 0 for count in depths[0].values()) > 1


@pytest.mark.parametrize(
    ("part", "where", "named"),
    [
        ("tokens", {"preemption": "recompute", "kv_layout": "compact"}, "recompute, compact"),
        ("exit_depths", {"max_num_seqs": 1}, "alone"),
    ],
)
def test_a_difference_is_told(part, where, named, monkeypatch):
    plain = pressure.run_requests

    def wrong(*args, **settings):
        outcome = plain(*args, **settings)
        if where.items() <= settings.items():
            getattr(outcome.requests[-1], part)[-1] += 1
        return outcome

    monkeypatch.setattr(pressure, "run_requests", wrong)
    arguments = build_parser().parse_args(["bench", "pressure", *SMALL])
    with pytest.raises(RuntimeError, match=rf"differs \({named}\)"):
        arguments.run(arguments)


def test_waits_are_seconds_and_launches_until_the_first_launch():
    engine = SimpleNamespace(stats=CDBStats(4, 4, 1, 1))
    requests = [SimpleNamespace(preemptions=0)]
    outcome = pressure.Outcome(engine, requests, {0: (2, 0.5), 1: (30, 7.5), 2: (40, 8.5)}, 10.0)
    row = pressure._figures("one", outcome, outcome)
    assert (row["wait p50"], row["wait max"], row["x unlimited"]) == (7.5, 8.5, 1)
    assert (row["wait in launches p50"], row["wait in launches max"]) == (30, 40)


@pytest.mark.parametrize(
    ("given", "told"),
    [
        (["--share", "0"], "share=0.0"),
        (["--share", "nan"], "share=nan"),
        (["--requests", "1"], "requests=1"),
        (["--width", "0"], "width=0"),
        (["--check", "-1"], "check=-1"),
        (["--prompt", "0"], "length '0'"),
        (["--mix", "9:1"], "names depth 9"),
        (["--mix", "full", "--exit-rule", "gate"], "mix='full' beside --exit-rule gate"),
        (["--exit-threshold", "0.5"], "exit_threshold=0.5 without --exit-rule"),
        (["--exit-rule", "replay"], "--mix"),
        (["--exit-rule", "gates"], "exit_rule='gates'"),
    ],
)
def test_odd_arguments_are_refused(given, told, capsys):
    assert main(["bench", "pressure", "--requests", "3", *given]) == 2
    assert told in capsys.readouterr().err
