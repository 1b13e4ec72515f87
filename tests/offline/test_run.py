"""Files of prompts: what one process makes of them, several, and those that are left when one is killed."""

import fcntl
import json
import math
import os
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor

import psutil
import pytest
import torch

from hf_cdb.cli import main
from hf_cdb.engine import Engine
from hf_cdb.evaluation.records import RecordFile
from hf_cdb.evaluation.run import load_model_to_evaluate
from hf_cdb.offline import run as offline_run
from hf_cdb.offline.claims import Claims
from hf_cdb.offline.run import FileSettings, generate_file

from ..requests import alone

GATE = {"exit_threshold": 0.3}
LINES = [
    {"prompt": "In the beginning", "id": "first"},
    {"messages": [{"role": "user", "content": "reverse: abc"}], "max_new_tokens": 12},
    {"input_ids": [5, 6, 7], "do_sample": True, "exit_threshold": 0.2},
    {"prompt": "And the LORD said", "do_sample": True, "temperature": 1.5, "seed": 11},
    {"prompt": "And it came", "max_new_tokens": 3, "min_depth": 3},
]
PATIENCE = 240  # seconds until a test gives up


@pytest.fixture(scope="module")
def loaded():
    return load_model_to_evaluate("tiny-ouro")


def write(path, lines):
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def read(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def settings_with(**settings):
    return FileSettings(**{"options": {"max_new_tokens": 20}, "cdb": GATE, **settings})


def test_each_line_gives_what_generate_gives(tmp_path, loaded):
    model, tokenizer = loaded
    source, output = write(tmp_path / "in.jsonl", LINES), tmp_path / "out.jsonl"
    assert generate_file(source, output, settings_with(seed=100), progress=False) == 0
    records = read(output)
    assert [(record["line"], record["id"], record["seed"]) for record in records] == [
        (1, "first", None),
        (2, 2, None),
        (3, 3, 103),
        (4, 4, 11),
        (5, 5, None),
    ]
    chat = tokenizer.apply_chat_template(LINES[1]["messages"], add_generation_prompt=True)["input_ids"]
    texts = [tokenizer(LINES[index]["prompt"])["input_ids"] for index in (0, 3, 4)]
    expected = [
        alone(model, texts[0], GATE, max_new_tokens=20),
        alone(model, chat, GATE, max_new_tokens=12),
        alone(model, [5, 6, 7], {"exit_threshold": 0.2, "seeds": [103]}, max_new_tokens=20, do_sample=True),
        alone(model, texts[1], {**GATE, "seeds": [11]}, max_new_tokens=20, do_sample=True, temperature=1.5),
        alone(model, texts[2], {**GATE, "min_depth": 3}, max_new_tokens=3),
    ]
    ends = model.generation_config.eos_token_id
    for record, [(tokens, depths)], prompt in zip(
        records, expected, [texts[0], chat, [5, 6, 7], *texts[1:]], strict=True
    ):
        assert (record["tokens"], record["exit_depths"]) == (tokens, depths)
        assert record["mean_depth"] == pytest.approx(sum(depths) / len(depths))
        assert record["text"] == tokenizer.decode(tokens, skip_special_tokens=True)
        assert record["finish_reason"] == ("stop" if tokens[-1] in torch.tensor(ends) else "length")
        assert record["prompt_tokens"] == len(prompt)
        assert record["error"] is None
    assert len({depth for record in records for depth in record["exit_depths"]}) > 2  # else all rules would do


def test_reasons_to_end(tmp_path, loaded):
    """A stop string and an end of sequence are no limits, also where they come with the last token allowed."""
    model, tokenizer = loaded
    ids = tokenizer("In the beginning")["input_ids"]
    [(tokens, _)] = alone(model, ids, GATE, max_new_tokens=6)
    assert len(tokens) == 6
    word = tokenizer.decode(tokens[5:])
    assert word
    assert word not in tokenizer.decode(tokens[:5])
    same = {"input_ids": ids, "max_new_tokens": 6}
    source = write(
        tmp_path / "in.jsonl", [same, {**same, "stop_strings": [word]}, {**same, "eos_token_id": [1, tokens[5]]}]
    )
    assert generate_file(source, tmp_path / "out.jsonl", settings_with(), progress=False) == 0
    records = read(tmp_path / "out.jsonl")
    assert [record["finish_reason"] for record in records] == ["length", "stop", "stop"]
    assert [record["tokens"] for record in records] == [tokens] * 3


def test_lines_that_fail_fail_alone(tmp_path, capsys):
    lines = [{"prompt": "x", "max_new_tokens": 3}, {"prompt": "x", "temprature": 2}, {"input_ids": [99999]}]
    source = write(tmp_path / "in.jsonl", lines)
    source.write_text(source.read_text() + '{"prompt": "x", "deadline": 1e-6}\nno JSON\n{"prompt": "y"}\n')
    output = tmp_path / "out.jsonl"
    arguments = ["generate", "--input", source, "--output", output, "--max-new-tokens", 4, "--no-progress"]
    assert main([*map(str, arguments)]) == 3
    assert capsys.readouterr().err.endswith(f"4 lines of {output} hold an error.\n")
    records = read(output)
    assert [record["finish_reason"] == "error" for record in records] == [False, True, True, True, True, False]
    reasons = ["'temprature'", "99999", "deadline=1e-06", "no JSON"]
    assert all(reason in record["error"] for record, reason in zip(records[1:5], reasons, strict=True))
    assert [len(record["tokens"]) for record in records] == [3, 0, 0, 0, 0, 4]
    assert [record["mean_depth"] for record in records[1:5]] == [None] * 4


def test_settings_that_no_line_could_run_with(tmp_path, capsys):
    """They are refused before anything is left that the corrected command would have to be told apart from."""
    source, output = write(tmp_path / "in.jsonl", LINES[:1]), tmp_path / "out.jsonl"
    command = ["generate", "--input", str(source), "--output", str(output), "--no-progress"]
    for wrong, reason in [
        (["--temperature", "-1", "--do-sample"], "temperature"),
        (["--options", '{"temprature": 1}'], "temprature"),
        (["--options", "[1]"], "options='[1]': give a JSON object"),
        (["--options", "[" * 50_000], "is no JSON: maximum recursion depth"),
        (["--options", '{"self": 1}'], "'self': 1}: no line could run with them"),
        (["--do-sample", "--seed", str(2**63 - 1)], f"seed={2**63}: choose an integer"),
        (["--cdb", '{"seeds": [1]}'], "seeds"),
        (["--max-new-tokens", "0"], "max_new_tokens"),
        (["--exit-rule", "gates"], "gates"),
        (["--model", str(tmp_path / "nowhere")], "nowhere"),
    ]:
        assert main([*command, *wrong]) == 2
        assert reason in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == [source]
    assert main([*command, "--max-new-tokens", "2"]) == 0


@pytest.mark.parametrize(
    "options",
    [
        {"request_id": "a"},
        {"streaming": True},
        {"record_timestamps": True},
        {"deadline": 5},
        {"created": 1},
        {"max_time": 9},
        {"num_return_sequences": 2, "do_sample": True},
        {"generation_config": {}},
        {"tokenizer": "x"},
        {"prompt": "x"},
        {"messages": []},
        {"input_ids": [1, 2]},
        {"id": 4},
        {"seed": 4, "do_sample": True},
    ],
    ids=str,
)
def test_what_cannot_be_an_option_of_all_lines(tmp_path, monkeypatch, capsys, options):
    source = write(tmp_path / "in.jsonl", LINES[:1])
    monkeypatch.setattr(offline_run, "load_model_to_evaluate", lambda *_: pytest.fail("nothing should run"))
    command = ["generate", "--input", str(source), "--output", str(tmp_path / "out.jsonl")]
    assert main([*command, "--options", json.dumps(options)]) == 2
    name, value = next(iter(options.items()))
    assert f"error: options: {name}={value!r} has no meaning for a line: " in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == [source]


@pytest.mark.parametrize(("name", "value"), [("num_return_sequences", 2), ("max_time", 60.0)])
def test_what_the_model_asks_for_and_a_line_cannot_have(tmp_path, monkeypatch, name, value):
    model, tokenizer = load_model_to_evaluate("tiny-ouro")
    model.generation_config.update(do_sample=True, **{name: value})
    monkeypatch.setattr(offline_run, "load_model_to_evaluate", lambda *_: (model, tokenizer))
    source = write(tmp_path / "in.jsonl", LINES[:1])
    with pytest.raises(ValueError, match=f"^generation_config of the model: {name}={value} has no meaning for a line"):
        generate_file(source, tmp_path / "out.jsonl", settings_with(), progress=False)
    assert list(tmp_path.iterdir()) == [source]


def test_lengths_of_a_line_replace_those_of_all(tmp_path, loaded, saved):
    """With `max_length` beside `max_new_tokens` generate reads the latter alone, which here nobody has given."""
    model, tokenizer = loaded
    ids = tokenizer("In the beginning")["input_ids"]
    kinds = [{"max_length": len(ids) + 3}, {"max_length": len(ids) + 3, "max_new_tokens": 5}, {"max_new_tokens": 2}, {}]
    source = write(tmp_path / "in.jsonl", [{"input_ids": ids, **kind} for kind in kinds])
    expected = [
        alone(model, ids, GATE, **kind)[0][0]
        for kind in (kinds[0], {"max_new_tokens": 5}, kinds[2], {"max_new_tokens": 7})
    ]
    assert [len(tokens) for tokens in expected] == [3, 5, 2, 7]
    output = tmp_path / "out.jsonl"
    command = ["generate", "--input", str(source), "--output", str(output), "--exit-threshold", "0.3", "--no-progress"]
    assert main([*command, "--max-new-tokens", "7", "--max-num-seqs", "1"]) == 0
    assert [record["tokens"] for record in read(output)] == expected
    assert saved == sorted(saved, key=lambda line: -[len(ids) + 3, 5, 2, 7][line - 1])
    other = tmp_path / "other.jsonl"
    command[4] = str(other)
    assert main([*command, "--options", json.dumps(kinds[0])]) == 0
    assert [len(record["tokens"]) for record in read(other)] == [3, 5, 2, 3]


def test_a_seed_is_told_where_something_was_drawn(tmp_path):
    """And a null among the options is what is left out."""
    prompt = {"prompt": "And", "max_new_tokens": 2, "seed": 7}
    source = write(tmp_path / "in.jsonl", [prompt, {**prompt, "do_sample": True}, {**prompt, "do_sample": False}])
    settings = settings_with(options={"max_new_tokens": 2, "do_sample": None, "request_id": None, "streaming": None})
    generate_file(source, tmp_path / "out.jsonl", settings, progress=False)
    assert [record["seed"] for record in read(tmp_path / "out.jsonl")] == [None, 7, None]


@pytest.mark.parametrize("name", ["RANK", "LOCAL_RANK", "WORLD_SIZE"])
@pytest.mark.parametrize("value", ["-1", "two", "", "1.0"])
def test_numbers_of_a_launcher_that_are_none(tmp_path, monkeypatch, name, value):
    monkeypatch.setenv(name, value)
    monkeypatch.setattr(offline_run, "load_model_to_evaluate", lambda *_: pytest.fail("nothing should run"))
    source = write(tmp_path / "in.jsonl", LINES[:1])
    with pytest.raises(ValueError, match=f"^{name}='{value}' in the environment: .* at least .* unset it"):
        generate_file(source, tmp_path / "out.jsonl", settings_with(), progress=False)


def test_no_processes_are_none(tmp_path, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "0")
    source = write(tmp_path / "in.jsonl", LINES[:1])
    with pytest.raises(ValueError, match=r"^WORLD_SIZE='0' in the environment: .* at least 1 "):
        generate_file(source, tmp_path / "out.jsonl", settings_with(), progress=False)


@pytest.mark.parametrize("content", ["", "[]", '{"seed"'])
def test_damaged_settings(tmp_path, content):
    source, output = write(tmp_path / "in.jsonl", LINES[:1]), tmp_path / "out.jsonl"
    (tmp_path / "out.jsonl.run").mkdir()
    (tmp_path / "out.jsonl.run" / "settings.json").write_text(content)
    with pytest.raises(ValueError, match=r"out.jsonl.run/settings.json', .* is damaged .*or remove .*out.jsonl.run\."):
        generate_file(source, output, settings_with(), progress=False)


def edited(model):
    model.generation_config.cdb_config = {"exit_threshold": 0.7}


def trained(model):
    with torch.no_grad():
        next(model.parameters()).add_(1e-3)


@pytest.mark.parametrize(("change", "name"), [(edited, "generation_config_sha256"), (trained, "weights_sha256")])
def test_a_model_that_changed_since_the_run_was_stopped(tmp_path, monkeypatch, change, name):
    """What it was called is the same, and its lines would not belong to the first ones."""
    source, output = write(tmp_path / "in.jsonl", LINES), tmp_path / "out.jsonl"
    model, tokenizer = load_model_to_evaluate("tiny-ouro")
    monkeypatch.setattr(offline_run, "load_model_to_evaluate", lambda *_: (model, tokenizer))
    with monkeypatch.context() as patch:
        patch.setattr(Engine, "step", lambda _: (_ for _ in ()).throw(RuntimeError("a kill")))
        with pytest.raises(RuntimeError, match="a kill"):
            generate_file(source, output, settings_with(), progress=False)
    change(model)
    with pytest.raises(ValueError, match=f"belongs to a run with another {name} "):
        generate_file(source, output, settings_with(), progress=False)
    assert not output.exists()


@pytest.fixture
def saved(monkeypatch):
    """Numbers of the lines that this process saves, in order."""
    numbers, append = [], RecordFile.append

    def note(file, records):
        records = list(records)
        append(file, records)
        numbers.extend(record["line"] for record in records)

    monkeypatch.setattr(RecordFile, "append", note)
    return numbers


def test_the_longest_lines_begin_first(tmp_path, saved):
    lines = [{"prompt": "a" * length, "max_new_tokens": limit} for length, limit in [(1, 2), (1, 5), (9, 2), (1, 4)]]
    source = write(tmp_path / "in.jsonl", lines)
    generate_file(source, tmp_path / "out.jsonl", settings_with(cdb={"max_num_seqs": 1}), progress=False)
    assert saved == [2, 4, 3, 1]
    assert [record["line"] for record in read(tmp_path / "out.jsonl")] == [1, 2, 3, 4]


def test_a_finished_run_is_kept_and_others_are_refused(tmp_path, monkeypatch):
    source, output = write(tmp_path / "in.jsonl", LINES[:2]), tmp_path / "out.jsonl"
    generate_file(source, output, settings_with(), progress=False)
    before = output.read_bytes()
    monkeypatch.setattr(offline_run, "load_model_to_evaluate", lambda *_: pytest.fail("nothing was left to run"))
    assert generate_file(source, output, settings_with(), progress=False) == 0
    with pytest.raises(ValueError, match=r"belongs to a run with another seed \(seed: 0 there, 1 here\)"):
        generate_file(source, output, settings_with(seed=1), progress=False)
    write(source, LINES[:3])
    with pytest.raises(ValueError, match=r"belongs to a run with another input_sha256"):
        generate_file(source, output, settings_with(), progress=False)
    with pytest.raises(ValueError, match=r"in.jsonl' is the input. Name another file"):
        generate_file(source, source, settings_with(), progress=False)
    foreign = write(tmp_path / "foreign.jsonl", LINES)
    with pytest.raises(ValueError, match=r"foreign.jsonl' exists, and no foreign.jsonl.run beside it.* move this one"):
        generate_file(source, foreign, settings_with(), progress=False)
    assert output.read_bytes() == before


def test_a_process_that_comes_late_runs_nothing(tmp_path, monkeypatch, saved, loaded):
    """While it loads the model, another one does everything."""
    source, output = write(tmp_path / "in.jsonl", LINES[:2]), tmp_path / "out.jsonl"

    def load_slowly(*_):
        monkeypatch.setattr(offline_run, "load_model_to_evaluate", lambda *_: loaded)
        generate_file(source, output, settings_with(), progress=False)
        return loaded

    monkeypatch.setattr(offline_run, "load_model_to_evaluate", load_slowly)
    assert generate_file(source, output, settings_with(), progress=False) == 0
    assert sorted(saved) == [1, 2]
    assert [file.name for file in (tmp_path / "out.jsonl.run").iterdir()] == ["settings.json"]


def test_a_line_that_another_process_ends_at_the_last_moment_is_not_run(tmp_path, monkeypatch, saved):
    """It writes its record and lets go of the line after this process has looked, and before it locks."""
    source, output = write(tmp_path / "in.jsonl", LINES[:3]), tmp_path / "out.jsonl"
    other = {"line": 2, "text": "of the other process", "error": None}
    lockf = fcntl.lockf

    def end_and_lock(file, kind, length, byte):
        if kind & fcntl.LOCK_NB and byte == 2:
            write(tmp_path / "out.jsonl.run" / "records-other.jsonl", [other])
            os.pwrite(file, b"1", byte)
        lockf(file, kind, length, byte)

    monkeypatch.setattr(fcntl, "lockf", end_and_lock)
    assert generate_file(source, output, settings_with(), progress=False) == 0
    assert sorted(saved) == [1, 3]
    assert read(output)[1] == other


def test_no_process_holds_more_than_its_share_of_what_is_left(tmp_path, monkeypatch):
    """One of three, the only one that has begun, with room for all lines."""
    source, counts = write(tmp_path / "in.jsonl", [{"input_ids": [5, 6], "max_new_tokens": 3}] * 7), []
    take, finish, held = Claims.take, Claims.finish, set()

    def count(claims, piece):
        taken = take(claims, piece)
        held.update([piece] if taken else [])
        counts.append((len(held), claims.count - claims.done))
        return taken

    def let_go(claims, pieces):
        pieces = list(pieces)
        finish(claims, pieces)
        held.difference_update(pieces)

    monkeypatch.setattr(Claims, "take", count)
    monkeypatch.setattr(Claims, "finish", let_go)
    monkeypatch.setenv("WORLD_SIZE", "3")
    assert generate_file(source, tmp_path / "out.jsonl", settings_with(), progress=False) == 0
    assert max(counts) == (3, 7)
    assert all(lines <= math.ceil(left / 3) for lines, left in counts)


def test_an_error_of_the_model_is_no_error_of_the_lines(tmp_path, monkeypatch):
    source, output = write(tmp_path / "in.jsonl", LINES), tmp_path / "out.jsonl"
    settings = settings_with(cdb={**GATE, "max_num_seqs": 2})
    step, steps = Engine.step, []

    def failing(engine):
        steps.append(engine)
        if len(steps) == 150:
            raise RuntimeError("out of order")
        return step(engine)

    monkeypatch.setattr(Engine, "step", failing)
    with pytest.raises(
        RuntimeError, match=r"the model failed: RuntimeError\('out of order'\). The same command goes on"
    ):
        generate_file(source, output, settings, progress=False)
    part = RecordFile(tmp_path / "out.jsonl.run", key=lambda record: record["line"]).read()
    assert 0 < len(part) < len(LINES)
    assert all(record["error"] is None for record in part.values())
    assert not output.exists()
    assert generate_file(source, output, settings, progress=False) == 0
    generate_file(source, tmp_path / "whole.jsonl", settings, progress=False)
    assert output.read_bytes() == (tmp_path / "whole.jsonl").read_bytes()


# Enough that a run of them is under way for seconds. No token has the number 512, so that all run to their limits.
MANY = [{"input_ids": [5 + index, 6, 7], "max_new_tokens": 36, "do_sample": index % 2 == 0} for index in range(14)]
ARGUMENTS = ["--exit-threshold", "0.3", "--max-num-seqs", "2", "--options", '{"eos_token_id": 512}', "--no-progress"]


@pytest.fixture(scope="module")
def many(tmp_path_factory):
    """A file of prompts, and the bytes that one process makes of it."""
    folder = tmp_path_factory.mktemp("many")
    source = write(folder / "in.jsonl", MANY)
    assert main(["generate", "--input", str(source), "--output", str(folder / "out.jsonl"), *ARGUMENTS]) == 0
    assert all(len(record["tokens"]) == 36 for record in read(folder / "out.jsonl"))
    return source, (folder / "out.jsonl").read_bytes()


def command(source, output, *launcher):
    words = [sys.executable, *launcher, "-m", "hf_cdb", "generate", "--input", source, "--output", output, *ARGUMENTS]
    return [str(word) for word in words]


def wait_for(condition, process):
    until = time.monotonic() + PATIENCE
    while not condition():
        assert process.poll() is None, "it ended too early"
        assert time.monotonic() < until
        time.sleep(0.005)


def parts(output):
    """The files of records, and how many they hold."""
    files = output.with_name(output.name + ".run").glob("records-*.jsonl")
    return [count for file in files if (count := file.read_bytes().count(b"\n"))]


def done_lines(output):
    """Lines that are done, by the bytes of `Claims`."""
    file = output.with_name(output.name + ".run") / "claims"
    return [line for line, byte in enumerate(file.read_bytes()) if line and byte == ord("1")] if file.exists() else []


def test_the_lines_of_a_killed_process_go_to_those_that_are_left(tmp_path, many, saved):
    """One that stands still keeps its lines, while another does all that are free, and gives them up when it dies."""
    source, whole = many
    output = tmp_path / "out.jsonl"
    process = subprocess.Popen(command(source, output), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    with ThreadPoolExecutor() as pool:
        try:
            wait_for(lambda: done_lines(output), process)
            process.send_signal(signal.SIGSTOP)
            done = done_lines(output)
            free = len(MANY) - len(done) - 10  # 2 in flight and 8 that wait, at most
            settings = FileSettings(
                options={"max_new_tokens": 256, "eos_token_id": 512}, cdb={"exit_threshold": 0.3, "max_num_seqs": 2}
            )
            rest = pool.submit(generate_file, source, output, settings, progress=False)
            until = time.monotonic() + PATIENCE
            while len(saved) < free and time.monotonic() < until and not rest.done():
                time.sleep(0.01)
            assert len(saved) >= free
            assert not rest.done()
        finally:
            process.kill()
            process.wait()
        assert rest.result(timeout=PATIENCE) == 0
    assert sorted([*saved, *done]) == list(range(1, len(MANY) + 1))
    assert output.read_bytes() == whole


def test_two_processes_of_torchrun_give_the_file_of_one_and_outlive_a_kill(tmp_path, many):
    """Of a rank that is killed in mid-run: torchrun starts both again, and they go on. A line that fails costs none."""
    source, whole = many
    source = write(tmp_path / "in.jsonl", [*read(source), {"prompt": "x", "temprature": 2}])
    output = tmp_path / "out.jsonl"
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2", "--max-restarts", "1"]
    log = tmp_path / "log"
    with log.open("w") as file:
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        process = subprocess.Popen(command(source, output, *torchrun), stdout=file, stderr=file, env=environment)
        try:
            wait_for(lambda: len(parts(output)) == 2, process)  # both have done lines
            ranks = [child for child in psutil.Process(process.pid).children() if "generate" in child.cmdline()]
            assert len(ranks) == 2
            ranks[1].kill()
            assert not output.exists()
            before = parts(output)
            assert process.wait(timeout=PATIENCE) == 0, log.read_text()[-3000:]
        finally:
            process.kill()
            process.wait()
    assert sum(before) < len(MANY)
    assert "exitcode: -9" in log.read_text()
    assert f"1 lines of {output} hold an error." in log.read_text()
    assert output.read_bytes().startswith(whole)
    assert "temprature" in read(output)[len(MANY)]["error"]
