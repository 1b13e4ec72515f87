"""Prompts that begin alike compute that part once, and nothing else changes."""

import functools

import pytest
import torch

from hf_cdb import CDBConfig, CDBManager, RowsFailedError, enable_cdb
from hf_cdb.adapters import adapter_for
from hf_cdb.cache import DepthCache
from hf_cdb.engine import Engine
from hf_cdb.kv_policy import KVPolicy
from hf_cdb.prefix_reuse import PrefixReuse
from hf_cdb.prefixes import LEAST
from hf_cdb.reference import reference_generate
from hf_cdb.request import Request
from hf_cdb.sampling import Sampler

from .pairwise import pairwise
from .test_engine import model_of
from .tiny import assert_close, left_pad, prompts, random_ouro

EARLY = {"exit_rule": "confidence", "exit_threshold": 0.3}
SHARED = 80
NEW_TOKENS = 6


def begin_alike(*lengths, shared=SHARED):
    """Prompts that part right after `shared` tokens."""
    system, *rests = prompts(shared, *lengths)
    for index, rest in enumerate(rests):
        rest[0] = 1 + index % 49
    return [torch.cat((system, rest)) for rest in rests]


def generate(model, rows, **options):
    ids, mask = left_pad(rows)
    cdb = {**EARLY, **options.pop("cdb", {})}
    options = {"max_new_tokens": NEW_TOKENS, "do_sample": False, "output_logits": True, **options}
    return model.generate(ids, attention_mask=mask, return_dict_in_generate=True, cdb=cdb, **options)


@functools.cache
def expected_of(name, row):
    """The oracle's run of one of the prompts of the grid."""
    return reference_generate(model_of(name), grid_prompts()[row], NEW_TOKENS, **EARLY)


@functools.cache
def grid_prompts():
    rows = begin_alike(3, 1, 9, 30)
    other = prompts(40, seed=5)[0]
    return [*rows, rows[2], torch.cat((rows[3][:100], other)), other, rows[0][:SHARED]]


CASES = pairwise(
    {
        "model": ["ouro", "ouro-gqa", "huginn", "dory"],
        "max_num_seqs": [1, 2, 3, 64],
        "refill": [True, False],
        "min_coda_batch": [1, 3],
        "prefill_chunk_size": [None, 1, 7, SHARED],
        "max_prefill_tokens": [None, 8, 100],
        "max_kv_memory": [None, 150, 300],  # positions
    }
)


@pytest.mark.parametrize("case", CASES, ids=lambda case: "-".join(map(str, case.values())))
def test_rows_equal_the_oracle_whatever_the_schedule(case):
    case = dict(case)
    name = case.pop("model")
    model = model_of(name)
    if case["max_kv_memory"] is not None:
        adapter = adapter_for(model)
        engine = Engine(adapter, CDBConfig(**EARLY).resolve(adapter))
        case["max_kv_memory"] *= engine.cache.bytes_per_position()
    rows = grid_prompts()
    output = generate(model, rows, cdb=case)
    for index in range(len(rows)):
        expected = expected_of(name, index)
        length = output.sequences.shape[1] - NEW_TOKENS
        assert output.sequences[index, length:].tolist() == expected.tokens, f"tokens of row {index}"
        assert output.exit_depths[index].tolist() == expected.exit_depths, f"depths of row {index}"
        logits = torch.stack([step[index] for step in output.logits])
        assert_close(logits, expected.logits, 1e-6, f"logits of row {index}")
    stats = output.stats
    assert stats.prompt_positions + stats.reused_positions == sum(map(len, rows))
    # Each of the first five but the donor has what they share, and so has the one that stops where they part.
    if case["max_kv_memory"] is None:
        assert stats.reused_positions >= 4 * SHARED


