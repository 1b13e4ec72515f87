"""`kv_layout="compact"`: what the dense layout gives, in memory that follows depth."""

import numpy
import pytest
import torch

from hf_cdb import CDBConfig, enable_cdb
from hf_cdb.adapters import adapter_for
from hf_cdb.attention import depth_attention
from hf_cdb.cache import DepthCache
from hf_cdb.compact_cache import CompactCache
from hf_cdb.engine import Engine
from hf_cdb.kv_policy import KVPolicy
from hf_cdb.pool import Pool
from hf_cdb.request import Request
from hf_cdb.sampling import Sampler
from hf_cdb.spans import Spans

from . import test_engine, test_prefix_reuse, test_ragged
from .pairwise import pairwise
from .test_engine import LENGTHS, THRESHOLDS, model_of, run_toy
from .tiny import assert_close, left_pad, prompts, random_huginn, random_ouro
from .toy import ToyModel, predict, toy_prompt

COMPACT = {"kv_layout": "compact", "kv_policy": "last_exited"}
SHORT = {"long": 0, "mixed": 9_000, "short": 10**9}
BEGINNINGS = {**SHORT, "mixed": 45_000}  # the same for the longer prompts that begin alike

CASES = pairwise(
    {
        "model": ["ouro", "ouro-gqa", "huginn", "dory"],
        "exit_rule": ["latent-diff", "confidence", "argmax-stability", "never", "replay"],
        "short": [*SHORT],
        "max_num_seqs": [1, 3, 64],
        "refill": [True, False],
        "min_coda_batch": [1, 3],
        "lookahead": [0, 1],
        "min_depth": [1, 2],
        "prefill_chunk_size": [None, 3, 13],
        "max_prefill_tokens": [None, 8],
        "do_sample": [False, True],
        "pool": ["lazy", "growing"],
    }
)


def choose(monkeypatch, short, pool="lazy", sizes=SHORT):
    """Which requests are short, and whether memory is mapped by the page."""
    monkeypatch.setattr("hf_cdb.cache.SHORT_BYTES", sizes[short])
    if pool == "growing":
        monkeypatch.setattr("hf_cdb.lazy_pool.LazyPool.serves", lambda device: False)


@pytest.mark.parametrize("case", CASES, ids=lambda case: "-".join(map(str, case.values())))
def test_compact_equals_the_oracle(case, monkeypatch):
    case = dict(case)
    choose(monkeypatch, case.pop("short"), case.pop("pool"))
    test_engine.test_engine_equals_the_oracle({**case, **COMPACT})


@pytest.mark.parametrize("short", SHORT)
@pytest.mark.parametrize("settings", [{"max_num_seqs": 2}, {"refill": False}, {"prefill_chunk_size": 2}], ids=str)
def test_every_read_is_right_by_value(short, settings, monkeypatch):
    """Each entry of the toy carries (request, position, loop, layer)."""
    monkeypatch.setattr("hf_cdb.cache.SHORT_BYTES", {"long": 0, "mixed": 700, "short": 10**9}[short])
    test_engine.test_every_read_of_the_toy_is_right_by_value(
        {"min_coda_batch": 1, "kv_slots": None, **settings, **COMPACT}
    )


