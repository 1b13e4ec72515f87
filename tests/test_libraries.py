"""What calls generate, or wraps the model, gets from cdb what it gets without."""

import copy

import pytest
import torch
from accelerate import Accelerator, cpu_offload, disk_offload
from datasets import Dataset
from transformers import GenerationConfig, pipeline
from transformers.pipelines.pt_utils import KeyDataset

from hf_cdb import CDBGenerationMixin, diagnose, enable_cdb

from .dory import random_dory
from .models.test_generate import tiny_tokenizer
from .test_generation import EARLY, IDS, MASK, generate, refused
from .tiny import RANDOM, prompts, random_huginn, random_ouro

OFF = {"exit_rule": "never"}


def test_pipeline_over_a_dataset(model):
    """Batches of the pipeline, return sequences, and the text of each prompt alone."""
    pipe = pipeline("text-generation", model=model, tokenizer=tiny_tokenizer())
    texts = ["w5 w6 w7", "w9 w4 w3 w11 w40 w8", "w2", "w7 w7 w8 w9", "w30 w1"]
    data = KeyDataset(Dataset.from_dict({"text": texts}), "text")
    options = {"max_new_tokens": 5, "do_sample": False, "return_full_text": False}
    batched = list(pipe(data, batch_size=2, cdb=EARLY, **options))
    assert batched == [pipe(text, cdb=EARLY, **options) for text in texts]
    assert list(pipe(data, batch_size=2, cdb=OFF, **options)) == list(pipe(data, batch_size=2, **options))
    several = pipe(texts[:2], cdb={**EARLY, "seeds": [1]}, **{**options, "do_sample": True}, num_return_sequences=3)
    assert [len(result) for result in several] == [3, 3]


def test_pipeline_with_saved_settings(ouro):
    """A model that names cdb in its generation config needs no argument."""
    pipe = pipeline("text-generation", model=ouro, tokenizer=tiny_tokenizer())
    options = {"max_new_tokens": 5, "do_sample": False}
    wanted = pipe("w5 w6 w7", cdb=EARLY, **options)
    assert wanted != pipe("w5 w6 w7", **options)
    ouro.generation_config.cdb = EARLY
    pipe = pipeline("text-generation", model=ouro, tokenizer=tiny_tokenizer())
    assert pipe("w5 w6 w7", **options) == wanted


def lora(model, targets, **kwargs):
    from peft import LoraConfig, get_peft_model

    config = LoraConfig(target_modules=targets, r=4, task_type="CAUSAL_LM", init_lora_weights=False, **kwargs)
    return get_peft_model(model, config).eval()


@pytest.mark.parametrize(("family", "targets"), [("ouro", ["q_proj", "v_proj"]), ("huginn", ["Wqkv", "proj"])])
def test_lora(family, targets):
    """The adapter acts, can be switched off, and merging it changes nothing."""
    plain = RANDOM[family](eos_token_id=None, pad_token_id=0).double()
    before = generate(plain, EARLY)
    model = lora(plain, targets)
    options = {"input_ids": IDS, "attention_mask": MASK, "max_new_tokens": 8, "do_sample": False}
    adapted = model.generate(cdb=EARLY, **options)
    assert not torch.equal(adapted, before)
    assert torch.equal(model.generate(cdb=OFF, **options), model.generate(**options))
    with model.disable_adapter():
        assert torch.equal(model.generate(cdb=EARLY, **options), before)
    told = []
    model.generate(cdb=EARLY, on_token=lambda row, token, depth: told.append(token), **options)
    assert sorted(told) == sorted(adapted[:, 9:].flatten().tolist())
    rows = [[] for _ in range(3)]
    for row, token, _ in model.generate_stream(cdb=EARLY, **options):
        rows[row].append(token)
    assert rows == adapted[:, 9:].tolist()
    assert torch.equal(generate(model.merge_and_unload(), EARLY), adapted)


