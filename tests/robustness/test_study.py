"""What the study counts is what happened."""

import csv
import json

import numpy
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from hf_cdb import tiny_checkpoint
from hf_cdb.calibration import default_thresholds
from hf_cdb.cli import main
from hf_cdb.robustness import drift as drift_module
from hf_cdb.robustness import reading as reading_module
from hf_cdb.robustness.command import _base
from hf_cdb.robustness.drift import drift
from hf_cdb.robustness.material import Material, task_material, text_material, token_class
from hf_cdb.robustness.reading import mixed, read
from hf_cdb.robustness.study import Study
from hf_cdb.training.forced import FixedDepth, ForcedRow
from hf_cdb.training.measure import exact_match
from hf_cdb.training.tasks import TASKS, examples

from ..tiny import random_ouro
from ..training.tokens import tokenizer

TEXT = "And God said, Let there be light: and there was light. " * 20


@pytest.fixture(scope="module")
def ouro():
    path = tiny_checkpoint("ouro")
    return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval(), AutoTokenizer.from_pretrained(path)


def test_classes_of_tokens():
    words = tokenizer()
    (letter,), (digit,), (mark,), (line,) = (words(text, add_special_tokens=False).input_ids for text in "A7=\n")
    kinds = [token_class(words, token) for token in (letter, digit, mark, line, words.eos_token_id)]
    assert kinds == ["letter", "digit", "punctuation", "space", "end"]


def test_windows_of_text_follow_each_other():
    model = random_ouro(vocab_size=512, eos_token_id=2, pad_token_id=0)
    material = text_material(model, tokenizer(), [TEXT, "Too short.", TEXT], 3, context=10, length=7)
    ids = [tokenizer().bos_token_id, *tokenizer()(TEXT, add_special_tokens=False).input_ids]
    assert material.owners == [0, 0, 0, 2, 2, 2]
    for k, (prompt, continuation) in enumerate(zip(material.prompts[:3], material.continuations[:3], strict=True)):
        assert (len(prompt), len(continuation)) == (10, 8)
        assert prompt + continuation == ids[7 * k : 7 * k + 18]
    looked_at = [token for continuation in material.continuations[:3] for token in continuation[1:]]
    assert looked_at == ids[11 : 11 + 21]  # each once
    assert text_material(model, tokenizer(), [TEXT], 3, by_window=True).owners == [0, 1, 2]


def test_figures_by_hand(monkeypatch):
    """Two items of two and one prompts; the first token of a continuation does not count."""
    material = Material(
        "tasks",
        [[1], [1], [1]],
        [[5, 6, 7], [5, 6], [8, 9, 9]],
        [0, 0, 1],
        [["letter", "digit", "end"], ["letter", "end"], ["digit", "digit", "end"]],
        [
            ForcedRow([5, 6, 7], [1.0, 1.0, 1.0], [4, 4, 4]),  # right at full depth
            ForcedRow([5, 5], [1.0, 1.0], [4, 4]),  # wrong
            ForcedRow([8, 9, 9], [1.0, 1.0, 1.0], [4, 4, 4]),
        ],
    )
    early = [
        ForcedRow([5, 6, 8], [1.0, 1.5, 2.0], [4, 2, 1]),  # wrong now
        ForcedRow([5, 6], [1.0, 0.5], [4, 3]),  # right now, and so another token than full depth's
        ForcedRow([8, 9, 9], [9.0, 1.0, 1.0], [4, 1, 1]),
    ]
    monkeypatch.setattr(reading_module, "force", lambda *given: early)
    found = read(None, material, {})
    assert found.depth.tolist() == [2, 1, 3, 1, 1]
    assert found.lost.tolist() == [0, 1, 1, 0, 0]
    assert found.extra_bits.tolist() == [0.5, 1.0, -0.5, 0.0, 0.0]
    assert found.score_lost.tolist() == [1, -1, 0]
    assert found.score_loss().mean == 0.0
    assert found.disagreement().mean == pytest.approx(2 / 5)
    assert found.losses().tolist() == pytest.approx([2 / 3, 0.0])
    # Ratio of two items: residuals 2 - .4 * 3 = .8 and -.8, so sqrt(2 * 2 * .64) / 5.
    assert found.disagreement().standard_error == pytest.approx(numpy.sqrt(2.56) / 5)
    assert found.extra().mean == pytest.approx(1.0 / 5)
    assert found.disagreement(found.token_class == "end").mean == pytest.approx(2 / 3)
    assert found.disagreement(found.position == 1).mean == pytest.approx(1 / 3)