@pytest.mark.parametrize("short", SHORT)
@pytest.mark.parametrize("name", ["ouro", "ouro-gqa", "huginn"])
def test_float32_equals_dense(name, short, monkeypatch):
    choose(monkeypatch, short)
    # With larger weights the dense layout itself is off by more from one width of the launches to another.
    gqa = {"hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2, "initializer_range": 0.2}
    model = enable_cdb({"ouro": random_ouro, "ouro-gqa": lambda: random_ouro(**gqa), "huginn": random_huginn}[name]())
    model.generation_config.update(eos_token_id=None, bos_token_id=None, pad_token_id=0)
    ids, mask = left_pad(prompts(*LENGTHS))
    settings = {"exit_rule": "confidence", "exit_threshold": THRESHOLDS["confidence"][name], "max_num_seqs": 4}
    options = {"max_new_tokens": 24, "do_sample": False, "return_dict_in_generate": True, "output_logits": True}
    dense, compact = (
        model.generate(ids, attention_mask=mask, cdb={**settings, "kv_layout": layout}, **options)
        for layout in ("dense", "compact")
    )
    assert torch.equal(compact.sequences, dense.sequences)
    assert torch.equal(compact.exit_depths, dense.exit_depths)
    assert len(set(dense.exit_depths.flatten().tolist())) > 1
    for step, (left, right) in enumerate(zip(compact.logits, dense.logits, strict=True)):
        assert_close(left, right, 3e-4 if name == "huginn" else 1e-4, f"token {step}")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("heads", [2, 4])
@pytest.mark.parametrize("window", [None, 1, 5, 100])
def test_attention_over_two_stretches(dtype, heads, window, monkeypatch):
    """A long request and a short one, whose tokens left at loops 1 and 2, against a softmax in float64, within half a
    unit in the last place."""
    torch.manual_seed(0)
    model = random_ouro(hidden_size=16 * heads, num_attention_heads=heads, num_key_value_heads=2).to(dtype)
    adapter = adapter_for(model)
    cache = CompactCache(adapter, KVPolicy.create("last_exited", 4))
    row_bytes = 4 * 16 * dtype.itemsize
    monkeypatch.setattr("hf_cdb.cache.SHORT_BYTES", 60 * row_bytes)
    entries = torch.randn(2, 3, 2, 2, 40, 16).to(dtype)  # request, loop, keys and values, heads, positions
    depths = {20: 1, 21: 2, 23: 1, 24: 2, 25: 1}
    for key, capacity in ((0, 60), (1, 61)):
        cache.allocate(key, capacity)
        for start, end in ((0, 20), *[(position, position + 1) for position in range(20, 39)]):
            for loop in range(1, depths.get(start, 3) + 1):
                cache.bind(Spans([key], numpy.array([start]), numpy.array([end]), numpy.array([loop])))
                new = entries[key, loop - 1, :, None, :, start:end]
                cache.update(new[0], new[1], 1)
            if start >= 20:
                cache.leave([key], [start], [depths.get(start, 4)])
    query = torch.randn(1, heads, 2, 16).to(dtype)
    for loops in ((2, 3), (3, 1), (1, 2)):
        cache.bind(Spans([0, 1], numpy.array([39, 39]), numpy.array([40, 40]), numpy.array(loops)))
        new = torch.stack([entries[key, loop - 1, :, :, 39] for key, loop in enumerate(loops)], dim=2)[:, None]
        cache.update(new[0], new[1], 1)
        assert (len(cache.places.packs), cache.places.single, cache.places.split) == (1, [], [1])
        output, _ = depth_attention(model, query, new[0], new[1], None, 0.25, cache, window)
        for key, loop in enumerate(loops):
            at = [min(loop, depths.get(position, 4)) - 1 for position in range(40)]
            read = entries[key, at, :, :, torch.arange(40)].double()[-(window or 40) :]  # positions, 2, heads, size
            keys, values = (x.repeat_interleave(heads // 2, dim=1).transpose(0, 1) for x in read.unbind(1))
            weights = (0.25 * query[0, :, key, None].double() @ keys.mT).softmax(-1)
            exact = (weights @ values)[:, 0]
            bound = 0.501 * torch.finfo(dtype).eps * exact.abs() + 2e-6
            assert ((output[0, key].double() - exact).abs() <= bound).all(), (key, loop)


def engine_of(model, lengths, new_tokens, settings, **more):
    """An engine with compact requests of these prompts; and the requests."""
    adapter = adapter_for(model)
    engine = Engine(adapter, CDBConfig(**settings, kv_layout="compact").resolve(adapter))
    sampler = Sampler([()] * len(lengths), prompts(*lengths), do_sample=False)
    requests = [
        Request(key=row, row=row, max_new_tokens=new_tokens, sampler=sampler, prompt_ids=prompt, **more)
        for row, prompt in enumerate(prompts(*lengths))
    ]
    for request in requests:
        engine.add_request(request)
    return engine, requests


@pytest.mark.parametrize("short", ["long", "short"])
def test_memory_is_the_loops_that_were_run(short, monkeypatch):
    """Counted by hand after every launch: an entry for each loop of each cached position, prompts at R. So on this
    workload, of the mix .4/.3/.2/.1, it is soon under nine tenths of dense, and what is reserved is close to it."""
    choose(monkeypatch, short)
    lengths, new_tokens = [30 + 7 * row for row in range(12)], 40
    generator = numpy.random.default_rng(0)
    depths = generator.choice([1, 2, 3, 4], p=[0.4, 0.3, 0.2, 0.1], size=(12, new_tokens))
    depths[:, 0] = 4
    settings = {"exit_rule": "replay", "exit_depths": depths, "max_num_seqs": 5}
    model = enable_cdb(random_ouro(hidden_size=512, num_attention_heads=2, intermediate_size=16, num_hidden_layers=1))
    engine, requests = engine_of(model, lengths, new_tokens, settings)
    row_bytes, ratios, shares = 2 * 512 * 4, [], []
    while (launch := engine.step()) is not None:
        expected = positions = 0
        for request in requests:
            if request.status != "running":
                continue
            depth = engine.scheduler._unfinished[request.key].depth
            expected += request.prompt_length * (4 if request.tokens else depth)
            expected += sum(request.exit_depths[1:]) + (depth if request.tokens else 0)
            positions += request.end
        assert engine.cache.core_bytes == expected * row_bytes
        if launch.stage == "loop" and positions:
            ratios.append(engine.cache.reserved_bytes / engine.cache.core_bytes)
            shares.append(expected / positions / 4)
    assert all(request.exit_depths == depths[request.key].tolist() for request in requests)
    assert min(ratios) >= 1
    assert numpy.mean(ratios) < 1.1
    assert engine.stats.kv_bytes_reserved < 1.1 * engine.stats.kv_bytes
    assert numpy.mean(shares[len(shares) // 4 :]) < 0.9
    assert engine.cache.core_bytes == engine.cache.arrays.held == engine.cache.arrays.reserved_bytes == 0


@pytest.mark.parametrize("short", SHORT)
def test_requests_of_different_full_depth(short, monkeypatch):
    """A request may be less deep than the engine: its prompt stays in the slot of its own last loop."""
    choose(monkeypatch, short)
    model = model_of("ouro")
    adapter = adapter_for(model)
    rows, depths, outputs = prompts(9, 4, 15, 7), [2, 4, 1, 3], []
    for layout in ("dense", "compact"):
        config = CDBConfig(exit_rule="confidence", exit_threshold=0.3, max_num_seqs=3, kv_layout=layout)
        engine = Engine(adapter, config.resolve(adapter))
        sampler = Sampler([()] * 4, rows, do_sample=False, keep_logits=True)
        requests = [
            Request(key=row, row=row, max_new_tokens=12, sampler=sampler, prompt_ids=rows[row], max_depth=depths[row])
            for row in range(4)
        ]
        for request in requests:
            engine.add_request(request)
        engine.run()
        outputs.append(requests)
    for dense, compact in zip(*outputs, strict=True):
        assert compact.tokens == dense.tokens
        assert compact.exit_depths == dense.exit_depths
        assert_close(torch.stack(compact.logits), torch.stack(dense.logits), 1e-6)


RAGGED = [(case, [*SHORT][index % 3]) for index, case in enumerate(test_ragged.CASES[::2])]


@pytest.mark.parametrize(("case", "short"), RAGGED, ids=str)
def test_prompts_whose_positions_leave(case, short, monkeypatch):
    choose(monkeypatch, short)
    make = test_ragged.engine_of
    monkeypatch.setattr(test_ragged, "engine_of", lambda model, **cdb: make(model, kv_layout="compact", **cdb))
    test_ragged.test_the_engine_equals_the_oracle(case)


@pytest.mark.parametrize("short", ["long", "short"])
@pytest.mark.parametrize("prefill_exit", [False, True])
@pytest.mark.parametrize("name", ["ouro", "huginn", "dory"])
def test_a_request_goes_on(name, prefill_exit, short, monkeypatch):
    """What ran before runs again at the depths that it had, in memory that it had."""
    choose(monkeypatch, short)
    settings = {"exit_rule": "confidence", "exit_threshold": THRESHOLDS["confidence"][name]}
    settings |= {"prefill_exit": prefill_exit, "kv_layout": "compact"}
    rows, model = prompts(9, 1, 14), model_of(name)
    whole = test_ragged.run(test_ragged.engine_of(model, **settings), test_ragged.requests_of(rows, 9))
    engine, again = test_ragged.engine_of(model, prefill_chunk_size=6, **settings), test_ragged.requests_of(rows, 9)
    for one, other in zip(whole, again, strict=True):
        other.tokens, other.exit_depths = one.tokens[:5], one.exit_depths[:5]
        other.prompt_depths, other.logits = one.prompt_depths, one.logits[:5]
        engine.add_request(other)
    while any(other.end <= other.prefill_length for other in again):
        engine.step()
    running = {key: row.depth for key, row in engine.scheduler._unfinished.items()}
    entries = sum(running.values())
    for other in (other for other in again if other.key in running):
        prompt = other.prompt_depths or [adapter_for(model).full_depth] * other.prompt_length
        entries += sum(prompt) + sum(other.exit_depths[1:])
    assert engine.cache.arrays.entries == entries
    engine.run()
    for one, other in zip(whole, again, strict=True):
        assert (one.tokens, one.exit_depths) == (other.tokens, other.exit_depths)
        assert_close(torch.stack(one.logits), torch.stack(other.logits), 1e-6)


PREFIXES = [
    (case, [*SHORT][index % 3], ["lazy", "growing"][index // 2 % 2])
    for index, case in enumerate(test_prefix_reuse.CASES)
]


@pytest.mark.parametrize(("case", "short", "pool"), PREFIXES, ids=str)
def test_prompts_that_begin_alike(case, short, pool, monkeypatch):
    choose(monkeypatch, short, pool, BEGINNINGS)
    test_prefix_reuse.test_rows_equal_the_oracle_whatever_the_schedule({**case, **COMPACT})


@pytest.fixture
def compact_prefixes(monkeypatch):
    """The engines of the tests of prefix reuse are compact, and requests there long and short."""
    choose(monkeypatch, "mixed", sizes=BEGINNINGS)
    make = test_prefix_reuse.engine_of
    monkeypatch.setattr(
        test_prefix_reuse, "engine_of", lambda *arguments, **settings: make(*arguments, **settings, **COMPACT)
    )


@pytest.mark.usefixtures("compact_prefixes")
@pytest.mark.parametrize("launches", [3, 9])
def test_a_donor_that_is_cancelled(launches):
    test_prefix_reuse.test_a_donor_that_is_cancelled(launches, 64)


@pytest.mark.usefixtures("compact_prefixes")
def test_memory_bounds_what_is_kept_too():
    test_prefix_reuse.test_memory_bounds_what_is_kept_too()


@pytest.mark.usefixtures("compact_prefixes")
def test_after_an_error_of_the_model_nothing_is_copied(monkeypatch):
    test_prefix_reuse.test_after_an_error_of_the_model_nothing_is_copied(monkeypatch)


@pytest.mark.parametrize("lookahead", [0, 1])
def test_beginnings_of_different_full_depth(lookahead):
    """A request may be less deep than the engine, and fewer slots are copied then; equal to requests that share
    nothing in the dense layout."""
    model = model_of("ouro")
    rows, depths, outputs = test_prefix_reuse.begin_alike(3, 9, 5, 4, 7, 2), [2, 4, 2, 4, 2, 4], []
    for settings in ({"prefix_reuse": False}, COMPACT):
        engine, requests = test_prefix_reuse.engine_of(model, rows, 6, lookahead=lookahead, max_num_seqs=4, **settings)
        for request, depth in zip(requests, depths, strict=True):
            request.max_depth = depth
            engine.add_request(request)
        engine.run()
        outputs.append([(request.tokens, request.exit_depths) for request in requests])
    assert outputs[1] == outputs[0]
    assert engine.stats.reused_positions == 4 * test_prefix_reuse.SHARED


def entries_of(engine, key):
    """By array of a request the positions, and the entries `[layers, heads, positions, head dim]`; then those of the
    layers around the loop. What left early in the order of positions, with the number that left by each loop."""
    arrays, number = engine.cache.arrays, engine.cache._segments[key].core
    parts = []
    for column in range(arrays.loops + 1):
        first, used = int(arrays.first[number, column]), int(arrays.used[number, column])
        positions = torch.from_numpy(arrays.positions[first : first + used])
        order = positions.argsort() if column == arrays.loops else slice(None)
        parts.append((positions[order].tolist(), arrays.array(number, column)[:, :, order].clone()))
    parts[-1][0].extend(arrays.early[number].tolist())
    outer = engine.cache._entries("outer", engine.cache._segments[key])
    return parts, outer[:, 0].clone()


@pytest.mark.parametrize("short", SHORT)
@pytest.mark.parametrize("pool", ["lazy", "growing"])
@pytest.mark.parametrize(("name", "threshold"), [("ouro", 0.25), ("huginn", 0.1)])
def test_what_is_copied_is_what_would_have_been_written(name, threshold, pool, short, monkeypatch):
    """From a request that has generated meanwhile, then from what is kept: every entry is that of the request alone,
    and what is kept takes R entries a position and not one more."""
    choose(monkeypatch, short, pool, BEGINNINGS)
    model, shared = model_of(name), test_prefix_reuse.SHARED
    rows = test_prefix_reuse.begin_alike(3, 9, 5)
    settings = {"exit_threshold": threshold, "max_num_seqs": 2, "prefill_chunk_size": 32, **COMPACT}
    engine, requests = test_prefix_reuse.engine_of(model, rows, 9, **settings)

    def step_until(engine, request, tokens):
        while len(request.tokens) < tokens:
            engine.step()

    def check_against_the_request_alone(request):
        alone, (own,) = test_prefix_reuse.engine_of(model, rows[request.key : request.key + 1], 9, **settings)
        alone.add_request(own)
        step_until(alone, own, 5)
        assert (request.tokens, request.exit_depths) == (own.tokens, own.exit_depths)
        (core, outer), (expected, expected_outer) = entries_of(engine, request.key), entries_of(alone, 0)
        for (positions, entries), (others, expected_entries) in zip(core, expected, strict=True):
            assert positions == others
            assert_close(entries, expected_entries, 1e-9)
        assert_close(outer[:, : own.end - 1], expected_outer[:, : own.end - 1], 1e-9)

    engine.add_request(requests[0])
    step_until(engine, requests[0], 6)
    assert len(set(requests[0].exit_depths[1:])) > 1
    engine.add_request(requests[1])
    step_until(engine, requests[1], 5)
    assert engine.stats.reused_positions == shared
    assert len(set(requests[1].exit_depths[1:])) > 1
    check_against_the_request_alone(requests[1])
    (core, outer), slots = entries_of(engine, 1), engine.cache.policy.slots
    engine.run()

    (kept,) = engine.cache._segments
    kept_core, kept_outer = entries_of(engine, kept)
    for (_, entries), (positions, own) in zip(core[:slots], kept_core[:slots], strict=True):
        assert positions == list(range(shared))
        assert torch.equal(own, entries[:, :, :shared])
    assert torch.equal(kept_outer, outer[:, :shared])
    assert engine.cache.arrays.entries == slots * shared
    assert engine.cache.core_bytes + engine.cache.outer_bytes == engine._reuse.prefixes.kept_bytes
    engine.add_request(requests[2])
    step_until(engine, requests[2], 5)
    assert engine.stats.reused_positions == 2 * shared
    check_against_the_request_alone(requests[2])
    engine.run()
    engine.close()
    assert engine.cache.core_bytes == engine.cache.outer_bytes == engine.cache.arrays.held == 0


@pytest.mark.parametrize("pool", ["lazy", "growing"])
def test_nothing_stays_after_cancels_and_errors(pool, monkeypatch):
    choose(monkeypatch, "mixed", pool)
    settings = {"exit_rule": "confidence", "exit_threshold": 0.3, "max_num_seqs": 4}
    engine, requests = engine_of(model_of("ouro"), LENGTHS, 9, settings)

    def fails(row):
        if row.key == 1 and len(row.tokens) == 3:
            raise KeyError("no")
        return False

    for request in requests:
        request.stop = fails
    for _ in range(6):
        engine.step()
    engine.cancel(2)
    engine.cancel(5)
    for _ in range(9):
        engine.step()
    monkeypatch.setattr(engine._stages.core, "run", lambda *arguments: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        engine.run()
    arrays = engine.cache.arrays
    assert engine.cache.core_bytes == engine.cache.outer_bytes == arrays.held == 0
    assert arrays.pool._free == [(0, arrays.pool.tensor.shape[1])]
    assert {request.status for request in requests} <= {"failed", "cancelled"}


def test_a_compiled_loop(monkeypatch):
    """Its attention is an operator that is told of the cache aside."""
    from hf_cdb import core_loop

    monkeypatch.setattr(core_loop, "_graph", lambda captured: core_loop._loop)
    model, settings = ToyModel(), {"kv_layout": "compact", "compile": True}
    running, engine = run_toy(model, [toy_prompt(1, 3, 4), toy_prompt(2, 5)], 6, **settings)
    assert isinstance(engine.cache, CompactCache)
    for request in running:
        expected = predict(model.config, request.prompt_ids.tolist(), 6)
        assert request.tokens == expected.tokens
        assert_close(torch.stack(request.logits), torch.stack(expected.logits), 1e-4)


def test_what_is_refused():
    with pytest.raises(ValueError, match=r"kv_layout='compcat' is unknown; did you mean 'compact'\?.*compact, auto"):
        CDBConfig(kv_layout="compcat")
    with pytest.raises(ValueError, match=r"kv_layout=\['compact'\] is unknown"):
        CDBConfig(kv_layout=["compact"])
    adapter = adapter_for(model_of("huginn"))
    for policy in ("shared", "first_then_shared", "modular"):
        with pytest.raises(ValueError, match=f"kv_layout='compact' with kv_policy='{policy}'.*kv_layout='dense'"):
            CDBConfig(kv_layout="compact", kv_policy=policy).resolve(adapter)


def test_flash_is_refused(monkeypatch):
    monkeypatch.setattr("hf_cdb.stages.find_flash", lambda adapter, implementation: lambda *arguments: None)
    with pytest.raises(ValueError, match=r"kv_layout='compact' with attn_implementation='flash_attention_2'.*sdpa"):
        run_toy(ToyModel(), [toy_prompt(1, 3)], 2, kv_layout="compact")


def test_auto_is_compact_where_memory_is_bounded():
    model, rows = ToyModel(), [toy_prompt(1, 3, 4), toy_prompt(2, 5)]
    kinds = []
    for settings in ({}, {"max_kv_memory": 10**6}):
        running, engine = run_toy(model, rows, 6, kv_layout="auto", **settings)
        kinds.append(type(engine.cache))
        for request in running:
            assert request.tokens == predict(model.config, request.prompt_ids.tolist(), 6).tokens
    assert kinds == [DepthCache, CompactCache]


def test_dense_stays_the_default():
    _, engine = run_toy(ToyModel(), [toy_prompt(1, 3)], 2, max_kv_memory=10**6)
    assert not isinstance(engine.cache, CompactCache)
    assert type(engine.cache._pools["core"]) is Pool
