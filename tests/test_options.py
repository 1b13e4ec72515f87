"""Every option of GenerationConfig has a verdict here, so that a new one fails until it has.

* WORKS: equal to stock generate on ragged rows with exits off, and to every row alone with exits on.
* REFUSED: raises, and names the option.
* IDLE: belongs to a decoding mode that cdb does not have; stock does not read it either, and a warning says so.
"""

import functools

import pytest
import torch
from transformers import CompileConfig, GenerationConfig, SynthIDTextWatermarkingConfig, WatermarkingConfig
from transformers.generation.configuration_utils import ContinuousBatchingConfig
from transformers.utils import logging

from hf_cdb.generation_arguments import IDLE_OPTIONS

from .test_generation import letter_tokenizer
from .tiny import RANDOM, assert_close, left_pad, prompts

IDS, MASK = left_pad(prompts(3, 9, 6))
EARLY = {"exit_rule": "confidence", "exit_threshold": 0.1}
SEEDS = [11, 12, 13]
ENDS = list(range(1, 50, 4))  # end tokens that come up soon
SAMPLE = {"do_sample": True}
NEGATIVE, NEGATIVE_MASK = left_pad(prompts(4, 2, 5, seed=2))
NEGATIVES = {"negative_prompt_ids": NEGATIVE, "negative_prompt_attention_mask": NEGATIVE_MASK}
SYNTH_ID = SynthIDTextWatermarkingConfig(keys=[654, 400, 836], ngram_len=3, sampling_table_size=64)

WORKS = {
    "max_length": [{"max_length": 13, "max_new_tokens": None}],
    "max_new_tokens": [{"max_new_tokens": 3}],
    "min_length": [{"min_length": 13, "eos_token_id": ENDS}],
    "min_new_tokens": [{"min_new_tokens": 4, "eos_token_id": ENDS}],
    "max_time": [{"max_time": 1000.0}],
    "stop_strings": [{"stop_strings": [chr(ord("A") + token) for token in ENDS], "eos_token_id": 999}],
    "do_sample": [{"do_sample": True}],
    "temperature": [{"temperature": 3.0, **SAMPLE}],
    "top_k": [{"top_k": 3, **SAMPLE}],
    "top_p": [{"top_p": 0.3, **SAMPLE}],
    "min_p": [{"min_p": 0.7, **SAMPLE}],
    "top_h": [{"top_h": 0.2, **SAMPLE}],
    "typical_p": [{"typical_p": 0.2, **SAMPLE}],
    "epsilon_cutoff": [{"epsilon_cutoff": 0.1, **SAMPLE}],
    "eta_cutoff": [{"eta_cutoff": 0.3, **SAMPLE}],
    "repetition_penalty": [{"repetition_penalty": 5.0}],
    "encoder_repetition_penalty": [{"encoder_repetition_penalty": 5.0}],
    "no_repeat_ngram_size": [{"no_repeat_ngram_size": 1}],
    "encoder_no_repeat_ngram_size": [{"encoder_no_repeat_ngram_size": 1}],
    "bad_words_ids": [{"bad_words_ids": [[token] for token in ENDS] + [[2, 4]]}],
    "renormalize_logits": [{"renormalize_logits": True}],
    "forced_bos_token_id": [{"forced_bos_token_id": 7, "input_ids": IDS[:, -1:], "attention_mask": MASK[:, -1:]}],
    "forced_eos_token_id": [{"forced_eos_token_id": 7}],
    "remove_invalid_values": [{"remove_invalid_values": True}],
    "exponential_decay_length_penalty": [{"exponential_decay_length_penalty": (1, 4.0), "eos_token_id": ENDS}],
    "suppress_tokens": [{"suppress_tokens": ENDS}],
    "begin_suppress_tokens": [{"begin_suppress_tokens": [token for token in range(50) if token % 10 in (3, 8, 9)]}],
    "sequence_bias": [{"sequence_bias": {(4,): 20.0, (4, 9): 40.0, (1, 2, 3): -3.0}}],
    "guidance_scale": [{"guidance_scale": 2.5, **NEGATIVES}, {"guidance_scale": 0.5}],
    "watermarking_config": [
        {"watermarking_config": WatermarkingConfig(bias=9.0)},
        {"watermarking_config": WatermarkingConfig(bias=9.0, seeding_scheme="selfhash", context_width=2)},
        {"watermarking_config": SYNTH_ID, **SAMPLE},
    ],
    "num_return_sequences": [{"num_return_sequences": 2, **SAMPLE}],
    "output_scores": [{"output_scores": True, "repetition_penalty": 2.0, "eos_token_id": ENDS[::3]}],
    "output_logits": [{"output_logits": True, "repetition_penalty": 2.0}],
    "return_dict_in_generate": [{"return_dict_in_generate": True}],
    "pad_token_id": [{"pad_token_id": 3, "eos_token_id": ENDS}],
    "bos_token_id": [{"bos_token_id": 7, "input_ids": None, "attention_mask": None}],
    "eos_token_id": [{"eos_token_id": ENDS}, {"eos_token_id": [9, 43]}],
    "disable_compile": [{"disable_compile": True}],
    "transformers_version": [{"transformers_version": "5.24.0"}],
}
# These change no token: what they do change is compared, or tested in its own place.
UNSEEN = {
    *("max_time", "renormalize_logits", "remove_invalid_values", "output_scores", "output_logits"),
    *("return_dict_in_generate", "num_return_sequences", "bos_token_id", "disable_compile", "transformers_version"),
}

