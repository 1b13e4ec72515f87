"""The manager: requests come and go at any time, each with options of its own, and each gives what it gives alone."""

import asyncio
import functools
import gc
import queue
import threading
import time
import weakref

import pytest
import torch
from transformers import GenerationConfig
from transformers.generation.configuration_utils import ContinuousBatchingConfig
from transformers.generation.continuous_batching.requests import RequestStatus
from transformers.utils import logging

from hf_cdb import CDBConfig
from hf_cdb.bench.models import load_tokenizer
from hf_cdb.manager import CDBManager

from .requests import GATE, PATIENCE, Held, alone, assert_clean, failing, last, told
from .tiny import prompts, random_huginn, random_ouro

PROMPTS = [prompt.tolist() for prompt in prompts(3, 9, 6, 4, 12, 5)]


class EveryThird:
    """A processor with a state."""

    def __init__(self):
        self.calls = 0

    def __call__(self, ids, scores):
        self.calls += 1
        return scores if self.calls % 3 else scores.masked_fill(torch.arange(50) % 2 == 1, -torch.inf)


# What a request may bring, made anew for every run, as `add_request` and as `generate` take it.
OPTIONS = {
    "greedy": lambda: ({}, {}, {}),
    "sampled": lambda: ({"do_sample": True, "seed": 11}, {"seeds": [11]}, {"do_sample": True}),
    "warm": lambda: (
        {"do_sample": True, "seed": 5, "temperature": 1.7, "top_k": 9},
        {"seeds": [5]},
        {"do_sample": True, "temperature": 1.7, "top_k": 9},
    ),
    "shallow": lambda: ({"exit_threshold": 0.1}, {"exit_threshold": 0.1}, {}),
    "deep": lambda: ({"exit_rule": "never"}, {"exit_rule": "never", "exit_threshold": None}, {}),
    "confidence": lambda: (
        {"exit_rule": "confidence", "exit_threshold": 0.2},
        {"exit_rule": "confidence", "exit_threshold": 0.2},
        {},
    ),
    "bounded": lambda: ({"min_depth": 2, "max_depth": 3}, {"min_depth": 2, "max_depth": 3}, {}),
    "replay": lambda: (
        {"exit_depths": [4, 1, 3, 2, 4, 1, 1, 2]},
        {"exit_rule": "replay", "exit_threshold": None, "exit_depths": [[4, 1, 3, 2, 4, 1, 1, 2]]},
        {},
    ),
    "penalty": lambda: ({"repetition_penalty": 3.0}, {}, {"repetition_penalty": 3.0}),
    "stateful": lambda: ({"logits_processor": [EveryThird()]}, {}, {"logits_processor": [EveryThird()]}),
    "ends": lambda: ({"eos_token_id": list(range(1, 50, 6))}, {}, {"eos_token_id": list(range(1, 50, 6))}),
    "short": lambda: ({"max_new_tokens": 2}, {}, {"max_new_tokens": 2}),
}


@functools.cache
def shared_model():
    model = random_ouro(vocab_size=50, eos_token_id=None, bos_token_id=None, pad_token_id=0).double()
    model.generation_config.max_new_tokens = 8
    return model


@pytest.fixture
def manager():
    """One that runs, and must hold nothing at the end."""
    with CDBManager(shared_model(), cdb=GATE) as running:
        yield running
    assert_clean(running)
    assert running._engine.cache.reserved_bytes == 0


@functools.cache
def alone_with(kind, prompt):
    _, settings, options = OPTIONS[kind]()
    return alone(shared_model(), PROMPTS[prompt], {**GATE, **settings}, **options)[0]


