"""Loading and saving checkpoints in the published layout."""

import json
import shutil
import subprocess
import sys

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModel, AutoModelForCausalLM
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

import hf_cdb

from ..tiny import DATA, load_golden, random_huginn, random_ouro

NAMES = ["ouro-tiny", "ouro-gqa-tiny", "huginn-tiny", "huginn-tied-tiny"]


@pytest.fixture
def poisoned(tmp_path):
    """A copy of a checkpoint whose remote code, if anything ran it, would fail loudly."""

    def make(name):
        folder = tmp_path / name
        shutil.copytree(DATA / name, folder)
        for module, _ in (
            reference.split(".") for reference in json.loads((folder / "config.json").read_text())["auto_map"].values()
        ):
            (folder / f"{module}.py").write_text("raise RuntimeError('remote code ran')\n")
        return folder

    return make


@pytest.mark.parametrize("trust", [None, False, True])
@pytest.mark.parametrize("name", NAMES)
def test_no_remote_code_runs_whatever_is_trusted(name, trust, poisoned):
    model = AutoModelForCausalLM.from_pretrained(poisoned(name), trust_remote_code=trust)
    assert type(model) in (hf_cdb.OuroForCausalLM, hf_cdb.RavenForCausalLM)


def test_every_class_that_auto_map_names_is_registered():
    for name in NAMES:
        for auto_class in json.loads((DATA / name / "config.json").read_text())["auto_map"]:
            auto = {"AutoModel": AutoModel, "AutoModelForCausalLM": AutoModelForCausalLM}.get(auto_class)
            if auto is not None:
                assert type(auto.from_pretrained(DATA / name)).__module__.startswith("hf_cdb.")