@pytest.mark.parametrize("preemption", ["offload", "recompute"])
@pytest.mark.parametrize("name", ["ouro", "huginn"])
def test_rows_that_are_preempted_lend_nothing_and_may_borrow(name, preemption, monkeypatch):
    """Memory is so short that what is kept has to go, and rows that come back begin with what others computed."""
    monkeypatch.setattr("hf_cdb.cache.STEP", 2)
    model, rows, new = model_of(name), grid_prompts()[:5], 36
    position = Engine(adapter_for(model), CDBConfig(**EARLY).resolve(adapter_for(model))).cache.bytes_per_position()
    budget = 300 * position  # of about 640 that they need at the end
    settings = {"max_kv_memory": budget, "preemption": preemption, "prefill_chunk_size": 50}
    output = generate(model, rows, max_new_tokens=new, cdb=settings)
    stats = output.stats
    assert stats.pressure["preemptions"] > 0
    assert stats.reused_positions > 0
    assert stats.kv_bytes_peak <= budget
    again = stats.pressure["recomputed_positions"]
    assert stats.prompt_positions + stats.reused_positions == sum(map(len, rows)) + again
    for index, row in enumerate(rows):
        expected = reference_generate(model, row, new, **EARLY)
        assert output.sequences[index, -new:].tolist() == expected.tokens, f"tokens of row {index}"
        assert output.exit_depths[index].tolist() == expected.exit_depths, f"depths of row {index}"
        assert_close(torch.stack([step[index] for step in output.logits]), expected.logits, 1e-6)


@pytest.mark.parametrize("kv_layout", ["dense", "compact"])
@pytest.mark.parametrize("preemption", ["offload", "recompute"])
def test_what_is_kept_makes_room_for_rows_that_start_grow_and_come_back(preemption, kv_layout, monkeypatch):
    """After every launch rows and kept beginnings are within the budget, in requests that come and go in turn."""
    monkeypatch.setattr("hf_cdb.cache.STEP", 2)
    for module in ("prefixes", "prefix_reuse"):
        monkeypatch.setattr(f"hf_cdb.{module}.LEAST", 8)
    model = model_of("ouro")
    adapter = adapter_for(model)
    position = Engine(adapter, CDBConfig(**EARLY).resolve(adapter)).cache.bytes_per_position()
    events = {"preempted": 0, "kept": 0}
    for budget in (40, 41, 42, 47, 55):
        alike = begin_alike(1, 2, 3, shared=20)
        rows = [prompts(4)[0], alike[0], prompts(6, seed=7)[0], *alike[1:]]
        settings = {"max_kv_memory": budget * position, "preemption": preemption, "kv_layout": kv_layout}
        engine = Engine(adapter, CDBConfig(exit_rule="never", max_num_seqs=3, **settings).resolve(adapter))
        sampler = Sampler([[] for _ in rows], rows, do_sample=False)
        for key, (row, count) in enumerate(zip(rows, (30, 6, 25, 4, 4), strict=True)):
            engine.add_request(Request(key, count, sampler, prompt_ids=row, row=key))
        while (launch := engine.step()) is not None:
            assert engine.cache.core_bytes + engine.cache.outer_bytes <= budget * position
            kept = engine._reuse.prefixes.kept_bytes
            assert engine.scheduler._room.spent + kept <= budget * position
            events["preempted"] += len(launch.preempted)
            events["kept"] += kept > 0
    assert all(events.values()), events


@pytest.mark.parametrize("preemptions", [0, 1])
def test_a_prompt_that_runs_again_is_not_kept_before_it_is_through(preemptions):
    """A row that ends with its first token has run its prompt; one that was preempted and is cancelled may not have."""
    cache = DepthCache(adapter_for(model_of("ouro")), KVPolicy.create("last_exited", 4))
    reuse, (ended, waits) = PrefixReuse(cache, 10**9), begin_alike(1, 2)
    for key, ids in enumerate((ended, waits)):
        reuse.add(Request(key, 4, None, prompt_ids=ids, max_depth=4))
    cache.allocate(0, len(ended) + 3)
    assert reuse.prefixes.start(0) == 0
    request = Request(0, 4, None, prompt_ids=ended, max_depth=4, tokens=[5], exit_depths=[4], preemptions=preemptions)
    reuse.end(request)
    cache.free(0)
    assert list(cache._segments) == ([] if preemptions else ["prefix 1"])
    assert (reuse.prefixes.kept_bytes > 0) == (not preemptions)


@pytest.mark.parametrize("option", [torch.zeros(2), [1], {"a": 1}])
def test_start_options_that_their_texts_do_not_tell_apart_share_nothing(option):
    cache = DepthCache(adapter_for(model_of("ouro")), KVPolicy.create("last_exited", 4))
    reuse = PrefixReuse(cache, 10**9)
    for key, ids in enumerate(begin_alike(1, 2)):
        reuse.add(Request(key, 4, None, prompt_ids=ids, max_depth=4, start_options={"own": option}))
    assert reuse.prefixes.start(0) == reuse.prefixes.start(1) == 0


