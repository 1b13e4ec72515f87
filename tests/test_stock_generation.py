"""What the library's own generation tests ask of a model, asked of Ouro and Huginn with cdb and exits off.

Each body is in own words and compares with stock `generate`, or with whole forward passes. `ELSEWHERE` names the tests
whose body another file has; what cdb refuses is refused by name, with a way out.
"""

import importlib
import inspect

import pytest
import torch
from transformers import DynamicCache, GenerationMixin
from transformers.generation import LogitsProcessor

from hf_cdb import CDBGenerationMixin, GenerateCDBOutput

from .test_generation import refused
from .tiny import assert_close, left_pad, prompts

ROWS = prompts(3, 9, 6)
IDS, MASK = left_pad(ROWS)
OFF = {"exit_rule": "never"}
ON = {"exit_rule": "confidence", "exit_threshold": 0.1}
DICT = {"return_dict_in_generate": True, "output_scores": True, "output_logits": True}
ENDS = list(range(1, 50, 7))

# Tests of transformers' tests/generation/test_utils.py -> module and test here that have the body for both models.
ELSEWHERE = {
    "greedy_generate": "test_options.test_works_as_stock_with_exits_off",
    "sample_generate": "test_processors.test_sampling_is_stock_s_under_any_schedule",
    "generate_without_input_ids": "test_prompts.test_bos_alone",
    "generate_from_inputs_embeds with ids": "test_prompts.test_embeddings_beside_the_ids_that_processors_see",
    "generate_from_inputs_embeds without ids": "test_prompts.test_embeddings_alone",
    "max_length_if_input_embeds, min_length_if_input_embeds": "test_prompts.test_embeddings_alone",
    "generate_with_static_cache": "test_generation.test_what_is_not_supported_is_refused",
    "beam_search_generate": "test_generation.test_what_is_not_supported_is_refused",
    "assisted_decoding, prompt_lookup": "test_generation.test_what_is_not_supported_is_refused",
    "attention_outputs, hidden_states_output": "test_generation.test_what_is_not_supported_is_refused",
    "generate_continue_from_past_key_values": "test_generation.test_what_is_not_supported_is_refused",
    "custom_stopping_criteria": "test_criteria.test_a_criterion_by_row_is_asked_about_the_row_alone",
    "stop_sequence_stopping_criteria": "test_generation.test_stop_strings",
    "max_time": "test_criteria.test_max_time_keeps_what_is_done",
    "eos_token_id_int_and_list": "test_options.test_works_as_stock_with_exits_off",
    "transition_scores": "test_prompts.test_transition_scores_of_rows_that_end_early",
    "custom_logits_processor": "test_processors.test_a_user_s_processor_sees_each_row_as_if_alone",
    "watermarking, synthid": "test_options.test_works_as_stock_with_exits_off",
}


def generate(model, cdb, ids=IDS, mask=MASK, seed=5, **options):
    torch.manual_seed(seed)
    options = {"max_new_tokens": 6, "do_sample": False, **options}
    return model.generate(ids, attention_mask=mask, cdb=cdb, **options)


@pytest.mark.parametrize("place", sorted(set(ELSEWHERE.values())))
def test_the_others_are_where_they_are_said_to_be(place):
    """And run on both models."""
    module, name = place.split(".")
    test = getattr(importlib.import_module(f".{module}", __package__), name)
    assert {"model", "family"} & inspect.signature(test).parameters.keys()


@pytest.mark.parametrize("do_sample", [False, True])
@pytest.mark.parametrize("ends", [None, ENDS])
def test_dict_outputs(model, do_sample, ends):
    """greedy_generate_dict_outputs, sample_generate_dict_output: fields, shapes and values are stock's."""
    options = {**DICT, "do_sample": do_sample, "eos_token_id": ends, "num_return_sequences": 2 if do_sample else 1}
    stock, ours = generate(model, False, **options), generate(model, OFF, **options)
    assert isinstance(ours, GenerateCDBOutput)
    assert isinstance(ours, type(stock))
    assert torch.equal(ours.sequences, stock.sequences)
    new = stock.sequences.shape[1] - IDS.shape[1]
    lengths = ours.exit_depths.count_nonzero(dim=1)
    for name in ("scores", "logits"):
        mine, theirs = getattr(ours, name), getattr(stock, name)
        assert len(mine) == len(theirs) == new
        for step in range(new):
            assert mine[step].shape == theirs[step].shape
            assert mine[step].dtype == theirs[step].dtype
            going = lengths > step
            assert_close(mine[step][going].clamp(min=-1e9), theirs[step][going].clamp(min=-1e9), 1e-5, name)
    assert ours.attentions is ours.hidden_states is None


