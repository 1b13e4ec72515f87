import json

import pytest
import torch

from hf_cdb.bench import cells
from hf_cdb.bench.cells import Cell, measure_cell
from hf_cdb.bench.cost_fit import fit_costs
from hf_cdb.bench.costs import CostTable
from hf_cdb.bench.models import load_model
from hf_cdb.bench.step import summarise
from hf_cdb.cli import main

from ..tiny import RANDOM


def made(width, context, seconds, attention):
    cell = Cell(width, context)
    for stage in cell.seconds:
        cell.seconds[stage], cell.attention[stage] = seconds, attention
    return cell


def test_the_summary_by_hand():
    """A launch takes 10 ms up to 4 rows, 2 ms for each row beyond, and 1 ms for every 100 positions."""
    cells = [
        made(width, context, [(10 + 2 * max(0, width - 4) + width * (context + 1) / 100) / 1e3], [0.0])
        for context in (99, 199)
        for width in (1, 4, 8, 16)
    ]
    costs = fit_costs([launch for cell in cells for launch in cell.launches()], 4)
    summary = summarise(cells, 22_000_000, costs)
    assert summary["context"] == 99
    assert summary["floor_seconds"] == pytest.approx(11e-3)
    assert summary["weight_bytes_per_second"] == pytest.approx(2e9)
    assert summary["slope_seconds"] == pytest.approx(3e-3)  # 2 ms, and 1 ms for its context
    assert summary["saturation_width"] == pytest.approx(11 / 3)
    assert summary["context_seconds"] == pytest.approx(1e-5)
    assert costs("loop", 16, 16, 16 * 150) == pytest.approx((10 + 24 + 24) / 1e3)


def test_no_saturation_where_more_rows_take_no_longer():
    cells = [made(1, 8, [2.0], [0.0]), made(4, 8, [2.0], [0.0])]
    costs = fit_costs([launch for cell in cells for launch in cell.launches()], 4)
    assert summarise(cells, 1, costs)["saturation_width"] is None


def test_the_share_of_attention():
    assert made(2, 8, [4.0, 2.0, 3.0], [1.0, 3.0, 1.5]).attention_share == pytest.approx(1.5 / 3.0)
    assert made(2, 8, [4.0], []).attention_share is None


@pytest.mark.parametrize("family", ["ouro", "huginn"])
def test_what_is_timed_is_a_full_launch_over_the_whole_context(family, engines, monkeypatch):
    """The engine's own trace tells what ran: W rows, one new position each over `context` old ones."""
    create = cells.CDBConfig
    monkeypatch.setattr(cells, "CDBConfig", lambda **settings: create(**settings, trace=True))
    model, cell = RANDOM[family](), Cell(3, 20)
    measure_cell(model, cell)
    measure_cell(model, cell)
    loops = model.config.total_ut_steps if family == "ouro" else model.config.mean_recurrence
    assert {stage: len(seconds) for stage, seconds in cell.seconds.items()} == {
        "prelude": 4,
        "loop": 4 * loops,
        "coda": 4,
    }
    timed = engines[0].stats.trace[-2 * (loops + 2) :]
    assert {(launch.width, launch.tokens) for launch in timed} == {(3, 3)}
    assert [launch.context for launch in timed] == [3 * 22] * (loops + 2) + [3 * 23] * (loops + 2)
    assert all(0 < inside < whole for inside, whole in zip(cell.attention["loop"], cell.seconds["loop"], strict=True))
    # Ouro has no attention outside the loop.
    assert (sum(cell.attention["coda"]) > 0) == (family == "huginn")


def test_measuring_leaves_generation_as_it_was():
    model = load_model("tiny-ouro")
    ids = torch.tensor([[5, 6, 7]])
    before = model.generate(ids, max_new_tokens=4, do_sample=False, cdb={"exit_rule": "never"})
    measure_cell(model, Cell(2, 8))
    assert torch.equal(model.generate(ids, max_new_tokens=4, do_sample=False, cdb={"exit_rule": "never"}), before)


def test_the_command(tmp_path, capsys):
    pytest.importorskip("matplotlib", reason="pictures are an extra, hf-cdb[bench]")
    files = [f"--{name}={tmp_path / name}" for name in ("json", "save-costs")] + [f"--plot={tmp_path / 'a.png'}"]
    small = ["--width", "1", "4", "--context", "4", "20000", "--turns", "1", "--memory", "0.05"]
    assert main(["bench", "step", "--model", "tiny-ouro", *small, *files]) == 0
    printed = capsys.readouterr().out
    assert "| rows | 4 | 20000 | prelude | coda |" in printed
    assert "At context 4: floor, a launch of 1 row, " in printed
    assert "add --width 1" not in printed
    assert "1 cell(s) left out: their keys and values need more than --memory 0.05 GiB." in printed
    content = json.loads((tmp_path / "json").read_text())
    assert [(cell["width"], cell["context"]) for cell in content["cells"]] == [(1, 4), (4, 4), (1, 20000)]
    assert content["summary"]["floor_seconds"] == content["cells"][0]["median_seconds"]["loop"]
    assert CostTable.load(tmp_path / "save-costs").full_depth == 4
    assert (tmp_path / "a.png").stat().st_size > 1000


def test_the_floor_names_its_width(capsys):
    small = ["--width", "4", "2", "--context", "4", "--turns", "1"]
    assert main(["bench", "step", "--model", "tiny-ouro", *small]) == 0
    printed = capsys.readouterr().out
    assert "floor, a launch of 2 rows, " in printed
    assert "add --width 1 for the floor of one row" in printed


def test_one_context_has_no_cost_of_its_own(tmp_path, capsys):
    small = ["--width", "1", "3", "--context", "4", "--turns", "1", "--json", str(tmp_path / "json")]
    assert main(["bench", "step", "--model", "tiny-ouro", *small, "--save-costs", str(tmp_path / "costs")]) == 0
    printed = capsys.readouterr().out
    assert "A position of context costs" not in printed
    assert "Several values of --context tell it" in printed
    assert json.loads((tmp_path / "json").read_text())["summary"]["context_seconds"] is None
    assert CostTable.load(tmp_path / "costs").loop.per_context == 0


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--width", "4"], "width=4 alone gives no slope"),
        (["--width", "0", "4"], "width=0"),
        (["--turns", "0"], "turns=0"),
        (["--seed", "99999999999999999999999"], "seed=99999999999999999999999: choose"),
        (["--device", "foo"], "device='foo' cannot be used here"),
        (["--save-costs", "/"], "save_costs='/' is a folder"),
        (["--memory", "0"], "memory=0.0: choose more than 0"),
        (["--memory", "0.00001"], "holds fewer than two widths of context 128"),
    ],
)
def test_errors_are_one_line(words, message, capsys):
    assert main(["bench", "step", "--model", "tiny-ouro", *words]) == 2
    assert message in capsys.readouterr().err.splitlines()[-1]
