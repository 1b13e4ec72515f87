"""Faults of a manager: every request ends with its tokens or its own cause, the others do not notice."""

import asyncio
import concurrent.futures
import contextlib
import threading

import pytest
import torch

from hf_cdb.exits import ExitRule
from hf_cdb.manager import CDBManager

from .requests import GATE, PATIENCE, Held, alone, assert_clean, failing, last, told
from .test_manager import PROMPTS, alone_with, shared_model

LONG = {"max_new_tokens": 20_000}


@pytest.fixture
def manager():
    with CDBManager(shared_model(), cdb=GATE) as running:
        yield running
    assert_clean(running)
    assert not running.is_running()
    assert running._engine.cache.reserved_bytes == 0
    assert not any(thread.name == "hf-cdb-manager" for thread in threading.enumerate())


def assert_serves(manager):
    """As if nothing had been."""
    names = manager.add_requests(PROMPTS[:3])
    for index, name in enumerate(names):
        assert told(last(manager, name)) == alone_with("greedy", index)


class NotAnError(BaseException):
    pass


@pytest.mark.parametrize(
    "error", [RuntimeError("shape"), torch.OutOfMemoryError("no room"), NotAnError("killed")], ids=repr
)
@pytest.mark.parametrize("stage", ["prelude", "loop", "coda"])
def test_the_model_raises(manager, stage, error):
    """All that are left fail with its error, what comes then is refused with it, and the manager starts again."""
    with failing(manager, stage, error, skip=0):
        with manager.pause():
            names = manager.add_requests(PROMPTS[:4])
        for name in names:
            output = last(manager, name)
            assert output.cause is error
            assert output.error == f"{type(error).__name__}: {error}"
        with pytest.raises(RuntimeError, match="has died") as caught:
            manager.add_request(PROMPTS[0])
        assert caught.value.__cause__ is error
    assert manager.fatal_error is error
    assert manager.background_thread_status.fatal_error is error
    manager.start()
    assert manager.fatal_error is None
    assert_serves(manager)


def test_the_third_forward_raises_with_four_requests_and_one_after_them(manager):
    """H-01: all five are told the cause at once, nothing hangs, and the engine can be started again."""
    error = ValueError("third forward")
    with failing(manager, "loop", error, skip=2):
        with manager.pause():
            names = manager.add_requests(PROMPTS[:4])
        assert [last(manager, name).cause for name in names] == [error] * 4
        with pytest.raises(RuntimeError, match="third forward"):
            manager.add_request(PROMPTS[4])
    assert manager.get_result() is None
    manager.start()
    assert_serves(manager)


def test_what_has_ended_before_the_model_raises_keeps_its_tokens(manager):
    short = manager.add_request(PROMPTS[0], max_new_tokens=1)
    assert told(last(manager, short))[0] == alone_with("greedy", 0)[0][:1]
    running = manager.add_request(PROMPTS[0], **LONG, streaming=True)
    manager.get_result(running, timeout=PATIENCE)
    with failing(manager, "loop", ZeroDivisionError("loop")):
        output = last(manager, running)
    assert isinstance(output.cause, ZeroDivisionError)
    assert output.generated_tokens[:8] == alone_with("greedy", 0)[0][: len(output.generated_tokens)]
    assert len(output.exit_depths) == len(output.generated_tokens)


def raises_after(calls, error):
    """A processor, criterion or handler."""
    left = [calls]

    def call(*args):
        left[0] -= 1
        if left[0] < 0:
            raise error
        return args[1] if len(args) > 1 and isinstance(args[1], torch.Tensor) else torch.zeros(1, dtype=torch.bool)

    return call


class RaisingRule(ExitRule):
    """A request's own rule; comparable, so that it cannot be hashed."""

    def __init__(self, where, error):
        super().__init__()
        self.where, self.error = where, error

    def __eq__(self, other):
        return self is other

    __hash__ = None

    def bind(self, adapter, places):
        super().bind(adapter, places)
        if self.where == "bind":
            raise self.error

    def begin(self, places, embeds, start, tokens):
        if self.where == "begin":
            raise self.error

    def leave(self, places, depths, previous, state, logits):
        if self.where == "leave":
            raise self.error
        return [False] * (len(depths) + (self.where == "length"))


