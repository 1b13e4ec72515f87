"""Too little memory for the rows in flight: they wait, are preempted and come back, and nothing else changes."""

import itertools

import pytest
import torch

from hf_cdb import CDBConfig, CDBManager
from hf_cdb.adapters import adapter_for
from hf_cdb.cache import DepthCache
from hf_cdb.engine import Engine
from hf_cdb.kv_policy import KVPolicy
from hf_cdb.noise import Noise
from hf_cdb.reference import reference_generate
from hf_cdb.request import Request
from hf_cdb.sampling import Sampler

from .pairwise import pairwise
from .requests import alone, assert_clean, last, told
from .test_engine import THRESHOLDS, model_of
from .tiny import assert_close, prompts

LENGTHS = (5, 1, 8, 3, 2, 6, 4)
NEW = (16, 14, 9, 12, 12, 1, 17)


@pytest.fixture(autouse=True)
def small_steps(monkeypatch):
    """Rows of a few positions grow too."""
    monkeypatch.setattr("hf_cdb.cache.STEP", 2)


def engine_of(model, share=None, new=NEW, lengths=LENGTHS, do_sample=False, **settings):
    """An engine with a request for each of `lengths`, and a budget that is a share of what all of them need."""
    adapter = adapter_for(model)
    rows = prompts(*lengths)
    sampler = Sampler(
        [[] for _ in rows],
        rows,
        do_sample,
        Noise(None, adapter.vocab_size, adapter.device) if do_sample else None,
        keep_logits=True,
    )
    if share is not None:
        policy = CDBConfig(kv_policy=settings.get("kv_policy", "auto")).resolve(adapter)
        slots = KVPolicy.create(policy.kv_policy, policy.max_depth)
        needs = [len(row) + count - 1 for row, count in zip(rows, new, strict=True)]
        positions = max(*needs, int(share * sum(needs)))
        settings["max_kv_memory"] = positions * DepthCache(adapter, slots).bytes_per_position()
    engine = Engine(adapter, CDBConfig(**settings).resolve(adapter))
    requests = [
        Request(key, count, sampler, prompt_ids=row, row=key, seed=100 + key)
        for key, (row, count) in enumerate(zip(rows, new, strict=True))
    ]
    for request in requests:
        engine.add_request(request)
    return engine, requests


def run(model, share=None, **options):
    engine, requests = engine_of(model, share, **options)
    engine.run()
    return engine, requests


def assert_equal(got, expected, tolerance=1e-4):
    for one, other in zip(got, expected, strict=True):
        assert (one.tokens, one.exit_depths) == (other.tokens, other.exit_depths)
        assert_close(torch.stack(one.logits), torch.stack(other.logits), tolerance)


def assert_empty(engine):
    """No request holds anything, in the pool, on the host or in a line."""
    assert not engine.cache._segments
    assert not engine._requests
    assert len(engine.scheduler) == engine.scheduler._room.spent == 0
    assert not engine.scheduler._room.growing
    assert len(engine.scheduler._free_places) == engine.config.max_num_seqs


CASES = pairwise(
    {
        "model": ["ouro", "ouro-gqa", "huginn", "dory"],
        "exit_rule": [*THRESHOLDS, "never", "replay"],
        "kv": ["last_exited", "compact", "shared", "first_then_shared", "modular"],
        "preemption": ["offload", "recompute"],
        "lookahead": [0, 1],
        "refill": [True, False],
        "prefill_chunk_size": [None, 3],
        "max_prefill_tokens": [None, 4],
        "min_coda_batch": [1, 3],
        "max_num_seqs": [3, 64],
        "do_sample": [False, True],
        "short": [True, False],
    }
)


