"""What a model's own forward would do, which the engine never calls: honoured, refused by name, or warned about."""

import functools

import pytest
import torch
from accelerate import Accelerator
from accelerate.hooks import ModelHook, add_hook_to_module
from accelerate.state import AcceleratorState
from transformers.utils import logging

from hf_cdb import OuroForCausalLM, OuroModel

from .test_generation import EARLY, IDS, MASK, generate, refused
from .tiny import RANDOM

OFF = {"exit_rule": "never"}
PROMPT = {"input_ids": IDS[1:2], "max_new_tokens": 6, "do_sample": False, "eos_token_id": 999}
WITH_LOGITS = {"return_dict_in_generate": True, "output_logits": True}


@pytest.fixture
def bf16():
    AcceleratorState._reset_state(True)
    yield Accelerator(cpu=True, mixed_precision="bf16")
    AcceleratorState._reset_state(True)


@pytest.mark.parametrize("family", RANDOM)
def test_mixed_precision_of_accelerate(family, bf16):
    """The logits are those of the wrapped model, up to the order of sums; nothing stays switched on."""
    model = RANDOM[family](eos_token_id=None, pad_token_id=0)
    exact = model.generate(**PROMPT, **WITH_LOGITS, cdb=OFF).logits[0]
    model = bf16.prepare(model)
    stock = model.generate(**PROMPT, **WITH_LOGITS, cdb=False)
    ours = model.generate(**PROMPT, **WITH_LOGITS, cdb=OFF)
    error = (exact - stock.logits[0]).abs().max()
    assert error > 0.01
    assert torch.equal(ours.sequences, stock.sequences)
    assert max((a - b).abs().max() for a, b in zip(ours.logits, stock.logits, strict=True)) < 0.1 * error
    assert not torch.is_autocast_enabled("cpu")
    stepped = [token for _, token, _ in model.generate_stream(**PROMPT, cdb=OFF)]
    assert stepped == stock.sequences[0, 9:].tolist()


def test_processors_stay_outside_of_mixed_precision(bf16):
    model = bf16.prepare(RANDOM["ouro"](eos_token_id=None, pad_token_id=0))
    dtypes = set()

    def product(ids, scores):
        dtypes.add((scores @ torch.eye(50)).dtype)
        return scores

    for cdb in (False, OFF):
        model.generate(**PROMPT, cdb=cdb, logits_processor=[product])
    assert dtypes == {torch.float32}


def test_a_model_that_accelerate_has_unwrapped(bf16):
    model = RANDOM["ouro"](eos_token_id=None, pad_token_id=0)
    plain = model.generate(**PROMPT, **WITH_LOGITS, cdb=OFF).logits[0]
    model = bf16.unwrap_model(bf16.prepare(model), keep_fp32_wrapper=False)
    assert torch.equal(model.generate(**PROMPT, **WITH_LOGITS, cdb=OFF).logits[0], plain)


class Negated(OuroForCausalLM):
    def forward(self, *args, **kwargs):
        output = super().forward(*args, **kwargs)
        output.logits = -output.logits
        return output


class NegatedBody(OuroModel):
    def forward(self, *args, **kwargs):
        output = super().forward(*args, **kwargs)
        output.last_hidden_state = -output.last_hidden_state
        return output


class Mine(ModelHook):
    def post_forward(self, module, output):
        output.logits = -output.logits
        return output


def negate(module, arguments, output):
    name = "logits" if hasattr(output, "logits") else "last_hidden_state"
    output[name] = -output[name]
    return output


def masked(module, arguments, keywords):
    return arguments, {**keywords, "attention_mask": None}


def wrapped(model):
    forward = model.forward

    @functools.wraps(forward)
    def negated(*args, **kwargs):
        return negate(model, args, forward(*args, **kwargs))

    model.forward = negated


def of_class(module, cls):
    module.__class__ = cls


