"""Training of exit heads: heads that learn, serve and are judged, and the command."""

import argparse
import json
import math

import pytest
import torch
from transformers import AutoModelForCausalLM

from hf_cdb import attach_exit_head, enable_cdb, load_exit_head
from hf_cdb.adapters import adapter_for
from hf_cdb.exit_heads import KINDS, make_exit_head
from hf_cdb.reference import reference_generate
from hf_cdb.training import gate, gate_command
from hf_cdb.training.gate import GateSettings, train_gate
from hf_cdb.training.gate_data import GateData, Row
from hf_cdb.training.gate_report import exit_depths, report
from hf_cdb.training.gate_states import LoopCache, _Memory, collect_states
from hf_cdb.training.gate_targets import (
    KLToFull,
    LoopScores,
)

from ..dory import random_dory
from ..test_engine import run_toy
from ..test_exit_heads import IDS, MASK, refused, run
from ..tiny import assert_close, prompts, random_huginn, random_ouro
from ..toy import ToyModel, toy_prompt
from .test_gate_states import rows_of

MODELS = {"ouro": random_ouro, "huginn": random_huginn, "dory": random_dory, "toy": ToyModel}


def small_data(vocab=50):
    lengths = torch.randint(2, 30, (40,), generator=torch.Generator().manual_seed(5)).tolist()
    rows = rows_of(*lengths, vocab=vocab)
    return GateData(rows[:30], rows[30:])


def settings(kind="same-step", **kwargs):
    return GateSettings(kind=kind, target=KLToFull(scale=1.0), **{"steps": 40, "batch": 256, **kwargs})


# Training.


def planted(kind, tokens=3000, width=6, depths=4):
    """A cache whose right head is known, over states far from scale 1 and with a channel that never changes."""
    generator = torch.Generator().manual_seed(1)
    truth = make_exit_head(kind, width, depths)
    for parameter in truth.parameters():
        parameter.data = torch.randn(parameter.shape, generator=generator)
    truth.requires_grad_(False)
    inputs = {"same-step": depths - 1, "lookahead": depths - 2, "preloop": 1}[kind]
    clean = torch.randn(tokens * inputs, width, generator=generator)
    clean[:, 0] = 0.0
    loops = torch.arange(inputs).repeat(tokens) + 1
    wanted = truth(clean).softmax(-1) if kind == "preloop" else truth(clean, loops).sigmoid()
    store = _Memory()
    store.write(100 * clean + 30)
    store.finish(width)
    empty = LoopScores(*[torch.zeros(tokens, depths)] * 3)
    adapter = adapter_for(random_ouro())
    weights = torch.ones(tokens)
    cache = LoopCache(adapter, inputs, width, empty, weights, torch.full((tokens,), -1), 0, store)
    return cache, wanted.view(tokens, inputs, *wanted.shape[1:]), loops


@pytest.mark.parametrize("kind", KINDS)
def test_a_planted_head_is_found(kind):
    cache, wanted, loops = planted(kind)
    head = make_exit_head(kind, 6, 4)
    gate._start_at_mean(head, cache, wanted)
    log = gate._fit(head, cache, wanted, GateSettings(kind=kind, steps=600, lr=3e-2, batch=1024), False)
    head.requires_grad_(False)
    states = cache.states(torch.arange(len(loops)))
    found = head(states).softmax(-1) if kind == "preloop" else head(states, loops).sigmoid()
    assert (found - wanted.flatten(0, 1)).abs().max() < 0.02
    assert log[-1]["step"] == 600
    assert log[-1]["loss"] < log[0]["loss"]


def test_the_first_head_says_the_weighted_mean():
    cache, wanted, _ = planted("same-step")
    cache.weights = torch.rand(len(cache))
    head = make_exit_head("same-step", 6, 4)
    gate._start_at_mean(head, cache, wanted)
    mean = (cache.weights[:, None] * wanted).sum(0) / cache.weights.sum()
    assert_close(head(cache.states(torch.arange(3)), [1, 2, 3]).sigmoid(), mean, 1e-5)


