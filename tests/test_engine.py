"""The engine is the plain oracle, whatever the schedule (promises 1, 2 and 3)."""

import functools
import gc
import subprocess
import sys
import threading
import weakref
from pathlib import Path
from types import SimpleNamespace

import numpy
import pytest
import torch

from hf_cdb import CDBConfig, ExitRule, enable_cdb
from hf_cdb.adapters import adapter_for
from hf_cdb.attention import depth_attention
from hf_cdb.cache import DepthCache
from hf_cdb.engine import Engine
from hf_cdb.kv_policy import KVPolicy
from hf_cdb.noise import Noise
from hf_cdb.reference import reference_generate
from hf_cdb.request import Request
from hf_cdb.sampling import Sampler
from hf_cdb.spans import Spans

from .dory import random_dory
from .pairwise import pairwise
from .tiny import assert_close, left_pad, prompts, random_huginn, random_ouro
from .toy import ToyModel, predict, toy_prompt

NEW_TOKENS = 7
LENGTHS = (13, 1, 40, 5, 2, 24)  # in no order

# Thresholds that spread the depths of the random models.
THRESHOLDS = {
    "gate": {"ouro": 0.6, "ouro-gqa": 0.6},
    "latent-diff": {"ouro": 0.9, "ouro-gqa": 0.9, "huginn": 0.6, "dory": 0.6},
    "cosine": {"ouro": 0.4, "ouro-gqa": 0.4, "huginn": 0.2, "dory": 0.2},
    "entropy-diff": {"ouro": 0.5, "ouro-gqa": 0.5, "huginn": 0.05, "dory": 0.1},
    "kl": {"ouro": 1.0, "ouro-gqa": 1.0, "huginn": 0.05, "dory": 0.5},
    "minp-kl": {"ouro": 0.3, "ouro-gqa": 0.5, "huginn": 0.05, "dory": 0.1},
    "argmax-stability": {"ouro": 1, "ouro-gqa": 1, "huginn": 2, "dory": 1},
    "confidence": {"ouro": 0.3, "ouro-gqa": 0.3, "huginn": 0.1, "dory": 0.2},
}


@functools.cache
def model_of(name):
    make = {
        "ouro": random_ouro,
        "ouro-gqa": functools.partial(random_ouro, hidden_size=64, num_attention_heads=4, num_key_value_heads=2),
        "huginn": random_huginn,
        "dory": random_dory,
    }[name]
    model = enable_cdb(make().double())
    model.generation_config.update(eos_token_id=None, bos_token_id=None, pad_token_id=0)
    return model


def replayed_depths(adapter, rows, least):
    generator = torch.Generator().manual_seed(3)
    depths = torch.randint(least, adapter.full_depth + 1, (rows, NEW_TOKENS), generator=generator)
    depths[:, 0] = adapter.full_depth
    return depths.tolist()


def noisy_choice(row_seed, vocab):
    """The choice that `Noise` with a seed of the row's own makes, written plainly."""
    noise = Noise(None, vocab, torch.device("cpu"))

    def choose(index, logits):
        probabilities = logits.float().softmax(-1)
        return int((probabilities / noise.line(0, row_seed, index)).argmax())

    return choose


CASES = pairwise(
    {
        "model": ["ouro", "ouro-gqa", "huginn", "dory"],
        "exit_rule": [*THRESHOLDS, "never", "replay"],
        "kv_policy": ["last_exited", "shared", "first_then_shared", "modular"],
        "max_num_seqs": [1, 2, 3, 5, 64],
        "refill": [True, False],
        "min_coda_batch": [1, 2, 3, 4],
        "lookahead": [0, 1],
        "min_depth": [1, 2],
        "prefill_chunk_size": [None, 3, 13],
        "max_prefill_tokens": [None, 1, 8],
        "do_sample": [False, True],
    }
)