def test_enabling_and_diagnosing_a_wrapped_model():
    """The model inside is enabled, and the one outside stays PEFT's."""
    model = lora(random_dory(eos_token_id=None, pad_token_id=0), ["q_proj", "v_proj"])
    kind = type(model)
    assert enable_cdb(model) is model
    assert type(model) is kind
    assert isinstance(model.get_base_model(), CDBGenerationMixin)
    options = {"input_ids": IDS, "attention_mask": MASK, "max_new_tokens": 4, "do_sample": False}
    assert torch.equal(model.generate(cdb=OFF, **options), model.generate(**options))
    assert diagnose(model, prompts(3, 5), cdb=EARLY, max_new_tokens=4).differences == []


# PEFT reads sizes off the config, where it knows their names; a prefix needs an entry for every loop and layer.
HUGINN_SIZES = {"token_dim": 32, "num_attention_heads": 2}
SIZES = {
    ("PromptTuningConfig", "ouro"): {},
    ("PromptTuningConfig", "huginn_raven"): {"num_layers": 4, **HUGINN_SIZES},
    ("PrefixTuningConfig", "ouro"): {"num_layers": 2 * 4},
    ("PrefixTuningConfig", "huginn_raven"): {"num_layers": 1 + 2 * 6 + 1, **HUGINN_SIZES},
}


def virtual_tokens(model, kind):
    """PEFT's prompt learning, with virtual tokens that change what comes out."""
    import peft

    config = getattr(peft, kind)(num_virtual_tokens=3, task_type="CAUSAL_LM", **SIZES[kind, model.config.model_type])
    model = peft.get_peft_model(model, config).eval()
    for parameter in model.prompt_encoder.parameters():
        torch.nn.init.normal_(parameter)
    return model


@pytest.mark.parametrize("kind", ["PromptTuningConfig", "PrefixTuningConfig"])
@torch.no_grad()
def test_virtual_tokens_of_peft(model, kind):
    """Plain generate gives what whole passes of PEFT's model give; with cdb they are refused by name."""
    before = generate(model, EARLY)
    tuned = virtual_tokens(model.float(), kind)
    options = {"input_ids": IDS, "attention_mask": MASK, "max_new_tokens": 5, "do_sample": False}
    ids, mask = IDS, MASK
    for _ in range(5):
        token = tuned(input_ids=ids, attention_mask=mask).logits[:, -1:].argmax(-1)
        ids, mask = torch.cat((ids, token), 1), torch.cat((mask, torch.ones_like(token)), 1)
    assert not torch.equal(ids, generate(model, False, max_new_tokens=5))
    for use_cache in (True, False):
        assert torch.equal(tuned.generate(**options, use_cache=use_cache), ids)
    words = ["prepare_inputs_for_generation", "prompt and prefix tuning", "cdb=False", "inputs_embeds"]
    refused(words, lambda: tuned.generate(cdb=EARLY, **options))
    assert torch.equal(generate(model.double(), EARLY), before)


@torch.no_grad()
def test_virtual_tokens_as_part_of_the_prompt(model):
    """The way out that the refusal names."""
    tuned = virtual_tokens(model.float(), "PromptTuningConfig")
    plain = tuned.generate(input_ids=IDS, attention_mask=MASK, max_new_tokens=5, do_sample=False)
    embeds = torch.cat((tuned.get_prompt(3), model.get_input_embeddings()(IDS)), dim=1)
    mask = torch.cat((MASK.new_ones(3, 3), MASK), dim=1)

    def run(cdb, rows=slice(None)):
        options = {"inputs_embeds": embeds[rows], "attention_mask": mask[rows], "max_new_tokens": 5}
        return tuned.get_base_model().generate(**options, do_sample=False, cdb=cdb)

    assert torch.equal(run(OFF), plain[:, 9:])
    early = run(EARLY)
    for row in range(3):
        assert torch.equal(run(EARLY, slice(row, row + 1))[0], early[row])