@pytest.mark.parametrize("settings", [{}, {"max_num_seqs": 3}, {"lookahead": 1}, {"prefill_chunk_size": 2}], ids=str)
def test_requests_with_different_options_give_what_they_give_alone(settings):
    with CDBManager(shared_model(), cdb={**GATE, **settings}) as manager:
        names = {}
        for index, kind in enumerate(OPTIONS):
            if kind == "replay" and settings.get("lookahead"):
                continue  # depth 1 cannot be replayed then
            prompt = index % len(PROMPTS)
            names[manager.add_request(PROMPTS[prompt], **OPTIONS[kind]()[0])] = kind, prompt
        for name, (kind, prompt) in names.items():
            _, own, options = OPTIONS[kind]()
            wanted = alone(shared_model(), PROMPTS[prompt], {**GATE, **settings, **own}, **options)[0]
            assert told(last(manager, name)) == wanted, kind
    assert_clean(manager)


def test_requests_that_come_later_join_those_that_run(manager):
    first = manager.add_request(PROMPTS[0], max_new_tokens=40, streaming=True)
    output = manager.get_result(first, timeout=PATIENCE)  # it runs
    late = [manager.add_request(PROMPTS[1], **OPTIONS["warm"]()[0]) for _ in range(2)]
    assert not output.is_finished()
    for name in late:
        assert told(last(manager, name)) == alone_with("warm", 1)
    assert told(last(manager, first)) == alone(shared_model(), PROMPTS[0], max_new_tokens=40)[0]


def test_return_sequences_are_children(manager):
    options = {"num_return_sequences": 3, "do_sample": True}
    name = manager.add_request(PROMPTS[2], seed=7, **options)
    wanted = alone(shared_model(), PROMPTS[2], {**GATE, "seeds": [7]}, **options)
    names = [name, f"{name}__child#0", f"{name}__child#1"]
    assert [told(last(manager, one)) for one in names] == wanted


def test_streaming_gives_every_token_and_times(manager):
    name = manager.add_request(PROMPTS[0], streaming=True, record_timestamps=True)
    outputs = list(manager.request_id_iter(name))
    tokens, depths = alone_with("greedy", 0)
    for output in outputs:
        length = len(output.generated_tokens)
        assert output.generated_tokens == tokens[:length]
        assert output.exit_depths == depths[:length]
        assert len(output.timestamps) == length
        assert output.prompt_ids == PROMPTS[0]
    assert [output.status for output in outputs[:-1]] == [RequestStatus.DECODING] * (len(outputs) - 1)
    final = outputs[-1]
    times = [final.created_time, final.lifespan[0], *final.timestamps, final.lifespan[1]]
    assert times == sorted(times)
    assert final.mean_depth == pytest.approx(sum(depths) / 8)


def test_without_streaming_there_is_one_output(manager):
    name = manager.add_request(PROMPTS[0])
    assert [output.is_finished() for output in manager.request_id_iter(name)] == [True]
    assert manager.get_result(name) is None
    assert manager.get_result("no such request") is None


def test_a_slow_reader_misses_no_token_and_costs_no_memory(manager):
    name = manager.add_request(PROMPTS[0], max_new_tokens=60, streaming=True)
    other = manager.add_request(PROMPTS[1], max_new_tokens=60, streaming=True)
    assert len(last(manager, other).generated_tokens) == 60  # the first has not been read meanwhile
    assert len(manager._outbox) <= 1
    assert told(last(manager, name)) == alone(shared_model(), PROMPTS[0], max_new_tokens=60)[0]


def test_iteration_ends_when_the_manager_has_been_stopped(manager):
    names = manager.add_requests(PROMPTS[:3], 4)
    seen = []
    for output in manager:
        seen.append(output.request_id)
        if len(seen) == 3:
            manager.stop()
    assert sorted(seen) == names


def test_two_thousand_requests():
    with CDBManager(shared_model(), cdb={**GATE, "max_num_seqs": 32}) as manager:
        with Held(manager, "prelude"):
            names = [manager.add_request(PROMPTS[i % 6], max_new_tokens=1 + i % 3) for i in range(2000)]
            assert len(manager) == 2000
        manager.stop()
        for index, name in enumerate(names):
            tokens, depths = alone_with("greedy", index % 6)
            length = 1 + index % 3
            assert told(manager.get_result(name)) == (tokens[:length], depths[:length])
    assert_clean(manager)