def test_exact_match_is_that_of_generation(ouro):
    """With exits on, the answers that forced runs call right are those that generation gets right."""
    model, words = ouro
    material = task_material(model, words, "test", 3)
    asked = [example for task in TASKS for example in examples(task, "test", 3)]
    full = exact_match(model, words, asked, cdb={"exit_rule": "never", "exit_threshold": None})
    for threshold in (0.2, 0.4):
        cdb = {"exit_rule": "gate", "exit_threshold": threshold}
        found = read(model, material, cdb)
        answers = exact_match(model, words, asked, cdb=cdb)
        assert found.score_lost.tolist() == [int(a) - int(b) for a, b in zip(full.right, answers.right, strict=True)]
    assert found.mean_depth < 2


def test_depths_that_are_mixed(ouro):
    model, words = ouro
    material = text_material(model, words, [TEXT], 2, context=20, length=10)
    curve = [read(model, material, {"exit_rule": FixedDepth(depth)}) for depth in (1, 2, 3, 4)]
    assert [one.mean_depth for one in curve] == [1, 2, 3, 4]
    lost = [one.disagreement().mean for one in curve]
    assert lost[3] == 0.0
    value = lambda one: one.disagreement().mean  # noqa: E731
    assert mixed(curve, 1.0, value) == pytest.approx(lost[0])
    assert mixed(curve, 2.25, value) == pytest.approx(0.75 * lost[1] + 0.25 * lost[2])
    assert mixed(curve, 4.0, value) == pytest.approx(0.0)


@pytest.fixture(scope="module")
def study(ouro):
    model, words = ouro
    materials = {
        "tasks": task_material(model, words, "test", 1),
        "text": text_material(model, words, [TEXT, TEXT[7:]], 1, context=20, length=12),
    }
    return Study(model, {"exit_rule": "gate", "exit_threshold": 0.6}, materials, progress=False)


def test_errors_and_policies(study):
    """The undisturbed row is the base itself, a bias moves the depth its way, and full depth loses nothing."""
    rows = {(row["noise"], row["bias"]): row for row in study.noise().rows if row["data"] == "text"}
    base = read(study.model, study.materials["text"], study.base)
    assert rows[0.0, 0.0] == {"noise": 0.0, "bias": 0.0, **study.figures("text", base)}
    loops = [rows[0.0, bias]["loops"] for bias in (-1.0, -0.5, 0.0, 0.5, 1.0)]
    assert loops == sorted(loops, reverse=True)
    assert loops[0] > loops[-1]
    rows = {(row["kv policy"], row["rule"], row["lookahead"], row["data"]): row for row in study.policies().rows}
    assert len(rows) == 4 * 3 * 2
    assert rows["last_exited", "never", 0, "text"]["tokens lost"] == 0
    assert rows["last_exited", "gate", 0, "text"]["loops"] == base.mean_depth
    assert rows["shared", "never", 0, "text"]["tokens lost"] > 0


SAVED = {"lookahead": 1, "min_depth": 2, "max_depth": 3, "kv_policy": "modular", "kv_slots": 3}


def test_all_that_is_saved_is_studied(study):
    """Each part runs the saved lookahead, policy and depth bounds, but for what it varies itself."""
    model = study.model
    saved = {"exit_rule": "gate", "exit_threshold": 0.6, "max_num_seqs": 2, **SAVED}
    before, model.generation_config.cdb_config = model.generation_config.cdb_config, saved
    try:
        base = _base(model, {})
        assert base == {"exit_rule": "gate", "exit_threshold": 0.6, **SAVED}
        assert _base(model, {"lookahead": 0, "exit_threshold": 0.5}) == {
            **{name: value for name, value in base.items() if name != "lookahead"}, "exit_threshold": 0.5,
        }  # fmt: skip
    finally:
        model.generation_config.cdb_config = before
    own = Study(model, base, study.materials, progress=False)
    wanted = own.figures("text", read(model, study.materials["text"], base))
    rows = {(row["noise"], row["bias"]): row for row in own.noise().rows if row["data"] == "text"}
    assert rows[0.0, 0.0] == {"noise": 0.0, "bias": 0.0, **wanted}
    assert all(2 <= row["loops"] <= 3 for row in rows.values())
    rows = {(row["kv policy"], row["rule"], row["lookahead"]): row for row in own.policies().rows[1::2]}
    assert {name: rows["modular", "gate", 1][name] for name in wanted} == wanted
    assert rows["last_exited", "never", 0]["loops"] == 3
    rows = [row for row in own.rules().rows if row["data"] == "text"]
    assert all(2 <= row["loops"] <= 3 for row in rows)


