"""Traces say what ran, and come back from their files."""

import itertools
import json

import pytest

from hf_cdb import CDBConfig
from hf_cdb.adapters import adapter_for
from hf_cdb.cli import main
from hf_cdb.engine import Engine
from hf_cdb.request import Request
from hf_cdb.sampling import Sampler
from hf_cdb.trace import Trace, TracedLaunch

from .toy import ToyModel, toy_prompt

# By digit. The first new token of request 1 is 14, of request 2 it is 21, so their second ones leave at 1 and 2.
DEPTHS = (4, 2, 4, 4, 1, 4, 4, 4, 4, 4)


def traced_run(**settings):
    """Two requests of two and one positions, two new tokens each, two at a time."""
    adapter = adapter_for(ToyModel(depths=DEPTHS))
    engine = Engine(adapter, CDBConfig(trace=True, max_num_seqs=2, **settings).resolve(adapter))
    prompts = [toy_prompt(1, 5, 1), toy_prompt(2, 8)]
    sampler = Sampler([()] * 2, prompts, do_sample=False)
    for row, prompt in enumerate(prompts):
        engine.add_request(Request(key=row, row=row, max_new_tokens=2, sampler=sampler, prompt_ids=prompt))
    engine.run()
    return engine.stats


def test_a_run_told_by_hand():
    trace = traced_run().trace
    found = [(x.stage, x.rows, x.depths, x.tokens, x.context, x.entering, x.looping, x.left) for x in trace]
    both = (0, 1)
    assert found == [
        ("prelude", both, (0, 0), 3, 3, 2, 0, 0),
        *[("loop", both, (depth, depth), 3, 3, 0, 2, 0) for depth in (1, 2, 3, 4)],
        ("coda", both, (4, 4), 3, 3, 0, 0, 2),
        ("prelude", both, (0, 0), 2, 5, 2, 0, 0),  # the tokens stand at positions 2 and 1
        ("loop", both, (1, 1), 2, 5, 0, 2, 0),
        ("coda", (0,), (1,), 1, 3, 0, 1, 1),
        ("loop", (1,), (2,), 1, 2, 0, 1, 0),
        ("coda", (1,), (2,), 1, 2, 0, 0, 1),
    ]


def test_pieces_of_a_prompt_count_what_they_run():
    trace = traced_run(prefill_chunk_size=1).trace
    assert [(x.rows, x.tokens, x.context) for x in trace[:2]] == [((0, 1), 2, 2), ((0,), 1, 2)]


def test_times_follow_each_other():
    trace = traced_run().trace
    assert trace[0].start == 0
    for before, after in itertools.pairwise(trace):
        assert 0 < before.duration <= after.start - before.start
    assert trace.seconds == trace[-1].start + trace[-1].duration


def test_without_trace_there_is_none_to_save(tmp_path):
    stats = traced_run()
    stats.trace = None
    with pytest.raises(ValueError, match="Set trace=True"):
        stats.save_trace(tmp_path / "run.jsonl")


@pytest.mark.parametrize(("name", "format"), [("run.jsonl", None), ("run.json", None), ("run.txt", "chrome")])
def test_either_format_comes_back(name, format, tmp_path):
    stats = traced_run()
    stats.save_trace(tmp_path / name, format)
    found = Trace.load(tmp_path / name)
    assert len(found) == len(stats.trace)
    for own, read in zip(stats.trace, found, strict=True):
        times = {"start": own.start, "duration": own.duration}
        assert {name: getattr(read, name) for name in times} == pytest.approx(times)
        assert {**read.to_dict(), **times} == own.to_dict()