def test_two_requests_of_one_name_are_never_mixed(manager):
    """H-07: the second is refused while the first runs, or waits to be fetched; later the name is free."""
    with Held(manager, "prelude"):
        manager.add_request(PROMPTS[0], "mine")
        with pytest.raises(ValueError, match="request_id='mine' names a request that has not ended"):
            manager.add_request(PROMPTS[1], "mine")
    while manager._worker._jobs:
        time.sleep(0.001)
    with pytest.raises(ValueError, match="to be fetched"):
        manager.add_request(PROMPTS[1], "mine")
    assert told(manager.get_result("mine")) == alone_with("greedy", 0)
    manager.add_request(PROMPTS[1], "mine")
    assert told(last(manager, "mine")) == alone_with("greedy", 1)


def test_a_name_may_be_used_again_as_soon_as_its_output_is_there(manager):
    for turn in range(50):
        manager.add_request(PROMPTS[turn % 6], "again", max_new_tokens=1)
        assert told(last(manager, "again"))[0] == alone_with("greedy", turn % 6)[0][:1]


def test_made_up_names_pass_over_those_that_are_in_use(manager):
    with Held(manager, "prelude"):
        manager.add_request(PROMPTS[0], "req_0")
        assert manager.add_requests(PROMPTS[:2]) == ["req_1", "req_2"]
    for name in ("req_0", "req_1", "req_2"):
        told(last(manager, name))


def test_a_second_handler_for_a_name_is_refused(manager):
    """As Transformers' server registers before it adds: the first one's outputs must not go to the second."""
    got, done = [], threading.Event()
    with Held(manager, "prelude"):
        manager.register_result_handler("mine", lambda output: (got.append(output), done.set()))
        manager.add_request(PROMPTS[0], "mine")
        with pytest.raises(ValueError, match="has a result handler"):
            manager.register_result_handler("mine", got.append)
    assert done.wait(PATIENCE)
    assert told(got[0]) == alone_with("greedy", 0)


def test_a_refused_request_leaves_no_handler(manager):
    manager.register_result_handler("mine", print)
    with pytest.raises(ValueError, match="top_k"):
        manager.add_request(PROMPTS[0], "mine", do_sample=True, top_k=-1)
    assert not manager._outbox._handlers


@pytest.mark.parametrize(
    ("words", "prompt", "options"),
    [
        (["input_ids="], [], {}),
        (["input_ids="], [[1, 2]], {}),
        (["input_ids="], [1.5], {}),
        (["input_ids=None"], None, {}),
        (["input_ids='abc'"], "abc", {}),
        (["input_ids="], [2**70], {}),
        (["attention_mask="], [3, 4], {"attention_mask": 1}),
        (["50", "between 0 and 49"], [3, 50], {}),
        (["-1", "between 0 and 49"], [3, -1], {}),
        (["request_id="], [3], {"request_id": 5}),
        (["request_id=", "__child#"], [3], {"request_id": "a__child#0"}),
        (["deadline=-1"], [3], {"deadline": -1}),
        (["deadline=nan"], [3], {"deadline": float("nan")}),
        (["max_depth=5"], [3], {"max_depth": 5}),
        (["min_depth=0"], [3], {"min_depth": 0}),
        (["exit_rule='gates'", "gate"], [3], {"exit_rule": "gates"}),
        (["exit_depths", "8 tokens"], [3], {"exit_depths": [4, 1]}),
        (["lookahead=1", "manager"], [3], {"lookahead": 1}),
        (["seeds=", "seed"], [3], {"seeds": [1]}),
        (["cdb=", "exit_threshold"], [3], {"cdb": {"exit_threshold": 0.3}}),
        (["output_scores=True"], [3], {"output_scores": True}),
        (["streamer=", "streaming=True"], [3], {"streamer": print}),
        (["on_token=", "streaming=True"], [3], {"on_token": print}),
        (["inputs_embeds"], [3], {"inputs_embeds": torch.zeros(1, 1, 32)}),
        (["num_beams"], [3], {"num_beams": 2}),
        (["max_new_tokens"], [3], {"max_new_tokens": -3}),
        (["new tokens needs"], [3], {"max_new_tokens": 10**12}),
        (["tempurature", "temperature"], [3], {"tempurature": 1.0}),
        (["generation_config.cdb_config"], [3], {"generation_config": GenerationConfig(cdb_config={"lookahead": 1})}),
    ],
    ids=lambda value: str(value)[:30],
)
def test_what_cannot_be_honoured_is_refused_at_once(manager, words, prompt, options):
    with pytest.raises(ValueError) as caught:  # noqa: PT011 (the words are checked below)
        manager.add_request(prompt, **options)
    missing = [word for word in words if word not in str(caught.value)]
    assert not missing, f"{missing} not in: {caught.value}"
    assert not len(manager)


