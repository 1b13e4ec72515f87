"""Every tensor of the golden data, computed by the published code, within its documented rounding."""

import json

import pytest
import torch
from safetensors.torch import load_file

from ..tiny import DATA, assert_close, load_golden

ROUNDING = 5e-5
CACHED = {"ouro": ROUNDING, "huginn": 3e-4}
IMPLEMENTATIONS = ["eager", "sdpa"]
OURO = ["ouro-tiny", "ouro-gqa-tiny"]
HUGINN = ["huginn-tiny", "huginn-tied-tiny"]


def golden(name):
    record = json.loads((DATA / name / "golden.json").read_text())
    return record, load_file(DATA / name / "golden.safetensors")


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("name", OURO)
@torch.no_grad()
def test_ouro_forward(name, implementation):
    record, tensors = golden(name)
    model = load_golden(name, attn_implementation=implementation)
    checked = set()

    def check(key, actual):
        checked.add(key)
        assert_close(actual, tensors[key], ROUNDING, key)

    for prompt in record["prompts"]:
        ids = tensors[f"{prompt}.input_ids"][None]
        for depth in (1, 2, 3, 4):
            output = model(ids, exit_at_step=depth - 1)
            check(f"{prompt}.depth{depth}.logits", output.logits[0])
            check(f"{prompt}.depth{depth}.hidden", model.model(ids, loops=depth).last_hidden_state[0])
            assert (output.exit_steps == depth - 1).all()
        full = model(ids)
        check(f"{prompt}.gate_logits", full.gate_logits[0])
        check(f"{prompt}.hazards", full.gate_logits[0].sigmoid())
        check(f"{prompt}.exit_pdf", full.exit_pdf[0])
        check(f"{prompt}.exit_cdf", full.exit_pdf[0].cumsum(-1))
        check(f"{prompt}.weighted.logits", model(ids, use_weighted_exit=True).logits[0])
        for key in [key for key in tensors if key.startswith(f"{prompt}.exit_step.t")]:
            output = model(ids, exit_threshold=float(key.rpartition(".t")[2]))
            check(key, output.exit_steps[0])
            by_depth = torch.stack([tensors[f"{prompt}.depth{depth}.logits"] for depth in (1, 2, 3, 4)])
            chosen = by_depth[tensors[key], torch.arange(ids.shape[1])]
            assert_close(output.logits[0], chosen, ROUNDING, f"logits of {key}")
    forward = {key for key in tensors if key.startswith("p") and ".greedy." not in key and "input_ids" not in key}
    assert checked == forward


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("name", HUGINN)
@torch.no_grad()
def test_huginn_forward(name, implementation):
    record, tensors = golden(name)
    model = load_golden(name, attn_implementation=implementation)
    checked = set()
    for prompt in record["prompts"]:
        ids = tensors[f"{prompt}.input_ids"][None]
        for key in [key for key in tensors if key.startswith((f"{prompt}.zero.", f"{prompt}.state."))]:
            _, start, steps, kind = key.split(".")
            states = tensors[f"{prompt}.input_states"][None] if start == "state" else None
            output = model(ids, num_steps=int(steps.removeprefix("steps")), input_states=states)
            actual = output.logits if kind == "logits" else output.latent_states
            assert_close(actual[0], tensors[key], ROUNDING, key)
            checked.add(key)
    assert checked == {key for key in tensors if ".zero." in key or ".state." in key}


def run_with_hooks(model, names, run):
    """Outputs of the sub-modules `names` (path -> golden name), keyed as the golden trace, `name#call`."""
    calls, handles = {}, []
    for path, name in names.items():

        def hook(module, args, output, name=name):
            output = output[0] if isinstance(output, tuple) else output
            number = sum(key.startswith(f"{name}#") for key in calls)
            calls[f"{name}#{number}"] = output[0].clone()

        handles.append(model.get_submodule(path).register_forward_hook(hook))
    run()
    for handle in handles:
        handle.remove()
    return calls


@torch.no_grad()
def test_ouro_trace_of_sub_modules():
    record, tensors = golden("ouro-tiny")
    model = load_golden("ouro-tiny")
    names = {"model.embed_tokens": "embed", "model.norm": "norm"}
    for layer in range(3):
        names |= {
            f"model.layers.{layer}": f"layer{layer}",
            f"model.layers.{layer}.self_attn": f"layer{layer}.attn",
            f"model.layers.{layer}.mlp": f"layer{layer}.mlp",
        }
    ids = tensors[f"{record['trace']['prompt']}.input_ids"][None]
    calls = run_with_hooks(model, names, lambda: model(ids))
    assert set(calls) == set(record["trace"]["order"])
    for key, value in calls.items():
        assert_close(value, tensors[f"trace.{key}"], ROUNDING, key)