REFUSED = {
    "num_beams": ({"num_beams": 2}, ["num_beams=2", "num_beams=1", "beam_search", "greedy"]),
    "use_mtp": ({"use_mtp": True}, ["use_mtp=True", "assisted_generation", "greedy"]),
    "use_cache": ({"use_cache": False}, ["use_cache=False", "recomputed"]),
    "cache_implementation": ({"cache_implementation": "static"}, ["cache_implementation='static'", "cache of"]),
    "cache_config": ({"cache_config": {"nbits": 4}}, ["cache_config={'nbits': 4}", "cache of"]),
    "max_cache_len": ({"max_cache_len": 64}, ["max_cache_len=64", "cache of"]),
    "token_healing": ({"token_healing": True}, ["token_healing=True"]),
    "output_attentions": ({"output_attentions": True}, ["output_attentions=True", "weights"]),
    "output_hidden_states": ({"output_hidden_states": True}, ["output_hidden_states=True", "depths"]),
    "is_assistant": ({"is_assistant": True}, ["is_assistant=True"]),
    "prompt_lookup_num_tokens": (
        {"prompt_lookup_num_tokens": 2},
        ["prompt_lookup_num_tokens=2", "assisted_generation"],
    ),
    "assistant_early_exit": ({"assistant_early_exit": 2}, ["assistant_early_exit=2", "assisted_generation"]),
    "compile_config": ({"compile_config": CompileConfig()}, ["compile_config", "compiled"]),
    "continuous_batching_config": (
        {"continuous_batching_config": ContinuousBatchingConfig()},
        ["continuous_batching_config", "max_num_seqs"],
    ),
    "penalty_alpha": ({"penalty_alpha": 0.6, "top_k": 4}, ["penalty_alpha=0.6", "contrastive_search", "greedy"]),
    "dola_layers": ({"dola_layers": "low"}, ["dola_layers='low'", "dola_generation", "greedy"]),
    "constraints": ({"constraints": [object()]}, ["constraints=[", "constrained_beam_search", "greedy"]),
    "force_words_ids": ({"force_words_ids": [[1]]}, ["force_words_ids=[[1]]", "constrained_beam_search", "greedy"]),
    "prefill_chunk_size": ({"prefill_chunk_size": 4}, ["prefill_chunk_size=4", "cdb={'prefill_chunk_size'"]),
}

IDLE = {
    "early_stopping": True,
    "length_penalty": 2.0,
    "num_beam_groups": 2,
    "diversity_penalty": 0.5,
    "low_memory": True,
    "num_assistant_tokens": 3,
    "num_assistant_tokens_schedule": "heuristic",
    "assistant_confidence_threshold": 0.7,
    "max_matching_ngram_size": 3,
    "assistant_lookbehind": 4,
    "target_lookbehind": 4,
    "assistant_ensemble_weight": 0.5,
    "speculation_type": "dflash",
    "decoder_start_token_id": 3,
}
CASES = [(option, index) for option, cases in WORKS.items() for index in range(len(cases))]


@functools.cache
def model_of(family):
    return RANDOM[family](eos_token_id=None, bos_token_id=None, pad_token_id=0).double()