def test_rules_are_aimed_at_the_depth_of_the_base(study):
    model, materials = study.model, study.materials
    aim = read(model, materials["text"], study.base).mean_depth
    for name, lookahead, rule in study._scored_rules():
        if name in ("gate, same-step head", "latent-diff", "confidence", "gate, lookahead head"):
            rule.threshold = study._aimed(rule, lookahead, aim)
            loops = read(model, materials["text"], {"exit_rule": rule, "lookahead": lookahead}).mean_depth
            assert loops == pytest.approx(aim, abs=0.5), name
    names = [name for name, *_ in study._scored_rules()]
    assert names[:3] == ["gate of the model", "gate, same-step head", "gate, lookahead head"]
    assert set(names[3:]) == {"latent-diff", "cosine", "entropy-diff", "kl", "minp-kl", "confidence"}


def test_drift_runs_what_was_calibrated(monkeypatch):
    """Simulated: on text every threshold loses what its name says, on tasks nothing but below .5."""

    class Simulated:
        def __init__(self, name, threshold):
            share = 1 - threshold if name == "text" else 0.9 * (threshold < 0.5)
            self.mean_depth = 4 * threshold
            self._losses = numpy.full(300, share)

        def losses(self):
            return self._losses

    monkeypatch.setattr(drift_module, "read", lambda model, on, cdb: Simulated(on.name, cdb["exit_threshold"]))
    materials = {name: Material(name, [], [], [], []) for name in ("tasks", "text")}
    model = random_ouro()
    table = drift(model, {"exit_rule": "gate"}, materials, materials, qualities=(0.8, 0.9, 0.999))
    rows = {(row["calibrated on"], row["quality"], row.get("run on")): row for row in table.rows}
    assert rows["tasks", 0.8, "tasks"]["threshold"] == 0.5  # the shallowest that loses nothing
    assert rows["tasks", 0.8, "tasks"]["kept"] == "yes"
    assert rows["tasks", 0.8, "text"]["tokens lost"] == pytest.approx(0.5)
    assert rows["tasks", 0.8, "text"]["kept"] == "no"
    assert rows["text", 0.8, "text"]["threshold"] in default_thresholds("gate", 4)
    assert rows["text", 0.8, "text"]["tokens lost"] < 0.2
    assert rows["text", 0.8, "tasks"]["kept"] == "yes"
    assert rows["text", 0.999, None]["kept"] == "no threshold passed"


def test_the_command(tmp_path, capsys):
    folder = tmp_path / "study"
    arguments = ["--examples", "1", "--chapters", "2", "--parts", "places", "--output", str(folder)]
    assert main(["robustness", "tiny-ouro", *arguments]) == 0
    assert (folder / "robustness.md").read_text() in capsys.readouterr().out
    assert "Base setting: exit_rule gate, exit_threshold 0.6." in (folder / "robustness.md").read_text()
    assert not (folder / "robustness.png").exists()  # the tables of the picture are not all there
    found = json.loads((folder / "robustness.json").read_text())
    with (folder / "places.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == len(found["places"]["rows"])
    assert "NaN" not in (folder / "robustness.json").read_text()
    for row, line in zip(found["places"]["rows"], rows, strict=True):
        assert float(line["tokens lost"]) == pytest.approx(row["tokens lost"])
    kinds = {row["part"] for row in found["places"]["rows"] if row["data"] == "tasks"}
    assert {"digit", "letter", "end"} <= kinds


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--rule", "argmax-stability"], "rule='argmax-stability' holds no score"),
        (["--rule", "gates"], "exit_rule='gates' is unknown"),
        (["--examples", "0"], "examples=0"),
        (["--chapters", "1"], "chapters=1"),
        (["--threshold", "1.5"], "exit_threshold=1.5"),
    ],
)
def test_errors_of_the_command(arguments, words, capsys):
    assert main(["robustness", "tiny-ouro", *arguments]) == 2
    assert words in capsys.readouterr().err


def test_the_picture(tmp_path):
    pytest.importorskip("matplotlib")
    from hf_cdb.bench.report import save_plot
    from hf_cdb.robustness.picture import draw
    from hf_cdb.robustness.study import Table

    figures = {"data": "text", "loops": 2.5, "tokens lost": 0.1, "±": 0.02, "mixed depths lose": 0.12}
    tables = {
        "noise": Table(
            "noise", "", {}, [{"noise": 0.0, "bias": 0.0, **figures}, {"noise": 1.0, "bias": 0.0, **figures}]
        ),
        "rules": Table("rules", "", {}, [{"rule": "gate 0.5", **figures}]),
        "places": Table(
            "places", "", {}, [{"part": "position 1-2", **figures, "tokens lost with noise": 0.2, "± with noise": 0.1}]
        ),
    }
    save_plot(tmp_path / "study.png", draw(tables, [(1, 0.3), (2, 0.0)]), panels=3, dpi=40)
    assert (tmp_path / "study.png").stat().st_size > 1000
