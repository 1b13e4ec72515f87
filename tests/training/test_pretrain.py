import functools
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from accelerate.state import AcceleratorState
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from hf_cdb.training import pretrain
from hf_cdb.training.evaluation import evaluate
from hf_cdb.training.objectives import build_objective
from hf_cdb.training.recipe import ObjectiveRecipe
from hf_cdb.training.recipe_file import load_recipe
from hf_cdb.training.tokenizer import train_tokenizer

from ..tiny import RANDOM, random_ouro
from .test_objectives import packed

CONFIGS = Path(__file__).parents[2] / "configs" / "train"
FAMILIES = ("ouro", "huginn")
LAST = Path("checkpoints") / "step-00000006"
tokenizer_of_size = functools.cache(train_tokenizer)


@pytest.fixture(autouse=True)
def _fresh_accelerator(monkeypatch):
    # Its state belongs to the process. And training a tokenizer, always the same one, takes a second.
    AcceleratorState._reset_state(reset_partial_state=True)
    monkeypatch.setattr(pretrain, "train_tokenizer", tokenizer_of_size)


def smoke(family, *overrides):
    return load_recipe(CONFIGS / f"smoke-{family}.yaml", overrides)


def log_of(folder):
    return [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]


def without_speed(log):
    return [{key: value for key, value in entry.items() if key != "tokens_per_second"} for entry in log]


def kill_in_step(monkeypatch, step):
    advance = pretrain._Run.advance

    def killed(self):
        if self.step == step:
            raise KeyboardInterrupt
        return advance(self)

    monkeypatch.setattr(pretrain._Run, "advance", killed)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_killed_run_resumes_to_the_same_bits(family, tmp_path, monkeypatch):
    # Dropout draws from the global generator, whose state has to be resumed too.
    overrides = ["model.attention_dropout=0.1"] if family == "ouro" else ["model.init_scale=1.0"]
    recipe = smoke(family, "evaluation.every=2", "evaluation.chapters=1", "evaluation.examples=1", *overrides)
    metrics = pretrain.train(recipe, tmp_path / "whole")

    with monkeypatch.context() as patch:
        kill_in_step(patch, 4)
        with pytest.raises(KeyboardInterrupt):
            pretrain.train(recipe, tmp_path / "killed")
    assert [entry["step"] for entry in log_of(tmp_path / "killed")][-1] == 4
    torch.manual_seed(123)  # what happens in between does not matter
    assert pretrain.train(recipe, tmp_path / "killed", resume=True) == metrics

    whole, killed = (load_file(tmp_path / name / "model" / "model.safetensors") for name in ("whole", "killed"))
    assert whole.keys() == killed.keys()
    assert all(torch.equal(weight, killed[name]) for name, weight in whole.items())
    states = [
        load_file(tmp_path / n / "checkpoints" / "step-00000006" / "model.safetensors") for n in ("whole", "killed")
    ]
    assert all(torch.equal(weight, states[1][name]) for name, weight in states[0].items())
    assert without_speed(log_of(tmp_path / "killed")) == without_speed(log_of(tmp_path / "whole"))


@pytest.mark.parametrize("family", FAMILIES)
def test_the_saved_folder_is_what_from_pretrained_reads(family, tmp_path):
    recipe = smoke(family, "steps=1")
    metrics = pretrain.train(recipe, tmp_path / "run")
    folder = tmp_path / "run" / "model"
    assert json.loads((folder / "metrics.json").read_text()) == metrics
    assert load_recipe(folder / "recipe.yaml") == recipe

    model = AutoModelForCausalLM.from_pretrained(folder)
    assert type(model) is type(RANDOM[family]())
    assert model.dtype == torch.float16
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert len(tokenizer) == model.config.vocab_size == recipe.data.vocab_size
    assert model.generation_config.eos_token_id == tokenizer.eos_token_id
    settings = recipe.evaluation
    found = evaluate(
        model.float(),
        tokenizer,
        chapters=settings.final_chapters,
        count=settings.final_examples,
        length=recipe.data.length,
    )
    assert {name: metrics[name] for name in found} == found
    assert metrics["tokens"] == 4 * 64