@pytest.mark.parametrize("case", CASES, ids=lambda case: "-".join(map(str, case.values())))
def test_engine_equals_the_oracle(case):
    case = dict(case)
    name, do_sample = case.pop("model"), case.pop("do_sample")
    rule = case["exit_rule"]
    if rule == "gate" and "ouro" not in name:
        rule = case["exit_rule"] = "confidence"
    model = model_of(name)
    adapter = adapter_for(model)
    rows = prompts(*LENGTHS)
    oracle = {key: case[key] for key in ("exit_rule", "kv_policy", "lookahead", "min_depth")}
    depths = None
    if rule in THRESHOLDS:
        case["exit_threshold"] = oracle["exit_threshold"] = THRESHOLDS[rule][name]
    if rule == "replay":
        case["exit_depths"] = depths = replayed_depths(
            adapter, len(rows), max(1 + case["lookahead"], case["min_depth"])
        )
    seeds = list(range(50, 50 + len(rows)))
    ids, mask = left_pad(rows)
    output = model.generate(
        ids,
        attention_mask=mask,
        max_new_tokens=NEW_TOKENS,
        do_sample=do_sample,
        top_k=0,
        return_dict_in_generate=True,
        output_logits=True,
        cdb={**case, "seeds": seeds},
    )
    for index, row in enumerate(rows):
        expected = reference_generate(
            model,
            row,
            NEW_TOKENS,
            exit_depths=None if depths is None else depths[index],
            choose=noisy_choice(seeds[index], adapter.vocab_size) if do_sample else None,
            **oracle,
        )
        assert output.sequences[index, ids.shape[1] :].tolist() == expected.tokens, f"tokens of row {index}"
        assert output.exit_depths[index].tolist() == expected.exit_depths, f"depths of row {index}"
        logits = torch.stack([step[index] for step in output.logits])
        assert_close(logits, expected.logits, 1e-6, f"logits of row {index}")  # generate casts them to float32


@pytest.mark.parametrize("name", ["ouro", "huginn", "dory"])
def test_the_cases_spread_over_depths(name):
    """Depths that were all equal would prove little."""
    model = model_of(name)
    ids, mask = left_pad(prompts(*LENGTHS))
    for rule, thresholds in THRESHOLDS.items():
        if name not in thresholds:
            continue
        settings = {"exit_rule": rule, "exit_threshold": thresholds[name]}
        output = model.generate(
            ids,
            attention_mask=mask,
            max_new_tokens=NEW_TOKENS,
            do_sample=False,
            return_dict_in_generate=True,
            cdb=settings,
        )
        assert len(set(output.exit_depths[:, 1:].flatten().tolist())) > 1, (rule, output.exit_depths)


@pytest.mark.parametrize("max_num_seqs", [1, 2, 3, 64])
@pytest.mark.parametrize("name", ["ouro", "ouro-gqa", "huginn", "dory"])
def test_exits_off_equals_stock_generate(name, max_num_seqs):
    """Promise 1, greedy and sampled with the same seed, padded."""
    model = model_of(name)
    rows = prompts(3, 9, 17)
    ids, mask = left_pad(rows)
    options = {"attention_mask": mask, "max_new_tokens": 12, "return_dict_in_generate": True, "output_logits": True}
    settings = {"exit_rule": "never", "max_num_seqs": max_num_seqs}
    stock = model.generate(ids, do_sample=False, cdb=False, **options)
    ours = model.generate(ids, do_sample=False, cdb=settings, **options)
    assert torch.equal(ours.sequences, stock.sequences)
    for step, (left, right) in enumerate(zip(ours.logits, stock.logits, strict=True)):
        assert_close(left, right, 1e-6, f"token {step}")
    if max_num_seqs >= len(rows):
        for top_k in (0, 5):
            sampled = []
            for cdb in (False, settings):
                torch.manual_seed(11)
                sampled.append(model.generate(ids, do_sample=True, top_k=top_k, cdb=cdb, **options).sequences)
            assert torch.equal(*sampled)


@pytest.mark.parametrize("name", ["ouro", "huginn", "dory"])
def test_a_row_is_alone(name):
    """Promise 2: the same padded row and mask in a batch of one."""
    model = model_of(name)
    rows = prompts(*LENGTHS)
    ids, mask = left_pad(rows)
    seeds = [7, 8, 9, 10, 11, 12]
    settings = {"exit_rule": "confidence", "exit_threshold": THRESHOLDS["confidence"][name]}
    options = {"max_new_tokens": 9, "return_dict_in_generate": True, "do_sample": True, "repetition_penalty": 1.3}

    def run(rows, **more):
        cdb = {**settings, "seeds": [seeds[row] for row in rows], **more}
        return model.generate(ids[rows], attention_mask=mask[rows], cdb=cdb, **options)

    alone = [run([row]) for row in range(len(rows))]
    for more in ({}, {"max_num_seqs": 2}, {"max_num_seqs": 4, "min_coda_batch": 3}, {"refill": False}):
        order = [3, 0, 5, 1, 4, 2]
        together = run(order, **more)
        for line, row in enumerate(order):
            assert torch.equal(together.sequences[line], alone[row].sequences[0]), (row, more)
            assert torch.equal(together.exit_depths[line], alone[row].exit_depths[0]), (row, more)


