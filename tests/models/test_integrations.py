"""accelerate, PEFT, torch.compile, tensor parallelism and other attention implementations."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from ..tiny import DATA, FAMILIES, RANDOM, assert_close, load_family, prompts

IDS = torch.stack(prompts(7, 7, vocab=200))


def sections(family):
    """Module paths that together hold the whole model."""
    if family == "ouro":
        layers = [f"model.layers.{layer}" for layer in range(3)]
        return ["model.embed_tokens", *layers, "model.norm", "model.rotary_emb", "model.early_exit_gate", "lm_head"]
    core = [f"transformer.core_block.{layer}" for layer in range(4)]
    outer = ["transformer.wte", "transformer.prelude", "transformer.adapter", *core]
    return [*outer, "transformer.coda", "transformer.ln_f", "rotary_emb", "lm_head", "freqs_cis"]


@pytest.mark.parametrize("device_map", ["auto", "cpu", "split"])
@pytest.mark.parametrize("family", FAMILIES)
@torch.no_grad()
def test_device_map(family, device_map, tmp_path):
    """`split` keeps every second section on the disk: the hooks must be reached in every loop."""
    kwargs, tolerance = FAMILIES[family]
    if device_map == "split":
        device_map = {name: ("disk" if index % 2 else "cpu") for index, name in enumerate(sections(family))}
    model = load_family(family, device_map=device_map, offload_folder=tmp_path)
    assert_close(model(IDS, **kwargs).logits, load_family(family)(IDS, **kwargs).logits, tolerance)
    options = {"max_new_tokens": 4, "do_sample": False, **kwargs}
    mask = torch.ones_like(IDS)
    expected = load_family(family).generate(IDS, attention_mask=mask, **options)
    assert torch.equal(model.generate(IDS, attention_mask=mask, **options), expected)


@pytest.mark.parametrize("family", FAMILIES)
@torch.no_grad()
def test_dispatch_model_moves_every_weight_through_hooks(family):
    from accelerate import cpu_offload, dispatch_model

    kwargs, tolerance = FAMILIES[family]
    expected = load_family(family)(IDS, **kwargs).logits
    dispatched = dispatch_model(load_family(family), dict.fromkeys(sections(family), "cpu"), main_device="cpu")
    assert_close(dispatched(IDS, **kwargs).logits, expected, tolerance)
    offloaded = cpu_offload(load_family(family), execution_device="cpu")
    assert all(parameter.is_meta for parameter in offloaded.parameters())
    assert_close(offloaded(IDS, **kwargs).logits, expected, tolerance)


@pytest.mark.parametrize(
    ("family", "targets"),
    [("ouro", ["q_proj", "v_proj", "down_proj"]), ("huginn", ["Wqkv", "fc", "proj"])],
)
def test_lora_train_save_reload_merge(family, targets, tmp_path):
    from peft import LoraConfig, PeftModel, get_peft_model

    kwargs, tolerance = FAMILIES[family]
    mask = torch.ones_like(IDS)
    config = LoraConfig(target_modules=targets, r=4, lora_alpha=8, task_type="CAUSAL_LM")
    model = get_peft_model(load_family(family), config).train()
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    losses = []
    for _ in range(8):
        loss = model(input_ids=IDS, labels=IDS, **kwargs).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[-1] < losses[0]
    model.eval()
    options = {"attention_mask": mask, "max_new_tokens": 4, "do_sample": False, **kwargs}
    with torch.no_grad():
        expected = model(input_ids=IDS, **kwargs).logits
        model.save_pretrained(tmp_path)
        reloaded = PeftModel.from_pretrained(load_family(family), tmp_path).eval()
        assert_close(reloaded(input_ids=IDS, **kwargs).logits, expected, tolerance)
        assert torch.equal(reloaded.generate(input_ids=IDS, **options), model.generate(input_ids=IDS, **options))
        merged = reloaded.merge_and_unload()
        # a few trained steps make logits of size 10, the merge rounds every weight once more
        assert_close(merged(IDS, **kwargs).logits, expected, 10 * tolerance)


@pytest.mark.parametrize("family", RANDOM)
def test_lora_on_every_linear_layer(family):
    """PEFT wraps the exit gate too, whose output has to stay that of a linear layer."""
    from peft import LoraConfig, get_peft_model

    config = LoraConfig(target_modules="all-linear", r=2, task_type="CAUSAL_LM", init_lora_weights=False)
    plain = RANDOM[family]()
    ids = torch.stack(prompts(6, 6))
    before = plain(ids)
    model = get_peft_model(plain, config)
    output = model(input_ids=ids, labels=ids)
    output.loss.backward()
    assert output.logits.shape == before.logits.shape
    if family == "ouro":
        assert output.gate_logits.shape == before.gate_logits.shape == (2, 6, 4)
        assert not torch.equal(output.gate_logits, before.gate_logits)
        options = {"max_new_tokens": 3, "do_sample": False, "pad_token_id": 0}
        assert model.generate(input_ids=ids, exit_threshold=0.5, **options).shape == (2, 9)
        assert model.generate(input_ids=ids, cdb={"exit_threshold": 0.5}, **options).shape == (2, 9)


@pytest.mark.parametrize("family", RANDOM)
@torch.no_grad()
def test_compiled_forward(family):
    model = RANDOM[family](**({"total_ut_steps": 2} if family == "ouro" else {"mean_recurrence": 2}))
    ids = prompts(7)[0][None]
    compiled = torch.compile(model, fullgraph=True)
    assert_close(compiled(ids, use_cache=False).logits, model(ids, use_cache=False).logits, 1e-4)


@pytest.mark.parametrize("family", RANDOM)
@torch.no_grad()
def test_flex_attention(family):
    # flex attention wants heads of at least 16, a power of two
    model = RANDOM[family](eos_token_id=None)
    ids = prompts(7)[0][None]
    expected = model(ids).logits
    model.set_attn_implementation("flex_attention")
    assert model.config._attn_implementation == "flex_attention"
    assert_close(model(ids, use_cache=False).logits, expected, 1e-4)


TENSOR_PARALLEL = """
import sys, torch, torch.distributed as dist
import hf_cdb
from transformers import AutoModelForCausalLM
from transformers.distributed import DistributedConfig
torch.set_num_threads(1)
ids = torch.arange(1, 9)[None]
for folder, kwargs in (({ouro!r}, {{}}), ({gqa!r}, {{}}), ({huginn!r}, {{"num_steps": 3}})):
    whole = AutoModelForCausalLM.from_pretrained(folder).eval()
    split = AutoModelForCausalLM.from_pretrained(folder, distributed_config=DistributedConfig(tp_plan="auto")).eval()
    local = sum(getattr(p, "to_local", lambda p=p: p)().numel() for p in split.parameters())
    share = local / sum(p.numel() for p in whole.parameters())
    with torch.no_grad():
        logits = split(ids, **kwargs).logits
    logits = logits.full_tensor() if hasattr(logits, "full_tensor") else logits
    difference = (logits - whole(ids, **kwargs).logits).abs().max().item()
    options = dict(max_new_tokens=4, do_sample=False, **kwargs)
    same = torch.equal(split.generate(ids, **options), whole.generate(ids, **options))
    if dist.get_rank() == 0:
        print(f"RESULT {{difference < 3e-4}} {{same}} {{share < 0.85}}", flush=True)
"""


def test_tensor_parallel_plan_over_two_processes(tmp_path):
    script = tmp_path / "tensor_parallel.py"
    folders = {"ouro": "ouro-tiny", "gqa": "ouro-gqa-tiny", "huginn": "huginn-tiny"}
    script.write_text(TENSOR_PARALLEL.format(**{key: str(DATA / name) for key, name in folders.items()}))
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2", str(script)]
    result = subprocess.run(torchrun, capture_output=True, text=True, check=False, timeout=240)
    lines = [line for line in result.stdout.splitlines() if "RESULT" in line]
    assert [line.partition("RESULT ")[2] for line in lines] == ["True True True"] * 3, result.stderr[-3000:]


def test_importing_the_package_leaves_other_models_alone():
    from transformers import LlamaConfig

    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}
    model = AutoModelForCausalLM.from_config(LlamaConfig(vocab_size=50, **sizes))
    assert model(prompts(5)[0][None]).logits.shape == (1, 5, 50)
    assert Path(sys.modules[type(model).__module__].__file__).parts[-2] == "llama"