def test_the_chrome_format(tmp_path):
    """By hand: a launch of 2 ms after 1 ms is at ts 1000 for dur 2000, in the line of its stage."""
    launch = TracedLaunch("loop", (3, 5), (1, 4), 2, 20, 7, 0, 2, 1, start=0.001, duration=0.002)
    Trace([launch]).save(tmp_path / "run.json")
    *names, event, counter = json.loads((tmp_path / "run.json").read_text())["traceEvents"]
    assert [name["args"] for name in names if name["name"] == "thread_name"] == [
        {"name": "prelude"},
        {"name": "loop"},
        {"name": "coda"},
    ]
    assert (event["ph"], event["name"], event["ts"], event["dur"], event["tid"]) == ("X", "loop", 1000, 2000, 1)
    assert event["args"]["rows"] == [3, 5]
    assert (counter["ph"], counter["args"]) == ("C", {"waiting": 7, "entering": 0, "looping": 2, "left": 1})


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("{}\n", "without 'stage'"),
        ("", "it is empty"),
        ("\n \n", "it is empty"),
        ("\n{}\n{,\n", "line 3 is no JSON"),
        ("[]\n", "holds no trace"),
        ("no json\n", "holds no trace"),
        ('{"traceEvents": [{"ph": "X"}]}', "holds no trace"),
        (
            json.dumps({**TracedLaunch("loop", (), (), 0, 0, 0, 0, 0, 0, 0.0, 0.0).to_dict(), "stage": "core"}),
            "stage='core': a launch runs one of prelude, loop, coda",
        ),
    ],
)
def test_other_files_are_refused(text, words, tmp_path):
    path = tmp_path / "other.jsonl"
    path.write_text(text)
    with pytest.raises(ValueError, match=r"other\.jsonl") as error:
        Trace.load(path)
    assert words in str(error.value)


def test_the_layout_of_the_json_does_not_matter(tmp_path):
    """A blank line at the end, as editors leave one, and a Chrome trace that another tool wrote anew."""
    trace = traced_run().trace
    for name in ("run.jsonl", "run.json"):
        trace.save(tmp_path / name)
    lines, chrome = tmp_path / "run.jsonl", tmp_path / "run.json"
    lines.write_text(lines.read_text() + "\n")
    chrome.write_text(json.dumps({"displayTimeUnit": "ms", **json.loads(chrome.read_text())}, indent=1))
    assert Trace.load(lines) == trace
    assert [launch.rows for launch in Trace.load(chrome)] == [launch.rows for launch in trace]


def test_formats_that_are_none(tmp_path):
    with pytest.raises(ValueError, match=r"suffix '\.csv' names no format"):
        Trace().save(tmp_path / "run.csv")
    with pytest.raises(ValueError, match="format='xml' is unknown"):
        Trace().save(tmp_path / "run.jsonl", "xml")


def test_by_stage_adds_up():
    queues = (0, 0, 0, 0)
    trace = Trace(
        [
            TracedLaunch("loop", (0, 1), (1, 1), 5, 9, *queues, start=0.0, duration=0.5),
            TracedLaunch("loop", (0,), (2,), 1, 9, *queues, start=0.5, duration=0.25),
            TracedLaunch("coda", (1,), (1,), 1, 9, *queues, start=0.75, duration=0.125),
        ]
    )
    stages = trace.by_stage()
    assert set(stages) == {"loop", "coda"}
    assert (stages["loop"].launches, stages["loop"].seconds, stages["loop"].mean_width) == (2, 0.75, 1.5)
    assert stages["loop"].tokens == 6
    assert trace.seconds == 0.875


def test_show(tmp_path, capsys):
    path = tmp_path / "run.jsonl"
    traced_run().save_trace(path)
    assert main(["trace", "show", str(path), "--launches", "9"]) == 0
    lines = capsys.readouterr().out.splitlines()
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines if line.startswith("| ")]
    heading, *launches = cells[:10]
    assert [dict(zip(heading, launch, strict=True))["depths"] for launch in launches] == [
        "0:2", "1:2", "2:2", "3:2", "4:2", "4:2", "0:2", "1:2", "1:1",
    ]  # fmt: skip
    stages = {row[0]: row for row in cells[11:]}
    assert [stages[name][1] for name in ("prelude", "loop", "coda")] == ["2", "6", "3"]
    assert any(line.startswith("11 launches in ") for line in lines)


def test_show_says_what_is_wrong(tmp_path, capsys):
    assert main(["trace", "show", str(tmp_path / "nowhere.jsonl")]) == 2
    assert main(["trace", "show", str(tmp_path), "--launches", "-1"]) == 2
    errors = capsys.readouterr().err.splitlines()
    assert "nowhere.jsonl" in errors[0]
    assert "launches=-1" in errors[1]