def test_rows_with_adapters_of_their_own_are_refused(ouro):
    """PEFT counts rows of the batch in every layer, and a launch has none."""
    model = lora(ouro, ["q_proj"])
    options = {"input_ids": IDS, "attention_mask": MASK, "max_new_tokens": 3, "adapter_names": ["default"] * 3}
    refused(["adapter_names"], lambda: model.generate(cdb=EARLY, **options))


def test_calls_as_trl_makes_them(ouro):
    """A generation config object, synced_gpus=False, a model prepared and unwrapped by accelerate, in training."""
    accelerator = Accelerator(cpu=True)
    config = GenerationConfig(
        max_new_tokens=8, do_sample=True, temperature=0.9, top_k=20, pad_token_id=0, bos_token_id=1, eos_token_id=49
    )
    prepared = accelerator.prepare(ouro.train())
    prepared.gradient_checkpointing_enable()
    results = []
    for settings in (False, OFF):
        torch.manual_seed(3)
        results.append(
            accelerator.unwrap_model(prepared).generate(
                input_ids=IDS,
                attention_mask=MASK,
                generation_config=copy.deepcopy(config),
                disable_compile=True,
                synced_gpus=False,
                cdb=settings,
            )
        )
    assert torch.equal(*results)
    saved = copy.deepcopy(config)
    saved.cdb, saved.cdb_config = True, {**EARLY, "seeds": [1, 2, 3]}
    by_config = ouro.generate(IDS, saved, attention_mask=MASK)
    assert torch.equal(by_config, ouro.generate(IDS, config, attention_mask=MASK, cdb=saved.cdb_config))


def test_training_goes_on_after_generation(model):
    """Weights keep their gradients, and the outputs can be trained on."""
    model.train()
    reference = copy.deepcopy(model)
    losses = []
    for one, settings in ((model, EARLY), (reference, None)):
        if settings is not None:
            generate(one, settings)
        torch.manual_seed(0)
        loss = one(IDS, attention_mask=MASK, labels=IDS).loss
        loss.backward()
        losses.append(loss.detach())
        assert one.training
    assert torch.equal(*losses)
    for (name, parameter), other in zip(model.named_parameters(), reference.parameters(), strict=True):
        if other.grad is not None:
            assert torch.equal(parameter.grad, other.grad), name


def test_dropout_of_a_model_in_training_acts_as_in_stock():
    """Stock generate leaves the mode alone; so does cdb, and dropout makes its tokens random."""
    ouro = random_ouro(eos_token_id=None, pad_token_id=0, attention_dropout=0.9).double()
    calm = generate(ouro, OFF)
    ouro.train()
    for settings in (False, OFF):
        torch.manual_seed(1)
        assert not torch.equal(generate(ouro, settings), calm)


def test_inference_mode(model):
    expected = generate(model, EARLY)
    with torch.inference_mode():
        assert torch.equal(generate(model, EARLY), expected)
        pieces = list(model.generate_stream(IDS, attention_mask=MASK, max_new_tokens=8, do_sample=False, cdb=EARLY))
    assert sorted(piece.piece for piece in pieces) == sorted(expected[:, 9:].flatten().tolist())
    assert torch.equal(generate(model, EARLY), expected)


def test_grad_mode_is_left_alone(model):
    output = generate(model, EARLY, return_dict_in_generate=True, output_logits=True)
    assert not output.logits[0].requires_grad
    assert torch.is_grad_enabled()
    pieces = model.generate_stream(IDS, attention_mask=MASK, max_new_tokens=4, do_sample=False, cdb=EARLY)
    next(pieces)
    assert torch.is_grad_enabled()