# What raises -> options of the request, and how many tokens it has then.
CULPRITS = {
    "processor": (lambda error: {"logits_processor": [raises_after(3, error)]}, 3),
    "processor at once": (lambda error: {"logits_processor": [raises_after(0, error)]}, 0),
    "criterion": (lambda error: {"stopping_criteria": [raises_after(2, error)]}, 3),
    "bind": (lambda error: {"exit_rule": RaisingRule("bind", error)}, 0),
    "begin": (lambda error: {"exit_rule": RaisingRule("begin", error)}, 1),
    "leave": (lambda error: {"exit_rule": RaisingRule("leave", error)}, 1),
}


@pytest.mark.parametrize(
    ("settings", "error"),
    [
        ({}, KeyError("trie")),
        ({}, SystemExit("trie")),
        ({}, KeyboardInterrupt("trie")),  # which nobody else could have caused: signals go to the main thread
        ({"max_num_seqs": 2, "prefill_chunk_size": 2}, NotAnError("trie")),
        ({"lookahead": 1}, KeyError("trie")),
    ],
    ids=str,
)
@pytest.mark.parametrize("culprit", CULPRITS)
def test_what_belongs_to_a_request_fails_it_alone(culprit, settings, error):
    make, tokens = CULPRITS[culprit]
    with CDBManager(shared_model(), cdb={**GATE, **settings}) as manager:
        with manager.pause():
            before = manager.add_request(PROMPTS[0])
            name = manager.add_request(PROMPTS[1], **make(error))
            after = manager.add_request(PROMPTS[2])
        output = last(manager, name)
        assert output.cause is error
        assert output.error == f"{type(error).__name__}: {error}"
        assert len(output.generated_tokens) == tokens
        assert output.generated_tokens[:1] == alone_with("greedy", 1)[0][: min(tokens, 1)]
        for index, other in ((0, before), (2, after)):
            assert told(last(manager, other)) == alone(shared_model(), PROMPTS[index], {**GATE, **settings})[0]
        assert manager.fatal_error is None
    assert_clean(manager)


def test_a_rule_that_says_too_much_fails_its_request(manager):
    name = manager.add_request(PROMPTS[1], exit_rule=RaisingRule("length", None))
    other = manager.add_request(PROMPTS[0])
    assert "one bool" in last(manager, name).error
    assert told(last(manager, other)) == alone_with("greedy", 0)


@pytest.mark.parametrize("error", [KeyError("handler"), SystemExit("handler"), asyncio.CancelledError()], ids=repr)
@pytest.mark.parametrize("calls", [0, 3])
def test_a_handler_raises(manager, calls, error):
    with Held(manager, "prelude"):
        name = manager.add_request(PROMPTS[0], **LONG, streaming=True)
        manager.register_result_handler(name, raises_after(calls, error))
        other = manager.add_request(PROMPTS[1])
    output = last(manager, name)
    assert output.cause is error
    assert len(output.generated_tokens) == calls + 1
    assert told(last(manager, other)) == alone_with("greedy", 1)
    assert_serves(manager)


def test_a_handler_raises_at_the_last_output(manager):
    raised = threading.Event()

    def handler(output):
        raised.set()
        raise KeyError("handler")

    with Held(manager, "prelude"):
        name = manager.add_request(PROMPTS[0])
        manager.register_result_handler(name, handler)
    assert raised.wait(PATIENCE)
    assert_serves(manager)
    assert manager.get_result(name) is None


def test_a_handler_in_an_event_loop_raises(manager):
    async def serve():
        asyncio.get_running_loop().set_exception_handler(lambda loop, context: None)
        name = manager.add_request(PROMPTS[0], **LONG, streaming=True)
        manager.register_result_handler(name, raises_after(0, KeyError("handler")))
        other = await manager.generate_async(PROMPTS[1])
        return await asyncio.to_thread(last, manager, name), other

    output, other = asyncio.run(serve())
    assert isinstance(output.cause, KeyError)
    assert told(other) == alone_with("greedy", 1)