def test_of_several_prompts_all_are_queued_or_none(manager):
    with pytest.raises(ValueError, match="50"):
        manager.add_requests([PROMPTS[0], [50]])
    assert not len(manager)


@pytest.mark.parametrize("before", [False, True], ids=["waits", "ended"])
def test_of_several_prompts_that_find_no_room_nothing_is_left(before, monkeypatch):
    """Neither those that were queued before it ran out, nor outputs under names that nobody was told, whether or not
    they came before it was noticed."""
    config = ContinuousBatchingConfig(max_queue_size=2)
    manager = shared_model().init_continuous_batching(cdb=GATE, continuous_batching_config=config)
    submit = manager.submit_job

    def submit_without_patience(job):
        if job.request_id == "req_2":
            if before:
                manager.start()
                until = time.monotonic() + PATIENCE
                while len(manager) and time.monotonic() < until:
                    time.sleep(0.01)
            raise queue.Full
        submit(job, patience=0)

    monkeypatch.setattr(manager, "submit_job", submit_without_patience)
    options = {"num_return_sequences": 2, "do_sample": True, "seed": 1}
    with pytest.raises(queue.Full):
        manager.add_requests(PROMPTS[:3], max_new_tokens=2, **options)
    if not before:
        manager.start()
    manager.stop()
    assert list(manager) == []
    assert_clean(manager)


@pytest.mark.parametrize("name", ["seeds", "token_limits"])
def test_what_belongs_to_prompts_is_refused_by_a_manager(name):
    with pytest.raises(ValueError, match=name):
        CDBManager(shared_model(), cdb={name: [3]})


def test_keywords_of_huginn():
    """Its own number of loops and start states are each request's own; what concerns the cache is refused."""
    model = random_huginn(eos_token_id=None, bos_token_id=None, pad_token_id=0).double()
    with CDBManager(model, cdb=True) as manager:
        with pytest.raises(ValueError, match="kv_policy"):
            manager.add_request([3], max_new_tokens=2, cache_lookup_strategy="latest-m4-compress-s2")
        name = manager.add_request([3, 4], max_new_tokens=3, num_steps=3)
        starts = [{}, {"init_scale": 1.0}, {"init_scale": 1.0, "init_seed": 3}, {"init_scale": 2.0, "init_seed": 4}]
        starts = [{**start, "max_new_tokens": 3} for start in starts]
        with manager.pause():  # so that all share the launch of their prompts
            noisy = [manager.add_request([3, 4, 5], **start) for start in starts]
        for one, start in zip(noisy, starts, strict=True):
            assert told(last(manager, one)) == alone(model, [3, 4, 5], {}, **start)[0]
        assert told(last(manager, name)) == alone(model, [3, 4], {}, max_new_tokens=3, num_steps=3)[0]
        with pytest.raises(ValueError, match="init_scale=-1"):
            manager.add_request([3], max_new_tokens=2, init_scale=-1)


def test_the_seed_alone_decides_what_is_drawn_and_without_one_draws_differ(manager):
    options = {"do_sample": True, "temperature": 3.0}
    torch.manual_seed(4)
    drawn = [told(last(manager, manager.add_request(PROMPTS[0], **options))) for _ in range(2)]
    assert drawn[0] != drawn[1]
    torch.manual_seed(4)
    assert told(last(manager, manager.add_request(PROMPTS[0], **options))) == drawn[0]


