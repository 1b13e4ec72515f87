"""Trained heads: what they decide, where they are found, and which are refused."""

import copy
import json
import pickle

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM

from hf_cdb import CDBConfig, attach_exit_head, enable_cdb, exit_heads, load_exit_head
from hf_cdb.adapters import adapter_for
from hf_cdb.exit_heads import KINDS, find_exit_head, make_exit_head
from hf_cdb.exits import Gate, Preloop
from hf_cdb.reference import reference_generate

from .dory import random_dory
from .tiny import left_pad, prompts, random_huginn, random_ouro
from .toy import ToyModel

MODELS = {"ouro": random_ouro, "huginn": random_huginn, "dory": random_dory}
IDS, MASK = left_pad(prompts(3, 9, 6))


def make_model(name, **kwargs):
    return enable_cdb(MODELS[name](eos_token_id=None, bos_token_id=None, pad_token_id=0, **kwargs))


def random_head(model, kind, seed=0, scale=2.0):
    """Large enough that depths differ from token to token."""
    adapter = adapter_for(model)
    head = make_exit_head(kind, 32, adapter.full_depth, model_type=adapter.model_type)
    generator = torch.Generator().manual_seed(seed)
    head.weight.data = scale * torch.randn(head.weight.shape, generator=generator)
    head.bias.data = 0.5 * torch.randn(head.bias.shape, generator=generator)
    return head.requires_grad_(False)


def constant_head(kind, *logits, depths=4):
    """Says the same for every state; the logits by loop, or by depth."""
    head = make_exit_head(kind, 32, depths)
    head.bias.data = torch.tensor(logits)
    return head.requires_grad_(False)


def hazards(*values):
    return torch.tensor(values).logit().tolist()


def run(model, settings, ids=IDS, mask=MASK, **kwargs):
    options = {"max_new_tokens": 6, "do_sample": False, "return_dict_in_generate": True, **kwargs}
    return model.generate(ids, attention_mask=mask, cdb=settings, **options)


def refused(words, call, error=ValueError):
    with pytest.raises(error) as caught:
        call()
    missing = [word for word in words if word not in str(caught.value)]
    assert not missing, f"{missing} not in: {caught.value}"


# What heads decide, by hand.


@pytest.mark.parametrize(
    ("threshold", "depth"), [(0.09, 1), (0.11, 2), (0.36, 2), (0.38, 3), (0.68, 3), (0.69, 4), (None, 3), (1.0, 4)]
)
def test_hazards_of_a_same_step_head(threshold, depth):
    """Hazards .1 .3 .5: the CDF is .1, .1 + .9 x .3 = .37, .37 + .63 x .5 = .685. The default threshold is .5."""
    model = attach_exit_head(make_model("dory"), constant_head("same-step", *hazards(0.1, 0.3, 0.5)))
    output = run(model, {"exit_rule": "gate", "exit_threshold": threshold})
    assert output.exit_depths.tolist() == [[4] + [depth] * 5] * 3


@pytest.mark.parametrize(("threshold", "depth"), [(0.19, 2), (0.21, 3), (0.51, 3), (0.53, 4), (1.0, 4)])
def test_hazards_of_a_lookahead_head(threshold, depth):
    """After loops 1 and 2 hazards .2 and .4 of leaving at 2 and 3: the CDF is .2 at depth 2, .52 at depth 3."""
    model = attach_exit_head(make_model("dory"), constant_head("lookahead", *hazards(0.2, 0.4)))
    # The head has no signal of its own for the last loop, whose answer is full depth either way.
    output = run(model, {"exit_rule": "gate", "exit_threshold": threshold, "lookahead": 1})
    assert output.exit_depths.tolist() == [[4] + [depth] * 5] * 3


@pytest.mark.parametrize(("threshold", "depth"), [(0.09, 1), (0.29, 2), (0.59, 3), (0.61, 4), (None, 3), (1.0, 4)])
def test_distribution_of_a_preloop_head(threshold, depth):
    """Probabilities .1 .2 .3 .4. Lookahead shifts nothing, but leaves no depth below 2."""
    logits = torch.tensor([0.1, 0.2, 0.3, 0.4]).log().tolist()
    model = attach_exit_head(make_model("ouro"), constant_head("preloop", *logits))
    settings = {"exit_rule": "preloop", "exit_threshold": threshold}
    assert run(model, settings).exit_depths.tolist() == [[4] + [depth] * 5] * 3
    ahead = run(model, {**settings, "lookahead": 1})
    assert ahead.exit_depths.tolist() == [[4] + [max(depth, 2)] * 5] * 3