@pytest.mark.parametrize("lookahead", [0, 1])
@pytest.mark.parametrize("name", ["ouro", "huginn"])
def test_lookahead_and_sampling(name, lookahead):
    rows = begin_alike(3, 9, 1, 5)
    settings = {"lookahead": lookahead, "seeds": [5, 6, 7, 8]}
    on, off = (
        generate(model_of(name), rows, do_sample=True, cdb={**settings, "prefix_reuse": reuse})
        for reuse in (True, False)
    )
    assert on.stats.reused_positions == 3 * SHARED
    assert torch.equal(on.sequences, off.sequences)
    assert torch.equal(on.exit_depths, off.exit_depths)


def test_a_long_system_prompt_costs_one_prefill():
    """64 prompts that share their first 1,000 tokens."""
    model = enable_cdb(random_ouro(max_position_embeddings=2048).double())
    model.generation_config.update(eos_token_id=None, bos_token_id=None, pad_token_id=0)
    rows = begin_alike(*[1 + index % 7 for index in range(64)], shared=1000)
    on, off = (
        generate(model, rows, max_new_tokens=3, output_logits=False, cdb={"prefix_reuse": reuse})
        for reuse in (True, False)
    )
    assert on.stats.prompt_positions == 1000 + sum(len(row) - 1000 for row in rows)
    assert on.stats.reused_positions == 63 * 1000
    assert off.stats.prompt_positions == sum(map(len, rows))
    assert torch.equal(on.sequences, off.sequences)
    assert torch.equal(on.exit_depths, off.exit_depths)
    # The donor's prompt, those of the others, and then all decode.
    assert on.stats.launches["loop"] <= off.stats.launches["loop"] + model.config.total_ut_steps


@pytest.mark.parametrize("length", [LEAST - 1, LEAST, LEAST + 1, 2 * LEAST])
@pytest.mark.parametrize("new_tokens", [1, 2])
def test_the_same_prompt_again(length, new_tokens):
    """I-02: lengths about the least that is shared, and rows that end with the prompt."""
    model, rows = model_of("huginn"), prompts(length) * 3
    for width in (1, 64):
        output = generate(model, rows, max_new_tokens=new_tokens, cdb={"max_num_seqs": width})
        assert output.stats.reused_positions == (2 * (length - 1) if length > LEAST else 0)
        expected = reference_generate(model, rows[0], new_tokens, **EARLY)
        assert output.sequences[:, length:].tolist() == [expected.tokens] * 3


def test_return_sequences_share_their_prompt():
    model, rows = model_of("ouro"), prompts(90, 70)
    options = {"num_return_sequences": 3, "do_sample": True}
    on, off = (
        generate(model, rows, cdb={"prefix_reuse": reuse, "seeds": [1, 2]}, **options) for reuse in (True, False)
    )
    assert on.stats.reused_positions == 2 * (89 + 69)
    assert torch.equal(on.sequences, off.sequences)


def test_start_options_that_differ_share_nothing():
    model, rows = model_of("huginn"), begin_alike(3, 4, 5)
    options = {"init_scale": 1.0, "init_seed": [1, 2, 1]}
    on, off = (generate(model, rows, cdb={"prefix_reuse": reuse}, **options) for reuse in (True, False))
    assert on.stats.reused_positions == SHARED  # of the third, whose seed is that of the first
    assert torch.equal(on.sequences, off.sequences)
    assert_close(torch.stack(on.logits), torch.stack(off.logits), 1e-6)


def test_prompts_of_embeddings_share_nothing():
    model, (row,) = model_of("ouro"), prompts(90)
    embeds = model.get_input_embeddings()(torch.stack((row, row)))
    output = model.generate(
        inputs_embeds=embeds, max_new_tokens=3, do_sample=False, return_dict_in_generate=True, cdb=EARLY
    )
    assert (output.stats.prompt_positions, output.stats.reused_positions) == (180, 0)


@pytest.mark.parametrize("policy", ["shared", "first_then_shared", "modular"])
def test_sharing_policies_reuse_nothing(policy):
    model, rows = model_of("huginn"), begin_alike(3, 4)
    assert generate(model, rows, cdb={"kv_policy": policy}).stats.reused_positions == 0
    with pytest.raises(ValueError, match=rf"prefix_reuse=True with kv_policy='{policy}'"):
        generate(model, rows, cdb={"kv_policy": policy, "prefix_reuse": True})


def test_other_values_are_refused():
    with pytest.raises(ValueError, match="prefix_reuse='yes'"):
        CDBConfig(prefix_reuse="yes")