def test_past_key_values_format(model):
    """No cache comes back: the engine's is its own, and gone."""
    assert generate(model, False, **DICT).cache is not None
    assert generate(model, OFF, **DICT).cache is None


@torch.no_grad()
def test_unprocessed_logits_are_those_of_the_forward(model):
    """return_unprocessed_logit_scores: of one pass over the whole sequence."""
    output = generate(model, OFF, **DICT, repetition_penalty=3.0)
    mask = torch.cat((MASK, MASK.new_ones(3, 6)), dim=1)
    whole = model(output.sequences, attention_mask=mask).logits
    for step, logits in enumerate(output.logits):
        assert_close(logits, whole[:, IDS.shape[1] - 1 + step], 1e-5)
        assert not torch.equal(logits, output.scores[step])


@pytest.mark.parametrize("do_sample", [False, True])
def test_logits_processors_do_not_write_into_the_logits(model, do_sample):
    """logits_processor_not_inplace: not even where a user's own writes into what it is given, which spoils stock's."""

    class Lowers(LogitsProcessor):
        def __init__(self, in_place):
            self.in_place = in_place

        def __call__(self, ids, scores):
            scores = scores if self.in_place else scores.clone()
            scores[:, ids.shape[1] % 50] = -torch.inf
            scores -= 1
            return scores

    options = {**DICT, "do_sample": do_sample, "temperature": 0.7 if do_sample else None}
    output = generate(model, OFF, **options, logits_processor=[Lowers(True)])
    stock = generate(model, False, **options, logits_processor=[Lowers(False)])
    assert torch.equal(output.sequences, stock.sequences)
    for name in ("scores", "logits"):
        for left, right in zip(getattr(output, name), getattr(stock, name), strict=True):
            assert_close(left.clamp(min=-1e9), right.clamp(min=-1e9), 1e-5, name)


@pytest.mark.parametrize("cdb", [OFF, ON], ids=["off", "on"])
def test_left_padding_compatibility(model, cdb):
    """A padded row gives the tokens, depths and logits of the row without its padding."""
    output = generate(model, cdb, **DICT)
    for line, row in enumerate(ROWS):
        alone = generate(model, cdb, row[None], None, **DICT)
        assert torch.equal(alone.sequences[0, len(row) :], output.sequences[line, IDS.shape[1] :])
        assert torch.equal(alone.exit_depths[0], output.exit_depths[line])
        for mine, expected in zip(output.logits, alone.logits, strict=True):
            assert_close(mine[line], expected[0], 1e-5)


@pytest.mark.parametrize("by_embeddings", [False, True])
def test_continuing_by_the_text(model, by_embeddings):
    """generate_continue_from_*: without a cache to hand on, the sequences so far are the next prompt."""
    whole = generate(model, OFF)
    half = generate(model, OFF, max_new_tokens=2)
    mask = torch.cat((MASK, MASK.new_ones(3, 2)), dim=1)
    if by_embeddings:
        embeds = model.get_input_embeddings()(half)
        rest = generate(model, OFF, None, mask, inputs_embeds=embeds, max_new_tokens=4)
        assert torch.equal(rest, whole[:, -4:])
    else:
        assert torch.equal(generate(model, OFF, half, mask, max_new_tokens=4), whole)
    refused(["cache", "text"], lambda: generate(model, OFF, half, mask, cache=DynamicCache()))


def test_random_embeddings_decide_the_tokens(model):
    """generate_from_random_inputs_embeds: other embeddings, other tokens; and stock's."""
    embeds = model.get_input_embeddings()(IDS)
    outputs = [generate(model, OFF, None, MASK, inputs_embeds=embeds)]
    for seed in range(2):
        noise = torch.randn(embeds.shape, generator=torch.Generator().manual_seed(seed), dtype=embeds.dtype)
        other = embeds.std() * noise
        outputs.append(generate(model, OFF, None, MASK, inputs_embeds=other))
        assert torch.equal(outputs[-1], generate(model, False, None, MASK, inputs_embeds=other))
        assert not any(torch.equal(outputs[-1], one) for one in outputs[:-1])