def run_toy(model, requests, new_tokens, **settings):
    """Run prompts of the toy through an engine; the requests, finished."""
    adapter = adapter_for(model)
    config = CDBConfig(**settings).resolve(adapter)
    engine = Engine(adapter, config)
    sampler = Sampler([()] * len(requests), requests, do_sample=False, keep_logits=True)
    running = [
        Request(key=row, row=row, max_new_tokens=new_tokens, sampler=sampler, prompt_ids=prompt)
        for row, prompt in enumerate(requests)
    ]
    for request in running:
        engine.add_request(request)
    engine.run()
    return running, engine


TOY_CASES = pairwise(
    {
        "kv_policy": ["last_exited", "shared", "first_then_shared", "modular"],
        "max_num_seqs": [1, 2, 3, 5, 64],
        "refill": [True, False],
        "min_coda_batch": [1, 2, 3, 4],
        "prefill_chunk_size": [None, 1, 2],
        "max_prefill_tokens": [None, 1, 3],
        "kv_slots": [None, 2, 3],
    }
)


@pytest.mark.parametrize("case", TOY_CASES, ids=lambda case: "-".join(map(str, case.values())))
def test_every_read_of_the_toy_is_right_by_value(case):
    """Each entry carries (request, position, loop, layer), so reading a wrong one changes the logits."""
    case = dict(case)
    if case["kv_policy"] not in ("first_then_shared", "modular"):
        case["kv_slots"] = None
    model = ToyModel()
    requests = [toy_prompt(row + 1, *range(row, row + length)) for row, length in enumerate((3, 1, 4, 2, 5, 1, 2))]
    running, _ = run_toy(model, requests, 8, **case)
    for request, prompt in zip(running, requests, strict=True):
        expected = predict(model.config, prompt.tolist(), 8, case["kv_policy"], case["kv_slots"] or 2)
        assert request.tokens == expected.tokens
        assert request.exit_depths == expected.exit_depths
        assert_close(torch.stack(request.logits), torch.stack(expected.logits), 1e-4)  # kept as float32


@pytest.mark.parametrize("depths", [(1, 2, 3, 4, 4), (1, 1, 1, 1, 1), (4, 4, 4, 4, 4)])
def test_rows_of_one_step_leave_on_their_own(depths):
    """D-03: an exit test written for one row gives one decision for the batch."""
    model = ToyModel(depths=[*depths, *depths])
    requests = [toy_prompt(row + 1, (row - 3) % 10) for row in range(5)]  # the first new token is digit `row`
    running, _ = run_toy(model, requests, 2)
    assert [request.exit_depths for request in running] == [[4, depth] for depth in depths]
    for request, prompt in zip(running, requests, strict=True):
        alone, _ = run_toy(model, [prompt], 2)
        assert request.tokens == alone[0].tokens


def test_work_follows_depth():
    """Cost: the loops that run are the loops that the depths name."""
    model = ToyModel()
    running, engine = run_toy(model, [toy_prompt(row + 1, row) for row in range(6)], 10, max_num_seqs=4)
    stats = engine.stats
    assert stats.rows["loop"] == sum(sum(request.exit_depths) for request in running)
    assert stats.rows["coda"] == stats.rows["prelude"] == stats.tokens == 60
    assert sum(depth * count for depth, count in stats.depths.items()) == stats.rows["loop"]
    assert sum(width * count for width, count in stats.widths["loop"].items()) == stats.rows["loop"]
    assert stats.mean_depth == stats.rows["loop"] / 60
    # F0 = Fr = 1 and R = 4
    assert stats.flop_bound == pytest.approx(5 / (1 + stats.mean_depth))
    assert 0 < stats.realised_share <= 1


def test_nothing_is_kept_after_the_end():
    _, engine = run_toy(ToyModel(), [toy_prompt(row + 1, row) for row in range(6)], 5, max_num_seqs=2)
    assert engine.cache.core_bytes == engine.cache.outer_bytes == 0
    assert len(engine.scheduler) == 0
    assert not engine._requests