def engine_of(model, rows, new_tokens=4, **settings):
    adapter = adapter_for(model)
    engine = Engine(adapter, CDBConfig(**{**EARLY, **settings}).resolve(adapter))
    sampler = Sampler([()] * len(rows), rows, do_sample=False)
    requests = [
        Request(key=row, row=row, max_new_tokens=new_tokens, sampler=sampler, prompt_ids=prompt)
        for row, prompt in enumerate(rows)
    ]
    return engine, requests


def check(model, requests, new_tokens=4):
    for request in requests:
        expected = reference_generate(model, request.prompt_ids, new_tokens, **EARLY)
        assert (request.status, request.tokens) == ("finished", expected.tokens)
        assert request.exit_depths == expected.exit_depths


@pytest.mark.parametrize("launches", [1, 3, 6, 9])
@pytest.mark.parametrize("width", [2, 64])
def test_a_donor_that_is_cancelled(launches, width):
    """In the middle of its prompt, and after it."""
    model = model_of("ouro")
    engine, requests = engine_of(model, begin_alike(3, 4, 5, 6), max_num_seqs=width)
    for request in requests:
        engine.add_request(request)
    for _ in range(launches):
        engine.step()
    engine.cancel(0)
    engine.run()
    assert requests[0].status == "cancelled"
    check(model, requests[1:])
    assert engine.stats.reused_positions >= 2 * SHARED
    engine.close()
    assert engine.cache.core_bytes == engine.cache.outer_bytes == 0


@pytest.mark.parametrize("width", [1, 64])
def test_a_donor_that_fails(width):
    """Its processor raises at its first token; the others go on, from what it had computed or without."""

    class Raising:
        def __call__(self, input_ids, scores):
            if input_ids.shape[1] == len(rows[0]) and torch.equal(input_ids[0], rows[0]):
                raise RuntimeError("of the first row")
            return scores

    model, rows = model_of("ouro"), begin_alike(5, 5, 5)
    with pytest.raises(RowsFailedError, match="of the first row") as failed:
        generate(model, rows, logits_processor=[Raising()], cdb={"max_num_seqs": width})
    whole = generate(model, rows, cdb={"prefix_reuse": False})
    assert torch.equal(failed.value.output.sequences[1:], whole.sequences[1:])


def test_after_an_error_of_the_model_nothing_is_copied(monkeypatch):
    model = model_of("ouro")
    engine, requests = engine_of(model, begin_alike(3, 4, 5, 6), max_num_seqs=1)
    for request in requests[:3]:
        engine.add_request(request)
    while not requests[2].tokens:
        engine.step()
    assert engine.stats.reused_positions == 2 * SHARED
    with monkeypatch.context() as broken:
        broken.setattr(engine._stages, "loop", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            engine.run()
    assert engine.cache.core_bytes == 0
    engine.add_request(requests[3])
    engine.run()
    check(model, requests[3:])
    assert engine.stats.reused_positions == 2 * SHARED


def test_memory_bounds_what_is_kept_too():
    """Requests one after the other: never more bytes than the budget, and a request that needs it has it."""
    model = model_of("ouro")
    rows = begin_alike(3, 4, 5, 6)
    rows[3:3] = prompts(140, seed=9)
    per_position = engine_of(model, rows)[0].cache.bytes_per_position()
    budget = 170 * per_position
    engine, requests = engine_of(model, rows, max_kv_memory=budget)
    for request in requests:
        engine.add_request(request)
    while engine.step() is not None:
        assert engine.cache.core_bytes + engine.cache.outer_bytes <= budget
    check(model, requests)
    # The second and the third copy; the fourth needs the memory of what is kept, and the fifth computes again.
    assert engine.stats.reused_positions == 2 * SHARED


def test_a_manager_keeps_what_was_asked_for_twice():
    model = model_of("ouro")
    rows = begin_alike(3, 4, 5, 6, 7)
    with CDBManager(model, cdb=EARLY) as manager:

        def ask(row):
            name = manager.add_request(rows[row].tolist(), max_new_tokens=4, do_sample=False)
            output = manager.get_result(name)
            assert output.generated_tokens == reference_generate(model, rows[row], 4, **EARLY).tokens
            return manager.stats.reused_positions

        assert [ask(row) for row in range(4)] == [0, 0, SHARED, 2 * SHARED]
        with manager.pause():
            pass  # weights may have been changed
        assert [ask(row) for row in (4, 0)] == [2 * SHARED, 3 * SHARED]
