"""What the engine costs: the clock, the fit, and that the stand-in for a model leaves nothing out."""

import json

import pytest
import torch

from hf_cdb import CDBConfig
from hf_cdb.bench import null_model
from hf_cdb.bench.null_model import NullAdapter, NullSampler
from hf_cdb.bench.overhead import PARTS, fit_line, measure, measure_requests
from hf_cdb.bench.part_clock import PartClock
from hf_cdb.cache import DepthCache
from hf_cdb.cli import main
from hf_cdb.engine import Engine
from hf_cdb.exits import Gate
from hf_cdb.places import Places
from hf_cdb.request import Request
from hf_cdb.scheduler import Scheduler


class Clock:
    """A clock that moves when it is told to, and by `read` with every look at it."""

    def __init__(self, read=0):
        self.seconds, self.read = 0, read

    def __call__(self):
        self.seconds += self.read
        return self.seconds


class Worker:
    """Works 20 seconds, in the middle of which another part works 3."""

    def __init__(self, clock):
        self.clock = clock

    def outer(self):
        self.clock.seconds += 12
        found = self.inner() + 1
        self.clock.seconds += 8
        return found

    def inner(self):
        self.clock.seconds += 3
        return 1


@pytest.mark.parametrize("read", [0, 100])
def test_every_moment_belongs_to_the_innermost_part(read):
    now = Clock(read)
    clock, worker = PartClock(now), Worker(now)
    clock.watch(worker, "outer", "outer", then="after")
    clock.watch(worker, "inner", "inner")
    assert worker.outer() == 2  # not started: nothing is counted
    clock.start("before")
    now.seconds += 1
    assert worker.outer() == 2
    now.seconds += 5
    assert clock.stop() == {"before": 1, "outer": 20, "inner": 3, "after": 5}
    clock.start("again")
    assert clock.stop() == {"again": 0}


def test_parts_that_raise_end():
    clock, worker = PartClock(), Worker(Clock())
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


def test_the_parts_of_a_launch_by_hand(monkeypatch):
    """A clock that stands still but for work of known length; that of the stand-ins is a thousand times longer."""
    now = Clock()

    def working(owner, name, seconds):
        plain = getattr(owner, name)

        def method(*arguments):
            now.seconds += seconds
            return plain(*arguments)

        monkeypatch.setattr(owner, name, method)

    for owner, name, seconds in (
        (Scheduler, "next", 1),
        (Scheduler, "commit", 2),
        (Engine, "_batch", 4),
        (Engine, "_decide", 7),
        (Gate, "begin", 8),
        (Engine, "_ends", 100),
        (Places, "__init__", 40),
        (DepthCache, "update", 9_000),
        (null_model, "depth_attention", 9_000),
        (NullAdapter, "gate_logits", 1_000),
        (NullAdapter, "prelude", 10_000),
        (NullSampler, "choose", 2_000),
    ):
        working(owner, name, seconds)
    monkeypatch.setattr("hf_cdb.bench.null_model.PartClock", lambda: PartClock(now))
    found = {"prelude": 0, "loop": 0, "coda": 0}
    for entry in measure(rows=6, launches=8, prompt=3, hidden=4):
        found[entry["stage"]] += 1
        rows = entry["rows"]
        expected = {
            "prelude": {"addressing": 4, "gather": 0, "rule": 8, "results": 0},
            "loop": {"addressing": 44, "gather": 0, "rule": 7, "results": 0},
            "coda": {"addressing": 4, "gather": 0, "rule": 0, "results": 100 * rows},
        }[entry["stage"]]
        assert {name: entry[name] for name in PARTS} == {"scheduler": 3, **expected}
        assert entry["seconds"] == 3 + sum(expected.values())
        assert entry["stage"] != "loop" or rows == 6
    assert found["loop"] == 8
    assert found["prelude"] > 0 < found["coda"]


def test_a_request_comes_and_goes(monkeypatch):
    """On a clock that goes on by 7 s with every request that is queued and by 5 s with every one that ends."""
    now, ended = Clock(), []

    def slow(name, seconds):
        plain = getattr(Engine, name)

        def method(self, argument):
            now.seconds += seconds
            ended.append(argument)
            return plain(self, argument)

        monkeypatch.setattr(Engine, name, method)

    slow("add_request", 7)
    slow("cancel", 5)
    monkeypatch.setattr("hf_cdb.bench.null_model.PartClock", lambda: PartClock(now))
    found = measure_requests(rows=4, prompt=3, hidden=4)
    assert found == {"arrive": 7, "enter": 0, "end": 5}
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


def test_the_picture(tmp_path):
    pytest.importorskip("matplotlib", reason="pictures are an extra, hf-cdb[bench]")
    path = tmp_path / "overhead.png"
    assert main(["bench", "overhead", "--rows", "2", "8", "--launches", "3", "--hidden", "4", "--plot", str(path)]) == 0
    assert path.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--rows", "4"], "rows=[4]: choose two different"),
        (["--launches", "0"], "launches=0: choose at least 1"),
        (
            ["--rows", "2", "4", "--depth", "2", "--launches", "1"],
            "launches=1: with rows=[2, 4] the prelude had launches",
        ),
        (["--depth", "1"], "depth=1: at depth 1 no rule is asked"),
        (["--threads", "0"], "threads=0"),
        (["--plot", "figure.pdf"], "ends in .png"),
    ],
)
def test_what_cannot_be_measured_is_refused(arguments, words, capsys):
    assert main(["bench", "overhead", *arguments]) == 2
    assert words in capsys.readouterr().err