@pytest.mark.parametrize("name", NAMES)
def test_save_and_load_round_trip_bit_for_bit(name, tmp_path):
    """L-07 is one of these: an untied Huginn."""
    load_golden(name).save_pretrained(tmp_path)
    before, after = load_file(DATA / name / "model.safetensors"), load_file(tmp_path / "model.safetensors")
    assert before.keys() == after.keys()
    for key, tensor in before.items():
        assert tensor.dtype == after[key].dtype, key
        assert torch.equal(tensor, after[key]), key
    saved = json.loads((tmp_path / "config.json").read_text())
    assert "auto_map" not in saved
    assert saved["architectures"] == json.loads((DATA / name / "config.json").read_text())["architectures"]
    again, report = AutoModelForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    assert not any(report[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    ids = torch.arange(1, 12)[None]
    assert torch.equal(again.eval()(ids).logits, load_golden(name)(ids).logits)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", NAMES)
def test_round_trip_in_half_precision(name, dtype, tmp_path):
    """A file all in half precision, and for Huginn one whose rotary table stayed in float32."""
    tensors = load_file(DATA / name / "model.safetensors")
    whole = {key: tensor.to(dtype) for key, tensor in tensors.items()}
    mixed = {key: tensor if key == "freqs_cis" else tensor.to(dtype) for key, tensor in tensors.items()}
    for number, stored in enumerate((whole, mixed)):
        first, second = tmp_path / f"first{number}", tmp_path / f"second{number}"
        shutil.copytree(DATA / name, first)
        save_file(stored, first / "model.safetensors", metadata={"format": "pt"})
        AutoModelForCausalLM.from_pretrained(first, dtype=dtype).save_pretrained(second)
        again = load_file(second / "model.safetensors")
        assert stored.keys() == again.keys()
        for key, tensor in stored.items():
            assert tensor.dtype == again[key].dtype, key
            assert torch.equal(tensor, again[key]), key


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("make", [random_ouro, random_huginn])
def test_more_tokens(make, tied, tmp_path):
    model = make(tie_word_embeddings=tied)
    ids = torch.arange(1, 9)[None]
    before = model(ids).logits
    model.resize_token_embeddings(60)
    model.save_pretrained(tmp_path)
    again = AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    assert again(ids).logits.shape == (1, 8, 60)
    assert torch.equal(again(ids).logits[..., :50], before)


def test_a_missing_rotary_table_is_made_and_reported(tmp_path):
    shutil.copytree(DATA / "huginn-tiny", tmp_path / "without")
    tensors = load_file(DATA / "huginn-tiny" / "model.safetensors")
    published = tensors.pop("freqs_cis")
    save_file(tensors, tmp_path / "without" / "model.safetensors", metadata={"format": "pt"})
    model, report = AutoModelForCausalLM.from_pretrained(tmp_path / "without", output_loading_info=True)
    assert report["missing_keys"] == {"freqs_cis"}
    torch.testing.assert_close(model.freqs_cis, published)


def test_fresh_huginn_weights_have_the_published_spread():
    sizes = {"vocab_size": 500, "padding_multiple": 1, "n_embd": 200, "n_heads": 4, "intermediate_size": 300}
    model = hf_cdb.RavenForCausalLM(hf_cdb.HuginnConfig(tie_embeddings=False, **sizes))
    std = (2 / (5 * 200)) ** 0.5
    block = model.transformer["core_block"][0]
    depth = 2 + 4 * 32 + 2
    spreads = {
        model.transformer["wte"]: std,
        model.transformer["adapter"]: std,
        model.lm_head: std,
        block.attn.Wqkv: std,
        block.mlp.fc: std,
        block.attn.proj: std / (2 * depth) ** 0.5,
        block.mlp.proj: std / (2 * depth) ** 0.5,
    }
    for module, spread in spreads.items():
        assert module.weight.std().item() == pytest.approx(spread, rel=0.03)
    assert (block.attn.qk_bias == 0).all()


def test_a_model_without_the_query_and_key_bias():
    without, zero = random_huginn(qk_bias=False), random_huginn()
    assert not any("qk_bias" in name for name in without.state_dict())
    zero.load_state_dict({**zero.state_dict(), **without.state_dict()})
    ids = torch.arange(1, 9)[None]
    assert torch.equal(without(ids).logits, zero(ids).logits)
    for name, parameter in zero.named_parameters():
        if "qk_bias" in name:
            torch.nn.init.normal_(parameter)
    assert not torch.equal(without(ids).logits, zero(ids).logits)


def test_configured_to_return_tuples():
    for make in (random_ouro, random_huginn):
        model = make(return_dict=False)
        ids = torch.arange(1, 9)[None]
        assert torch.equal(model(ids)[0], make()(ids).logits)
        assert model.generate(ids, max_new_tokens=2, do_sample=False).shape == (1, 10)


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("make", [random_ouro, random_huginn])
def test_tied_and_untied_heads(make, tied, tmp_path):
    model = make(tie_word_embeddings=tied)
    model.save_pretrained(tmp_path)
    assert ("lm_head.weight" in load_file(tmp_path / "model.safetensors")) is not tied
    again = AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    head, embedding = again.get_output_embeddings().weight, again.get_input_embeddings().weight
    assert (head.data_ptr() == embedding.data_ptr()) is tied
    ids = torch.arange(1, 9)[None]
    assert torch.equal(again(ids).logits, model(ids).logits)


@pytest.mark.parametrize(
    ("name", "missing"),
    [
        ("ouro-tiny", "model.early_exit_gate.weight"),
        ("ouro-tiny", "model.layers.1.mlp.up_proj.weight"),
        ("huginn-tiny", "transformer.adapter.weight"),
        ("huginn-tiny", "transformer.core_block.2.attn.qk_bias"),
        ("huginn-tiny", "lm_head.weight"),
    ],
)
def test_missing_and_unexpected_weights_are_reported(name, missing, tmp_path, caplog):
    folder = tmp_path / name
    shutil.copytree(DATA / name, folder)
    tensors = load_file(folder / "model.safetensors")
    tensors["surplus.weight"] = tensors.pop(missing)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    import transformers

    transformers.utils.logging.enable_propagation()
    try:
        _, report = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    finally:
        transformers.utils.logging.disable_propagation()
    assert report["missing_keys"] == {missing}
    assert report["unexpected_keys"] == {"surplus.weight"}
    assert missing in caplog.text
    assert "surplus.weight" in caplog.text


def test_rotary_frequencies_by_hand_and_the_library_table_unchanged(tmp_path):
    """A-04: the published code needed the library's table of rotary initialisers patched."""
    before = dict(ROPE_INIT_FUNCTIONS)
    model = AutoModelForCausalLM.from_pretrained(DATA / "ouro-tiny", trust_remote_code=True)
    model.generate(torch.tensor([[5, 6]]), max_new_tokens=4)
    theta, size = 1e6, 16
    by_hand = torch.tensor([theta ** (-2 * j / size) for j in range(size // 2)])
    torch.testing.assert_close(model.model.rotary_emb.inv_freq, by_hand, rtol=1e-6, atol=0)
    assert before == ROPE_INIT_FUNCTIONS
    assert "default" not in ROPE_INIT_FUNCTIONS


def test_a_rounded_rotary_table_in_the_file_does_not_reach_the_angles(tmp_path):
    """L-04: a bfloat16 checkpoint stores the published table in bfloat16."""
    folder = tmp_path / "rounded"
    shutil.copytree(DATA / "huginn-tiny", folder)
    tensors = load_file(folder / "model.safetensors")
    tensors["freqs_cis"] = tensors["freqs_cis"].bfloat16()
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    ids = torch.arange(1, 60)[None]
    rounded = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    assert torch.equal(rounded(ids).logits, load_golden("huginn-tiny")(ids).logits)


def test_readme_example_in_a_fresh_process(tmp_path):
    """The quick start of the README, on a checkpoint written here."""
    random_ouro().save_pretrained(tmp_path / "checkpoint")
    code = (
        "import hf_cdb, torch\n"
        "from transformers import AutoModelForCausalLM\n"
        f"model = AutoModelForCausalLM.from_pretrained({str(tmp_path / 'checkpoint')!r})\n"
        "print(model.generate(torch.tensor([[1, 2, 3]]), max_new_tokens=5).shape)\n"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "torch.Size([1, 8])" in result.stdout


def test_without_the_package_the_message_is_the_library_s_own(tmp_path):
    code = (
        "from transformers import AutoConfig\n"
        f"AutoConfig.from_pretrained({str(DATA / 'huginn-tiny')!r}, trust_remote_code=False)\n"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert result.returncode != 0
    assert "hf_cdb" not in result.stderr
