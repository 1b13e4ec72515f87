import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from accelerate.state import AcceleratorState

from hf_cdb import __version__
from hf_cdb.cli import COMMANDS, PLAIN, build_parser, main

SMOKE = Path(__file__).parents[1] / "configs" / "train" / "smoke-ouro.yaml"


@pytest.fixture(autouse=True)
def _fresh_process_state():
    AcceleratorState._reset_state(reset_partial_state=True)
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


def tiny(*arguments):
    return main(["train", "tiny", "--config", str(SMOKE), *map(str, arguments)])


def test_every_command_is_described(capsys):
    commands = [([group, name], one[0]) for group, members in COMMANDS.items() for name, one in members.items()]
    for words, summary in [*commands, *(([name], summary) for name, (summary, _) in PLAIN.items())]:
        with pytest.raises(SystemExit) as end:
            build_parser().parse_args([*words, "--help"])
        assert end.value.code == 0
        assert summary.capitalize() in " ".join(capsys.readouterr().out.split())


def test_a_command_without_a_group(monkeypatch, capsys):
    def add_arguments(parser):
        parser.add_argument("count", type=int)
        parser.set_defaults(run=run)

    def run(arguments):
        if arguments.count < 1:
            raise ValueError(f"count={arguments.count}: choose at least 1.")

    monkeypatch.setitem(PLAIN, "shout", ("shout so many times", add_arguments))
    assert main(["shout", "2"]) == 0
    assert main(["shout", "0"]) == 2
    assert capsys.readouterr().err == "hf-cdb shout: error: count=0: choose at least 1.\n"


def test_the_module_is_the_command():
    done = subprocess.run([sys.executable, "-m", "hf_cdb", "--version"], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["hf-cdb", __version__]


def test_a_reader_that_has_enough_ends_it_quietly(tmp_path):
    """More than a pipe holds, to somebody who reads one line, as `head` does."""
    path = tmp_path / "run.jsonl"
    entry = dict.fromkeys(["tokens", "context", "waiting", "entering", "looping", "left", "start", "duration"], 0)
    path.write_text(20_000 * (json.dumps({"stage": "loop", "rows": [0], "depths": [1], **entry}) + "\n"))
    command = [sys.executable, "-m", "hf_cdb", "trace", "show", str(path), "--launches", "20000"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout.readline().startswith(b"| start ms")
        process.stdout.close()
        assert process.stderr.read() == b""
        assert process.wait() == 1


def test_a_run_and_its_resumption(tmp_path, capsys):
    output = tmp_path / "run"
    assert tiny("--output", output, "--threads", 1, "--set", "steps=3", "evaluation.final_examples=1") == 0
    assert "29633 parameters, 3 steps" in capsys.readouterr().out
    assert json.loads((output / "model" / "metrics.json").read_text())["steps"] == 3
    assert tiny("--output", output, "--resume", "--set", "steps=3", "--set", "evaluation.final_examples=2") == 0
    assert "3 steps" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--set", "stepz=3"], "the key 'stepz' is unknown. Did you mean 'steps'?"),
        (["--set", "model.num_attention_heads=3"], "hidden_size=32 is not a multiple of num_attention_heads=3"),
        (["--resume"], "holds no checkpoint. Start without resume"),
        (["--threads", "0"], "threads=0: at least one thread"),
        (["--config", "nowhere.yaml"], "config='nowhere.yaml': there is no such file"),
    ],
)
def test_errors_are_one_line(arguments, words, tmp_path, capsys):
    assert tiny("--output", tmp_path / "run", *arguments) == 2
    message = capsys.readouterr().err.splitlines()[-1]
    assert message.startswith("hf-cdb train tiny: error: ")
    assert words in message


def test_a_traceback_on_request(tmp_path):
    arguments = ["train", "tiny", "--config", "nowhere.yaml", "--output", str(tmp_path)]
    with pytest.raises(FileNotFoundError, match=r"nowhere\.yaml"):
        main(["--traceback", *arguments])
