"""Settings of cdb on the command line of `hf-cdb serve` and `hf-cdb generate`."""

import pytest

from hf_cdb.cdb_arguments import cdb_settings
from hf_cdb.cli import build_parser, main

COMMANDS = {"serve": ["serve", "tiny-ouro"], "generate": ["generate", "--input", "a", "--output", "b"]}


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize(
    ("arguments", "settings"),
    [
        ([], {}),
        (["--max-prefill-tokens", "64"], {"max_prefill_tokens": 64}),
        (["--max-kv-memory", "0.5", "--max-overtakes", "3"], {"max_kv_memory": 0.5, "max_overtakes": 3}),
        (["--max-kv-memory", "1"], {"max_kv_memory": 1}),
        (
            ["--max-kv-memory", "9", "--preemption", "recompute", "--kv-layout", "compact"],
            {"kv_layout": "compact", "max_kv_memory": 9, "preemption": "recompute"},
        ),
        (["--max-kv-memory", "1.0"], {"max_kv_memory": 1.0}),
        (["--quality", "0.99", "--lookahead", "1"], {"quality": 0.99, "lookahead": 1}),
        (["--cdb", '{"min_depth": 2, "refill": false}', "--min-depth", "3"], {"min_depth": 3, "refill": False}),
    ],
)
def test_settings(command, arguments, settings):
    found = cdb_settings(build_parser().parse_args([*COMMANDS[command], *arguments]))
    assert found == settings
    assert {name: type(value) for name, value in found.items()} == {n: type(value) for n, value in settings.items()}


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["--max-prefill-tokens", "0"], "max_prefill_tokens=0"),
        (["--max-kv-memory", "1.5"], "max_kv_memory=1.5"),
        (["--max-kv-memory", "nan"], "max_kv_memory=nan"),
        (["--max-overtakes", "2"], "max_overtakes=2 without max_kv_memory"),
        (["--preemption", "recompute"], "preemption='recompute' without max_kv_memory"),
        (["--quality", "2"], "quality=2.0"),
    ],
)
def test_settings_out_of_their_range(command, arguments, reason, capsys):
    assert main([*COMMANDS[command], *arguments]) == 2
    assert reason in capsys.readouterr().err


def test_a_word_is_no_memory(capsys):
    with pytest.raises(SystemExit):
        main([*COMMANDS["serve"], "--max-kv-memory", "much"])
    assert "--max-kv-memory: invalid bytes_or_share value: 'much'" in capsys.readouterr().err