def test_one_bias_serves_all_loops_and_the_last_one_those_beyond():
    """Huginn may run more loops than a head has biases: hazard .25 each, CDF 1 - .75^t >= .9 first at t = 9."""
    head = make_exit_head("same-step", 32, 6, depth_bias=False)
    head.bias.data = torch.tensor(hazards(0.25))
    model = attach_exit_head(make_model("huginn"), head.requires_grad_(False))
    output = run(model, {"exit_rule": "gate", "exit_threshold": 0.9, "max_depth": 12})
    assert output.exit_depths.tolist() == [[12] + [9] * 5] * 3
    attach_exit_head(model, constant_head("same-step", *hazards(0.25, 0.5, 0.25, 0.25, 0.5), depths=6))
    # CDF: .25, .625, .71875, .789, .895, .947
    assert run(model, {"exit_rule": "gate", "exit_threshold": 0.9, "max_depth": 12}).exit_depths[0, 1] == 6


@pytest.mark.parametrize(
    ("kind", "lookahead"), [("same-step", 0), ("same-step", 1), ("lookahead", 1), ("preloop", 0), ("preloop", 1)]
)
@pytest.mark.parametrize("name", MODELS)
def test_the_engine_is_the_oracle_with_heads(name, kind, lookahead):
    model = make_model(name).double()
    attach_exit_head(model, random_head(model, kind, seed=3))
    rule = "preloop" if kind == "preloop" else "gate"
    seen = set()
    for threshold in (0.3, 0.6, 0.9):
        settings = {"exit_rule": rule, "exit_threshold": threshold, "lookahead": lookahead}
        output = run(model, {**settings, "max_num_seqs": 2})
        for row, prompt in enumerate(prompts(3, 9, 6)):
            expected = reference_generate(model, prompt, 6, **settings)
            assert output.sequences[row, 9:].tolist() == expected.tokens
            assert output.exit_depths[row].tolist() == expected.exit_depths
            seen |= set(expected.exit_depths[1:])
    assert len(seen) > 1


def test_which_head_the_gate_reads():
    """Ouro's own gate, then a same-step head in its place, then a lookahead head where one is looked ahead."""
    model = make_model("ouro")
    settings = {"exit_rule": "gate", "exit_threshold": 0.5}
    own = run(model, settings).exit_depths
    model.model.early_exit_gate.bias.data.fill_(-50.0)
    assert run(model, settings).exit_depths.tolist() == [[4] * 6] * 3
    assert own.tolist() != [[4] * 6] * 3
    attach_exit_head(model, constant_head("same-step", *hazards(0.9, 0.9, 0.9)))
    assert run(model, settings).exit_depths.tolist() == [[4] + [1] * 5] * 3
    assert run(model, {**settings, "lookahead": 1}).exit_depths.tolist() == [[4] + [2] * 5] * 3
    attach_exit_head(model, constant_head("lookahead", *hazards(0.1, 0.9)))
    assert run(model, {**settings, "lookahead": 1}).exit_depths.tolist() == [[4] + [3] * 5] * 3
    assert run(model, settings).exit_depths.tolist() == [[4] + [1] * 5] * 3
    assert CDBConfig().resolve(adapter_for(model)).exit_rule.head.kind == "same-step"


def test_auto_of_a_model_without_a_gate_stays_latent_diff():
    model = attach_exit_head(make_model("huginn"), constant_head("same-step", *hazards(*[0.9] * 5), depths=6))
    assert CDBConfig().resolve(adapter_for(model)).exit_rule.name == "latent-diff"


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_heads_compute_in_at_least_float32(dtype):
    head = random_head(make_model("ouro"), "same-step")
    state = torch.randn(5, 32, dtype=dtype)
    logits = head(state, [1, 2, 3, 1, 2])
    assert logits.dtype == torch.promote_types(dtype, torch.float32)
    expected = state.double() @ head.weight[0].double() + head.bias.double()[torch.tensor([0, 1, 2, 0, 1])]
    assert (logits.double() - expected).abs().max() < 1e-5
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(head(state, [1, 2, 3, 1, 2]), logits)


# Where heads are found.


def test_file_round_trip(tmp_path):
    model = make_model("ouro")
    for kind in KINDS:
        head = random_head(model, kind)
        head.target, head.training_summary = {"name": "kl", "slope": 3.0}, {"steps": 7}
        loaded = load_exit_head(head.save(tmp_path))
        assert loaded.metadata() == head.metadata()
        assert torch.equal(loaded.weight, head.weight)
        assert torch.equal(loaded.bias, head.bias)
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(f"{kind}.safetensors" for kind in KINDS)


