"""The bench of too little memory: what it prints holds, and odd arguments are refused."""

import json

import pytest

from hf_cdb.bench import pressure
from hf_cdb.cli import build_parser, main

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


def test_a_difference_is_told(monkeypatch):
    plain = pressure.run_requests

    def wrong(*args, **settings):
        outcome = plain(*args, **settings)
        if settings.get("preemption") == "recompute":
            outcome.requests[3].tokens[-1] += 1
        return outcome

    monkeypatch.setattr(pressure, "run_requests", wrong)
    arguments = build_parser().parse_args(["bench", "pressure", *SMALL])
    with pytest.raises(RuntimeError, match="request 3 differs \\(recompute\\)"):
        arguments.run(arguments)


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
    ],
)
def test_odd_arguments_are_refused(given, told, capsys):
    assert main(["bench", "pressure", "--requests", "3", *given]) == 2
    assert told in capsys.readouterr().err