def test_a_consumer_whose_task_is_cancelled(manager):
    async def serve():
        reading = asyncio.Event()

        async def read():
            async for _ in manager.stream_async(PROMPTS[0], request_id="mine", **LONG):
                reading.set()

        task = asyncio.create_task(read())
        await asyncio.wait_for(reading.wait(), PATIENCE)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        awaited = asyncio.create_task(manager.generate_async(PROMPTS[0], request_id="other", **LONG))
        await asyncio.sleep(0)
        awaited.cancel()
        with pytest.raises(asyncio.CancelledError):
            await awaited
        return await manager.generate_async(PROMPTS[1])

    assert told(asyncio.run(serve())) == alone_with("greedy", 1)
    manager.stop()
    assert_clean(manager)


def test_a_consumer_who_breaks_off(manager):
    async def serve():
        async for output in manager.stream_async(PROMPTS[0], **LONG):
            if len(output.generated_tokens) > 2:
                break
        return await manager.generate_async(PROMPTS[1])

    assert told(asyncio.run(serve())) == alone_with("greedy", 1)


def test_a_consumer_whose_event_loop_is_closed(manager):
    async def leave():
        name = manager.add_request(PROMPTS[0], **LONG, streaming=True)
        manager.register_result_handler(name, lambda output: None)

    with Held(manager, "loop") as held:
        asyncio.run(leave())
        held.wait()
    assert_serves(manager)
    manager.stop()  # which would never end with that request


def test_an_iterator_that_is_dropped_leaves_its_request_to_others(manager):
    name = manager.add_request(PROMPTS[0], streaming=True)
    for _ in manager.request_id_iter(name):
        break
    while manager._worker._jobs:
        pass
    output = manager.get_result(name)
    assert output is None or told(output) == alone_with("greedy", 0)


@pytest.mark.parametrize("lookahead", [0, 1])
@pytest.mark.parametrize(
    ("stage", "skip"), [("prelude", 0), ("loop", 0), ("loop", 5), ("coda", 0), ("coda", 2), ("prelude", 2)]
)
def test_cancel_at_every_stage(stage, skip, lookahead):
    """In the middle of a chunked prompt, too: chunks of 2."""
    settings = {**GATE, "lookahead": lookahead, "prefill_chunk_size": 2}
    with CDBManager(shared_model(), cdb=settings) as manager:
        with Held(manager, stage, skip) as held:
            with manager.pause():
                name = manager.add_request(PROMPTS[1], **LONG)
                other = manager.add_request(PROMPTS[0])
            held.wait()
            manager.cancel_request(name)
        output = last(manager, name)
        assert isinstance(output.cause, concurrent.futures.CancelledError)
        assert len(output.generated_tokens) <= 4
        assert len(output.exit_depths) == len(output.generated_tokens)
        assert told(last(manager, other)) == alone(shared_model(), PROMPTS[0], settings)[0]
        manager.cancel_request(name)  # has ended
        manager.cancel_request("never was")
        assert told(last(manager, manager.add_request(PROMPTS[1]))) == alone(shared_model(), PROMPTS[1], settings)[0]
    assert_clean(manager)


def test_cancel_one_that_waits(manager):
    with Held(manager, "prelude"):
        names = manager.add_requests(PROMPTS[:3])
        manager.cancel_request(names[1])
    assert last(manager, names[1]).generated_tokens == []
    for index in (0, 2):
        assert told(last(manager, names[index])) == alone_with("greedy", index)


def test_cancel_a_child_or_all_of_them(manager):
    options = {"num_return_sequences": 2, "do_sample": True, "seed": 3}
    with Held(manager, "loop"):
        one = manager.add_request(PROMPTS[0], **options)
        all_of = manager.add_request(PROMPTS[0], **options)
        manager.cancel_request(f"{one}__child#0")
        manager.cancel_request(all_of)
    wanted = alone(shared_model(), PROMPTS[0], {**GATE, "seeds": [3]}, num_return_sequences=2, do_sample=True)
    assert told(last(manager, one)) == wanted[0]
    for name in (f"{one}__child#0", all_of, f"{all_of}__child#0"):
        assert isinstance(last(manager, name).cause, concurrent.futures.CancelledError)


