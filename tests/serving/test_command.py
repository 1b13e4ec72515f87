"""The command, in a process of its own."""

import os
import re
import signal
import subprocess
import sys

import httpx
import pytest

from hf_cdb.cli import main


def test_the_command_serves_until_it_is_told_to_end():
    command = [
        sys.executable,
        "-m",
        "hf_cdb",
        "serve",
        "tiny-ouro",
        "--port",
        "0",
        "--threads",
        "1",
        "--max-depth",
        "3",
    ]
    command += ["--cdb", '{"exit_rule": "never"}', "--name", "mine"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=os.environ) as process:
        try:
            address = next(found[0] for line in process.stderr if (found := re.search(r"http://[\d.:]+", line)))
            body = {"model": "mine", "prompt": "In the", "max_tokens": 200, "ignore_eos": True, "stream": True}
            body["stream_options"] = {"include_usage": True}
            with httpx.stream("POST", f"{address}/v1/completions", json=body, timeout=30) as answer:
                lines = answer.iter_lines()
                next(lines)
                process.send_signal(signal.SIGTERM)
                usage, end = [line for line in lines if line][-2:]
            assert '"completion_tokens": 200' in usage
            assert '"mean_depth": 3.0' in usage
            assert end == "data: [DONE]"
            assert process.wait(timeout=20) == 0
        finally:
            process.kill()


COMMAND = [sys.executable, "-m", "hf_cdb", "serve", "tiny-ouro", "--port", "0", "--threads", "1"]


def test_an_interrupt_is_no_failure():
    with subprocess.Popen(COMMAND, stderr=subprocess.PIPE, text=True, env=os.environ) as process:
        try:
            assert any("http://" in line for line in process.stderr)
            process.send_signal(signal.SIGINT)
            rest = process.stderr.read()
            assert process.wait(timeout=20) == 0, rest
            assert "Traceback" not in rest
        finally:
            process.kill()


def test_a_second_interrupt_ends_at_once():
    """Though the answer under way had minutes left."""
    with subprocess.Popen([*COMMAND, "--grace", "600"], stderr=subprocess.PIPE, text=True, env=os.environ) as process:
        try:
            address = next(found[0] for line in process.stderr if (found := re.search(r"http://[\d.:]+", line)))
            body = {"prompt": "In the", "max_tokens": 1000, "ignore_eos": True, "stream": True, "n": 128, "seed": 1}
            with httpx.stream(
                "POST", f"{address}/v1/completions", json={**body, "temperature": 1}, timeout=30
            ) as answer:
                next(answer.iter_lines())
                process.send_signal(signal.SIGINT)
                assert any("Waiting for" in line for line in process.stderr)
                process.send_signal(signal.SIGINT)
                assert process.wait(timeout=60) == 0
        finally:
            process.kill()


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["--cdb", "{"], "is no JSON"),
        (["--cdb", "[]"], "give a JSON object"),
        (["--cdb", '{"depth": 1}'], "'depth' is no setting"),
        (["--min-depth", "0"], "min_depth=0"),
        (["--max-queue", "0"], "max_queue=0"),
        (["--grace", "-1"], "grace=-1"),
    ],
)
def test_wrong_arguments(arguments, reason, capsys):
    assert main(["serve", "tiny-ouro", *arguments]) == 2
    assert reason in capsys.readouterr().err


def test_packages_that_are_missing_are_named(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "uvicorn", None)
    assert main(["serve", "tiny-ouro"]) == 2
    assert capsys.readouterr().err.endswith("uvicorn is not installed. Install it by `pip install 'hf-cdb[serve]'`.\n")