def test_memory_of_the_policies():
    """Core bytes of `shared` are 1 / R of `last_exited`; counted by hand."""
    model = ToyModel()
    peaks = {}
    for policy in ("last_exited", "shared", "first_then_shared", "modular"):
        _, engine = run_toy(model, [toy_prompt(1, 1, 2, 3)], 6, kv_policy=policy)
        peaks[policy] = engine.stats.kv_bytes
        # 3 + 6 - 1 positions, keys and values of 4 float64 in the prelude's and the coda's one layer
        assert engine.stats.kv_bytes_outer == 8 * 2 * 4 * 8 * 2
    assert peaks["last_exited"] == 8 * 2 * 4 * 8 * 2 * 4
    assert peaks["shared"] * 4 == peaks["last_exited"]
    assert peaks["modular"] == peaks["first_then_shared"] == 2 * peaks["shared"]


MEMORY = """
import psutil
from hf_cdb.adapters import adapter_for
from hf_cdb.cache import DepthCache
from hf_cdb.kv_policy import KVPolicy
from tests.tiny import random_ouro

adapter = adapter_for(random_ouro(hidden_size=256, intermediate_size=64, num_hidden_layers=1))
caches = []
for policy in ("shared", "last_exited"):
    caches.append(DepthCache(adapter, KVPolicy.create(policy, 4)))
    before = psutil.Process().memory_info().rss
    caches[-1].reserve([2000] * 16)
    for key in range(16):
        caches[-1].allocate(key, 2000)
    caches[-1]._pools["core"].tensor.zero_()
    print(caches[-1].core_bytes, psutil.Process().memory_info().rss - before)
"""


def test_memory_of_the_policies_in_the_process():
    """What the policies hold is seen from outside, once it has been written; in a process without memory to reuse."""
    root = Path(__file__).parents[1]
    ran = subprocess.run([sys.executable, "-c", MEMORY], cwd=root, capture_output=True, text=True, check=True)
    (shared, shared_grown), (last_exited, last_exited_grown) = (
        map(int, line.split()) for line in ran.stdout.splitlines()
    )
    assert last_exited == 4 * shared
    assert shared_grown == pytest.approx(shared, rel=0.1)
    assert last_exited_grown == pytest.approx(last_exited, rel=0.1)


def test_budget_bounds_the_rows_in_flight():
    model = ToyModel()
    requests = [toy_prompt(row + 1, row, row) for row in range(6)]
    free, engine = run_toy(model, requests, 5)
    one = engine.cache.bytes_per_position() * 6
    tight, engine = run_toy(model, requests, 5, max_kv_memory=2 * one + 1)
    assert [request.tokens for request in tight] == [request.tokens for request in free]
    assert engine.stats.kv_bytes + engine.stats.kv_bytes_outer == 2 * one
    share, _ = run_toy(model, requests, 5, max_kv_memory=0.5)
    assert [request.tokens for request in share] == [request.tokens for request in free]
    with pytest.raises(ValueError, match=rf"max_kv_memory={one - 1}.*needs {one}"):
        run_toy(model, requests, 5, max_kv_memory=one - 1)


def test_cancel_frees_the_place():
    model = ToyModel()
    adapter = adapter_for(model)
    engine = Engine(adapter, CDBConfig(max_num_seqs=1).resolve(adapter))
    prompts_ = [toy_prompt(1, 1), toy_prompt(2, 1)]
    sampler = Sampler([()] * 2, prompts_, do_sample=False)
    first, second = (
        Request(key=row, row=row, max_new_tokens=50 if row == 0 else 3, sampler=sampler, prompt_ids=prompt)
        for row, prompt in enumerate(prompts_)
    )
    engine.add_request(first)
    engine.add_request(second)
    for _ in range(20):
        engine.step()
    engine.cancel(first.key)
    engine.run()
    assert first.status == "cancelled"
    assert 0 < len(first.tokens) < 50
    assert second.status == "finished"
    assert second.tokens == predict(model.config, prompts_[1].tolist(), 3).tokens


