"""Whatever a request brings: it is refused with its name, its value and the way out, and no other request notices."""

import math

import numpy
import pytest
import torch
from transformers import GenerationConfig
from transformers.generation.configuration_utils import ContinuousBatchingConfig

from hf_cdb.manager import CDBManager

from .requests import GATE, alone, assert_clean, last, told
from .test_manager import PROMPTS, shared_model
from .tiny import random_huginn, random_ouro

nan, inf = math.nan, math.inf
HUGE = 10**400  # no float holds it
ENDLESS = 10**5000  # Python does not even print it
NO_COUNT = ["4", True, nan, inf, -1, 1.5, [1], {}, 2**63, ENDLESS]
NO_NUMBER = ["a", True, nan, inf, [1], {}, HUGE]
NO_SHARE = [*NO_NUMBER, -0.1, 2]
NO_FLAG = ["yes", 2, nan, [True]]
NO_TOKEN = ["4", 1.5, -2, True, [True], ["a"], [1.5], [[1]], {}, nan, HUGE, [HUGE], torch.tensor([1.5])]
NO_LIST = [5, "ab", b"ab", ["a"], [1.5], [True], {}]
NO_CALLABLES = [5, [5], "ab", [None], {}]
NO_PROMPT = [
    None,
    5,
    "5678",
    b"56",
    [],
    [[5]],
    [5.0],
    ["5"],
    [None],
    [True],
    {5: 6},
    iter([5]),
    object(),
    [-1],
    [50],
    [2**63],
]
NO_PROMPT += [torch.empty(3, dtype=torch.long, device="meta"), torch.tensor([5, 6]).to_sparse(), [ENDLESS]]

WRONG = {
    "input_ids": NO_PROMPT,
    "max_new_tokens": [0, *NO_COUNT],
    "num_return_sequences": [0, 2**17, *NO_COUNT],
    "min_new_tokens": NO_COUNT,
    "min_length": NO_COUNT,
    "max_length": NO_COUNT,
    "max_time": [-1, *NO_NUMBER],
    "deadline": [0, -1, *NO_NUMBER],
    "created": NO_NUMBER,
    "priority": ["high", True, 1.5, nan, [1]],
    "seed": ["a", True, 1.5, nan, [1], inf, 2**63, ENDLESS],
    "streaming": NO_FLAG,
    "record_timestamps": NO_FLAG,
    "request_id": [5, b"a", ["a"], True, "a__child#0"],
    "generation_config": [5, "a", {}, [1], True, GenerationConfig],
    "do_sample": NO_FLAG,
    "temperature": [0, -1, *NO_NUMBER],
    "top_k": NO_COUNT,
    "top_p": NO_SHARE,
    "min_p": NO_SHARE,
    "typical_p": NO_SHARE,
    "top_h": NO_SHARE,
    "epsilon_cutoff": NO_SHARE,
    "eta_cutoff": NO_SHARE,
    "repetition_penalty": [0, -1, *NO_NUMBER],
    "encoder_repetition_penalty": [0, -1, *NO_NUMBER],
    "no_repeat_ngram_size": NO_COUNT,
    "encoder_no_repeat_ngram_size": NO_COUNT,
    "renormalize_logits": NO_FLAG,
    "remove_invalid_values": NO_FLAG,
    "use_cache": [*NO_FLAG, False],
    "guidance_scale": NO_NUMBER,
    "num_beams": [0, 2, *NO_COUNT],
    "eos_token_id": NO_TOKEN,
    "pad_token_id": ["a", 1.5, -2, True, [1]],
    "bos_token_id": ["a", 1.5, -2, True, [1]],
    "forced_bos_token_id": ["a", 1.5, -1, 50, True],
    "forced_eos_token_id": [*NO_TOKEN, 50, [50], -1],
    "suppress_tokens": NO_LIST,
    "begin_suppress_tokens": NO_LIST,
    "bad_words_ids": [5, "ab", [], [5], [[]], [[-1]], [["a"]], [[50]]],
    "sequence_bias": [5, "ab", {}, {(5,): "a"}, {(50,): 1.0}, {(5,): nan}, {5: 1.0}, [[[5], 1, 2]]],
    "exponential_decay_length_penalty": [5, "ab", (1,), (1, "a"), (1, 0.0), (1.5, 2.0), (1, 2.0)],
    "watermarking_config": [5, "a", []],
    "stop_strings": [5, [5], "", [], [""], {}, ["a", None], "no tokenizer"],
    "tokenizer": [5, "a"],
    "logits_processor": NO_CALLABLES,
    "stopping_criteria": NO_CALLABLES,
    "prefix_allowed_tokens_fn": [5, "a", []],
    "exit_rule": [5, True, ["gate"], "", "gates"],
    "exit_threshold": ["a", True, nan, inf, -1, [1], HUGE, ENDLESS],
    "exit_at_step": ["a", 1.5, True, -1, ENDLESS],
    "negative_prompt_ids": ["a", 5, [[5]], torch.tensor([5]), torch.tensor([[5.0]]), torch.tensor([[50]])],
    "negative_prompt_attention_mask": ["a", 5, [[1]], torch.tensor([1])],
    "exit_depths": [5, "abc", [], [4.0], [True], [0], [nan], ["4"], [[4]], [4, HUGE], {}, torch.tensor([4.0, 1.0])],
    "min_depth": [0, 5, *NO_COUNT],
    "max_depth": [0, 5, *NO_COUNT],
    "prefill_exit": NO_FLAG,
    "quality": ["a", 2, nan, True],
    "seeds": [[1], ENDLESS],
    "lookahead": [1, ENDLESS],
    "attention_mask": [[1], ENDLESS],
    "cdb": [5, True, {}],
    "inputs": [[3]],
    "model": [1],
    "_only_prepare": [True],
    "unheard_of": [1],
}
NEEDS_SAMPLING = ("temperature", "top_k", "top_p", "min_p", "typical_p", "top_h", "epsilon_cutoff", "eta_cutoff")


