"""The embedded checkpoints: that they load anywhere, and are what their tables say."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import hf_cdb
from hf_cdb.checkpoints import model_path
from hf_cdb.cli import main
from hf_cdb.training.depth_tables import measure_depths, measure_settings

NAMES = ("ouro", "huginn")
# Tasks that gain ten points from loop 1 to full depth. Huginn's first loop, between a layer before it and one after it,
# answers most tasks already.
DEEP_TASKS = {"ouro": 2, "huginn": 1}
# Bits per byte and mean exact match at full depth that the checkpoints have to reach.
LIMITS = {"ouro": (1.40, 0.90), "huginn": (1.56, 0.83)}

FRESH = """
import socket, sys
def refuse(*arguments, **options):
    raise OSError("no network here")
socket.socket.connect = socket.getaddrinfo = refuse
import hf_cdb
from transformers import AutoModelForCausalLM, AutoTokenizer
folder = hf_cdb.tiny_checkpoint(sys.argv[1])
model, tokenizer = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
inputs = tokenizer(["sort:KDBHCA="], return_tensors="pt")
output = model.generate(**inputs, max_new_tokens=9, do_sample=False, cdb=True, return_dict_in_generate=True)
print(tokenizer.decode(output.sequences[0], skip_special_tokens=True), output.exit_depths.max().item())
"""


def load(name):
    folder = hf_cdb.tiny_checkpoint(name)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    return model, AutoTokenizer.from_pretrained(folder, padding_side="left")


def recorded(name, file):
    return json.loads((Path(hf_cdb.tiny_checkpoint(name)) / file).read_text())


def test_names():
    assert hf_cdb.tiny_checkpoint("tiny-ouro") == hf_cdb.tiny_checkpoint("ouro")
    with pytest.raises(ValueError, match=r"name='ouro-1b'.*ouro, huginn"):
        hf_cdb.tiny_checkpoint("ouro-1b")


@pytest.mark.parametrize("name", NAMES)
def test_it_is_small_and_has_what_belongs_to_it(name):
    folder = Path(hf_cdb.tiny_checkpoint(name))
    assert (folder / "model.safetensors").stat().st_size < 3e6
    assert sum(file.stat().st_size for file in folder.rglob("*") if file.is_file()) < 4e6
    assert (folder / "README.md").read_text().startswith("---\n")
    kinds = {file.stem for file in (folder / "exit_heads").glob("*.safetensors")}
    assert kinds >= {"lookahead", "preloop"}
    model, tokenizer = load(name)
    assert model.generation_config.cdb_config["exit_threshold"] < 1
    assert getattr(model.generation_config, "cdb", None) is None  # plain generate stays plain
    assert model.generation_config.eos_token_id == tokenizer.eos_token_id


@pytest.mark.parametrize("name", NAMES)
def test_a_fresh_process_without_network_loads_and_generates(name):
    environment = {**os.environ, "HF_HUB_OFFLINE": "0", "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, "-c", FRESH, name], capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    text, deepest = done.stdout.split()
    assert text == "sort:KDBHCA=ABCDHK"
    assert int(deepest) == load(name)[0].config.to_dict().get("total_ut_steps" if name == "ouro" else "mean_recurrence")


@pytest.mark.parametrize("name", NAMES)
def test_metrics_of_a_small_split_are_those_recorded(name):
    """To three digits, at every depth and with exits."""
    check = recorded(name, "check/depth.json")
    model, tokenizer = load(name)
    sizes = {"chapter_count": check["chapter_count"], "count": check["count"]}
    depths = measure_depths(model, tokenizer, **sizes)
    for depth, score in check["depths"]["bits_per_byte"].items():
        assert depths["bits_per_byte"][depth]["mean"] == pytest.approx(score["mean"], abs=5e-4)
    for task, scores in check["depths"]["tasks"].items():
        for depth, score in scores.items():
            assert depths["tasks"][task][depth]["mean"] == pytest.approx(score["mean"], abs=1e-9), (task, depth)
    assert depths["heuristics"] == check["depths"]["heuristics"]
    default = model.generation_config.cdb_config
    (*_, row) = measure_settings(model, tokenizer, {"default": default}, **sizes, progress=False)
    (wanted,) = [r for r in check["settings"] if r["name"] == f"{default['exit_rule']} {default['exit_threshold']:g}"]
    for key in ("mean_depth", "text_mean_depth", "answers_mean_depth", "agreement"):
        assert row[key] == pytest.approx(wanted[key], abs=5e-4)
    for key in ("bits_per_byte", "exact_match"):
        assert row[key]["mean"] == pytest.approx(wanted[key]["mean"], abs=5e-4)


@pytest.mark.parametrize("name", NAMES)
def test_it_has_learned_and_depth_matters(name):
    """The recorded tables, over all held-out chapters and 512 examples of every task."""
    table = recorded(name, "depth.json")
    assert table["count"] >= 512
    assert table["chapter_count"] is None
    bits, tasks = table["depths"]["bits_per_byte"], table["depths"]["tasks"]
    first, *_, last = bits
    most_bits, least_match = LIMITS[name]
    assert bits[last]["mean"] <= most_bits
    match = {depth: sum(scores[depth]["mean"] for scores in tasks.values()) / len(tasks) for depth in bits}
    assert match[last] >= least_match
    assert sum(scores[last]["mean"] - scores[first]["mean"] >= 0.1 for scores in tasks.values()) >= DEEP_TASKS[name]
    # Full depth is no worse than any shallower one by more than the noise of two standard errors.
    assert all(bits[last]["mean"] <= score["mean"] + 2 * score["standard_error"] for score in bits.values())
    for scores in tasks.values():
        full = scores[last]
        assert all(full["mean"] >= score["mean"] - 2 * full["standard_error"] - 0.01 for score in scores.values())
    for task, guesses in table["depths"]["heuristics"].items():
        assert max(guesses.values()) < tasks[task][last]["mean"] - 0.3


@pytest.mark.parametrize("name", NAMES)
def test_the_default_saves_loops_and_keeps_quality(name):
    table = recorded(name, "depth.json")
    default = load(name)[0].generation_config.cdb_config
    rows = {row["name"]: row for row in table["settings"]}
    row = rows[f"{default['exit_rule']} {default['exit_threshold']:g}"]
    full = rows[f"depth {len(table['depths']['bits_per_byte'])}"]
    assert full["mean_depth"] / row["mean_depth"] >= 1.5
    assert row["exact_match_difference"]["mean"] >= -0.01
    assert row["bits_difference"]["mean"] <= 0.01 * full["bits_per_byte"]["mean"]
    assert sum(share >= 0.05 for share in row["exits"]) >= 3


@pytest.mark.parametrize("name", NAMES)
def test_the_chat_template_asks_what_the_model_has_seen(name):
    model, tokenizer = load(name)
    ids = tokenizer.apply_chat_template(
        [{"role": "user", "content": "copy:PEAK="}], add_generation_prompt=True, return_tensors="pt", return_dict=True
    )["input_ids"]
    assert ids.tolist() == tokenizer(["copy:PEAK="])["input_ids"]
    output = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=8, do_sample=False, cdb=True)
    assert tokenizer.decode(output[0, ids.shape[1] :], skip_special_tokens=True) == "PEAK"


@pytest.mark.parametrize("name", NAMES)
def test_with_exits_off_cdb_gives_stock_tokens(name):
    model, tokenizer = load(name)
    prompts = [
        "In the beginning",
        "add:458+367=",
        "And it came to pass, when the king heard",
        "hops:AC,EB,CD,BA,DE:C3=",
    ]
    inputs = tokenizer(prompts, return_tensors="pt", padding=True)
    options = {"max_new_tokens": 24, "do_sample": False}
    expected = model.generate(**inputs, cdb=False, **options)
    assert torch.equal(
        model.generate(**inputs, cdb={"exit_rule": "never", "exit_threshold": None}, **options), expected
    )


def test_one_name_for_a_checkpoint_in_every_command(tmp_path, monkeypatch):
    """Both names of it, and a model in a folder of that name comes first."""
    monkeypatch.chdir(tmp_path)
    for name in NAMES:
        assert model_path(name) == model_path(f"tiny-{name}") == hf_cdb.tiny_checkpoint(name)
    assert model_path("me/ouro") == "me/ouro"
    for name in ("tiny-ouro", "ouro"):
        assert main(["hub", "export", name, str(tmp_path / f"exported-{name}")]) == 0
        assert (tmp_path / f"exported-{name}" / "model.safetensors").is_file()
    (tmp_path / "exported-ouro").rename("tiny-ouro")
    assert model_path("tiny-ouro") == "tiny-ouro"