@torch.no_grad()
def test_huginn_trace_of_sub_modules():
    record, tensors = golden("huginn-tiny")
    model = load_golden("huginn-tiny")
    names = {"transformer.adapter": "adapter", "transformer.ln_f": "ln_f"}
    for layer in range(2):
        names |= {
            f"transformer.prelude.{layer}": f"prelude{layer}",
            f"transformer.coda.{layer}": f"coda{layer}",
        }
    for layer in range(4):
        names |= {
            f"transformer.core_block.{layer}": f"core{layer}",
            f"transformer.core_block.{layer}.attn": f"core{layer}.attn",
            f"transformer.core_block.{layer}.mlp": f"core{layer}.mlp",
        }
    ids = tensors[f"{record['trace']['prompt']}.input_ids"][None]
    calls = run_with_hooks(model, names, lambda: model(ids, num_steps=record["trace"]["num_steps"]))
    calls["embed_scaled#0"] = model._embed(ids, None)[0]
    assert set(calls) == set(record["trace"]["order"])
    for key, value in calls.items():
        assert_close(value, tensors[f"trace.{key}"], ROUNDING, key)


def generate(model, ids, tokens, **kwargs):
    output = model.generate(
        ids, max_new_tokens=tokens, do_sample=False, return_dict_in_generate=True, output_logits=True, **kwargs
    )
    return output.sequences[0, ids.shape[1] :].tolist(), torch.cat(output.logits)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("use_cache", [True, False])
@pytest.mark.parametrize("name", OURO)
def test_ouro_greedy(name, use_cache, implementation):
    record, tensors = golden(name)
    model = load_golden(name, attn_implementation=implementation)
    for prompt, runs in record["greedy"]["tokens"].items():
        ids = tensors[f"{prompt}.input_ids"][None]
        for run, expected in runs.items():
            if run.startswith("depth"):
                kwargs = {"exit_at_step": int(run.removeprefix("depth")) - 1}
            else:
                kwargs, expected = {"exit_threshold": float(run.removeprefix("threshold"))}, expected["tokens"]
            tokens, logits = generate(model, ids, 16, use_cache=use_cache, **kwargs)
            assert tokens == expected, (prompt, run)
            if run == "depth4" and f"{prompt}.greedy.logits" in tensors:
                assert_close(logits, tensors[f"{prompt}.greedy.logits"], CACHED["ouro"], f"{prompt} {run}")


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("use_cache", [True, False])
@pytest.mark.parametrize("name", HUGINN)
def test_huginn_greedy(name, use_cache, implementation):
    record, tensors = golden(name)
    model = load_golden(name, attn_implementation=implementation)
    for prompt, runs in record["greedy"]["tokens"].items():
        ids = tensors[f"{prompt}.input_ids"][None]
        tokens, logits = generate(model, ids, 16, num_steps=16, use_cache=use_cache)
        assert tokens == runs["full"] == runs["uncached"], prompt
        for key in (f"{prompt}.greedy.full.logits", f"{prompt}.greedy.uncached.logits"):
            if key in tensors:
                assert_close(logits, tensors[key], CACHED["huginn"], key)


def test_huginn_greedy_at_other_depths():
    record, tensors = golden("huginn-tiny")
    model = load_golden("huginn-tiny")
    other = record["greedy_other_depths"]
    ids = tensors[f"{other['prompt']}.input_ids"][None]
    for steps, runs in other["tokens"].items():
        tokens, logits = generate(model, ids, 16, num_steps=int(steps))
        assert tokens == runs["full"], steps
        key = f"{other['prompt']}.greedy.full.steps{steps}.logits"
        if key in tensors:
            assert_close(logits, tensors[key], CACHED["huginn"], key)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("name", ["ouro-tiny", "huginn-tiny"])
def test_left_padded_batch_gives_the_right_values(name, implementation):
    """The published code gets these wrong; the right value is the prompt run alone."""
    record, tensors = golden(name)
    model = load_golden(name, attn_implementation=implementation)
    ids, mask = tensors["leftpad.input_ids"], tensors["leftpad.attention_mask"]
    with torch.no_grad():
        logits = model(ids, attention_mask=mask).logits[:, -1]
    tolerance = CACHED["huginn"] if name == "huginn-tiny" else 1e-4
    assert_close(logits, tensors["leftpad.batch1_last_logits"], tolerance, "forward")
    defect = record["defects"]["left_padded_batch"]
    expected = defect.get("batch1_tokens") or defect["batch1_greedy_tokens"]
    sequences = model.generate(ids, attention_mask=mask, max_new_tokens=8, do_sample=False)
    assert sequences[:, ids.shape[1] :].tolist() == expected


def test_golden_threshold_one_never_leaves_early_in_bfloat16():
    """L-02: the published code exits early at 1.0 once a cumulative probability rounds up."""
    _, tensors = golden("ouro-tiny")
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        model = load_golden("ouro-tiny", dtype=dtype)
        for bias in (0.0, 2.0, 4.0, 8.0, 20.0):
            model.model.early_exit_gate.bias.data.fill_(bias)
            output = model(tensors["p6.input_ids"][None], exit_threshold=1.0)
            assert (output.exit_steps == 3).all(), (dtype, bias)
