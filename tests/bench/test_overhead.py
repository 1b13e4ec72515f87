"""What the engine costs: the clock, the fit, and that the stand-in for a model leaves nothing out."""

import json

import pytest
import torch

from hf_cdb import CDBConfig
from hf_cdb.bench.null_model import NullAdapter, NullSampler
from hf_cdb.bench.overhead import PARTS, fit_line, measure, measure_requests
from hf_cdb.bench.part_clock import PartClock
from hf_cdb.cli import main
from hf_cdb.engine import Engine
from hf_cdb.request import Request


@pytest.fixture(autouse=True)
def _same_threads():
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


class Ticking:
    """A clock that goes on by one second with every look at it."""

    def __init__(self):
        self.now = 0.0

    def perf_counter(self):
        self.now += 1
        return self.now


class Worker:
    def outer(self):
        return self.inner() + 1

    def inner(self):
        return 1


def test_every_moment_belongs_to_the_innermost_part(monkeypatch):
    monkeypatch.setattr("hf_cdb.bench.part_clock.time", Ticking())
    clock, worker = PartClock(), Worker()
    clock.watch(worker, "outer", "outer", then="after")
    clock.watch(worker, "inner", "inner")
    assert worker.outer() == 2  # not started: nothing is counted
    clock.start("before")
    assert worker.outer() == 2
    # start 1, outer enters 2, inner enters 3 and leaves 4, outer leaves 5, stop 6
    assert clock.stop() == {"before": 1, "outer": 2, "inner": 1, "after": 1}
    clock.start("again")
    assert clock.stop() == {"again": 1}


def test_parts_that_raise_end():
    clock, worker = PartClock(), Worker()
    worker.inner = lambda: 1 / 0
    clock.watch(worker, "outer", "outer")
    clock.start("rest")
    with pytest.raises(ZeroDivisionError):
        worker.outer()
    assert clock._stack == ["rest"]
    with pytest.raises(AttributeError):
        clock.watch(worker, "middle", "middle")


def test_the_fit_by_hand():
    """An exact line comes back; relative residuals of (1, 2, 3 rows; 1, 1, 2 us) solved by hand."""
    fit = fit_line([16, 256, 4096], [60 + 5 * rows for rows in (16, 256, 4096)])
    assert (fit.a, fit.b) == pytest.approx((60, 5))
    # Minimise (a + b - 1)^2 + (a + 2b - 1)^2 + ((a + 3b) / 2 - 1)^2: 9a + 15b = 10 and 15a + 29b = 18.
    fit = fit_line([1, 2, 3], [1, 1, 2])
    assert (fit.a, fit.b) == pytest.approx(((10 * 29 - 18 * 15) / 36, (9 * 18 - 15 * 10) / 36))
    with pytest.raises(ValueError, match="two different widths"):
        fit_line([4, 4], [1, 2])


def test_rows_of_nothing_run_as_others_do():
    adapter = NullAdapter(rows=32, hidden=3, depth=4, tokens=64, seed=0)
    config = CDBConfig(exit_rule="gate", exit_threshold=0.5, max_num_seqs=32).resolve(adapter)
    engine = Engine(adapter, config)
    prompt = torch.zeros(2, dtype=torch.long)
    requests = [Request(key, 6, NullSampler(), prompt_ids=prompt, row=key) for key in range(32)]
    for request in requests:
        engine.add_request(request)
    engine.run()
    assert all(request.tokens == [0] * 6 and request.exit_depths[0] == 4 for request in requests)
    assert len(engine.stats.depths) >= 3, "rows that all leave together would hide what mixed depths cost"


def test_parts_make_up_the_launch(monkeypatch):
    """Every part is there, and the stand-in's own work is not counted."""
    ticking, plain = Ticking(), NullAdapter.prelude

    def prelude(self, *arguments):
        ticking.now += 10_000
        return plain(self, *arguments)

    monkeypatch.setattr(NullAdapter, "prelude", prelude)
    for module in ("part_clock", "null_model"):
        monkeypatch.setattr(f"hf_cdb.bench.{module}.time", ticking)
    entries = measure(rows=6, launches=8, prompt=3, hidden=4)
    stages = [entry["stage"] for entry in entries]
    assert stages.count("loop") >= 7
    assert {"prelude", "coda"} < set(stages)
    for entry in entries:
        assert entry["seconds"] == sum(entry[name] for name in PARTS) < 10_000
        assert all(entry[name] > 0 for name in ("scheduler", "addressing", "gather", "results"))
        assert (entry["rule"] > 0) == (entry["stage"] != "coda")
    assert all(entry["rows"] == 6 for entry in entries if entry["stage"] == "loop")


def test_a_request_comes_and_goes(monkeypatch):
    """On a clock that goes on by 7 s with every request that is queued and by 5 s with every one that ends."""
    ticking, ended = Ticking(), []

    def slow(name, seconds):
        plain = getattr(Engine, name)

        def method(self, argument):
            ticking.now += seconds
            ended.append(argument)
            return plain(self, argument)

        monkeypatch.setattr(Engine, name, method)

    slow("add_request", 7)
    slow("cancel", 5)
    for module in ("part_clock", "null_model", "overhead"):
        monkeypatch.setattr(f"hf_cdb.bench.{module}.time", ticking)
    found = measure_requests(rows=4, prompt=3, hidden=4)
    # and one second more in all: the look at the clock that ends it
    assert (found["arrive"], found["end"]) == (7.25, 5.25)
    assert found["enter"] > 0
    assert sorted(ended[4:]) == [0, 1, 2, 3]


def test_the_command(tmp_path, capsys):
    path = tmp_path / "overhead.json"
    arguments = ["--rows", "2", "8", "--launches", "4", "--hidden", "4", "--json", str(path)]
    assert main(["bench", "overhead", *arguments]) == 0
    printed = capsys.readouterr().out
    assert "within target" in printed
    content = json.loads(path.read_text())
    assert content["settings"]["rows"] == [2, 8]
    assert set(content["fits_us"]) == {"prelude", "loop", "coda"}
    assert [entry["rows"] for entry in content["medians"] if entry["stage"] == "loop"] == [2, 8]
    assert [entry["in_flight"] for entry in content["requests_seconds"]] == [2, 8]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--rows", "4"], "rows=[4]: choose two different"),
        (["--launches", "0"], "launches=0: choose at least 1"),
        (["--depth", "1"], "depth=1: at depth 1 no rule is asked"),
        (["--threads", "0"], "threads=0"),
        (["--plot", "figure.pdf"], "ends in .png"),
    ],
)
def test_what_cannot_be_measured_is_refused(arguments, words, capsys):
    assert main(["bench", "overhead", *arguments]) == 2
    assert words in capsys.readouterr().err
