"""`generate_batch(cdb=True)` beside Transformers' own."""

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.generation.configuration_utils import ContinuousBatchingConfig
from transformers.generation.continuous_batching import ContinuousMixin
from transformers.utils import logging

from hf_cdb import CDBConfig
from hf_cdb.adapters.ouro import OuroAdapter
from hf_cdb.manager import CDBManager

from .requests import GATE, alone, told
from .test_manager import PROMPTS, alone_with, shared_model
from .tiny import random_ouro


@pytest.fixture
def errors():
    """What `hf_cdb.batching` logs."""
    logger, seen = logging.get_logger("hf_cdb.batching"), []
    handler = logging.logging.Handler()
    handler.emit = lambda record: seen.append(record.getMessage())
    logger.addHandler(handler)
    yield seen
    logger.removeHandler(handler)


def stock_names(sequences):
    """Of Transformers' own `generate_batch`, with a dense model that it can run."""
    sizes = {"hidden_size": 8, "intermediate_size": 8, "num_attention_heads": 1, "num_key_value_heads": 1}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=50, num_hidden_layers=1, **sizes)).eval()
    model.generation_config.update(eos_token_id=-1, max_new_tokens=1, do_sample=True, num_return_sequences=sequences)
    small = ContinuousBatchingConfig(num_blocks=16, max_batch_tokens=64)
    return list(model.generate_batch(PROMPTS, continuous_batching_config=small, warmup=False))


@pytest.mark.parametrize("sequences", [1, 3])
def test_names_order_and_tokens(sequences):
    options = {"do_sample": True, "num_return_sequences": sequences}
    outputs = shared_model().generate_batch(PROMPTS, cdb=GATE, seed=3, **options)
    assert list(outputs) == stock_names(sequences)
    for index, prompt in enumerate(PROMPTS):
        wanted = alone(shared_model(), prompt, {**GATE, "seeds": [3]}, **options)
        names = [f"req_{index}", *(f"req_{index}__child#{child}" for child in range(sequences - 1))]
        assert [told(outputs[name]) for name in names] == wanted
        assert all(outputs[name].prompt_ids == prompt for name in names)


def test_the_saved_default_and_its_way_out(monkeypatch):
    model = random_ouro(eos_token_id=None, bos_token_id=None, pad_token_id=0).double()
    model.generation_config.max_new_tokens, model.generation_config.cdb = 3, True
    model.generation_config.cdb_config = GATE
    outputs = model.generate_batch([PROMPTS[0]])
    assert told(outputs["req_0"]) == alone(model, PROMPTS[0])[0]
    stock = []
    monkeypatch.setattr(ContinuousMixin, "generate_batch", lambda self, *args, **kwargs: stock.append((args, kwargs)))
    model.generate_batch([PROMPTS[0]], cdb=False, record_timestamps=True, max_new_tokens=5)
    assert stock == [(([PROMPTS[0]], None, None, True, False, False, True), {"max_new_tokens": 5})]


def test_no_prompts():
    assert shared_model().generate_batch([], cdb=GATE) == {}


def test_a_prompt_that_is_refused_fails_alone(errors):
    outputs = shared_model().generate_batch([PROMPTS[0], [99], PROMPTS[2]], cdb=GATE)
    first, second, third = outputs.values()
    assert told(first) == alone_with("greedy", 0)
    assert told(third) == alone_with("greedy", 2)
    assert second.is_finished()
    assert second.prompt_ids == [99]
    assert "between 0 and 49" in second.error
    assert errors == [f"Requests ['{second.request_id}'] failed; see their `error`."]


def test_arguments_that_no_prompt_can_have_are_refused():
    with pytest.raises(ValueError, match="temperature"):
        shared_model().generate_batch(PROMPTS, cdb=GATE, do_sample=True, temperature=-1.0)
    with pytest.raises(ValueError, match="streaming=True"):
        shared_model().generate_batch(PROMPTS, cdb=GATE, streaming=True)
    with pytest.raises(ValueError, match="request_id"):
        shared_model().generate_batch(PROMPTS, cdb=GATE, request_id="mine")


def test_settings_with_an_entry_for_every_prompt():
    depths = [[4, 1, 2, 3], [4, 3, 1, 1]]
    settings = {"exit_depths": depths, "exit_rule": "replay", "seeds": [8, 9], "token_limits": [4, 2]}
    outputs = shared_model().generate_batch(PROMPTS[:2], cdb=settings, do_sample=True, max_new_tokens=3)
    for index, (output, length) in enumerate(zip(outputs.values(), (3, 2), strict=True)):
        own = {"exit_rule": "replay", "exit_depths": [depths[index]], "seeds": [settings["seeds"][index]]}
        assert told(output) == alone(shared_model(), PROMPTS[index], own, do_sample=True, max_new_tokens=length)[0]
    with pytest.raises(ValueError, match="seeds has 2 entries, but there are 3 prompts"):
        shared_model().generate_batch(PROMPTS[:3], cdb={"seeds": [1, 2]}, do_sample=True)


def test_the_model_raises_and_all_outputs_say_so(monkeypatch, errors):
    """Also those of prompts that come when it has died."""
    error, prelude = RuntimeError("shape"), OuroAdapter.prelude

    def fails_once_all_are_in(self, *args):
        if len(asked) == len(PROMPTS):
            raise error
        return prelude(self, *args)

    asked, make = [], CDBManager.make_job
    monkeypatch.setattr(CDBManager, "make_job", lambda *args, **kwargs: asked.append(1) or make(*args, **kwargs))
    monkeypatch.setattr(OuroAdapter, "prelude", fails_once_all_are_in)
    outputs = shared_model().generate_batch(PROMPTS, cdb=GATE, max_new_tokens=200)
    assert len(outputs) == len(PROMPTS)
    assert all(output.cause is error or output.cause.__cause__ is error for output in outputs.values())
    assert "failed" in errors[-1]


def test_a_manager_that_is_kept_is_used_again_for_the_same_settings_only(errors):
    model = random_ouro(eos_token_id=None, bos_token_id=None, pad_token_id=0).double()
    model.generation_config.max_new_tokens = 4
    model.generate_batch(PROMPTS[:1], cdb=GATE, persistent_manager=True)
    kept = model._cached_continuous_batching_manager
    assert not kept.is_running()
    with torch.no_grad():
        model.lm_head.weight.neg_()
    outputs = model.generate_batch(PROMPTS[:2], cdb=CDBConfig(**GATE), persistent_manager=True)
    assert model._cached_continuous_batching_manager is kept
    assert [told(output) for output in outputs.values()] == [alone(model, prompt)[0] for prompt in PROMPTS[:2]]
    assert model.init_continuous_batching(cdb={"exit_threshold": 0.3}).config.exit_rule.threshold == 0.3
    assert "other settings" in errors[-1]
    assert not hasattr(model, "_cached_continuous_batching_manager")
    model.generate_batch(PROMPTS[:1], cdb=GATE, persistent_manager=True)
    model.destroy_cached_continuous_batching_manager()
    assert not hasattr(model, "_cached_continuous_batching_manager")


def test_the_progress_bar_ends_at_all_sequences(capsys):
    shared_model().generate_batch(PROMPTS[:2], cdb=GATE, progress_bar=True, num_return_sequences=2, do_sample=True)
    assert "Solving 4 requests: 100%" in capsys.readouterr().err
    shared_model().generate_batch(PROMPTS[:2], cdb=GATE)
    assert capsys.readouterr().err == ""