def test_slot_arithmetic_by_hand():
    """Policies of four loops: slots that loops 1 to 4 use, and those unwritten after leaving at 1 to 4."""
    expected = {
        ("last_exited", None): ([0, 1, 2, 3], [[1, 2, 3], [2, 3], [3], []]),
        ("shared", None): ([0, 0, 0, 0], [[], [], [], []]),
        ("first_then_shared", None): ([0, 1, 1, 1], [[1], [], [], []]),
        ("first_then_shared", 3): ([0, 1, 2, 2], [[1, 2], [2], [], []]),
        ("modular", None): ([0, 1, 0, 1], [[1], [], [], []]),
        ("modular", 3): ([0, 1, 2, 0], [[1, 2], [2], [], []]),
    }
    for (name, slots), (used, unwritten) in expected.items():
        policy = KVPolicy.create(name, 4, slots)
        assert [policy.slot(loop) for loop in (1, 2, 3, 4)] == used
        assert policy.slot(numpy.array([1, 2, 3, 4])).tolist() == used
        assert [list(policy.unwritten(depth)) for depth in (1, 2, 3, 4)] == unwritten


@pytest.mark.parametrize("short", [0, 2_000, 10**9])
def test_reading_copies_nothing(short, monkeypatch):
    """What attention is handed are views of the requests' own tensors, in either layout and in both at once."""
    monkeypatch.setattr("hf_cdb.cache.SHORT_BYTES", short)
    adapter = adapter_for(random_ouro())
    cache = DepthCache(adapter, KVPolicy.create("last_exited", 4))
    for key, capacity in ((0, 6), (1, 9)):
        cache.allocate(key, capacity)
    cache.bind(Spans([0, 1], numpy.array([2, 5]), numpy.array([3, 8]), loop=numpy.array([1, 3])))
    new = torch.randn(2, 1, 2, 4, 16)
    cache.update(*new, 1)
    pool = cache._pools["core"].tensor.untyped_storage().data_ptr()
    for index, end in enumerate((3, 8)):
        for read in cache.views(index):
            assert read.untyped_storage().data_ptr() == pool
            assert read.shape == (1, 2, end, 16)
    assert torch.equal(cache.views(0)[0][:, :, 2], new[0][:, :, 0])
    assert torch.equal(cache.views(1)[1][:, :, 5:], new[1][:, :, 1:])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("short", [0, 10**9])
def test_half_precision_attends_in_float32(dtype, short, monkeypatch):
    """Within half a unit in the last place of softmax(q k^T) v in float64, which a kernel in that dtype exceeds."""
    monkeypatch.setattr("hf_cdb.cache.SHORT_BYTES", short)
    adapter = adapter_for(random_ouro().to(dtype))
    cache = DepthCache(adapter, KVPolicy.create("last_exited", 4))
    keys, values, queries = torch.randn(3, 2, 2, 40, 16, generator=torch.Generator().manual_seed(0)).to(dtype)
    for key in (0, 1):
        cache.allocate(key, 40)
        cache.bind(Spans([key], numpy.array([0]), numpy.array([40]), loop=numpy.array([1])))
        cache.update(keys[key][None], values[key][None], 0)
    ends = (29, 40)
    cache.bind(Spans([0, 1], numpy.array(ends) - 1, numpy.array(ends), loop=numpy.array([1, 1])))
    last = [torch.stack([x[row, :, end - 1] for row, end in enumerate(ends)], 1)[None] for x in (queries, keys, values)]
    cache.update(last[1], last[2], 0)
    output, _ = depth_attention(adapter.model, *last, None, 0.25, cache)
    for row, end in enumerate(ends):
        query, key, value = (x[row].double() for x in (queries, keys, values))
        weights = (0.25 * query[:, end - 1, None] @ key[:, :end].mT).softmax(-1)
        exact = (weights @ value[:, :end])[:, 0]
        assert ((output[0, row].double() - exact).abs() <= 0.501 * torch.finfo(dtype).eps * exact.abs() + 1e-6).all()