@pytest.mark.parametrize("name", MODELS)
def test_heads_travel_with_the_model(tmp_path, name):
    model = make_model(name)
    settings = {kind: {"exit_rule": "preloop" if kind == "preloop" else "gate"} for kind in KINDS}
    settings["lookahead"]["lookahead"] = 1
    threshold = {"exit_threshold": 0.7}
    for kind in KINDS:
        attach_exit_head(model, random_head(model, kind))
    expected = {kind: run(model, {**settings[kind], **threshold}).exit_depths for kind in KINDS}
    model.save_pretrained(tmp_path / "first")
    for file in (tmp_path / "first").glob("*.safetensors"):
        assert not [key for key in load_file(file) if "exit_head" in key]
    first = enable_cdb(AutoModelForCausalLM.from_pretrained(tmp_path / "first").eval())
    # Not asked for a head yet, and saved elsewhere all the same.
    first.save_pretrained(tmp_path / "second")
    second = enable_cdb(AutoModelForCausalLM.from_pretrained(tmp_path / "second").eval())
    for loaded in (first, second, copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        for kind in KINDS:
            assert torch.equal(run(loaded, {**settings[kind], **threshold}).exit_depths, expected[kind])
    assert expected["same-step"].unique().numel() > 1


def test_a_head_saved_later_is_found_and_an_attached_one_comes_first(tmp_path):
    make_model("dory").save_pretrained(tmp_path)
    model = enable_cdb(AutoModelForCausalLM.from_pretrained(tmp_path).eval())
    refused(["DoryForCausalLM", "no exit gate", "hf-cdb train gate"], lambda: run(model, {"exit_rule": "gate"}))
    constant_head("same-step", *hazards(0.9, 0.9, 0.9)).save(tmp_path / "exit_heads")
    assert run(model, {"exit_rule": "gate"}).exit_depths.tolist() == [[4] + [1] * 5] * 3
    attach_exit_head(model, constant_head("same-step", *hazards(0.1, 0.1, 0.1)))
    assert run(model, {"exit_rule": "gate"}).exit_depths.tolist() == [[4] * 6] * 3
    model.save_pretrained(tmp_path / "other", is_main_process=False)
    assert not (tmp_path / "other" / "exit_heads").exists()


@pytest.mark.parametrize("family", ["ouro", "dory"])
def test_new_weights_have_no_heads_though_their_config_names_a_folder(family, tmp_path):
    """A head belongs to the weights that it was trained for; a copy of those keeps it."""
    model = attach_exit_head(make_model(family), constant_head("same-step", *hazards(0.9, 0.9, 0.9)))
    model.save_pretrained(tmp_path)
    config = AutoConfig.from_pretrained(tmp_path)
    for new in (AutoModelForCausalLM.from_config(config), type(model)(config)):
        assert new.name_or_path == str(tmp_path)
        assert find_exit_head(new, "same-step") is None
        assert find_exit_head(attach_exit_head(new, model._exit_heads["same-step"]), "same-step") is not None
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    for one in (loaded, copy.deepcopy(loaded)):
        assert find_exit_head(one, "same-step").width == 32


def test_a_repository_is_asked_once(monkeypatch, tmp_path, caplog):
    import transformers

    asked = []

    def cached_file(name, file, **kwargs):
        asked.append((name, file))
        if "lookahead" in file:
            raise OSError("no network")
        return str(path) if "same-step" in file else None

    monkeypatch.setattr(exit_heads, "cached_file", cached_file)
    path = constant_head("same-step", *hazards(0.9, 0.9, 0.9)).save(tmp_path)
    model = make_model("ouro")
    model.save_pretrained(tmp_path / "model")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    model.name_or_path = "somebody/looped"
    transformers.utils.logging.enable_propagation()
    try:
        for _ in range(2):
            assert find_exit_head(model, "same-step").width == 32
            assert find_exit_head(model, "preloop") is None
            assert find_exit_head(model, "lookahead") is None
        assert "no network" in caplog.text
        assert "attach_exit_head" in caplog.text
    finally:
        transformers.utils.logging.disable_propagation()
    files = [f"exit_heads/{kind}.safetensors" for kind in ("same-step", "preloop", "lookahead")]
    assert asked == [("somebody/looped", file) for file in files]


def test_an_upload_takes_the_heads_along(tmp_path):
    """The library uploads what is newer than a list of files that it makes while it saves."""
    model = attach_exit_head(make_model("ouro"), constant_head("same-step", *hazards(0.9, 0.9, 0.9)))
    model.save_pretrained(tmp_path)
    (tmp_path / "old").write_text("")
    listed = model._get_files_timestamps(tmp_path)
    assert "old" in listed
    assert "exit_heads" not in listed
    assert (tmp_path / "exit_heads" / "same-step.safetensors").is_file()


# Which are refused.


def test_heads_for_another_model():
    model = make_model("ouro")
    for head, words in (
        (make_exit_head("same-step", 64, 4), ["width 64", "width 32", "--kind same-step"]),
        (make_exit_head("preloop", 32, 6), ["full depth 6", "full depth 4", "--kind preloop"]),
        (make_exit_head("lookahead", 32, 4, model_type="dory"), ["model type 'dory'", "'ouro'"]),
    ):
        refused([head.kind, "OuroForCausalLM", *words], lambda head=head: attach_exit_head(model, head))
    # A model whose config does not tell its width is refused by the first state.
    toy = attach_exit_head(ToyModel(), make_exit_head("same-step", 32, 4))
    refused(["width 32", "6"], lambda: find_exit_head(toy, "same-step")(torch.zeros(1, 6), [1]))


def test_a_bad_file_beside_the_model_is_refused_where_it_is_wanted(tmp_path):
    make_model("ouro").save_pretrained(tmp_path)
    make_exit_head("preloop", 64, 4).save(tmp_path / "exit_heads")
    model = AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    refused(["preloop", "width 64"], lambda: run(model, {"exit_rule": "preloop"}))
    run(model, {"exit_rule": "gate", "exit_threshold": 0.5})


def test_heads_of_another_horizon():
    model = make_model("dory")
    same, ahead = (constant_head(kind, *[0.0] * size) for kind, size in (("same-step", 3), ("lookahead", 2)))
    pre = constant_head("preloop", *[0.0] * 4)
    refused(["lookahead=0", "same-step", "is lookahead"], lambda: run(model, {"exit_rule": Gate(0.5, ahead)}))
    refused(["'gate'", "is preloop"], lambda: run(model, {"exit_rule": Gate(0.5, pre), "lookahead": 1}))
    refused(["'preloop'", "is same-step"], lambda: run(model, {"exit_rule": Preloop(same)}))
    refused(["Gate()", "no exit gate of its own"], lambda: run(model, {"exit_rule": Gate(0.5)}))
    attach_exit_head(model, ahead)
    refused(["lookahead=0", "no exit gate", "lookahead=1"], lambda: run(model, {"exit_rule": "gate"}))
    assert run(model, {"exit_rule": Gate(0.4, same)}).exit_depths.tolist() == [[4] + [1] * 5] * 3


def test_a_preloop_head_knows_no_deeper_depths():
    model = attach_exit_head(make_model("huginn"), constant_head("preloop", *[0.0] * 6, depths=6))
    refused(["max_depth=7", "6 depths"], lambda: run(model, {"exit_rule": "preloop", "max_depth": 7}))
    assert run(model, {"exit_rule": "preloop", "max_depth": 2}).exit_depths.max() == 2


def test_heads_that_would_decide_nothing():
    refused(["same-step", "1 loops"], lambda: make_exit_head("same-step", 32, 1))
    refused(["lookahead", "2 loops"], lambda: make_exit_head("lookahead", 32, 2))
    refused(["'ahead'", "lookahead"], lambda: make_exit_head("ahead", 32, 4))


def test_files_that_are_no_head(tmp_path):
    refused(["nowhere", "same-step.safetensors"], lambda: load_exit_head(tmp_path / "nowhere"), FileNotFoundError)
    refused(["no file"], lambda: load_exit_head(tmp_path), FileNotFoundError)
    path = tmp_path / "same-step.safetensors"
    path.write_bytes(b"text")
    refused(["no safetensors file"], lambda: load_exit_head(path))
    save_file({"weight": torch.zeros(1, 32)}, path)
    refused(["no exit head"], lambda: load_exit_head(path))
    metadata = make_exit_head("same-step", 32, 4).metadata()
    for tensors in ({"weight": torch.zeros(1, 32)}, {"weight": torch.zeros(1, 16), "bias": torch.zeros(3)}):
        save_file(tensors, path, {"hf_cdb.exit_head": json.dumps(metadata)})
        refused(["width 32", "4 depths", "holds"], lambda: load_exit_head(path))
    save_file(tensors, path, {"hf_cdb.exit_head": json.dumps({**metadata, "kind": "postloop"})})
    refused(["'postloop'", "preloop"], lambda: load_exit_head(path))


def test_damaged_files_are_refused_by_name(tmp_path):
    head = make_exit_head("same-step", 32, 4)
    path = head.save(tmp_path)
    with torch.no_grad():
        head.weight.fill_(float("nan"))
    head.save(tmp_path)
    refused(["same-step.safetensors", "not finite"], lambda: load_exit_head(path))
    for text in ("{", '{"kind": "same-step"}', "[]"):
        save_file({"weight": torch.zeros(1, 32), "bias": torch.zeros(3)}, path, {"hf_cdb.exit_head": text})
        refused(["same-step.safetensors", "damaged"], lambda: load_exit_head(path))