@pytest.mark.parametrize("name", ["ouro", "huginn", "dory"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_trained_head_serves_as_the_oracle_says(name, kind):
    model = enable_cdb(MODELS[name](eos_token_id=None, bos_token_id=None, pad_token_id=0))
    before = {key: value.clone() for key, value in model.state_dict().items()}
    head = train_gate(model, small_data(), settings(kind), progress=False).head
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())
    assert (head.kind, head.width, head.depths) == (kind, 32, adapter_for(model).full_depth)
    attach_exit_head(model.double(), head)
    cdb = {"exit_rule": "preloop" if kind == "preloop" else "gate", "lookahead": int(kind == "lookahead")}
    for threshold in (0.3, 0.8):
        output = run(model, {**cdb, "exit_threshold": threshold})
        for row, prompt in enumerate(prompts(3, 9, 6)):
            expected = reference_generate(model, prompt, 6, **cdb, exit_threshold=threshold)
            assert output.sequences[row, IDS.shape[1] :].tolist() == expected.tokens
            assert output.exit_depths[row].tolist() == expected.exit_depths


@pytest.mark.parametrize("kind", KINDS)
def test_the_toy_is_full_depth_after_any_loop(kind):
    """Its output never changes, so every target lets it leave at once: at depth 1, or 2 with lookahead."""
    model = ToyModel()
    head = train_gate(model, small_data(200), settings(kind), progress=False).head
    attach_exit_head(model, head)
    lookahead = int(kind == "lookahead")
    rule = "preloop" if kind == "preloop" else "gate"
    running, _ = run_toy(model, [toy_prompt(3, 1, 4)], 4, exit_rule=rule, exit_threshold=0.9, lookahead=lookahead)
    assert running[0].exit_depths == [4] + [1 + lookahead] * 3


def test_a_run_depends_on_its_seed_alone():
    model = random_ouro()
    first, second, other = (train_gate(model, small_data(), settings(seed=seed), progress=False) for seed in (3, 3, 4))
    assert torch.equal(first.head.weight, second.head.weight)
    assert first.log == second.log
    assert not torch.equal(first.head.weight, other.head.weight)
    assert not model.training
    assert train_gate(model.train(), small_data(), settings(), progress=False).head is not None
    assert model.training


def test_settings_and_models_that_cannot_be_trained():
    refused(["kind='gate'", "same-step"], lambda: GateSettings(kind="gate"))
    refused(["steps=0"], lambda: GateSettings(steps=0))
    refused(["batch=1.5"], lambda: GateSettings(batch=1.5))
    refused(["lr=-1"], lambda: GateSettings(lr=-1))
    refused(["thresholds", "1.5"], lambda: GateSettings(thresholds=(0.5, 1.5)))
    refused(
        ["2 loops", "nothing to decide"],
        lambda: train_gate(random_ouro(total_ut_steps=2), small_data(), settings("lookahead"), progress=False),
    )


# The report.


def test_report_by_hand():
    """Two tokens of weights 1 and 3 over three depths; the head leaves the first at depth 1 and the second at 2."""
    store = _Memory()
    store.write(torch.tensor([[[1.0], [1.0]], [[-1.0], [1.0]]]))
    store.finish(1)
    loss = torch.tensor([[2.0, 1.0, 0.5], [4.0, 3.0, 1.0]])
    agrees = torch.tensor([[0.0, 1.0, 1.0], [0.0, 1.0, 1.0]])
    adapter = adapter_for(ToyModel(loops=3))
    sizes = torch.tensor([2, 3])
    cache = LoopCache(adapter, 2, 1, LoopScores(agrees, loss, agrees), torch.tensor([1.0, 3.0]), sizes, 0, store)
    head = make_exit_head("same-step", 1, 3)
    head.weight.data.fill_(10.0)
    head.requires_grad_(False)
    assert exit_depths(head, cache, 0.5).tolist() == [1, 2]
    result = report(head, cache, [0.5, 1.0])
    row, full = result.thresholds
    assert (row.mean_depth, row.depths) == (1.75, [0.25, 0.75, 0.0])
    assert (row.agreement, row.loss) == (0.75, pytest.approx(0.25 * 2.0 + 0.75 * 3.0))
    assert row.bits_per_byte == pytest.approx((2.0 + 3.0) / math.log(2) / 5)
    # Fixed depth 1: loss 3.5, nothing agrees; depth 2: 2.5, all agrees. A quarter of one and three of the other.
    assert [fixed.loss for fixed in result.fixed] == pytest.approx([3.5, 2.5, 0.875])
    assert (row.mix_loss, row.mix_agreement) == (pytest.approx(2.75), pytest.approx(0.75))
    assert row.mix_bits_per_byte == pytest.approx((0.25 * 6 + 0.75 * 4) / math.log(2) / 5)
    assert (full.mean_depth, full.loss, full.mix_loss) == (3.0, pytest.approx(0.875), pytest.approx(0.875))
    table = result.to_markdown()
    assert "| 0.5 | 1.75 | .25 .75 .00 | 0.750 | 0.750 | 2.7500 | 2.7500 |" in table
    assert "keys of full depth" in table
    cache.sizes = torch.tensor([-1, -1])
    assert "bits per byte |" not in report(head, cache, [0.5]).to_markdown()


def test_depths_of_the_report_are_those_of_a_first_token():
    """The first token that may leave reads a past of full depth, so there teacher forcing is exact."""
    for kind in KINDS:
        model = enable_cdb(random_ouro(eos_token_id=None, bos_token_id=None, pad_token_id=0))
        head = train_gate(model, small_data(), settings(kind), progress=False).head
        attach_exit_head(model, head)
        cdb = {"exit_rule": "preloop" if kind == "preloop" else "gate", "lookahead": int(kind == "lookahead")}
        for threshold in (0.2, 0.6, 0.9):
            output = run(model, {**cdb, "exit_threshold": threshold}, max_new_tokens=2)
            rows = [
                Row(output.sequences[row, MASK[row].argmax() :].tolist(), [1.0] * int(MASK[row].sum() + 2))
                for row in range(3)
            ]
            for row, expected in zip(rows, output.exit_depths[:, 1].tolist(), strict=True):
                cache = collect_states(adapter_for(model), [row], kind, progress=False)
                assert exit_depths(head, cache, threshold)[-1] == expected


# The command.


def command(*arguments):
    parser = argparse.ArgumentParser()
    gate_command.add_arguments(parser)
    parsed = parser.parse_args([str(argument) for argument in arguments])
    parsed.run(parsed)


@pytest.fixture
def folder(tmp_path):
    random_dory(eos_token_id=None, bos_token_id=None, pad_token_id=0).save_pretrained(tmp_path / "model")
    records = [{"input_ids": row.ids} for row in small_data().train]
    (tmp_path / "data.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    return tmp_path


def test_the_command_leaves_a_head_that_generate_uses(folder, capsys):
    arguments = ("--data", folder / "data.jsonl", "--scale", 1.0, "--steps", 40, "--batch", 256, "--threads", 1)
    for kind in KINDS:
        command(folder / "model", "--kind", kind, *arguments)
        assert f"Exit head `{kind}`" in capsys.readouterr().out
    heads = folder / "model" / "exit_heads"
    files = [f"{kind}.{ending}" for kind in KINDS for ending in ("json", "md", "safetensors")]
    assert sorted(path.name for path in heads.iterdir()) == sorted(files)
    record = json.loads((heads / "same-step.json").read_text())
    assert record["target"] == {"name": "kl", "slope": 3.0, "scale": 1.0}
    assert record["training"]["steps"] == record["log"][-1]["step"] == 40
    assert len(record["report"]["fixed"]) == 4
    model = enable_cdb(AutoModelForCausalLM.from_pretrained(folder / "model").eval())
    output = run(model, {"exit_rule": "gate", "exit_threshold": 0.6})
    expected = reference_generate(model, prompts(9)[0], 6, exit_rule="gate", exit_threshold=0.6)
    alone = run(model, {"exit_rule": "gate", "exit_threshold": 0.6}, prompts(9)[0][None], None)
    assert alone.exit_depths[0].tolist() == expected.exit_depths
    assert output.exit_depths.unique().numel() > 1


def test_a_head_saved_elsewhere(folder, capsys):
    arguments = ("--data", folder / "data.jsonl", "--target", "agreement", "--steps", 2, "--output", folder / "other")
    command(folder / "model", *arguments)
    assert "attach_exit_head" in capsys.readouterr().out
    assert not (folder / "model" / "exit_heads").exists()
    assert load_exit_head(folder / "other" / "exit_heads" / "same-step.safetensors").target == {"name": "agreement"}


def test_a_killed_run_leaves_no_half_file(folder, monkeypatch):
    arguments = ("--data", folder / "data.jsonl", "--steps", 2)
    command(folder / "model", *arguments)
    before = load_exit_head(folder / "model" / "exit_heads" / "same-step.safetensors")

    def killed(tensors, path, metadata):
        path.write_bytes(b"half")
        raise KeyboardInterrupt

    monkeypatch.setattr("hf_cdb.exit_heads.save_file", killed)
    with pytest.raises(KeyboardInterrupt):
        command(folder / "model", *arguments, "--seed", 1)
    after = load_exit_head(folder / "model" / "exit_heads" / "same-step.safetensors")
    assert torch.equal(after.weight, before.weight)


def test_arguments_of_the_command_that_cannot_work(folder):
    data = ("--data", folder / "data.jsonl")
    refused(["somebody/looped", "--output"], lambda: command("somebody/looped", *data))
    refused(["margin=0.1", "'kl'"], lambda: command(folder / "model", *data, "--margin", 0.1))
    refused(["steps=0"], lambda: command(folder / "model", *data, "--steps", 0))


def test_a_head_goes_into_the_model_s_own_gate(tmp_path):
    """Plain Ouro then leaves where the report's rule does, and nothing else about the model has changed."""
    model = random_ouro(eos_token_id=None, pad_token_id=0).half()
    model.save_pretrained(tmp_path / "model")
    records = [{"input_ids": row.ids} for row in small_data().train]
    (tmp_path / "data.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    arguments = ("--data", tmp_path / "data.jsonl", "--scale", 1.0, "--steps", 40, "--batch", 256, "--threads", 1)
    command(tmp_path / "model", *arguments, "--no-depth-bias", "--into-model")
    command(tmp_path / "model", *arguments, "--no-depth-bias", "--output", tmp_path / "beside")
    assert not (tmp_path / "model" / "exit_heads" / "same-step.safetensors").exists()
    assert (tmp_path / "model" / "exit_heads" / "own-gate.md").exists()
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    head = load_exit_head(tmp_path / "beside" / "exit_heads" / "same-step.safetensors")
    gate = loaded.model.early_exit_gate
    assert loaded.dtype == torch.float16
    assert torch.equal(gate.weight, head.weight.half())
    assert torch.equal(gate.bias, head.bias.half())
    for name, value in loaded.state_dict().items():
        if "early_exit_gate" not in name:
            assert torch.equal(value, model.state_dict()[name])


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--kind", "lookahead", "--no-depth-bias"], ["--kind lookahead", "--kind same-step"]),
        ([], ["a bias for every loop", "--no-depth-bias"]),
    ],
)
def test_heads_that_are_no_gate_of_the_model(tmp_path, arguments, words):
    random_ouro().save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="--into-model") as caught:
        command(tmp_path, "--into-model", *arguments)
    assert all(word in str(caught.value) for word in words), caught.value