def test_no_wrong_argument_is_taken_and_none_harms_others():
    taken, unnamed = [], []
    with CDBManager(shared_model(), cdb=GATE) as manager:
        other = manager.add_request(PROMPTS[0], max_new_tokens=40)
        for name, values in WRONG.items():
            for value in values:
                options = {"input_ids": PROMPTS[1], name: value}
                options |= {"do_sample": True} if name in NEEDS_SAMPLING else {}
                try:
                    manager.add_request(**options)
                    taken.append((name, type(value)))
                except ValueError as error:
                    if name not in str(error):
                        unnamed.append((name, str(error)))
        assert not taken
        assert not unnamed
        assert len(manager) <= 1
        assert told(last(manager, other)) == alone(shared_model(), PROMPTS[0], max_new_tokens=40)[0]
    assert_clean(manager)


WRONG_FOR_HUGINN = {
    "num_steps": ["a", 1.5, True, 0, -1, 7, ENDLESS],
    "init_scale": ["a", True, -1, nan, inf, [1], HUGE],
    "init_seed": ["a", 1.5, True, 2**63, ENDLESS, [1, 2], ["a"]],
}


@pytest.mark.parametrize("name", WRONG_FOR_HUGINN)
def test_wrong_keywords_of_huginn(name):
    """A scale that no float holds would end the thread."""
    model = random_huginn(eos_token_id=None, bos_token_id=None, pad_token_id=0)
    manager = CDBManager(model, cdb=True)
    named = f"{name}=|max_depth=7"  # num_steps is its name for that
    for value in WRONG_FOR_HUGINN[name]:
        with pytest.raises(ValueError, match=named):
            manager.add_request(PROMPTS[0], **{name: value})
    assert_clean(manager)


def test_none_is_what_is_left_out():
    """Also in the thread, where a request would fail by itself."""
    expected = alone(shared_model(), PROMPTS[1], max_new_tokens=4)[0]
    names = [name for name in WRONG if name not in ("input_ids", "model", "_only_prepare", "unheard_of")]
    with CDBManager(shared_model(), GenerationConfig(max_new_tokens=4), cdb=GATE) as manager:
        requests = {name: manager.add_request(PROMPTS[1], **{name: None}) for name in names}
        assert [name for name, request in requests.items() if told(last(manager, request)) != expected] == []
    assert_clean(manager)