def test_stop_strings(manager):
    tokenizer = load_tokenizer("tiny-ouro")
    text = tokenizer.decode(alone_with("greedy", 0)[0][3:5])
    name = manager.add_request(PROMPTS[0], stop_strings=[text], tokenizer=tokenizer)
    wanted = alone(shared_model(), PROMPTS[0], stop_strings=[text], tokenizer=tokenizer)[0]
    assert told(last(manager, name)) == wanted
    assert len(wanted[0]) < 8


def test_integers_of_any_kind_are_tokens(manager):
    """One of a narrow dtype, alone in its launch, must not be an error of the model."""
    for dtype in (torch.int8, torch.uint8, torch.int16, torch.int32):
        name = manager.add_request(torch.tensor(PROMPTS[0], dtype=dtype), max_new_tokens=3)
        assert [told(last(manager, name))] == alone(manager.model, PROMPTS[0], max_new_tokens=3)


def test_a_handler_that_raises_for_an_output_that_waits_ends_its_request(manager):
    name = manager.add_request(PROMPTS[0], max_new_tokens=20_000, streaming=True)
    while len(manager._outbox) == 0:
        time.sleep(0.001)
    with pytest.raises(ZeroDivisionError):
        manager.register_result_handler(name, lambda output: 1 / 0)
    assert isinstance(last(manager, name).cause, ZeroDivisionError)


def test_prompts_have_no_padding():
    """The id of padding is a token like others, first, last and alone."""
    model = random_ouro()
    model.generation_config.pad_token_id = 0
    with CDBManager(model, cdb=GATE) as manager:
        for prompt in ([0], [0, 5, 0], [7, 0]):
            name = manager.add_request(prompt, max_new_tokens=4)
            mask = torch.ones(1, len(prompt), dtype=torch.long)
            assert [told(last(manager, name))] == alone(model, prompt, max_new_tokens=4, attention_mask=mask)


def test_who_starts_first():
    """One place: by priority, then by deadline, then by order of arrival."""
    model = random_ouro()
    with CDBManager(model, cdb={"max_num_seqs": 1, **GATE}) as manager, Held(manager, "loop") as held:
        running = manager.add_request(PROMPTS[0], max_new_tokens=3)
        held.wait()
        options = {
            "late": {},
            "due": {"deadline": PATIENCE},
            "soon": {"deadline": PATIENCE / 2},
            "urgent": {"priority": 2},
            "idle": {"priority": -1},
        }
        for name, own in options.items():
            manager.add_request(PROMPTS[1], name, max_new_tokens=2, **own)
        held.go.set()
        started = {name: last(manager, name).lifespan[0] for name in (running, *options)}
    assert sorted(started, key=started.get) == [running, "urgent", "soon", "due", "late", "idle"]
    with pytest.raises(ValueError, match=r"priority=1\.5: choose an integer"):
        manager.make_job(PROMPTS[0], priority=1.5)


def test_a_deadline_ends_a_request_that_waits_and_one_that_runs():
    with CDBManager(shared_model(), cdb={**GATE, "max_num_seqs": 1}) as manager:
        running = manager.add_request(PROMPTS[0], max_new_tokens=20_000, streaming=True, deadline=0.3)
        manager.get_result(running, timeout=PATIENCE)
        waiting = manager.add_request(PROMPTS[1], deadline=0.1)
        patient = manager.add_request(PROMPTS[2], deadline=PATIENCE)
        first, second = last(manager, running), last(manager, waiting)
        assert (first.error, second.error) == tuple(
            f"TimeoutError: deadline={seconds}: so many seconds have passed." for seconds in (0.3, 0.1)
        )
        assert isinstance(first.cause, TimeoutError)
        assert first.generated_tokens
        assert not second.generated_tokens
        assert told(last(manager, patient)) == alone_with("greedy", 2)
    assert_clean(manager)