@pytest.mark.parametrize("name", ["ouro-gqa", "huginn", "dory"])
@pytest.mark.parametrize(("packed", "short"), [(0, 10**9), (7_000, 10**9), (10**9, 10**9), (10**9, 0), (10**9, 9_000)])
def test_packed_and_single_attention_agree(name, packed, short, monkeypatch):
    """Whichever of the two a row's length calls for: none packed, some, all; in either layout, and in both at once."""
    model = model_of(name)
    ids, mask = left_pad(prompts(*LENGTHS))
    settings = {"exit_rule": "confidence", "exit_threshold": THRESHOLDS["confidence"][name], "prefill_chunk_size": 9}
    options = {"max_new_tokens": 10, "do_sample": False, "return_dict_in_generate": True, "output_logits": True}
    expected = model.generate(ids, attention_mask=mask, cdb=settings, **options)
    monkeypatch.setattr("hf_cdb.places.PACK_BYTES", packed)
    monkeypatch.setattr("hf_cdb.cache.SHORT_BYTES", short)
    output = model.generate(ids, attention_mask=mask, cdb=settings, **options)
    assert torch.equal(output.sequences, expected.sequences)
    assert torch.equal(output.exit_depths, expected.exit_depths)
    for left, right in zip(output.logits, expected.logits, strict=True):
        assert_close(left, right, 1e-6)


def test_freed_memory_is_used_again_in_every_pool():
    """Requests that come and go do not make the pools grow: neither the core's nor that of the layers around it."""
    adapter = adapter_for(random_huginn())
    cache = DepthCache(adapter, KVPolicy.create("last_exited", 6))
    for key in range(3):
        cache.allocate(key, 10)
    reserved = {kind: pool.reserved_bytes for kind, pool in cache._pools.items()}
    assert all(reserved.values())
    for key in range(3, 30):
        cache.free(key - 3)
        cache.allocate(key, 10)
    assert {kind: pool.reserved_bytes for kind, pool in cache._pools.items()} == reserved


class Greedy:
    """The most probable token."""

    def choose(self, rows, logits):
        return logits.argmax(-1).tolist()


def engine_of(model, requests=3, **settings):
    """An engine with requests of 3, 4, 5, ... positions and three new tokens each."""
    adapter = adapter_for(model)
    engine = Engine(adapter, CDBConfig(**settings).resolve(adapter))
    rows = [
        Request(key=row, row=row, prompt_ids=torch.arange(1, 4 + row), max_new_tokens=3, sampler=Greedy())
        for row in range(requests)
    ]
    for row in rows:
        engine.add_request(row)
    return engine, rows


def test_results_are_those_that_ended_since():
    engine, rows = engine_of(random_ouro(), exit_rule="never", max_num_seqs=1)
    engine.cancel(2)
    assert engine.results() == [rows[2]]
    engine.run()
    assert engine.results() == rows[:2]
    assert engine.results() == []
    assert [row.status for row in rows] == ["finished", "finished", "cancelled"]


def test_a_cancelled_request_keeps_nothing_and_is_not_cancelled_twice():
    engine, rows = engine_of(random_ouro(), exit_rule="never")
    while rows[1].status != "running" or not rows[1].tokens:
        engine.step()
    engine.cancel(1)
    assert set(engine.cache._segments) == {0, 2}
    with pytest.raises(KeyError, match="key=1 names no request"):
        engine.cancel(1)
    engine.add_request(Request(key=1, max_new_tokens=2, sampler=Greedy(), prompt_ids=torch.tensor([4]), row=1))
    engine.run()
    assert len(rows[0].tokens) == len(rows[2].tokens) == 3


def test_a_share_of_the_memory_is_a_share(monkeypatch):
    monkeypatch.setattr(
        "hf_cdb.memory.psutil.virtual_memory", lambda: SimpleNamespace(available=1_000_000, total=2_000_000)
    )
    engine, _ = engine_of(random_ouro(), exit_rule="never", max_kv_memory=0.25)
    assert engine.scheduler.budget == 250_000


def test_an_engine_goes_when_it_is_let_go():
    """Its keys and values do not wait for the collector of cycles."""
    gc.collect()
    gc.disable()
    try:
        engine, _ = engine_of(random_ouro(), exit_rule="never")
        engine.run()
        cache = weakref.ref(engine.cache)
        del engine
        assert cache() is None
    finally:
        gc.enable()


class Watching(ExitRule):
    """Leaves nothing, and notes after which loops it was asked."""

    def __init__(self):
        self.asked = set()
        super().__init__()

    def leave(self, places, depths, previous, state, logits):
        self.asked |= set(depths)
        return [False] * len(depths)