@pytest.mark.parametrize("short", [1 << 20, 0, 700])
@pytest.mark.parametrize(
    "settings", [OFF, {**OFF, "max_num_seqs": 2}, {**OFF, "max_num_seqs": 2, "prefill_chunk_size": 2}]
)
def test_autocast(model, settings, short, monkeypatch):
    """Keys and values come in the dtype of autocast; rows agree with stock but for its rounding.

    Rows that decode beside prompts, and long ones beside short ones, are attended to in calls of their own.
    """
    monkeypatch.setattr("hf_cdb.cache.SHORT_BYTES", short)
    model.float()
    with torch.autocast("cpu", torch.bfloat16):
        stock = generate(model, False, max_new_tokens=4, return_dict_in_generate=True, output_logits=True)
        ours = generate(model, settings, max_new_tokens=4, return_dict_in_generate=True, output_logits=True)
    for row in range(3):
        for step in range(4):
            left, right = stock.logits[step][row], ours.logits[step][row]
            assert (left - right).abs().max() < 0.05 * left.abs().max()
            if stock.sequences[row, 9 + step] != ours.sequences[row, 9 + step]:
                break
    assert ours.logits[0].dtype == torch.float32


def test_weights_on_disk(ouro, tmp_path):
    expected = generate(ouro, EARLY)
    offloaded = disk_offload(ouro, tmp_path, execution_device="cpu")
    assert all(parameter.is_meta for parameter in offloaded.parameters())
    assert torch.equal(generate(offloaded, EARLY), expected)


def test_some_layers_offloaded(ouro):
    expected = generate(ouro, EARLY)
    cpu_offload(ouro.model.layers[0], execution_device="cpu")
    assert torch.equal(generate(ouro, EARLY), expected)


def test_a_model_without_weights_is_refused():
    for make in (random_ouro, random_huginn):
        with torch.device("meta"):
            empty = make()
        refused(["meta", type(empty).__name__], lambda empty=empty: generate(empty, EARLY))


def test_quantised_weights():
    """Linear layers with weights of 4 bits, dequantised when they are called, as weight-only quantisation does."""
    ouro = random_ouro(eos_token_id=None, pad_token_id=0).double()
    plain = generate(ouro, EARLY)
    for layer in ouro.model.layers:
        for name, module in list(layer.named_modules()):
            if isinstance(module, torch.nn.Linear):
                parent, _, last = name.rpartition(".")
                setattr(layer.get_submodule(parent), last, FourBitLinear(module))
    assert torch.equal(generate(ouro, OFF), generate(ouro, False))
    quantised = generate(ouro, EARLY)
    assert not torch.equal(quantised, plain)
    for row in range(3):
        assert torch.equal(generate(ouro, EARLY, IDS[row : row + 1], MASK[row : row + 1])[0], quantised[row])


@pytest.mark.parametrize("family", RANDOM)
def test_weights_quantised_by_torchao(family):
    torchao = pytest.importorskip("torchao.quantization", reason="torchao, which the package does not need, is missing")
    model = RANDOM[family](eos_token_id=None, pad_token_id=0)
    plain = generate(model, EARLY, return_dict_in_generate=True, output_logits=True)
    torchao.quantize_(model, torchao.Int8WeightOnlyConfig())
    assert torch.equal(generate(model, OFF), generate(model, False))
    quantised = generate(model, EARLY, return_dict_in_generate=True, output_logits=True)
    assert not torch.equal(quantised.logits[0], plain.logits[0])
    for row in range(3):
        alone = generate(model, EARLY, IDS[row : row + 1], MASK[row : row + 1])
        assert torch.equal(alone[0], quantised.sequences[row])


class FourBitLinear(torch.nn.Module):
    def __init__(self, linear):
        super().__init__()
        scale = linear.weight.detach().abs().amax(1, keepdim=True) / 7
        self.register_buffer("weight", (linear.weight.detach() / scale).round().to(torch.int8))
        self.register_buffer("scale", scale)
        self.bias = linear.bias

    def forward(self, x):
        return torch.nn.functional.linear(x, self.weight.to(x.dtype) * self.scale.to(x.dtype), self.bias)