def test_an_error_names_the_value_and_the_way_out():
    manager = CDBManager(shared_model(), cdb=GATE)
    for name, value, words in (
        ("max_new_tokens", "4", "max_new_tokens='4': choose an integer of at least 1, or leave it out."),
        ("seed", ENDLESS, "seed=<an integer of 16610 bits>: choose an integer"),
        ("top_p", 2, "top_p=2: choose a finite number of at least 0 and at most 1"),
        ("forced_eos_token_id", 50, "choose a token id, or a list of them, or leave it out. Ids of tokens lie between"),
        ("inputs", [3], "The prompt is the first argument"),
    ):
        with pytest.raises(ValueError) as caught:  # noqa: PT011 (the words are checked below)
            manager.add_request(PROMPTS[0], **{name: value})
        assert words in str(caught.value)


@pytest.mark.parametrize("name", ["max_new_tokens", "top_k", "eos_token_id"])
def test_values_of_a_generation_config_are_looked_at_too(name):
    """Those of a request, and the defaults of all."""
    config = GenerationConfig()
    setattr(config, name, 1.5)
    manager = CDBManager(shared_model(), cdb=GATE)
    with pytest.raises(ValueError, match=rf"{name}=1\.5: choose"):
        manager.add_request(PROMPTS[0], generation_config=config)
    with pytest.raises(ValueError, match=rf"{name}=1\.5: choose"):
        CDBManager(shared_model(), config, cdb=GATE)


def test_what_a_request_leaves_out_may_stand_in_the_config_of_the_model():
    """An end of sequence, without which the penalty would be refused; ids may be arrays."""
    model = random_ouro(eos_token_id=7, pad_token_id=0).double()
    ends = model.generation_config.eos_token_id
    config = GenerationConfig(exponential_decay_length_penalty=(1, 1.5), max_new_tokens=8)
    options = {"eos_token_id": numpy.array([ends]), "suppress_tokens": torch.tensor([20])}
    with CDBManager(model, cdb=GATE) as manager:
        names = [manager.add_request(PROMPTS[0], generation_config=config, **own) for own in ({}, options)]
        for name, own in zip(names, ({}, {"suppress_tokens": [20]}), strict=True):
            assert told(last(manager, name)) == alone(model, PROMPTS[0], generation_config=config, **own)[0]
        for name in manager.add_requests(numpy.array([[3, 4], [5, 6]]), 1):
            assert len(told(last(manager, name))[0]) == 1
    assert_clean(manager)


@pytest.mark.parametrize("value", [5, "ab", None, {}, iter([[3]])], ids=["number", "text", "none", "dict", "iterator"])
def test_what_is_no_list_of_prompts(value):
    for call in (CDBManager(shared_model(), cdb=GATE).add_requests, shared_model().generate_batch):
        options = {"cdb": GATE} if call == shared_model().generate_batch else {}
        with pytest.raises(ValueError, match="inputs="):
            call(value, **options)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("generation_config", 5),
        ("continuous_batching_config", 5),
        ("continuous_batching_config", {}),
        ("record_timestamps", "yes"),
        ("progress_bar", "yes"),
        ("persistent_manager", 1),
        ("max_new_tokens", 1.5),
        ("deadline", True),
    ],
)
def test_arguments_of_a_batch(name, value):
    with pytest.raises(ValueError, match=name):
        shared_model().generate_batch(PROMPTS[:2], cdb=GATE, **{name: value})


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("generation_config", 5),
        ("continuous_batching_config", 5),
        ("continuous_batching_config", ContinuousBatchingConfig(max_queue_size="9")),
        ("cdb", 5),
    ],
)
def test_arguments_of_a_manager(name, value):
    named = "max_queue_size" if isinstance(value, ContinuousBatchingConfig) else name
    with pytest.raises(ValueError, match=named):
        shared_model().init_continuous_batching(**{"cdb": GATE, name: value})