@pytest.mark.parametrize("case", CASES, ids=lambda case: "-".join(map(str, case.values())))
def test_rows_under_pressure_equal_the_oracle(case, monkeypatch):
    case = dict(case)
    name, short, rule, kv = case.pop("model"), case.pop("short"), case["exit_rule"], case.pop("kv")
    case["kv_policy"], case["kv_layout"] = ("last_exited", "compact") if kv == "compact" else (kv, "dense")
    if rule == "gate" and "ouro" not in name:
        rule = case["exit_rule"] = "confidence"
    model = model_of(name)
    adapter = adapter_for(model)
    if not short:  # rows become long ones while they grow
        monkeypatch.setattr("hf_cdb.places.SHORT_BYTES", 12 * 2 * adapter.kv_heads * adapter.head_dim * 8)
        monkeypatch.setattr("hf_cdb.cache.SHORT_BYTES", 12 * 2 * adapter.kv_heads * adapter.head_dim * 8)
    if rule in THRESHOLDS:
        case["exit_threshold"] = THRESHOLDS[rule][name]
    if rule == "replay":
        generator = torch.Generator().manual_seed(4)
        least = 1 + case["lookahead"]
        depths = torch.randint(least, adapter.full_depth + 1, (len(NEW), max(NEW)), generator=generator)
        depths[:, 0] = adapter.full_depth
        case["exit_depths"] = depths.tolist()
    engine, requests = run(model, 0.3, **case)
    assert engine.stats.pressure["preemptions"] == sum(request.preemptions for request in requests)
    if case["max_num_seqs"] == 64 and case["refill"]:
        assert engine.stats.pressure["preemptions"] > 0
    assert engine.stats.kv_bytes_peak <= engine.scheduler.budget
    assert engine.stats.kv_bytes_reserved >= engine.stats.kv_bytes_peak
    if kv != "compact":  # which takes whole pages
        assert engine.cache.reserved_bytes <= engine.scheduler.budget
    assert_empty(engine)
    assert engine.stats.tokens == sum(NEW)
    oracle = {key: case[key] for key in ("exit_rule", "kv_policy", "lookahead", "exit_threshold") if key in case}
    for key in (0, 1, 4, 6):
        if case["do_sample"]:
            noise = Noise(None, adapter.vocab_size, adapter.device)
            oracle["choose"] = lambda index, logits, key=key, noise=noise: int(
                (logits.float().softmax(-1) / noise.line(0, 100 + key, index)).argmax()
            )
        if rule == "replay":
            oracle["exit_depths"] = case["exit_depths"][key]
        expected = reference_generate(model, prompts(*LENGTHS)[key], NEW[key], **oracle)
        assert (requests[key].tokens, requests[key].exit_depths) == (expected.tokens, expected.exit_depths)
        assert_close(torch.stack(requests[key].logits), expected.logits, 1e-4)


@pytest.mark.parametrize("kv", ["last_exited", "compact", "shared", "first_then_shared", "modular"])
@pytest.mark.parametrize(
    ("name", "exit_rule"),
    [("ouro", "gate"), *itertools.product(("ouro", "huginn"), [*sorted({*THRESHOLDS} - {"gate"}), "never", "replay"])],
)
def test_what_is_recomputed_equals_the_original_run_under_every_rule_and_policy(name, exit_rule, kv):
    lengths, new = (3, 6, 2), (10, 12, 14)
    settings = {"exit_rule": exit_rule, "new": new, "lengths": lengths}
    settings["kv_policy"], settings["kv_layout"] = ("last_exited", "compact") if kv == "compact" else (kv, "dense")
    if exit_rule in THRESHOLDS:
        settings["exit_threshold"] = THRESHOLDS[exit_rule][name]
    if exit_rule == "replay":
        full = adapter_for(model_of(name)).full_depth
        settings["exit_depths"] = [[full, *([1, 2, full, 3, 2] * 3)[start:][:13]] for start in range(3)]
    _, expected = run(model_of(name), **settings)
    engine, requests = run(model_of(name), 0.4, preemption="recompute", **settings)
    assert engine.stats.pressure["recomputed_positions"] > 0
    assert_equal(requests, expected, 1e-9)


@pytest.mark.parametrize("preemption", ["offload", "recompute"])
def test_counts_of_what_the_requests_did_are_those_without_pressure(preemption):
    model = model_of("ouro")
    free, expected = run(model, exit_threshold=0.6)
    tight, requests = run(model, 0.3, exit_threshold=0.6, preemption=preemption)
    assert_equal(requests, expected)
    assert tight.stats.depths == free.stats.depths
    assert not free.stats.pressure
    pressure = tight.stats.pressure
    again = tight.stats.rows["loop"] - free.stats.rows["loop"]
    if preemption == "offload":
        assert again == 0
        assert pressure["offloaded_bytes"] > 0
        assert not pressure["recomputed_positions"]
    else:
        assert again > 0
        assert pressure["recomputed_positions"] > 0
        assert not pressure["offloaded_bytes"]
    assert tight.stats.to_dict()["pressure"] == dict(pressure)


