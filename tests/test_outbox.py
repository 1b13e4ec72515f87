"""Outputs find their reader: each is given to one, none is lost, and nobody waits for what cannot come."""

import asyncio
import threading

import pytest
from transformers.generation.continuous_batching.requests import RequestStatus

from hf_cdb.jobs import CDBGenerationOutput
from hf_cdb.outbox import Outbox

from .requests import PATIENCE


def output(name, *tokens, last=False):
    status = RequestStatus.FINISHED if last else RequestStatus.DECODING
    return CDBGenerationOutput(name, generated_tokens=list(tokens), status=status)


def opened(*names):
    outbox = Outbox()
    outbox.open()
    outbox.expect(names)
    return outbox


def never(name, error):
    raise AssertionError(f"the handler of {name} raised {error!r}")


def test_the_oldest_first_and_by_name():
    outbox = opened("a", "b", "c")
    for name in ("b", "a", "c"):
        outbox.put(output(name, 1, last=True))
    assert outbox.get("c").request_id == "c"
    assert [outbox.get().request_id for _ in range(2)] == ["b", "a"]
    assert outbox.get(timeout=0) is None


def test_a_slow_reader_is_given_the_newest_only():
    outbox = opened("a")
    for length in range(1, 1001):
        outbox.put(output("a", *range(length), last=length == 1000))
    assert len(outbox) == 1
    assert outbox.get("a").generated_tokens == list(range(1000))


def test_nobody_waits_for_what_cannot_come():
    outbox = opened("a")
    assert outbox.get("never added") is None
    outbox.put(output("a", last=True))
    assert outbox.get("a") is not None
    assert outbox.get("a") is None
    outbox.close()
    assert outbox.get() is None


@pytest.mark.parametrize("wake", [lambda outbox: outbox.close(), lambda outbox: outbox.put(output("a", last=True))])
@pytest.mark.parametrize("handled", [False, True])
def test_who_waits_is_woken(wake, handled):
    """By the end of all, and by a last output also where it goes to a handler."""
    outbox, got = opened("a"), []
    if handled:
        outbox.register("a", lambda output: None, never)
    reader = threading.Thread(target=lambda: got.append(outbox.get("a")), daemon=True)
    reader.start()
    wake(outbox)
    reader.join(PATIENCE)
    assert len(got) == 1


def test_a_name_is_free_once_its_last_output_has_been_fetched():
    outbox = opened("a", "a__child#0")
    with pytest.raises(ValueError, match=r"request_id='a'.* still to come, or to be fetched"):
        outbox.expect(["a"])
    outbox.put(output("a", 1, last=True))
    with pytest.raises(ValueError, match="request_id='a'"):
        outbox.expect(["b", "a"])
    assert outbox.get("a").generated_tokens == [1]
    outbox.expect(["a", "b"])  # nothing is left of what was refused


def test_a_handler_begins_with_what_waits_and_is_gone_with_the_last():
    outbox, given = opened("a"), []
    outbox.put(output("a", 1))
    outbox.register("a", given.append, never)
    outbox.put(output("a", 1, 2))
    with pytest.raises(ValueError, match="'a' has a result handler"):
        outbox.register("a", given.append, never)
    outbox.put(output("a", 1, 2, 3, last=True))
    assert [len(one.generated_tokens) for one in given] == [1, 2, 3]
    assert len(outbox) == 0
    outbox.expect(["a"])
    outbox.register("a", given.append, never)


def test_a_handler_of_an_ended_request_is_given_its_last_output():
    outbox, given = opened("a"), []
    outbox.put(output("a", 1, last=True))
    outbox.register("a", given.append, never)
    assert [one.generated_tokens for one in given] == [[1]]
    outbox.register("a", given.append, never)  # for a later request of this name


def test_a_handler_that_raises_is_called_no_more_and_the_rest_can_be_fetched():
    outbox, calls = opened("a"), []

    def raises(one):
        calls.append(one)
        raise SystemExit("in a handler")

    outbox.register("a", raises, never)
    with pytest.raises(SystemExit):
        outbox.put(output("a", 1))
    outbox.put(output("a", 1, 2, last=True))
    assert len(calls) == 1
    assert outbox.get("a").generated_tokens == [1, 2]


def test_an_event_loop_is_given_the_newest_once_it_has_time():
    outbox, given = opened("a"), []

    async def read():
        done = asyncio.Event()

        def handler(one):
            given.append(len(one.generated_tokens))
            if one.is_finished():
                done.set()

        outbox.register("a", handler, never)
        loop = asyncio.get_running_loop()
        for length in range(100):  # the loop is busy here
            outbox.put(output("a", *range(length)))
        assert len(loop._ready) <= 1
        await asyncio.sleep(0)
        outbox.put(output("a", *range(100), last=True))
        await asyncio.wait_for(done.wait(), PATIENCE)

    asyncio.run(read())
    assert given == [99, 100]


def test_an_event_loop_whose_handler_raises_tells_of_it():
    outbox, failures = opened("a"), []

    async def read():
        asyncio.get_running_loop().set_exception_handler(lambda loop, context: None)
        outbox.register("a", lambda one: 1 / 0, lambda name, error: failures.append((name, error)))
        outbox.put(output("a", 1))
        await asyncio.sleep(0)

    asyncio.run(read())
    assert [(name, type(error)) for name, error in failures] == [("a", ZeroDivisionError)]
    outbox.put(output("a", 1, 2, last=True))
    assert outbox.get("a").generated_tokens == [1, 2]


def test_for_a_closed_event_loop_nothing_is_kept():
    outbox = opened("a")

    async def leave():
        outbox.register("a", lambda one: None, never)

    asyncio.run(leave())
    with pytest.raises(RuntimeError, match="closed"):
        outbox.put(output("a", 1))
    outbox.put(output("a", 1, last=True))
    assert len(outbox) == 0
    assert not outbox.knows("a")


def test_two_readers_never_share_an_output():
    names = [f"r{index}" for index in range(200)]
    outbox, got = opened(*names), []

    def read():
        while (one := outbox.get()) is not None:
            got.append(one.request_id)

    readers = [threading.Thread(target=read, daemon=True) for _ in range(4)]
    for reader in readers:
        reader.start()
    for name in names:
        outbox.put(output(name, last=True))
    outbox.close()
    for reader in readers:
        reader.join(PATIENCE)
    assert sorted(got) == sorted(names)
