"""A sequence of 8,000 positions beside short ones, with and without enough memory: nothing of any of them changes."""

import functools

import pytest
import torch

from hf_cdb import CDBConfig, enable_cdb
from hf_cdb.adapters import adapter_for
from hf_cdb.engine import Engine

from .test_engine import THRESHOLDS
from .tiny import assert_close, left_pad, prompts, random_huginn, random_ouro

LENGTHS, NEW_TOKENS = (3, 40, 700, 8000), 20


@functools.cache
def model_of(name):
    make, context = {"ouro": (random_ouro, "max_position_embeddings"), "huginn": (random_huginn, "block_size")}[name]
    model = enable_cdb(make(**{context: 8192}).double())
    model.generation_config.update(eos_token_id=None, bos_token_id=None, pad_token_id=0)
    return model


@functools.cache
def rows():
    return prompts(*LENGTHS)


def generate(name, chosen, cdb):
    ids, mask = left_pad(chosen)
    options = {"max_new_tokens": NEW_TOKENS, "do_sample": False, "output_logits": True, "return_dict_in_generate": True}
    return model_of(name).generate(ids, attention_mask=mask, cdb=cdb, **options)


def early(name, **settings):
    return {"exit_rule": "latent-diff", "exit_threshold": THRESHOLDS["latent-diff"][name], **settings}


@functools.cache
def alone(name):
    """Each row in a call of its own, its prompt in one piece, with all the memory that it may need."""
    return [generate(name, [row], early(name, max_num_seqs=1)) for row in rows()]


def test_without_exits_it_is_stock_generate():
    expected = generate("ouro", [rows()[3]], False)
    found = generate("ouro", list(rows()), {"exit_rule": "never", "prefill_chunk_size": 512})
    assert torch.equal(found.sequences[3], expected.sequences[0])
    assert_close(torch.stack(found.logits)[:, 3], torch.stack(expected.logits)[:, 0], 1e-6)


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("ouro", {"budget": 8800, "preemption": "offload", "max_prefill_tokens": 1000}),
        ("ouro", {"budget": 8800, "preemption": "recompute", "max_prefill_tokens": 1500}),
        ("huginn", {"kv_layout": "compact", "prefill_chunk_size": 512}),
        ("huginn", {"budget": 8791, "kv_layout": "compact", "preemption": "recompute"}),
    ],
    ids=["offload", "recompute", "compact", "compact-recompute"],
)
def test_every_row_equals_its_run_alone(name, settings, monkeypatch):
    """Where there is a budget, the short rows grow, and the long one has to make room for them."""
    monkeypatch.setattr("hf_cdb.cache.STEP", 2)
    settings = dict(settings)
    if budget := settings.pop("budget", None):  # positions, of 8819 at the ends of all rows
        adapter = adapter_for(model_of(name))
        settings["max_kv_memory"] = budget * Engine(adapter, CDBConfig().resolve(adapter)).cache.bytes_per_position()
    found = generate(name, list(rows()), early(name, **settings))
    for index, expected in enumerate(alone(name)):
        assert torch.equal(found.sequences[index, -NEW_TOKENS:], expected.sequences[0, -NEW_TOKENS:])
        assert torch.equal(found.exit_depths[index], expected.exit_depths[0])
        assert_close(torch.stack(found.logits)[:, index], torch.stack(expected.logits)[:, 0], 1e-6)
    assert len(set(found.exit_depths[:, 1:].flatten().tolist())) > 1
    if budget:
        assert found.stats.kv_bytes_peak <= settings["max_kv_memory"]
        assert found.stats.pressure["preemptions"] > 0