@pytest.mark.parametrize("cdb", [OFF, ON], ids=["off", "on"])
def test_eager_matches_sdpa_generate(model, cdb):
    outputs = []
    for implementation in ("eager", "sdpa"):
        model.set_attn_implementation(implementation)
        outputs.append(generate(model, cdb, **DICT))
    assert torch.equal(outputs[0].sequences, outputs[1].sequences)
    assert torch.equal(outputs[0].exit_depths, outputs[1].exit_depths)
    for left, right in zip(outputs[0].logits, outputs[1].logits, strict=True):
        assert_close(left, right, 1e-5)


@pytest.mark.parametrize("keep", [0, 1])
def test_logits_to_keep(model, keep):
    """generate_methods_with_logits_to_keep: it changes no token."""
    assert torch.equal(generate(model, OFF, logits_to_keep=keep), generate(model, False))


def test_a_compiled_model(model):
    """What torch.compile wraps is generated with all the same; the engine calls the parts as they are."""
    compiled = torch.compile(model, backend="eager")
    assert torch.equal(generate(compiled, OFF), generate(model, False))


def test_inherits_generation_mixin(model):
    """And everything that it has."""
    assert isinstance(model, GenerationMixin)
    assert isinstance(model, CDBGenerationMixin)
    assert model.can_generate()
    names = [name for name in vars(GenerationMixin) if not name.startswith("__")]
    assert all(hasattr(model, name) for name in names)


def test_prepare_inputs_for_generation_forwards_what_it_does_not_know(model):
    inputs = model.prepare_inputs_for_generation(IDS, attention_mask=MASK, num_steps=3)
    assert inputs["num_steps"] == 3
    assert torch.equal(inputs["input_ids"], IDS)
    parameters = inspect.signature(GenerationMixin.prepare_inputs_for_generation).parameters
    assert inspect.signature(model.prepare_inputs_for_generation).parameters.keys() == parameters.keys() - {"self"}


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"num_beams": 2, "do_sample": True}, ["beam_sample", "greedy"]),
        ({"num_beams": 2, "num_return_sequences": 2}, ["beam_search", "greedy"]),
        ({"penalty_alpha": 0.6, "top_k": 4}, ["contrastive_search", "greedy"]),
        ({"dola_layers": "high"}, ["dola_generation", "greedy"]),
        ({"cache_implementation": "offloaded"}, ["cache_implementation='offloaded'"]),
        ({"cache_implementation": "quantized"}, ["cache_implementation='quantized'"]),
        ({"cache_implementation": "dynamic"}, ["cache_implementation='dynamic'"]),
        ({"use_cache": False}, ["use_cache=False", "recomputed"]),
    ],
    ids=str,
)
def test_what_stock_s_other_tests_ask_for_is_refused(model, options, words):
    """beam_sample, group and constrained beams, contrastive, dola, caches of other kinds: before anything runs."""
    refused([*words, "cdb=False"], lambda: generate(model, OFF, **options))
    assert torch.equal(torch.get_rng_state(), torch.Generator().manual_seed(5).get_state())


@pytest.mark.parametrize("lengths", [(1, 1), (1, 8)])
def test_prompts_of_one_token(model, lengths):
    ids, mask = left_pad(prompts(*lengths))
    for options in ({}, {"max_new_tokens": 1}, {"do_sample": True}):
        assert torch.equal(generate(model, OFF, ids, mask, **options), generate(model, False, ids, mask, **options))


def test_special_tokens_fall_back_to_the_model_s_config(model):
    """special_tokens_fall_back_to_model_defaults: those of the generation config, then those of the call."""
    ends = generate(model, False)[0, 11].item()
    model.generation_config.update(eos_token_id=ends, pad_token_id=3)
    for options in ({}, {"eos_token_id": ENDS}, {"pad_token_id": 4}, {"eos_token_id": ends, "pad_token_id": ends}):
        stock = generate(model, False, **options)
        assert torch.equal(generate(model, OFF, **options), stock)