def test_a_model_without_a_gate_takes_no_head_into_itself(folder):
    with pytest.raises(ValueError, match="--into-model: DoryForCausalLM has no gate of its own"):
        command(folder / "model", "--into-model", "--no-depth-bias")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--threads", 0], ["threads=0"]),
        (["--tokens", -5], ["tokens=-5"]),
        (["--device", "foo"], ["device='foo' cannot be used", "Choose cpu"]),
        (["--device", "meta"], ["device='meta' cannot be used"]),
        (["--output", "/proc/nothing"], ["output='/proc/nothing'", "cannot be written", "--output"]),
    ],
)
def test_what_cannot_work_is_found_before_the_work(folder, arguments, words, monkeypatch):
    monkeypatch.setattr(gate_command, "train_gate", None)
    with pytest.raises((ValueError, OSError)) as caught:
        command(folder / "model", "--data", folder / "data.jsonl", *arguments)
    assert all(word in str(caught.value) for word in words), caught.value


def test_token_ids_beyond_the_vocabulary_are_refused(folder):
    rows = [{"input_ids": [5, 6, 7, token]} for token in (*range(10, 40), 9999)]
    (folder / "odd.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    with pytest.raises(ValueError, match="input_ids holds 9999, but the model's vocabulary has 50 tokens"):
        command(folder / "model", "--data", folder / "odd.jsonl")
