import json

import pytest
from transformers import AutoConfig

import hf_cdb

from ..tiny import DATA


def test_published_keys_reach_the_ouro_config():
    config = AutoConfig.from_pretrained(DATA / "ouro-gqa-tiny")
    assert isinstance(config, hf_cdb.OuroConfig)
    assert (config.num_attention_heads, config.num_key_value_heads, config.head_dim) == (4, 2, 16)
    assert config.rope_parameters == {"rope_type": "default", "rope_theta": 1e6}
    assert (config.total_ut_steps, config.early_exit_threshold) == (4, 1.0)


def test_published_keys_and_aliases_reach_the_huginn_config():
    config = AutoConfig.from_pretrained(DATA / "huginn-tied-tiny")
    assert isinstance(config, hf_cdb.HuginnConfig)
    assert (config.n_embd, config.hidden_size) == (48, 48)
    assert (config.n_heads, config.num_attention_heads) == (4, 4)
    assert (config.n_layers, config.num_hidden_layers) == (8, 8)
    assert (config.block_size, config.max_position_embeddings) == (256, 256)
    assert (config.norm_eps, config.rms_norm_eps) == (1e-6, 1e-6)
    assert (config.rope_base, config.rope_theta) == (50000, 50000)
    assert config.tie_embeddings is config.tie_word_embeddings is True


def test_huginn_aliases_set_the_published_keys_and_what_follows_from_them():
    config = hf_cdb.HuginnConfig(
        hidden_size=64, num_attention_heads=4, max_position_embeddings=128, rope_theta=1e4, tie_word_embeddings=False
    )
    assert (config.n_embd, config.n_heads, config.head_dim, config.block_size) == (64, 4, 16, 128)
    assert (config.rope_base, config.tie_embeddings) == (1e4, False)
    assert config.init_values["embed_scale"] == 8.0
    partial = hf_cdb.HuginnConfig(n_embd=64, n_heads=4, init_values={"std": 0.1}).init_values
    assert (partial["std"], partial["embed_scale"]) == (0.1, 8.0)
    assert hf_cdb.HuginnConfig(rope_parameters={"rope_type": "default", "rope_theta": 7.0}).rope_base == 7.0


def test_derived_values_equal_the_published_ones():
    """The golden configs were written by the published class, with its own derived values."""
    for name in ("huginn-tiny", "huginn-tied-tiny"):
        published = json.loads((DATA / name / "config.json").read_text())
        derived = ("init_values", "effective_expected_depth", "n_layers", "head_dim", "num_key_value_heads")
        stripped = {key: value for key, value in published.items() if key not in (*derived, "padded_vocab_size")}
        config = hf_cdb.HuginnConfig(**stripped)
        for key in derived:
            assert getattr(config, key) == pytest.approx(published[key]), key
        assert config.padded_vocab_size == published["padded_vocab_size"]


@pytest.mark.parametrize("name", ["ouro-tiny", "huginn-tiny", "huginn-tied-tiny"])
def test_saved_config_is_one_the_published_class_can_read(name, tmp_path):
    """L-07: both spellings of one setting in a file make the published class raise."""
    published = json.loads((DATA / name / "config.json").read_text())
    AutoConfig.from_pretrained(DATA / name).save_pretrained(tmp_path)
    saved = json.loads((tmp_path / "config.json").read_text())
    assert "auto_map" not in saved
    for key in ("tie_word_embeddings", "hidden_size", "rope_theta", "num_attention_heads"):
        if name.startswith("huginn"):
            assert key not in saved, f"{key} is not a key of the published file"
    for key in set(published) - {"auto_map", "torch_dtype", "transformers_version", "rope_scaling"}:
        assert saved[key] == published[key], key
    again, first = (AutoConfig.from_pretrained(folder).to_dict() for folder in (tmp_path, DATA / name))
    assert again | {"_name_or_path": ""} == first | {"_name_or_path": ""}


