"""Attention over pages of the pool, with a stand-in for FlashAttention-2 that is given what it would be given.

The kernels themselves need a GPU and are not run here.
"""

import sys
from types import SimpleNamespace

import numpy
import pytest
import torch
from torch import nn

from hf_cdb import CDBConfig
from hf_cdb import flash as flash_module
from hf_cdb.adapters import adapter_for
from hf_cdb.attention import depth_attention
from hf_cdb.cache import DepthCache
from hf_cdb.engine import Engine
from hf_cdb.flash import PAGE, PageTable, find_flash
from hf_cdb.kv_policy import KVPolicy
from hf_cdb.reference import reference_generate
from hf_cdb.spans import Spans

from .test_engine import LENGTHS, THRESHOLDS, TOY_CASES, model_of, run_toy
from .tiny import assert_close, left_pad, prompts, random_ouro
from .toy import ToyModel, predict, toy_prompt


class FakeFlash:
    """`flash_attn_varlen_func` in plain PyTorch, from its documentation; refuses what its kernels do not take."""

    def __init__(self, page):
        self.page, self.calls = page, 0

    def __call__(
        self,
        q,
        k,
        v,
        cu_seqlens_q,
        cu_seqlens_k,
        max_seqlen_q,
        max_seqlen_k,
        dropout_p,
        softmax_scale,
        causal,
        window_size,
        block_table,
    ):
        self.calls += 1
        spans = len(block_table)
        assert k.shape == v.shape
        assert k.shape[1] == self.page
        assert q.stride(-1) == k.stride(-1) == v.stride(-1) == 1
        assert q.dtype == k.dtype == v.dtype
        assert cu_seqlens_q.dtype == cu_seqlens_k.dtype == block_table.dtype == torch.int32
        assert len(cu_seqlens_q) == len(cu_seqlens_k) == spans + 1
        assert cu_seqlens_q[-1] == len(q)
        assert block_table.shape[1] * self.page >= max_seqlen_k
        assert ((block_table >= 0) & (block_table < len(k))).all()
        assert causal
        assert dropout_p == 0
        output = torch.empty_like(q)
        for span in range(spans):
            first, last = cu_seqlens_q[span : span + 2].tolist()
            keys = int(cu_seqlens_k[span + 1] - cu_seqlens_k[span])
            queries = last - first
            assert queries <= max_seqlen_q
            assert keys <= max_seqlen_k
            own = [x[block_table[span].long()].flatten(0, 1)[:keys].transpose(0, 1) for x in (k, v)]
            own = [x.repeat_interleave(q.shape[1] // k.shape[2], dim=0) for x in own]
            # The last query reads the last key.
            distance = torch.arange(keys - queries, keys)[:, None] - torch.arange(keys)
            seen = distance >= 0
            if window_size != (-1, -1):
                before, after = window_size
                assert after == 0
                seen &= distance <= before
            query = q[first:last].transpose(0, 1)
            read = nn.functional.scaled_dot_product_attention(query, *own, attn_mask=seen, scale=softmax_scale)
            output[first:last] = read.transpose(0, 1)
        return output


@pytest.fixture(params=[2, PAGE])
def flash(request, monkeypatch):
    """The engines of the test attend by it, over pages of this size."""
    fake = FakeFlash(request.param)
    monkeypatch.setattr("hf_cdb.flash.PAGE", request.param)
    monkeypatch.setattr("hf_cdb.cache.PAGE", request.param)
    monkeypatch.setattr("hf_cdb.stages.find_flash", lambda adapter, implementation: fake)
    return fake


def test_a_page_table_by_hand(monkeypatch):
    """Three spans over pages of 4: 6 positions from row 8, of which 2 are new; one of one from row 0; 9 from row 16."""
    monkeypatch.setattr(flash_module, "PAGE", 4)
    spans = Spans([5, 6, 7], numpy.array([4, 0, 8]), numpy.array([6, 1, 9]), loop=numpy.ones(3, dtype=int))
    table = PageTable.create(spans, numpy.array([8, 0, 16]), torch.device("cpu"))
    assert table.pages.tolist() == [[2, 3, 3], [0, 0, 0], [4, 5, 6]]
    assert table.cu_queries.tolist() == [0, 2, 3, 4]
    assert table.cu_keys.tolist() == [0, 6, 7, 16]
    assert (table.most_queries, table.most_keys) == (2, 9)


@pytest.mark.parametrize("case", TOY_CASES[::2], ids=lambda case: "-".join(map(str, case.values())))
def test_every_read_of_the_toy_is_right_by_value(case, flash):
    case = dict(case)
    if case["kv_policy"] not in ("first_then_shared", "modular"):
        case["kv_slots"] = None
    model = ToyModel()
    requests = [toy_prompt(row + 1, *range(row, row + length)) for row, length in enumerate((3, 1, 4, 2, 5))]
    running, engine = run_toy(model, requests, 6, **case)
    assert flash.calls > 0
    for request, prompt in zip(running, requests, strict=True):
        expected = predict(model.config, prompt.tolist(), 6, case["kv_policy"], case["kv_slots"] or 2)
        assert (request.tokens, request.exit_depths) == (expected.tokens, expected.exit_depths)
        assert_close(torch.stack(request.logits), torch.stack(expected.logits), 1e-4)
    assert engine.cache.core_bytes == 0


@pytest.mark.parametrize("name", ["ouro-gqa", "huginn", "dory"])
def test_pages_and_packs_agree(name, flash, monkeypatch):
    """Heads that share keys, layers before and after the loop, prompts in pieces, rows that come late."""
    model = model_of(name)
    ids, mask = left_pad(prompts(*LENGTHS))
    settings = {"exit_rule": "confidence", "exit_threshold": THRESHOLDS["confidence"][name]}
    settings |= {"prefill_chunk_size": 9, "max_num_seqs": 4}
    options = {"max_new_tokens": 10, "do_sample": False, "return_dict_in_generate": True, "output_logits": True}
    paged = model.generate(ids, attention_mask=mask, cdb=settings, **options)
    assert flash.calls > 0
    monkeypatch.setattr("hf_cdb.stages.find_flash", lambda adapter, implementation: None)
    packed = model.generate(ids, attention_mask=mask, cdb=settings, **options)
    assert torch.equal(paged.sequences, packed.sequences)
    assert torch.equal(paged.exit_depths, packed.exit_depths)
    for left, right in zip(paged.logits, packed.logits, strict=True):
        assert_close(left, right, 1e-6)


@pytest.mark.parametrize("window", [1, 3, 100])
def test_a_window_of_keys(window, monkeypatch):
    """A query reads the last `window` positions, its own included, of the slot of its loop."""
    monkeypatch.setattr("hf_cdb.flash.PAGE", 2)
    monkeypatch.setattr("hf_cdb.cache.PAGE", 2)
    outputs = []
    spans = Spans([0, 1], numpy.array([0, 0]), numpy.array([5, 3]), loop=numpy.array([1, 2]))
    new = torch.randn(3, 1, 2, 8, 16)
    for flash in (None, FakeFlash(2)):
        cache = DepthCache(adapter_for(random_ouro()), KVPolicy.create("last_exited", 4), flash)
        for key, capacity in ((0, 6), (1, 9)):
            cache.allocate(key, capacity)
        cache.bind(spans)
        cache.update(new[1], new[2], 1)
        outputs.append(depth_attention(None, *new, None, 0.25, depth_cache=cache, sliding_window=window)[0])
    assert_close(*outputs, 1e-5)


def test_whole_pages_are_held_and_paid_for(flash):
    """A request of 4 + 3 - 1 positions holds whole pages in every slot, and the budget counts them."""
    adapter = adapter_for(ToyModel())
    engine = Engine(adapter, CDBConfig(max_kv_memory=10**9).resolve(adapter))
    held = -(-6 // flash.page) * flash.page
    engine.cache.reserve([6])
    engine.cache.allocate(0, 6)
    row = 2 * 4 * 8  # bytes of keys and values of a position and layer: 4 float64 each
    assert engine.cache.core_bytes == held * 4 * 2 * row
    assert engine.cache.outer_bytes == held * 2 * row
    assert engine.cache.core_bytes + engine.cache.outer_bytes == held * engine.cache.bytes_per_position()
    _, ran = run_toy(ToyModel(), [toy_prompt(1, 1, 2, 3, 4)], 3, max_kv_memory=held * engine.cache.bytes_per_position())
    assert ran.stats.tokens == 3
    with pytest.raises(ValueError, match=rf"{held} positions of"):
        run_toy(ToyModel(), [toy_prompt(1, 1, 2, 3, 4)], 3, max_kv_memory=held * engine.cache.bytes_per_position() - 1)


@pytest.mark.parametrize(
    ("changes", "found"),
    [
        ({}, True),
        ({"dtype": torch.float32}, False),
        ({"device": torch.device("cpu")}, False),
        ({"head_dim": 320}, False),
        ({"implementation": "sdpa"}, False),
        ({"installed": False}, False),
    ],
    ids=str,
)
def test_where_it_is_used(changes, found, monkeypatch):
    case = {"dtype": torch.bfloat16, "device": torch.device("cuda"), "head_dim": 128}
    case |= {"implementation": "flash_attention_2", "installed": True, **changes}
    function = object()
    monkeypatch.setitem(sys.modules, "flash_attn", SimpleNamespace(flash_attn_varlen_func=function))
    monkeypatch.setattr(flash_module, "is_flash_attn_2_available", lambda: case["installed"])
    adapter = SimpleNamespace(**{name: case[name] for name in ("dtype", "device", "head_dim")})
    assert find_flash(adapter, case["implementation"]) is (function if found else None)


@pytest.mark.parametrize("name", ["ouro-gqa", "huginn", "dory"])
def test_prompts_whose_positions_leave_one_by_one(name, flash):
    """Every run of positions that are still in the loop is a sequence of its own for the kernels."""
    model, rows = model_of(name), prompts(*LENGTHS)
    options = {"exit_rule": "confidence", "exit_threshold": THRESHOLDS["confidence"][name], "prefill_exit": True}
    ids, mask = left_pad(rows)
    settings = {**options, "prefill_chunk_size": 9, "max_num_seqs": 4}
    output = model.generate(ids, attention_mask=mask, max_new_tokens=5, do_sample=False, cdb=settings)
    assert flash.calls > 0
    for new, row in zip(output[:, ids.shape[1] :].tolist(), rows, strict=True):
        assert new == reference_generate(model, row, 5, **options).tokens
