"""With lookahead a launch is enqueued before the signal of the loop before it is read."""

import numpy
import pytest
import torch

from hf_cdb import CDBConfig
from hf_cdb.adapters import adapter_for
from hf_cdb.engine import Engine
from hf_cdb.exits import ExitRule
from hf_cdb.scheduler import Launch
from hf_cdb.signals import Signal, Signals

from .test_failures import toy_requests
from .toy import ToyModel, predict

LAUNCH = Launch("loop", (7, 8, 9), (0, 1, 2), (1, 2, 1), (0, 0, 0))
CPU = torch.device("cpu")


def lookahead_engine(rows, new_tokens=6, **settings):
    model = ToyModel()
    adapter = adapter_for(model)
    engine = Engine(adapter, CDBConfig(lookahead=1, **settings).resolve(adapter))
    requests = toy_requests(0, rows, new_tokens)
    for request in requests:
        engine.add_request(request)
    return model, engine, requests


def expected_depths(model, request):
    """By hand: the toy's gate says so after the loop that is the token's, and one more runs; 4 at most, 2 at least."""
    script = predict(model.config, request.prompt_ids.tolist(), request.max_new_tokens)
    first, *others = script.exit_depths
    return script.tokens, [first, *(min(depth + 1, 4) for depth in others)]


class FakeEvent:
    """Stands in for an event of a device: notes when somebody waits for it."""

    def __init__(self, log, number):
        self.log, self.number = log, number

    def synchronize(self):
        self.log.append(("read", self.number))


def with_a_fake_device(engine, monkeypatch):
    """Put every signal behind an event; a log of what was enqueued and read, by the number of the launch."""
    log, send, run = [], engine._signals.send, engine._run_stage

    def send_late(launch, deciding, said):
        send(launch, deciding, said)  # checks it
        return Signal(launch, deciding, said, FakeEvent(log, sum(kind != "read" for kind, _ in log) - 1))

    def run_and_log(batch):
        log.append((batch.launch.stage, sum(kind != "read" for kind, _ in log)))
        return run(batch)

    monkeypatch.setattr(engine._signals, "send", send_late)
    monkeypatch.setattr(engine, "_run_stage", run_and_log)
    return log


@pytest.mark.parametrize("settings", [{}, {"max_num_seqs": 2}, {"refill": False}, {"min_coda_batch": 3}], ids=str)
def test_the_next_launch_is_enqueued_before_a_signal_is_read(monkeypatch, settings):
    model, engine, requests = lookahead_engine(5, **settings)
    log = with_a_fake_device(engine, monkeypatch)
    engine.run()
    loops = [number for kind, number in log if kind == "loop"]
    assert [number for kind, number in log if kind == "read"] == loops
    for number in loops:
        after = log.index(("read", number))
        assert log[after - 1][1] == number + 1, "read before the launch after it was enqueued, or too late"
    for request in requests:
        assert (request.tokens, request.exit_depths) == expected_depths(model, request)


def test_without_lookahead_a_signal_is_read_at_once(monkeypatch):
    _, engine, _ = lookahead_engine(3)
    engine = Engine(engine.adapter, CDBConfig().resolve(engine.adapter))
    for request in toy_requests(0, 3):
        engine.add_request(request)
    log = with_a_fake_device(engine, monkeypatch)
    engine.run()
    for place, (kind, number) in enumerate(log):
        if kind == "loop":
            assert log[place + 1] == ("read", number)


@pytest.mark.parametrize("moment", range(3, 24))
def test_rows_that_end_between_a_launch_and_its_signal(moment):
    """One is cancelled and its key used again, one fails; the others are as ever."""
    model, engine, requests = lookahead_engine(5, max_num_seqs=4)
    for _ in range(moment):
        engine.step()
    twin = toy_requests(1, 1)[0]
    if not requests[1].ended:
        engine.cancel(1)
    engine.add_request(twin)
    if not requests[2].ended:
        engine.fail(requests[2], ArithmeticError())
    engine.run()
    for request in (requests[0], requests[3], requests[4], twin):
        assert (request.tokens, request.exit_depths) == expected_depths(model, request)
    for request in requests[1:3]:
        tokens, depths = expected_depths(model, request)
        assert (request.tokens, request.exit_depths) == (tokens[: len(request.tokens)], depths[: len(request.tokens)])
    assert engine.cache.core_bytes == engine.cache.outer_bytes == 0


@pytest.mark.parametrize("what", ["launch", "signal"])
@pytest.mark.parametrize("count", [1, 2, 6, 7, 8, 11])
def test_an_error_while_a_signal_is_under_way(monkeypatch, what, count):
    """The model fails, or the device does when the signal is read: all get the cause, and the engine works on."""
    model, engine, requests = lookahead_engine(4, max_num_seqs=3)
    calls = []

    def boom(*_):
        calls.append(1)
        if len(calls) == count:
            raise RuntimeError("boom")

    if what == "launch":
        model.layers[1].register_forward_pre_hook(boom)
    else:
        with_a_fake_device(engine, monkeypatch)
        monkeypatch.setattr(FakeEvent, "synchronize", boom)
    with pytest.raises(RuntimeError, match="boom") as caught:
        engine.run()
    assert all(request.status == "finished" or request.error is caught.value for request in requests)
    assert engine.step() is None
    assert engine.cache.core_bytes == engine.cache.outer_bytes == 0
    later = toy_requests(0, 4)
    for request in later:
        engine.add_request(request)
    engine.run()
    for request in later:
        assert (request.tokens, request.exit_depths) == expected_depths(model, request)


def test_depths_that_are_replayed_are_not_shifted():
    """They run ahead as others do; the toy's prompts run 4 loops."""
    depths = [[4, 2, 3, 4, 2, 2], [4, 4, 3, 2, 3, 2], [4, 3, 3, 3, 4, 4]]
    model, engine, requests = lookahead_engine(3, exit_rule="replay", exit_depths=depths, max_num_seqs=2)
    engine.run()
    for request, row in zip(requests, depths, strict=True):
        assert request.exit_depths == row
        script = predict(model.config, request.prompt_ids.tolist(), 6, exit_depths=row)
        assert request.tokens == script.tokens


@pytest.mark.parametrize("said", [torch.tensor([True, False]), [True, False], numpy.array([True, False])], ids=type)
def test_rows_that_were_not_asked_stay(said):
    signal = Signals(3, CPU).send(LAUNCH, [0, 2], said)
    assert signal.read() == [True, False, False]
    assert all(type(flag) is bool for flag in signal.read())


def test_a_signal_is_what_was_sent():
    """A rule may write into its answer when it is asked again, before the signal is read."""
    said = torch.tensor([True, False, True])
    signal = Signals(3, CPU).send(LAUNCH, range(3), said)
    said.zero_()
    assert signal.read() == [True, False, True]


def test_with_lookahead_a_rule_that_says_nonsense_fails_at_its_launch():
    class Odd(ExitRule):
        def leave(self, places, depths, previous, state, logits):
            return [0.5] * len(depths)

    _, engine, _ = lookahead_engine(2, exit_rule=Odd())
    with pytest.raises(ValueError, match=r"Odd\) returned \[0.5, 0.5\] for 2 rows"):
        engine.run()
    assert engine.stats.launches["loop"] == 4  # the prompts'; the one that failed is not counted