@pytest.mark.parametrize(
    ("kwargs", "words"),
    [
        ({"hidden_size": 30, "num_attention_heads": 4}, ["hidden_size=30", "num_attention_heads=4"]),
        ({"num_attention_heads": 4, "num_key_value_heads": 3}, ["num_key_value_heads=3", "num_attention_heads=4"]),
        ({"head_dim": 7}, ["head_dim=7", "odd"]),
        ({"total_ut_steps": 0}, ["total_ut_steps=0", "at least 1"]),
        ({"total_ut_steps": 2.5}, ["total_ut_steps=2.5", "integer"]),
        ({"num_hidden_layers": 0}, ["num_hidden_layers=0"]),
        ({"num_attention_heads": 0}, ["num_attention_heads=0"]),
        ({"early_exit_threshold": 0.0}, ["early_exit_threshold=0.0", "above 0"]),
        ({"early_exit_threshold": 1.2}, ["early_exit_threshold=1.2", "at most 1"]),
        ({"early_exit_step": 4}, ["early_exit_step=4", "total_ut_steps=4"]),
        ({"early_exit_step": 1, "early_exit_threshold": 0.5}, ["early_exit_step=1", "early_exit_threshold=0.5"]),
        ({"use_sliding_window": True}, ["use_sliding_window=True"]),
        ({"num_hidden_layers": 1, "layer_types": ["full_attention"] * 2}, ["layer_types", "num_hidden_layers=1"]),
        ({"hidden_act": "sillu"}, ["hidden_act='sillu'"]),
        ({"early_exit_threshold": "0.5"}, ["early_exit_threshold='0.5'"]),
        ({"rms_norm_eps": -1.0}, ["rms_norm_eps=-1.0"]),
        ({"rms_norm_eps": "x"}, ["rms_norm_eps='x'"]),
        ({"attention_dropout": 2.0}, ["attention_dropout=2.0"]),
        ({"exit_entropy_weight": float("nan")}, ["exit_entropy_weight=nan"]),
        ({"pad_token_id": 99, "vocab_size": 50}, ["pad_token_id=99", "vocab_size=50"]),
        ({"rope_theta": 0.0}, ["rope_theta", "positive"]),
        ({"rope_parameters": {"rope_type": "foo"}}, ["rope_parameters", "'foo'", "yarn"]),
        ({"rope_scaling": {"rope_type": "linear"}}, ["rope_parameters", "linear"]),
        ({"rope_theta": 1e4, "rope_parameters": {"rope_theta": 1e6}}, ["rope_theta=10000.0", "contradict"]),
    ],
)
def test_ouro_values_that_cannot_work(kwargs, words):
    with pytest.raises(ValueError) as error:  # noqa: PT011 (the words are checked below)
        hf_cdb.OuroConfig(**kwargs)
    assert all(word in str(error.value) for word in words), error.value


@pytest.mark.parametrize(
    ("kwargs", "words"),
    [
        ({"n_embd": 30, "n_heads": 4}, ["n_embd=30", "n_heads=4"]),
        ({"n_embd": 12, "n_heads": 4}, ["head_dim=3", "odd"]),
        ({"mean_recurrence": 0}, ["mean_recurrence=0"]),
        ({"mean_backprop_depth": 0}, ["mean_backprop_depth=0"]),
        ({"n_layers_in_recurrent_block": 0}, ["n_layers_in_recurrent_block=0"]),
        ({"n_layers_in_coda": -1}, ["n_layers_in_coda=-1"]),
        ({"n_layers": 9}, ["n_layers=9", "8"]),
        ({"num_key_value_heads": 5}, ["num_key_value_heads=5"]),
        ({"padded_vocab_size": 100}, ["padded_vocab_size=100", "vocab_size=65536"]),
        ({"injection_type": "add"}, ["injection_type='add'", "'linear'"]),
        ({"test_time_noise": 0.1}, ["test_time_noise=0.1"]),
        ({"init_scale": -1.0}, ["init_scale=-1.0"]),
        ({"hidden_size": 64, "n_embd": 128}, ["hidden_size=64", "n_embd=128"]),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 2.0}}, ["rope_scaling", "yarn"]),
        ({"rope_base": 7, "rope_parameters": {"rope_theta": 9}}, ["rope_base=7", "9"]),
        ({"rope_base": -1}, ["rope_base=-1"]),
        ({"norm_eps": -1.0}, ["norm_eps=-1.0"]),
        ({"init_scale": float("inf")}, ["init_scale=inf"]),
        ({"init_seed": "a"}, ["init_seed='a'"]),
        ({"effective_expected_depth": 0}, ["effective_expected_depth=0"]),
        ({"num_key_value_heads": 0}, ["num_key_value_heads=0"]),
        ({"init_strategy": "other"}, ["init_strategy='other'"]),
    ],
)
def test_huginn_values_that_cannot_work(kwargs, words):
    with pytest.raises(ValueError) as error:  # noqa: PT011 (the words are checked below)
        hf_cdb.HuginnConfig(**kwargs)
    assert all(word in str(error.value) for word in words), error.value


def test_overrides_of_from_pretrained_are_checked_too():
    from transformers import AutoModelForCausalLM

    with pytest.raises(ValueError, match="total_ut_steps=0"):
        AutoModelForCausalLM.from_pretrained(DATA / "ouro-tiny", total_ut_steps=0)
    with pytest.raises(ValueError, match="rope_theta"):
        AutoModelForCausalLM.from_pretrained(DATA / "ouro-tiny", rope_parameters={"rope_type": "linear", "factor": 2.0})
    partly = AutoModelForCausalLM.from_pretrained(DATA / "ouro-tiny", rope_parameters={"rope_theta": 1e4})
    assert partly.model.rotary_emb.inv_freq[1] == pytest.approx(1e4 ** (-2 / 16))
    with pytest.raises(ValueError, match="mean_recurrence=-1"):
        AutoModelForCausalLM.from_pretrained(DATA / "huginn-tiny", mean_recurrence=-1)
