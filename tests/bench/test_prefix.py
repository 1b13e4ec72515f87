"""The bench of prompts that begin alike: what it counts is right, and odd arguments are refused."""

import json

import pytest

from hf_cdb.bench import prefix
from hf_cdb.cli import build_parser, main

SMALL = ["bench", "prefix", "--prompts", "2", "5", "--shared", "3", "70", "--own", "4", "--new", "2", "--turns", "1"]


def test_what_is_shared_runs_once(tmp_path, capsys):
    file = tmp_path / "figures.json"
    assert main([*SMALL, "--dtype", "float64", "--json", str(file)]) == 0
    rows = {(row["prompts"], row["shared"]): row for row in json.loads(file.read_text())["prefix_reuse"]}
    assert set(rows) == {(2, 3), (2, 70), (5, 3), (5, 70)}
    for (prompts, shared), row in rows.items():
        assert row["positions off"] == prompts * (shared + 4)
        reused = (prompts - 1) * shared if shared >= 64 else 0  # less is not worth a copy
        assert row["positions on"] == row["positions off"] - reused
        assert row["off / on"] == pytest.approx(row["seconds off"] / row["seconds on"])
    assert "| 5 | 70 | 370 | 90 |" in capsys.readouterr().out


def test_a_difference_is_told(monkeypatch):
    model = prefix.load_model("tiny-ouro", "float32", "cpu")
    plain = model.generate

    def wrong(*args, **settings):
        output = plain(*args, **settings)
        if settings["cdb"]["prefix_reuse"]:
            output.exit_depths[1, -1] -= 1
        return output

    model.generate = wrong
    monkeypatch.setattr(prefix, "load_model", lambda *args: model)
    arguments = build_parser().parse_args(SMALL)
    with pytest.raises(RuntimeError, match="2 prompts that share 3 positions"):
        arguments.run(arguments)


@pytest.mark.parametrize(
    ("given", "told"),
    [(["--shared", "0"], "shared=0"), (["--prompts", "3", "0"], "prompts=0"), (["--turns", "-1"], "turns=-1")],
)
def test_odd_arguments_are_refused(given, told, capsys):
    assert main(["bench", "prefix", *given]) == 2
    assert told in capsys.readouterr().err