def test_a_clock_that_is_set_changes_nothing(manager, monkeypatch):
    """Neither `max_time` nor a deadline is fooled by the time of day."""
    held = Held(manager, "loop")
    limited = manager.add_request(PROMPTS[0], max_time=PATIENCE)
    due = manager.add_request(PROMPTS[1], deadline=PATIENCE)
    now = time.time()
    with held:
        monkeypatch.setattr(time, "time", lambda: now + 1e6)
    assert told(last(manager, limited)) == alone_with("greedy", 0)
    assert told(last(manager, due)) == alone_with("greedy", 1)


def test_max_time_ends_a_request_with_its_tokens(manager):
    name = manager.add_request(PROMPTS[0], max_new_tokens=20_000, max_time=0.05)
    output = last(manager, name)
    assert output.error is None
    assert output.status == RequestStatus.FINISHED
    assert output.generated_tokens[:8] == alone_with("greedy", 0)[0][: len(output.generated_tokens)]


def test_a_full_queue(manager, monkeypatch):
    """Those that wait are counted, not those that run; who cannot wait is told at once."""
    monkeypatch.setattr(manager, "max_queue_size", 2)
    with Held(manager, "prelude") as held:
        names = [manager.add_request(PROMPTS[0], max_new_tokens=4) for _ in range(2)]
        held.wait()
        job = manager.make_job(PROMPTS[1], max_new_tokens=4)
        with pytest.raises(queue.Full, match="max_queue_size=2"):
            manager.submit_job(job, patience=0.01)

        async def add():
            return manager.add_request(PROMPTS[1])

        with pytest.raises(queue.Full):
            asyncio.run(add())
        late = []
        waiter = threading.Thread(target=lambda: late.append(manager.add_request(PROMPTS[1], max_new_tokens=8)))
        waiter.start()
    waiter.join(PATIENCE)
    assert told(last(manager, late[0])) == alone_with("greedy", 1)
    for name in names:
        assert told(last(manager, name))[0] == alone_with("greedy", 0)[0][:4]


def test_a_pause_holds_launches_and_new_weights_are_used_after_it(manager):
    """Prepacked weights must follow: the layers are large enough to be packed."""
    model = random_ouro(hidden_size=256, intermediate_size=512, eos_token_id=None, pad_token_id=0)
    with CDBManager(model, cdb={"exit_rule": "never", "prepack_weights": "auto"}) as packing:
        before = told(last(packing, packing.add_request(PROMPTS[0], max_new_tokens=6)))
        with packing.pause():
            with torch.no_grad():
                for layer in model.model.layers:
                    layer.mlp.down_proj.weight.mul_(-1)
            name = packing.add_request(PROMPTS[0], max_new_tokens=6)
            assert packing.get_result(name, timeout=0.05) is None
        after = told(last(packing, name))
        assert after != before
        assert after == alone(model, PROMPTS[0], {"exit_rule": "never"}, max_new_tokens=6)[0]


@pytest.mark.parametrize("ran", [False, True])
def test_new_weights_before_a_start_are_used(ran):
    model = random_ouro(hidden_size=256, intermediate_size=512, eos_token_id=None, pad_token_id=0)
    packing = CDBManager(model, cdb={"exit_rule": "never", "prepack_weights": "auto"})
    if ran:
        with packing:
            last(packing, packing.add_request(PROMPTS[0], max_new_tokens=1))
    with torch.no_grad():
        for layer in model.model.layers:
            layer.mlp.down_proj.weight.mul_(-1)
    with packing:
        found = told(last(packing, packing.add_request(PROMPTS[0], max_new_tokens=6)))
    assert found == alone(model, PROMPTS[0], {"exit_rule": "never"}, max_new_tokens=6)[0]