def generate(family, cdb, options, seed=5, **more):
    """A call of three ragged rows; the output as a dict, whatever the options say."""
    arguments = {"input_ids": IDS, "attention_mask": MASK, "max_new_tokens": 6, "do_sample": False, **options, **more}
    if "stop_strings" in arguments:
        arguments["tokenizer"] = letter_tokenizer()
    model = model_of(family)  # making it draws from the generator
    torch.manual_seed(seed)
    output = model.generate(**arguments, cdb=cdb)
    return output if isinstance(output, dict) else {"sequences": output}


def test_every_option_has_a_verdict():
    options = {name for name in vars(GenerationConfig()) if not name.startswith("_")}
    verdicts = [*WORKS, *REFUSED, *IDLE]
    assert sorted(verdicts) == sorted(options)
    assert {*IDLE, "penalty_alpha"} == set(IDLE_OPTIONS)


@pytest.mark.parametrize(("option", "index"), CASES)
@pytest.mark.parametrize("family", RANDOM)
def test_works_as_stock_with_exits_off(family, option, index):
    options = WORKS[option][index]
    stock = generate(family, False, options)
    ours = generate(family, {"exit_rule": "never"}, options)
    assert torch.equal(ours["sequences"], stock["sequences"])
    lengths = ours["exit_depths"].count_nonzero(dim=1) if "exit_depths" in ours else None
    for name in ("scores", "logits"):
        for step, (left, right) in enumerate(zip(ours.get(name) or (), stock.get(name) or (), strict=True)):
            going = lengths > step
            assert_close(left[going].clamp(min=-1e9), right[going].clamp(min=-1e9), 1e-5, name)
    if option not in UNSEEN:
        without = generate(family, False, {name: value for name, value in options.items() if name != option})
        assert not torch.equal(stock["sequences"], without["sequences"]), "the case shows nothing"


@pytest.mark.parametrize(("option", "index"), CASES)
@pytest.mark.parametrize("family", RANDOM)
def test_works_as_the_row_alone_with_exits_on(family, option, index):
    options = {**WORKS[option][index], "return_dict_in_generate": True}
    rows = 1 if option == "bos_token_id" else 3
    copies = options.get("num_return_sequences", 1)
    together = generate(family, {**EARLY, "seeds": SEEDS[:rows], "max_num_seqs": 2}, options)
    for row in range(rows):
        own = {
            name: value[row : row + 1] if isinstance(value, torch.Tensor) and len(value) == 3 else value
            for name, value in {"input_ids": IDS, "attention_mask": MASK, **options}.items()
        }
        alone = generate(family, {**EARLY, "seeds": SEEDS[row : row + 1]}, own, seed=6)
        for copy in range(copies):
            line = row * copies + copy
            length = alone["sequences"].shape[1]
            assert torch.equal(together["sequences"][line, :length], alone["sequences"][copy]), line
            assert (together["sequences"][line, length:] == options.get("pad_token_id", 0)).all()
            depths = alone["exit_depths"][copy]
            assert torch.equal(together["exit_depths"][line, : len(depths)], depths), line
            assert not together["exit_depths"][line, len(depths) :].any()


@pytest.mark.parametrize("option", REFUSED)
@pytest.mark.parametrize("saved", [False, True])
@pytest.mark.filterwarnings("ignore:Passing ContinuousBatchingConfig:FutureWarning")
def test_refused_by_name(option, saved):
    """As an argument of the call, and from a GenerationConfig."""
    arguments, words = REFUSED[option]
    given = {"generation_config": GenerationConfig(**arguments)} if saved else arguments
    with pytest.raises(ValueError, match="cdb=False") as caught:
        generate("ouro", True, given)
    missing = [word for word in words if word not in str(caught.value)]
    assert not missing, f"{missing} not in: {caught.value}"


@pytest.mark.parametrize("option", IDLE)
def test_idle_options_are_warned_of_once(option, monkeypatch):
    said = []
    monkeypatch.setattr(logging.get_logger("hf_cdb.generation_arguments"), "warning_once", said.append)
    plain = generate("ouro", EARLY, {})
    assert not said
    given = generate("ouro", EARLY, {option: IDLE[option]})
    assert torch.equal(given["sequences"], plain["sequences"])
    assert len(said) == 1
    assert f"{option}={IDLE[option]!r} has no effect" in said[0]
    stock = generate("ouro", False, {option: IDLE[option]})
    assert torch.equal(stock["sequences"], generate("ouro", False, {})["sequences"])
