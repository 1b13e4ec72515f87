"""The gates open for the embedded checkpoints, and shut for what breaks."""

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest

from eval.parity import main
from hf_cdb.evaluation.parity import check_engine, check_quality
from hf_cdb.training.text import chapters

from .small import small_config, write_config

CONFIGS = Path(__file__).parents[2] / "configs"


@pytest.mark.parametrize("name", ["tiny-ouro", "tiny-huginn"])
def test_the_embedded_checkpoints_pass(name, tmp_path, capsys):
    """Of their own configurations half of the answers, and short texts, since reading them takes the time."""
    texts = tmp_path / "bible.jsonl"
    texts.write_text("".join(json.dumps({"text": chapter[:330]}) + "\n" for chapter in chapters("held-out")[:4]))
    arguments = ["--config", str(CONFIGS / f"{name}.yaml"), "--output", str(tmp_path / "out")]
    assert main([*arguments, "--limit", "448", "--data", f"bible={texts}"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "engine at full depth against stock: 0 differences in 452 records"
    assert [line.partition(":")[0] for line in lines[1:]] == ["tasks/exact_match", "bible/bits_per_byte"]


def test_a_default_that_loses_quality_fails(tmp_path, capsys):
    """One shared slot of keys ruins Ouro; the same system under another name is what `--system` looks at."""
    bad = {"exit_rule": "gate", "exit_threshold": 0.3, "kv_policy": "shared"}
    tolerances = {"tasks/exact_match": 0.01, "psalm/bits_per_byte": 0.01}
    config = small_config(tmp_path, cdb={"shared": bad, "depth 1": {"exit_rule": "never", "max_depth": 1}})
    tasks = [{**config.tasks[0]}, {**config.tasks[2], "signal": []}]
    config = replace(config, tasks=tasks, tolerances=tolerances)
    file = write_config(config, tmp_path / "config.yaml")
    arguments = ["--config", str(file), "--output", str(tmp_path / "out")]
    assert main([*arguments, "--system", "shared"]) == 1
    failed = [line for line in capsys.readouterr().err.splitlines() if line.startswith("FAILED")]
    assert [line.split()[1] for line in failed] == ["tasks/exact_match:", "psalm/bits_per_byte:"]
    assert main(arguments) == 2
    assert "system='default': the systems are engine, shared, depth 1" in capsys.readouterr().err


def records(kind="generate", **engine):
    values = {
        "generate": {"tokens": [1, 2], "completion": "ab", "scores": {"exact_match": 1.0}, "ended": True},
        "text": {"bits": 100.0, "bytes": 50, "tokens": 20, "agreement": 1.0},
        "loglikelihood": {"scores": {"accuracy": 1.0, "accuracy_norm": 1.0}},
    }[kind]
    common = {"task": "tasks", "id": "0", "kind": kind}
    return [{**common, **values, "system": "stock"}, {**common, **values, "system": "engine", **engine}]


@pytest.mark.parametrize(
    ("kind", "change", "words"),
    [
        ("generate", {}, None),
        ("generate", {"tokens": [1, 3], "completion": "ac"}, "gives 'ac', stock 'ab'"),
        ("text", {"bits": 100.005}, None),
        ("text", {"bits": 100.05}, "takes 100.050 bits, stock 100.000"),
        ("loglikelihood", {"scores": {"accuracy": 0.0}}, "scores {'accuracy': 0.0}, stock {'accuracy': 1.0,"),
    ],
)
def test_what_differs_from_stock(kind, change, words):
    failures = check_engine(records(kind, **change))
    assert len(failures) == (words is not None)
    assert words is None or words in failures[0]


@pytest.mark.parametrize(
    ("right", "tolerance", "fails"),
    [
        (88, 0.05, True),  # a loss of 0.12, whose one-sided bound is 0.12 - 1.645 * 0.0325 = 0.067
        (88, 0.08, False),
        (99, 0.0, False),  # one in a hundred may be chance
        (100, 0.0, False),
    ],
)
def test_a_loss_has_to_be_beyond_chance(right, tolerance, fails, tmp_path):
    """Hand-worked: stock is right in 100 of 100, the other in `right` of them."""
    config = small_config(tmp_path, tolerances={"tasks/exact_match": tolerance}, draws=20_000)
    rows = [
        {**one, "id": str(k), "system": system, "scores": {"exact_match": float(system == "stock" or k < right)}}
        for k in range(100)
        for system, one in zip(("stock", "default"), records(), strict=True)
    ]
    ((line, failure),) = check_quality(rows, config)
    assert (failure is not None) == fails
    assert f"{right / 100 - 1:+.4f}" in line


@pytest.mark.parametrize(("ended", "fails"), [(False, True), (True, False)])
def test_more_answers_that_are_cut_off_are_a_loss(ended, fails, tmp_path):
    config = small_config(tmp_path, tolerances={"tasks/cut_off": 0.5})
    stock, other = records()
    rows = [stock, {**other, "system": "default", "ended": ended}, {**stock, "id": "1"}]
    rows.append({**rows[1], "id": "1"})
    ((_, failure),) = check_quality(rows, config)
    assert (failure is not None) == fails


def test_tolerances_that_mean_nothing(tmp_path, capsys):
    with pytest.raises(ValueError, match=re.escape("'tasks/cut_off' cannot be held, for 'default' ran nothing")):
        check_quality(records(), small_config(tmp_path, tolerances={"tasks/cut_off": 0.1}))
    file = write_config(small_config(tmp_path), tmp_path / "config.yaml")
    assert main(["--config", str(file), "--output", str(tmp_path / "out")]) == 2
    assert "has no tolerances" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("left_out", ["engine", "default"])
def test_a_gate_that_would_compare_nothing_is_refused(left_out, tmp_path, capsys):
    config = small_config(tmp_path, tolerances={"tasks/exact_match": 0.01})
    config.tasks[0]["systems"] = [name for name in ("stock", "engine", "default") if name != left_out]
    file = write_config(config, tmp_path / "config.yaml")
    assert main(["--config", str(file), "--output", str(tmp_path / "out")]) == 2
    assert f"of task 'tasks': {left_out!r} is missing, which the gate holds" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(("kind", "task"), [("generate", 0), ("loglikelihood", 1), ("text", 2)])
def test_all_qualities_have_a_difference(kind, task, tmp_path):
    """What a tolerance may name, the gate can hold: no KeyError after the whole evaluation."""
    spec = small_config(tmp_path).task_specs[task]
    config = small_config(tmp_path, tolerances={f"{spec.name}/{name}": 0.1 for name in spec.qualities})
    rows = [{**one, "task": spec.name} for one in records(kind)]
    assert [failure for _, failure in check_quality(rows, config, "engine")] == [None] * len(spec.qualities)