def test_a_pause_in_the_middle_loses_nothing(manager):
    name = manager.add_request(PROMPTS[0], max_new_tokens=60, streaming=True)
    manager.get_result(name, timeout=PATIENCE)
    with manager.pause(), manager.pause():
        launches = sum(manager.stats.launches.values())
        wanted = alone(shared_model(), PROMPTS[0], max_new_tokens=60)[0]  # the model is free
        assert sum(manager.stats.launches.values()) == launches
        with pytest.raises(RuntimeError, match="paused"):
            manager.stop()
        cancelled = manager.add_request(PROMPTS[1])
        manager.cancel_request(cancelled)
    assert told(last(manager, name)) == wanted
    assert last(manager, cancelled).error.startswith("CancelledError")


def test_a_pause_of_a_manager_that_does_not_run_or_is_about_to_end():
    manager = CDBManager(shared_model(), cdb=GATE)
    with pytest.raises(RuntimeError, match="that runs"), manager.pause():
        pass
    manager.start()
    raised = []

    def pause():
        try:
            with manager.pause():
                pass
        except RuntimeError as error:
            raised.append(str(error))

    thread = threading.Thread(target=pause)
    with failing(manager, "loop", ZeroDivisionError()), Held(manager, "loop") as held:
        manager.add_request(PROMPTS[0])
        held.wait()
        thread.start()
        while not manager._worker._pauses:
            time.sleep(0.001)
    thread.join(PATIENCE)
    assert not thread.is_alive()
    assert raised == ["the manager ended before it could pause."]


def test_async_front(manager):
    async def serve():
        results = await asyncio.gather(*(manager.generate_async(prompt) for prompt in PROMPTS))
        lengths = []
        async for output in manager.stream_async(PROMPTS[0]):
            lengths.append(len(output.generated_tokens))
            final = output
        several = {}
        async for output in manager.stream_async(PROMPTS[0], num_return_sequences=2, do_sample=True, seed=7):
            several[output.request_id] = output
        return results, lengths, final, several

    results, lengths, final, several = asyncio.run(serve())
    assert [told(output) for output in results] == [alone_with("greedy", index) for index in range(len(PROMPTS))]
    assert lengths == sorted(set(lengths))
    assert told(final) == alone_with("greedy", 0)
    wanted = alone(shared_model(), PROMPTS[0], {**GATE, "seeds": [7]}, num_return_sequences=2, do_sample=True)
    assert [told(several[name]) for name in sorted(several)] == wanted


def test_the_async_front_refuses_what_add_request_refuses(manager):
    with pytest.raises(ValueError, match="between 0 and 49"):
        asyncio.run(manager.generate_async([99]))
    with pytest.raises(ValueError, match="num_return_sequences=2"):
        asyncio.run(manager.generate_async(PROMPTS[0], num_return_sequences=2, do_sample=True))
    assert_clean(manager)  # nothing was queued, of which an output would come that nobody waits for


def test_a_dropped_manager_ends_its_thread():
    manager = CDBManager(shared_model(), cdb=GATE)
    manager.start()
    manager.add_request(PROMPTS[0], max_new_tokens=20_000)
    thread, gone = manager._worker._thread, weakref.ref(manager)
    del manager
    gc.collect()
    assert gone() is None
    thread.join(PATIENCE)
    assert not thread.is_alive()


def test_settings_of_transformers_are_taken_or_warned_of():
    config = ContinuousBatchingConfig(max_requests_per_batch=3, max_queue_size=5, page_size=128)
    warned = []
    logger = logging.get_logger("hf_cdb.batching")
    handler = logging.logging.Handler()
    handler.emit = lambda record: warned.append(record.getMessage())
    logger.addHandler(handler)
    try:
        manager = shared_model().init_continuous_batching(continuous_batching_config=config, cdb=GATE)
    finally:
        logger.removeHandler(handler)
    assert (manager.config.max_num_seqs, manager.max_queue_size) == (3, 5)
    assert len(warned) == 1
    assert "page_size=128" in warned[0]
    own = shared_model().init_continuous_batching(
        continuous_batching_config=config, cdb=CDBConfig(exit_threshold=0.6, max_num_seqs=7)
    )
    assert own.config.max_num_seqs == 7
    assert own.max_queue_size == 5
    with pytest.raises(ValueError, match="max_queue_size=-1"):
        CDBManager(shared_model(), max_queue_size=-1)