def test_the_signal_after_the_last_loop_is_never_asked_for():
    rule = Watching()
    engine, _ = engine_of(random_ouro(), exit_rule=rule)
    engine.run()
    assert rule.asked == {1, 2, 3}


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (lambda state: state[:, :1] > 9, ["torch.bool [3, 1]"]),
        (lambda state: torch.full((len(state),), 0.2), ["torch.float32 [3]"]),
        (lambda state: [True], ["[True]"]),
        (lambda state: [0.5] * len(state), ["[0.5, 0.5, 0.5]"]),
        (lambda state: None, ["None"]),
    ],
)
def test_what_a_rule_returns_is_checked(answer, words):
    class Odd(ExitRule):
        name = "odd one"

        def leave(self, places, depths, previous, state, logits):
            return answer(state)

    engine, _ = engine_of(random_ouro(), exit_rule=Odd())
    with pytest.raises(ValueError, match=r"exit rule 'odd one' \(Odd\) returned") as caught:
        engine.run()
    assert all(word in str(caught.value) for word in [*words, "3 rows", "[3]"]), caught.value


def test_arrays_of_numpy_are_fine_as_an_answer():
    class Two(ExitRule):
        def leave(self, places, depths, previous, state, logits):
            return numpy.array(depths) >= 2

    engine, rows = engine_of(random_ouro(), exit_rule=Two())
    engine.run()
    assert [row.exit_depths for row in rows] == [[4, 2, 2]] * 3


def test_a_rule_that_looks_at_logits_pays_for_them():
    """`(F0 + R Fr) / (F0 + d Fr + asked)` by hand: tokens of depth 2 ask after loops 1 and 2, the first not at all."""

    class Looking(ExitRule):
        needs_logits = True

        def leave(self, places, depths, previous, state, logits):
            logits()
            return [depth >= 2 for depth in depths]

    model = random_huginn()
    engine, _ = engine_of(model, exit_rule=Looking())
    engine.run()
    parts, stats = model.transformer, engine.stats
    sizes = {
        name: sum(weight.numel() for module in modules for weight in module.parameters())
        for name, modules in {
            "once": (parts["prelude"], parts["coda"], parts["ln_f"], model.lm_head),
            "coda": (parts["coda"], parts["ln_f"], model.lm_head),
            "loop": (parts["adapter"], parts["core_block"]),
        }.items()
    }
    assert stats.asked == {"launches": 4, "rows": 12}
    full = sizes["once"] + 6 * sizes["loop"]
    assert stats.flop_bound == pytest.approx(
        full / (sizes["once"] + (6 + 2 + 2) / 3 * sizes["loop"] + 12 / 9 * sizes["coda"])
    )
    # Three prelude and coda launches, 6 + 2 + 2 loops, all of three rows.
    assert stats.counted_speedup == pytest.approx(
        3 * full / (3 * sizes["once"] + 10 * sizes["loop"] + 4 * sizes["coda"])
    )


def test_a_prompt_in_pieces_counts_its_loops_once():
    whole, _ = engine_of(random_ouro(), exit_rule="never")
    pieces, _ = engine_of(random_ouro(), exit_rule="never", prefill_chunk_size=1)
    whole.run()
    pieces.run()
    assert whole.stats.rows["loop"] == pieces.stats.rows["loop"] == 3 * 3 * 4
    assert pieces.stats.launches["loop"] > whole.stats.launches["loop"]


def test_threads_may_share_a_model():
    """Launches of one model take turns, and the model's own attention comes back."""
    model = random_ouro(eos_token_id=None, pad_token_id=0)
    ids, mask = left_pad(prompts(3, 9, 6))
    options = {"max_new_tokens": 30, "do_sample": False, "cdb": {"exit_rule": "confidence", "exit_threshold": 0.1}}
    expected, wrong = model.generate(ids, attention_mask=mask, **options), []

    def run():
        for _ in range(3):
            if not torch.equal(model.generate(ids, attention_mask=mask, **options), expected):
                wrong.append(1)

    threads = [threading.Thread(target=run) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    assert model.config._attn_implementation == "sdpa"


def test_a_rule_may_run_the_model():
    class Asking(ExitRule):
        """Leaves where the model's plain forward over the embeddings says something."""

        def leave(self, places, depths, previous, state, logits):
            model = self.adapter.model
            return (model(inputs_embeds=state[:, None], use_cache=False).logits[:, 0].argmax(-1) >= 0).tolist()

    engine, rows = engine_of(random_ouro(), exit_rule=Asking())
    engine.run()
    assert [row.exit_depths for row in rows] == [[4, 1, 1]] * 3