ACTS = {
    "hook": (lambda model: model.register_forward_hook(negate), ["OuroForCausalLM", "forward hook", "negate"]),
    "hook of the body": (lambda model: model.model.register_forward_hook(negate), ["OuroModel", "hook", "negate"]),
    "pre-hook": (lambda model: model.model.register_forward_pre_hook(masked, with_kwargs=True), ["pre-hook, masked"]),
    "replaced": (wrapped, ["OuroForCausalLM", "forward replaced by", "negated"]),
    "subclass": (lambda model: of_class(model, Negated), ["forward of Negated", "OuroForCausalLM"]),
    "subclass of the body": (lambda model: of_class(model.model, NegatedBody), ["forward of NegatedBody", "OuroModel"]),
    "accelerate's kind": (lambda model: add_hook_to_module(model, Mine()), ["hook of accelerate's kind, Mine"]),
}


@pytest.mark.parametrize("act", ACTS)
def test_what_acts_in_the_whole_pass_is_refused_by_name(ouro, act):
    """Each of them changes what stock generates."""
    before = generate(ouro, False)
    change, words = ACTS[act]
    change(ouro)
    assert not torch.equal(generate(ouro, False), before)
    refused([*words, "layers, norms or head", "cdb=False"], lambda: generate(ouro, EARLY))


def test_a_hook_on_the_whole_of_huginn():
    model = RANDOM["huginn"](eos_token_id=None, pad_token_id=0)
    model.register_forward_hook(negate)
    refused(["RavenForCausalLM", "negate"], lambda: generate(model, EARLY))


def test_hooks_on_layers_norms_and_head_act(ouro):
    before = generate(ouro, False)
    for module in (ouro.model.layers[1], ouro.model.norm, ouro.lm_head):
        module.register_forward_hook(lambda module, arguments, output: output.roll(1, -1))
    stock = generate(ouro, False)
    assert not torch.equal(stock, before)
    assert torch.equal(generate(ouro, OFF), stock)


@pytest.mark.parametrize("how", ["forward", "model"])
def test_a_compiled_forward_has_no_effect(ouro, how, monkeypatch):
    said = []
    monkeypatch.setattr(logging.get_logger("hf_cdb.model_checks"), "warning_once", said.append)
    plain = generate(ouro, EARLY)
    assert not said
    if how == "model":
        ouro.compile(backend="eager")
    else:
        ouro.forward = torch.compile(ouro.forward, backend="eager")
    assert torch.equal(generate(ouro, EARLY), plain)
    assert len(said) == 1
    assert "OuroForCausalLM is compiled" in said[0]


def test_adapter_names_by_row_are_refused_before_anything_runs(ouro, engines):
    from peft import LoraConfig, get_peft_model

    model = get_peft_model(ouro, LoraConfig(target_modules=["q_proj"], init_lora_weights=False)).eval()
    options = {"input_ids": IDS, "attention_mask": MASK, "max_new_tokens": 3, "do_sample": False}
    names = ["default", "__base__", "default"]
    words = [f"adapter_names={names}", "set_adapter", "cdb=False"]
    refused(words, lambda: model.generate(cdb=EARLY, adapter_names=names, **options))
    assert not engines
    one = {**options, "input_ids": IDS[1:2], "attention_mask": MASK[1:2], "adapter_names": ["__base__"]}
    assert torch.equal(model.generate(cdb=OFF, **one), model.generate(cdb=False, **one))


def test_the_refusal_of_virtual_tokens_is_short(ouro):
    from peft import PromptTuningConfig, get_peft_model

    model = get_peft_model(ouro.float(), PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3))
    with pytest.raises(ValueError, match=r"replaced by PeftModelForCausalLM\.prepare_inputs_for_generation,") as caught:
        model.generate(input_ids=IDS, attention_mask=MASK, max_new_tokens=3, cdb=EARLY)
    assert len(str(caught.value)) < 700
