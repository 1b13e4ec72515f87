import json

import pytest

from hf_cdb.cli import main
from hf_cdb.training import depth_tables
from hf_cdb.training.depth_tables import measure_depths, measure_settings, to_markdown
from hf_cdb.training.forced import FixedDepth
from hf_cdb.training.measure import bits_per_byte
from hf_cdb.training.passes import logits_by_depth
from hf_cdb.training.tasks import TASKS

from ..tiny import random_ouro
from .tokens import tokenizer

CHAPTERS = ["In the beginning God created the heaven and the earth.\n" * 14, "And God said, Let there be light. " * 19]


@pytest.fixture
def model(monkeypatch):
    monkeypatch.setattr(depth_tables, "chapters", lambda split: CHAPTERS)
    monkeypatch.setattr("hf_cdb.training.measure.chapters", lambda split: CHAPTERS)
    return random_ouro(vocab_size=512, eos_token_id=2, pad_token_id=0, max_position_embeddings=1024)


def test_rows_by_what_is_known_of_them(model):
    settings = {"two": {"exit_rule": FixedDepth(2)}, "never": {"exit_rule": "never"}}
    one, two, three, four, again, never = measure_settings(model, tokenizer(), settings, count=2, progress=False)
    names = [row["name"] for row in (one, two, three, four, again, never)]
    assert names == ["depth 1", "depth 2", "depth 3", "depth 4", "two", "never"]
    assert four["bits_difference"] == {"mean": 0, "half_width_95": 0}
    assert four["mean_depth"] == four["text_mean_depth"] == four["answers_mean_depth"] == 4
    assert four["agreement"] == 1
    assert two["text_mean_depth"] == 2
    assert 2 < two["answers_mean_depth"] < 4  # the first token of an answer comes from the prompt, at full depth
    assert two["exits"][1] + two["exits"][3] == pytest.approx(1)
    # A setting that is a fixed depth is what the mix at its mean depth says.
    for key in ("bits_per_byte", "agreement", "exact_match", "exits"):
        assert again[key] == two[key]
    assert again["mix_bits_per_byte"] == pytest.approx(two["bits_per_byte"]["mean"])
    assert never["mix_agreement"] == never["agreement"] == 1
    bits = {row["name"]: row["bits_per_byte"]["mean"] for row in (one, three)}
    for row in (one, three):
        assert row["bits_difference"]["mean"] == pytest.approx(bits[row["name"]] - four["bits_per_byte"]["mean"])
    depths = measure_depths(model, tokenizer(), count=2)
    table = to_markdown(depths, [one, two, three, four, again, never])
    assert table.count("\n| depth ") == 4
    assert "| two | " in table
    assert all(f"\n| {task} | " in table for task in TASKS)


def test_depths_are_those_of_whole_passes(model):
    depths = measure_depths(model, tokenizer(), chapter_count=1, count=2)
    expected = bits_per_byte(lambda ids: logits_by_depth(model, ids), tokenizer(), CHAPTERS[:1])
    for depth, score in expected.items():
        assert depths["bits_per_byte"][str(depth)]["mean"] == pytest.approx(score.mean)
    assert all(set(scores) == {"1", "2", "3", "4"} for scores in depths["tasks"].values())
    assert set(depths["heuristics"]) == set(TASKS)


def test_the_command_writes_what_it_prints(model, tmp_path, capsys):
    model.save_pretrained(tmp_path / "model")
    tokenizer().save_pretrained(tmp_path / "model")
    arguments = ["measure", "depth", str(tmp_path / "model"), "--examples", "2", "--chapters", "1", "--min-depth", "2"]
    assert main([*arguments, "--rule", "gate", "0.5", "--rule", "lookahead", "0.5", "--output", str(tmp_path)]) == 0
    written = json.loads((tmp_path / "depth.json").read_text())
    assert [row["name"] for row in written["settings"][4:]] == ["gate 0.5", "lookahead 0.5"]
    assert written["min_depth"] == 2
    assert written["settings"][4]["exits"][0] == 0
    assert (tmp_path / "depth.md").read_text() in capsys.readouterr().out


@pytest.mark.parametrize(
    ("rule", "words"),
    [
        (["gate"], "rule 'gate' has no threshold"),
        (["gate", "half"], "not all numbers"),
        (["gates", "0.5"], "did you mean 'gate'"),
        (["gate", "0.5", "--min-depth", "9"], "min_depth=9"),
        (["gate", "0.5", "--examples", "0"], "examples=0"),
    ],
)
def test_rules_that_cannot_be_measured(rule, words, capsys, monkeypatch):
    monkeypatch.setattr("hf_cdb.training.tables_command.measure_depths", None)
    assert main(["measure", "depth", "ouro", "--rule", *rule]) == 2
    assert words in capsys.readouterr().err
