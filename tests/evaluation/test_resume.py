"""Killed runs, several processes, and folders that hold something already."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
from safetensors import safe_open
from safetensors.torch import load_file, save_file

import hf_cdb
from hf_cdb.evaluation import RecordFile
from hf_cdb.evaluation.report import save_picture
from hf_cdb.evaluation.run import evaluate

from .small import small_config, without_times, write_config

ROOT = Path(__file__).parents[2]


def test_two_processes_and_a_killed_run(tmp_path):
    """Killed within, with half a line at the end of a file, and gone on with by two processes: the numbers of one."""
    config = small_config(tmp_path, batch_size=2)
    file = write_config(config, tmp_path / "config.yaml")
    whole = evaluate(config, tmp_path / "whole", progress=False)
    out = tmp_path / "out"
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = ["-m", "eval.run", "--config", str(file), "--output", str(out), "--no-plot"]
    process = subprocess.Popen(
        [sys.executable, *command], cwd=ROOT, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    partial = out / "records-0.jsonl"
    until = time.monotonic() + 240
    while not (partial.exists() and partial.read_bytes().count(b"\n") >= 3) and process.poll() is None:
        assert time.monotonic() < until
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert process.returncode == -signal.SIGKILL
    assert not (out / "results.json").exists()
    assert len(RecordFile(out).read()) >= 3
    with partial.open("a") as lines:
        lines.write('{"task": "tasks", "sys')
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
    done = subprocess.run(
        [sys.executable, *torchrun, *command], cwd=ROOT, env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-3000:]
    both = json.loads((out / "results.json").read_text())
    assert both["processes"] == 2
    assert_alike(without_times(both), without_times(json.loads(json.dumps(whole))))
    assert [file.name for file in out.glob("records*")] == ["records.jsonl"]
    assert "| engine |" in done.stdout


def assert_alike(found, expected):
    """Equal, numbers within the rounding of sums in another order."""
    if isinstance(expected, dict):
        assert found.keys() == expected.keys()
        for key in expected:
            assert_alike(found[key], expected[key])
    elif isinstance(expected, list):
        assert len(found) == len(expected)
        for pair in zip(found, expected, strict=True):
            assert_alike(*pair)
    else:
        assert found == (pytest.approx(expected, rel=1e-4, abs=1e-6) if isinstance(expected, float) else expected)


def test_a_finished_run_is_not_run_again_and_others_are_refused(tmp_path, monkeypatch):
    config = small_config(tmp_path)
    config = replace(config, tasks=config.tasks[1:2])
    first = evaluate(config, tmp_path / "out", progress=False)
    assert [system["name"] for system in first["systems"]] == ["stock", "engine", "depth 1"]  # "default" ran nothing
    save_picture(tmp_path / "choices.png", first)
    monkeypatch.setattr(RecordFile, "append", lambda *_: pytest.fail("nothing was left to run"))
    assert without_times(evaluate(config, tmp_path / "out", progress=False)) == without_times(first)
    other = replace(config, limit=1)
    with pytest.raises(ValueError, match=r"holds an evaluation with another limit \(limit: None there, 1 here\)"):
        evaluate(other, tmp_path / "out", progress=False)


def test_what_changed_under_a_started_run_is_not_mixed_into_it(tmp_path):
    """The configuration is the same each time: the saved settings, the data, the weights and a head are not."""
    folder = tmp_path / "model"
    shutil.copytree(hf_cdb.tiny_checkpoint("ouro"), folder)
    data = tmp_path / "data.jsonl"
    data.write_text(json.dumps({"prompt": "copy:ab=", "answer": "ab"}) + "\n")
    config = small_config(tmp_path, str(folder), cdb={"default": True})
    config = replace(config, tasks=[{**config.tasks[0], "data": str(data), "group": None}])
    evaluate(config, tmp_path / "out", progress=False)

    def change_settings(path):
        values = json.loads(path.read_text())
        path.write_text(json.dumps({**values, "cdb_config": {"exit_rule": "gate", "exit_threshold": 0.01}}))

    def change_weights(path):
        weights = {name: tensor.clone() for name, tensor in load_file(path).items()}
        next(iter(weights.values())).view(-1)[0] += 1
        save_file(weights, path, metadata=safe_open(path, "pt").metadata())

    for path, change, words in [
        (folder / "generation_config.json", change_settings, "another settings of default"),
        (data, lambda path: path.write_text(path.read_text().replace("ab", "ac")), "another examples of tasks"),
        (folder / "model.safetensors", change_weights, "another weights"),
        (folder / "exit_heads" / "same-step.safetensors", change_weights, "another weights"),
    ]:
        before = path.read_bytes()
        change(path)
        with pytest.raises(ValueError, match=f"holds an evaluation with {words} "):
            evaluate(config, tmp_path / "out", progress=False)
        path.write_bytes(before)
    evaluate(config, tmp_path / "out", progress=False)


def test_folders_that_cannot_be_completed(tmp_path):
    config = small_config(tmp_path)
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match=r"output='.*file' is a file\. Name a folder"):
        evaluate(config, tmp_path / "file", progress=False)
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "settings.json").write_text("")
    with pytest.raises(ValueError, match=r"output='.*settings\.json' is no JSON"):
        evaluate(config, tmp_path / "out", progress=False)