def test_training_lowers_the_loss(tmp_path):
    pretrain.train(smoke("ouro", "steps=30", "optimizer.muon_lr=0.02", "checkpoint.every_steps=30"), tmp_path / "run")
    losses = [entry["losses"] for entry in log_of(tmp_path / "run") if "losses" in entry]
    assert len(losses) == 30
    for first, last in zip(losses[0], losses[-1], strict=True):
        assert first == pytest.approx(5.7, abs=0.1)  # ln(300): nothing known of 300 tokens
        assert last < first - 0.8


def test_old_checkpoints_go_and_half_written_ones_do_not_count(tmp_path, monkeypatch):
    recipe = smoke("ouro", "checkpoint.every_steps=1", "checkpoint.keep=2")
    folder = tmp_path / "run" / "checkpoints"
    with monkeypatch.context() as patch:
        kill_in_step(patch, 3)
        with pytest.raises(KeyboardInterrupt):
            pretrain.train(recipe, tmp_path / "run")
    assert sorted(path.name for path in folder.iterdir()) == ["step-00000002", "step-00000003"]
    (folder / "partial-00000004").mkdir()
    (folder / "partial-00000004" / "model.safetensors").write_bytes(b"half")
    pretrain.train(recipe, tmp_path / "run", resume=True)
    assert sorted(path.name for path in folder.iterdir()) == ["step-00000005", "step-00000006"]


def test_other_measurements_may_be_resumed_other_recipes_not(tmp_path, monkeypatch):
    with monkeypatch.context() as patch:
        kill_in_step(patch, 3)
        with pytest.raises(KeyboardInterrupt):
            pretrain.train(smoke("ouro"), tmp_path / "run")
    with pytest.raises(ValueError, match=r"another recipe; optimizer\.muon_lr, seed differ"):
        pretrain.train(smoke("ouro", "seed=1", "optimizer.muon_lr=0.1"), tmp_path / "run", resume=True)
    metrics = pretrain.train(smoke("ouro", "evaluation.final_examples=1"), tmp_path / "run", resume=True)
    assert metrics["steps"] == 6


def test_refused_folders(tmp_path):
    with pytest.raises(FileNotFoundError, match="holds no checkpoint"):
        pretrain.train(smoke("ouro"), tmp_path / "none", resume=True)
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "log.jsonl").touch()
    with pytest.raises(FileExistsError, match="holds a run already"):
        pretrain.train(smoke("ouro"), tmp_path / "run")
    (tmp_path / "file").touch()
    with pytest.raises(OSError, match=r"output='.*file/run' cannot be written"):
        pretrain.train(smoke("ouro"), tmp_path / "file" / "run")


def test_divergence_stops_the_run(tmp_path):
    recipe = smoke("ouro", "optimizer.adamw_lr=1e30", "checkpoint.every_steps=1")
    with pytest.raises(FloatingPointError, match="training has diverged"):
        pretrain.train(recipe, tmp_path / "run")


def test_compiled_losses_and_gradients_are_the_same():
    found = []
    for compiled in (False, True):
        model = random_ouro(num_hidden_layers=1, total_ut_steps=2).train()
        objective = build_objective(model, ObjectiveRecipe("loops"), seed=0, compile=compiled)
        assert all((layer._compiled_call_impl is not None) is compiled for layer in objective.layers())
        loss, losses = objective(*packed(), step=0)
        loss.backward()
        gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
        found.append((losses, gradients))
    torch.testing.assert_close(*found, rtol=1e-3, atol=1e-4)


def test_two_processes_train_the_same_model(tmp_path):
    pretrain.train(smoke("ouro", "steps=2"), tmp_path / "one")
    launch = [
        sys.executable,
        "-m",
        "accelerate.commands.launch",
        "--cpu",
        "--num_processes",
        "2",
        "--num_machines",
        "1",
    ]
    launch += ["--mixed_precision", "no", "--dynamo_backend", "no", "--main_process_port", "0", "-m", "hf_cdb"]
    train = ["train", "tiny", "--config", str(CONFIGS / "smoke-ouro.yaml"), "--output", str(tmp_path / "two")]
    train += ["--threads", "1", "--set", "steps=2"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run([*launch, *train], env=environment, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr[-3000:]
    one, two = (
        load_file(tmp_path / name / "checkpoints" / "step-00000002" / "model.safetensors") for name in ("one", "two")
    )
    for weight, other in zip(one.values(), two.values(), strict=True):
        # Muon's steps are computed in bfloat16.
        torch.testing.assert_close(other, weight, rtol=0, atol=2e-3)
    assert [entry["step"] for entry in log_of(tmp_path / "two")] == [1, 2, 2]