def test_stop_while_busy_ends_all_requests(manager):
    with Held(manager, "loop"):
        names = manager.add_requests(PROMPTS[:3])
        manager.stop(block=False)
        with pytest.raises(RuntimeError, match="is stopping"):
            manager.add_request(PROMPTS[0])
        with pytest.raises(RuntimeError, match="is stopping"):
            manager.start()
        manager.stop(timeout=0.01)  # does not come to an end in time
        assert manager.is_running()
    manager.join(timeout=PATIENCE)
    for index, name in enumerate(names):
        assert told(manager.get_result(name)) == alone_with("greedy", index)
    assert manager.get_result() is None
    manager.start()
    assert_serves(manager)


def test_who_waits_for_an_end_is_not_told_of_the_thread_that_was_started_after_it():
    """A thread that takes the other's place while somebody waits for that one."""
    manager = CDBManager(shared_model(), cdb=GATE)
    worker, go = manager._worker, threading.Event()
    after = threading.Thread(target=go.wait, args=(PATIENCE,))

    class Ends(threading.Thread):
        def join(self, timeout=None):
            super().join(timeout)
            worker._thread = after

    worker._thread = Ends()
    worker._thread.start()
    after.start()
    assert worker.join()
    assert not worker.join(timeout=0.01)
    go.set()
    assert worker.join(timeout=PATIENCE)


def test_a_thread_that_cannot_be_started_leaves_a_manager_that_can_be(monkeypatch):
    manager = CDBManager(shared_model(), cdb=GATE)

    def no_room(thread):
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", no_room)
        with pytest.raises(RuntimeError, match="can't start"):
            manager.start()
    assert not manager.is_running()
    with manager:
        assert_serves(manager)


def test_a_hard_stop_fails_what_is_left(manager):
    running = manager.add_request(PROMPTS[0], **LONG, streaming=True)
    manager.get_result(running, timeout=PATIENCE)
    with Held(manager, "loop"):
        new = manager.add_request(PROMPTS[1])
        manager.stop(block=False, hard_stop=True)
    manager.join(timeout=PATIENCE)
    first, second = last(manager, running), last(manager, new)
    assert first.generated_tokens
    assert not second.generated_tokens
    for output in (first, second):
        assert "was stopped before" in output.error
    manager.start()
    assert_serves(manager)


def test_a_handler_stops_the_manager_and_adds_requests(manager):
    """In the manager's own thread, where nothing may wait for it."""
    seen, refusals = [], []

    def handler(output):
        seen.append(output)
        manager.add_request(PROMPTS[1], "next")
        for call in (manager.get_result, manager.start, lambda: manager.pause().__enter__()):
            try:
                call()
            except RuntimeError as error:
                refusals.append(error)
        manager.stop()

    with Held(manager, "prelude"):
        name = manager.add_request(PROMPTS[0])
        manager.register_result_handler(name, handler)
    manager.join(timeout=PATIENCE)
    assert not manager.is_running()
    assert told(seen[0]) == alone_with("greedy", 0)
    assert told(manager.get_result("next")) == alone_with("greedy", 1)
    assert len(refusals) == 3


def test_stop_of_a_manager_that_was_never_started(caplog):
    manager = CDBManager(shared_model(), cdb=GATE)
    name = manager.add_request(PROMPTS[0])
    assert manager.get_result(name) is None  # nothing can come
    manager.stop()
    with manager:
        assert told(last(manager, name)) == alone_with("greedy", 0)
    assert_clean(manager)


def test_an_error_in_the_context_ends_at_once():
    manager = CDBManager(shared_model(), cdb=GATE)
    with contextlib.suppress(KeyError), manager:
        name = manager.add_request(PROMPTS[0], **LONG)
        raise KeyError
    assert "was stopped before" in manager.get_result(name).error
    assert_clean(manager)


def test_handlers_that_raise_do_not_keep_a_dying_manager_from_telling_the_others(manager):
    error = RuntimeError("model")
    with failing(manager, "loop", error):
        with manager.pause():
            names = manager.add_requests(PROMPTS[:3])
            manager.register_result_handler(names[0], raises_after(0, SystemExit()))
            manager.register_result_handler(names[1], raises_after(0, KeyError()))
        assert last(manager, names[2]).cause is error
    manager.join(timeout=PATIENCE)
    manager.start()
    assert_serves(manager)