def test_recomputed_tokens_are_neither_chosen_nor_told_nor_judged_again():
    model = model_of("ouro")
    engine, requests = engine_of(model, 0.3, exit_threshold=0.6, preemption="recompute")
    asked, chosen = [], []
    begin, choose = engine._rules.begin, requests[0].sampler.choose
    engine._rules.begin = lambda rows, *rest: asked.extend((r.key, len(r.tokens)) for r in rows) or begin(rows, *rest)
    requests[0].sampler.choose = lambda rows, logits: (
        chosen.extend((r.key, len(r.tokens)) for r in rows) or choose(rows, logits)
    )
    engine.run()
    assert engine.stats.pressure["recomputed_positions"] > 0
    assert sorted(chosen) == [(key, index) for key, count in enumerate(NEW) for index in range(count)]
    assert sorted(asked) == [(key, index) for key, count in enumerate(NEW) for index in range(1, count)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_an_offloaded_row_comes_back_bit_by_bit(dtype):
    """The pool is scribbled over meanwhile."""
    model = model_of("huginn").to(dtype)
    try:
        adapter = adapter_for(model)
        cache = DepthCache(adapter, KVPolicy.create("last_exited", 6))
        cache.allocate(0, 7)
        cache.allocate(1, 9)
        for pool in cache._pools.values():
            pool.tensor.normal_()
        cache._written[cache._segments[1].core : cache._segments[1].core + 9] = [5, 0, 1, 2, 3, 4, 5, 0, 1]
        before = [cache._entries(kind, cache._segments[1])[:, :, :8].clone() for kind in ("core", "outer")]
        saved = cache.save(1, 8).to_host()
        cache.free(1)
        for pool in cache._pools.values():
            pool.tensor.fill_(float("nan"))
        cache.allocate(2, 5)
        cache.allocate(1, 12)
        cache.restore(1, saved)
        for kind, entries in zip(("core", "outer"), before, strict=True):
            assert torch.equal(cache._entries(kind, cache._segments[1])[:, :, :8], entries)
        first = cache._segments[1].core
        assert cache._written[first : first + 12].tolist() == [5, 0, 1, 2, 3, 4, 5, 0, 5, 5, 5, 5]
    finally:
        model.to(torch.float64)


def test_a_row_that_becomes_long_has_an_entry_in_every_slot():
    adapter = adapter_for(model_of("ouro"))
    cache = DepthCache(adapter, KVPolicy.create("last_exited", 4))
    cache.allocate(0, 3)
    segment = cache._segments[0]
    entries = cache._entries("core", segment)
    entries.copy_(torch.arange(entries.numel()).view(entries.shape))
    cache._written[segment.core : segment.core + 3] = [3, 0, 2]
    expected = entries.clone()
    expected[:, 1:, 1] = expected[:, :1, 1]  # the second position left after loop 1
    expected[:, 3:, 2] = expected[:, 2:3, 2]  # the third after loop 3
    saved = cache.save(0, 3).filled()
    assert torch.equal(saved.core, expected)
    assert saved.written.tolist() == [3, 3, 3]


def test_gaps_are_closed_before_the_pool_grows_beyond_its_bound():
    adapter = adapter_for(model_of("huginn"))
    cache = DepthCache(adapter, KVPolicy.create("last_exited", 6))
    cache.bound_memory(20 * cache.bytes_per_position())
    for key in range(5):
        cache.allocate(key, 4)
        for kind in ("core", "outer"):
            cache._entries(kind, cache._segments[key]).fill_(key)
        first = cache._segments[key].core
        cache._written[first : first + 4] = [key % 6] * 4
    for key in (0, 2):
        cache.free(key)
    cache.allocate(9, 8)  # free are twice 4, in two pieces
    assert cache.reserved_bytes <= 20 * cache.bytes_per_position()
    for key in (1, 3, 4):
        segment = cache._segments[key]
        assert all((cache._entries(kind, segment) == key).all() for kind in ("core", "outer"))
        assert (cache._written[segment.core : segment.core + 4] == key).all()


def test_memory_that_runs_out_between_the_pools_is_given_back():
    adapter = adapter_for(model_of("huginn"))
    cache = DepthCache(adapter, KVPolicy.create("last_exited", 6))

    def fail(rows):
        raise MemoryError

    cache._pools["outer"].allocate = fail
    with pytest.raises(MemoryError):
        cache.allocate(0, 7)
    (free,) = cache._pools["core"]._free
    assert free == (0, cache._pools["core"].tensor.shape[1])
    assert not cache._segments


@pytest.mark.parametrize("kv_policy", ["last_exited", "shared"])
@pytest.mark.parametrize(
    ("preemption", "moment"),
    [("offload", "waiting"), ("recompute", "waiting"), ("recompute", "prompt"), ("recompute", "token")],
)
def test_a_cancel_of_a_row_that_was_preempted_gives_everything_back(preemption, moment, kv_policy):
    """While it waits, and while its prompt, or its tokens one by one, run again."""
    settings = {"exit_threshold": 0.6, "kv_policy": kv_policy}
    model = model_of("ouro")
    _, expected = run(model, **settings)
    engine, requests = engine_of(model, 0.3, preemption=preemption, **settings)

    def is_there(request):
        if not request.preemptions or request.status != ("waiting" if moment == "waiting" else "running"):
            return False
        if moment == "waiting":
            return True
        return request.start == 0 if moment == "prompt" else 0 < request.start < request.length - 1

    cancelled = None
    while engine.step() is not None:
        there = [request for request in requests if is_there(request)]
        if cancelled is None and there:
            cancelled = there[0]
            engine.cancel(cancelled.key)
            assert cancelled.saved is None
    if moment == "token" and kv_policy == "last_exited":
        assert cancelled is None  # they run in one pass
        return
    assert cancelled is not None
    assert cancelled.status == "cancelled"
    assert_empty(engine)
    others = [key for key in range(len(NEW)) if requests[key] is not cancelled]
    assert_equal([requests[key] for key in others], [expected[key] for key in others])
    assert cancelled.tokens == expected[cancelled.key].tokens[: len(cancelled.tokens)]


@pytest.mark.parametrize("stage", ["prelude", "loop", "coda"])
@pytest.mark.parametrize("preemption", ["offload", "recompute"])
def test_a_fault_while_rows_are_preempted_fails_all_and_leaves_nothing(preemption, stage):
    model = model_of("ouro")
    engine, requests = engine_of(model, 0.3, exit_threshold=0.6, preemption=preemption)
    while not any(request.preemptions and request.status == "waiting" for request in requests):
        engine.step()
    plain = getattr(engine.adapter, stage)

    def fail(*args, **kwargs):
        raise ZeroDivisionError

    setattr(engine.adapter, stage, fail)
    with pytest.raises(ZeroDivisionError):
        engine.run()
    setattr(engine.adapter, stage, plain)
    assert all(request.ended for request in requests)
    assert not any(request.saved for request in requests)
    assert_empty(engine)
    _, expected = run(model, exit_threshold=0.6)
    more = Request(50, NEW[1], requests[1].sampler, prompt_ids=prompts(*LENGTHS)[1], row=1, seed=101)
    engine.add_request(more)
    engine.run()
    assert more.tokens == expected[1].tokens


def test_processors_that_raise_fail_their_row_alone_under_pressure():
    model = model_of("ouro")
    _, expected = run(model, exit_threshold=0.6)
    engine, requests = engine_of(model, 0.3, exit_threshold=0.6, preemption="recompute")

    def stop(request):
        if request.key == 1 and len(request.tokens) == 9:
            raise ZeroDivisionError
        return False

    for request in requests:
        request.stop = stop
    engine.run()
    assert isinstance(requests[1].error, ZeroDivisionError)
    assert requests[1].status == "failed"
    assert requests[1].tokens == expected[1].tokens[:9]
    others = [key for key in range(len(NEW)) if key != 1]
    assert_equal([requests[key] for key in others], [expected[key] for key in others])
    assert_empty(engine)


def test_what_can_never_fit_is_refused_at_once_and_the_others_finish():
    """Report I-01: a cache of 64 positions, a prompt of 100; and one that fits, but not with its tokens."""
    model = model_of("ouro")
    position = DepthCache(adapter_for(model), KVPolicy.create("last_exited", 4)).bytes_per_position()
    settings = {"exit_threshold": 0.6, "max_kv_memory": 64 * position}
    with CDBManager(model, cdb=settings) as manager:
        for prompt, new in ((100, 4), (60, 6)):
            with pytest.raises(ValueError, match=rf"{64 * position} bytes.*needs {(prompt + new - 1) * position}"):
                manager.add_request([3] * prompt, max_new_tokens=new)
        ids = prompts(8)[0].tolist()
        name = manager.add_request(ids, max_new_tokens=30)
        assert told(last(manager, name)) == alone(model, ids, {"exit_threshold": 0.6}, max_new_tokens=30)[0]
        border = manager.add_request([3] * 60, max_new_tokens=5)  # 64 positions, all there are
        assert len(last(manager, border).generated_tokens) == 5
    assert_clean(manager)


def test_a_budget_beyond_the_machine_leaves_its_memory_the_bound(monkeypatch):
    monkeypatch.setattr("hf_cdb.engine.whole_memory", lambda device: 10**9)
    adapter = adapter_for(model_of("ouro"))
    engine = Engine(adapter, CDBConfig(max_kv_memory=10**16).resolve(adapter))
    with pytest.raises(ValueError, match=r"^the memory is 1000000000 bytes, but a prompt of 3 with 1000000 new"):
        engine.check(Request(0, 10**6, None, prompt_ids=prompts(3)[0]))
    engine = Engine(adapter, CDBConfig(max_kv_memory=10**8).resolve(adapter))
    with pytest.raises(ValueError, match=r"^max_kv_memory=100000000 is 100000000 bytes"):
        engine.check(Request(0, 10**6, None, prompt_ids=prompts(3)[0]))


@pytest.mark.parametrize("preemption", ["offload", "recompute"])
def test_lengths_around_a_step_of_growth(preemption, monkeypatch):
    """Report I-02: prompts of a step, one less and one more, outputs that end on its border, the same prompt twice."""
    monkeypatch.setattr("hf_cdb.cache.STEP", 8)
    model = model_of("ouro")
    ids = [prompts(length)[0] for length in (7, 8, 9, 16, 8, 8)]
    counts = [2, 9, 8, 9, 17, 10]
    rows = [alone(model, row, max_new_tokens=count)[0] for row, count in zip(ids, counts, strict=True)]
    position = DepthCache(adapter_for(model), KVPolicy.create("last_exited", 4)).bytes_per_position()
    for positions in (24, 33, 40, 41, 64):
        settings = {"exit_threshold": 0.6, "max_kv_memory": positions * position, "preemption": preemption}
        with CDBManager(model, cdb=settings) as manager:
            names = [
                manager.add_request(row.tolist(), max_new_tokens=count) for row, count in zip(ids, counts, strict=True)
            ]
            assert [told(last(manager, name)) for name in names] == rows
        assert_clean(manager)


@pytest.mark.parametrize("preemption", ["offload", "recompute"])
def test_a_manager_streams_every_token_once_under_pressure(preemption):
    model = model_of("huginn")
    position = DepthCache(adapter_for(model), KVPolicy.create("last_exited", 6)).bytes_per_position()
    cdb = {"exit_rule": "latent-diff", "exit_threshold": 0.6}
    ids = prompts(*LENGTHS)
    expected = [alone(model, row, cdb, max_new_tokens=count)[0] for row, count in zip(ids, NEW, strict=True)]
    with CDBManager(model, cdb={**cdb, "max_kv_memory": 26 * position, "preemption": preemption}) as manager:
        names = [
            manager.add_request(row.tolist(), max_new_tokens=count, streaming=True)
            for row, count in zip(ids, NEW, strict=True)
        ]
        for name, whole in zip(names, expected, strict=True):
            outputs = list(manager.request_id_iter(name))
            lengths = [len(output.generated_tokens) for output in outputs]
            assert lengths == sorted(lengths)
            assert told(outputs[-1]) == whole
        assert manager._engine.stats.pressure["preemptions"] > 0
    assert_clean(manager)
