"""Thresholds chosen on a sample keep what they promise, and losses are those of the runs."""

import json
import math

import numpy
import pytest
import torch
from transformers import AutoModelForCausalLM

from hf_cdb.calibrate_command import NOTHING_PASSED
from hf_cdb.calibration import calibrate, default_thresholds, fixed_sequence
from hf_cdb.cli import main
from hf_cdb.evaluation.tasks import load_task
from hf_cdb.losses import Sample

from .test_config import refused
from .tiny import random_ouro
from .training.tokens import tokenizer


def sample(losses, depth=2.0):
    return Sample(numpy.asarray(losses, dtype=float), depth)


def test_the_sequence_ends_at_the_first_that_fails():
    asked = []

    def measure(threshold):
        asked.append(threshold)
        return sample([0.0] * 50 if threshold != 0.7 else [1.0] * 50, depth=4 * threshold)

    steps = fixed_sequence(measure, [0.9, 0.8, 0.7, 0.6], 0.1, 0.95, False)
    assert asked == [0.9, 0.8, 0.7]  # 0.6 would have passed, but comes after one that did not
    assert [step.passed for step in steps] == [True, True, False]
    assert steps[0].p_value == pytest.approx(0.9**50)
    assert (steps[1].loss, steps[1].mean_depth, steps[2].loss) == (0.0, 3.2, 1.0)


@pytest.mark.parametrize("signed", [False, True])
@pytest.mark.parametrize(
    "risks",
    [
        [0.02, 0.05, 0.08, 0.1, 0.101, 0.12, 0.2],  # the fifth is the first beyond the limit, and only just
        [0.1001] * 80,  # all are: with so many tries luck would let one pass, were they not one sequence
        [0.02, 0.11, 0.03, 0.2, 0.05, 0.3],  # not in the order of the thresholds
    ],
)
def test_the_promise(risks, signed):
    """Over 1,000 samples of known risk, the share of runs in which *any* threshold beyond the limit passes."""
    generator = numpy.random.default_rng(0)
    gains = 0.05 if signed else 0.0  # so that losses have to be that much more frequent
    wrong = 0

    def measure(place):
        # Other examples for every threshold: were thresholds tested on after one failed, more of them would pass.
        uniform = generator.random(120)
        return sample((uniform < risks[place] + gains).astype(float) - (uniform > 1 - gains))

    for _ in range(1000):
        steps = fixed_sequence(measure, range(len(risks)), 0.1, 0.9, signed)
        wrong += any(step.passed and risks[step.threshold] > 0.1 for step in steps)
    assert wrong <= 100 + 3 * math.sqrt(1000 * 0.1 * 0.9)  # 3 standard deviations of 1,000 draws


def test_the_promise_is_worth_something():
    """A risk of a fifth of the limit is found out by 400 examples nearly always."""
    generator = numpy.random.default_rng(1)
    for signed in (False, True):
        passed = sum(
            fixed_sequence(lambda _: sample(generator.random(400) < 0.01), [0], 0.05, 0.9, signed)[0].passed
            for _ in range(200)
        )
        assert passed > 180


def test_grids():
    assert default_thresholds("gate", 4)[0] == 0.99
    assert default_thresholds("latent-diff", 8) == [0.003, 0.0065, 0.014, 0.03, 0.065, 0.14, 0.3, 0.65, 1.4, 3.0]
    assert default_thresholds("argmax-stability", 8) == [1, 2, 3, 4, 5, 6]  # 6 unchanged loops need loop 7
    assert default_thresholds("argmax-stability", 8, lookahead=1) == [1, 2, 3, 4, 5]
    assert default_thresholds("argmax-stability", 2) == [1]


@pytest.fixture
def model():
    return random_ouro(vocab_size=512, eos_token_id=2, pad_token_id=0)


@pytest.fixture
def rows(tmp_path):
    """Twenty-four prompts."""
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps({"prompt": f"copy:{k}A{k % 7}=", "reference": "x"}) + "\n" for k in range(24)))
    return path


def task_of(rows, **more):
    spec = {"name": "rows", "kind": "generate", "data": str(rows), "max_new_tokens": 6, "metrics": ["exact_match"]}
    return load_task({**spec, **more}, tokenizer())


def alone(model, prompt, **mode):
    """The new tokens of one prompt in a batch of one, and the depths of a run with cdb."""
    ids = tokenizer()(prompt, return_tensors="pt").input_ids
    output = model.generate(ids, max_new_tokens=6, do_sample=False, return_dict_in_generate=True, **mode)
    depths = output.exit_depths[0].tolist() if hasattr(output, "exit_depths") else None
    return output.sequences[0, ids.shape[1] :].tolist(), depths


def test_losses_are_those_of_rows_alone(model, rows):
    """Agreement by brute force: stock at full depth against cdb, row by row."""
    task = task_of(rows)
    found = calibrate(
        model,
        tokenizer(),
        task,
        0.2,
        confidence=0.7,
        loss="agreement",
        cdb={"exit_rule": "confidence"},
        thresholds=[0.05, 0.9],
        held_out=0.25,
        progress=False,
    )
    order = numpy.random.default_rng(0).permutation(24)
    parts = {"first": order[6:], "held out": order[:6]}
    for part, thresholds in (("first", [step.threshold for step in found.steps]), ("held out", [None])):
        for place, threshold in enumerate(thresholds):
            cdb = {"exit_rule": "confidence", "exit_threshold": threshold or found.chosen.exit_threshold}
            losses, loops = [], []
            for k in parts[part]:
                full, _ = alone(model, task.examples[k].prompt, cdb=False)
                own, depths = alone(model, task.examples[k].prompt, cdb=cdb)
                same = [left == right for left, right in zip(own, full, strict=False)]
                losses.append(1 - (same.index(False) if False in same else min(len(own), len(full))) / len(full))
                loops += depths
            got = found.steps[place] if part == "first" else None
            loss, depth = (
                (got.loss, got.mean_depth)
                if got
                else (
                    found.chosen.held_out["loss"],
                    found.chosen.held_out["mean_depth"],
                )
            )
            assert loss == pytest.approx(numpy.mean(losses))
            assert depth == pytest.approx(numpy.mean(loops))
    assert found.steps[0].threshold == 0.9  # the deepest first
    assert found.examples == 18
    assert found.steps[0].loss < found.steps[-1].loss
    assert (
        found.chosen.settings
        == found.settings
        == {
            "exit_rule": "confidence",
            "lookahead": 0,
            "kv_policy": "last_exited",
            "kv_slots": None,
            "min_depth": 1,
            "max_depth": 4,
        }
    )
    assert "Held out, 6 other examples" in str(found)


def test_scores_are_lost_net_of_what_is_gained(model, rows, monkeypatch):
    """Full depth right on the first half of the examples, the early exits on the second: nothing lost on balance."""
    task = task_of(rows)
    answers = []

    def answer(model, tokenizer, system, task, examples, batch_size):
        early = system.config.exit_rule != "never"
        answers.append(early)
        right = [(int(e.id) % 2 == 0) != early for e in examples]
        return [{"completion": "x" if one else "y", "tokens": [5], "depths": [2 if early else 4]} for one in right]

    monkeypatch.setattr("hf_cdb.losses.answer", answer)
    options = {"confidence": 0.6, "cdb": {"exit_rule": "gate"}, "thresholds": [0.5], "progress": False}
    found = calibrate(model, tokenizer(), task, 0.6, seed=3, **options)
    even = sum(int(task.examples[k].id) % 2 == 0 for k in numpy.random.default_rng(3).permutation(24)[12:])
    assert found.steps[0].loss == pytest.approx((even - (12 - even)) / 12)
    assert found.steps[0].mean_depth == 2
    assert found.full_score == even / 12
    assert f"which score {even / 12:.4f}, 12 examples" in str(found)
    assert answers == [False, True, *([False, True] if found.chosen else [])]


def test_nothing_is_certified_where_there_is_nothing_to_lose(model, rows):
    """A random model has no answer right, so no threshold could lose any."""
    options = {"confidence": 0.6, "cdb": {"exit_rule": "gate"}, "progress": False}
    refused(
        ["quality=0.5", "exact_match of task 'rows' is 0 at full depth", "loss='agreement'"],
        lambda: calibrate(model, tokenizer(), task_of(rows), 0.5, **options),
    )


def test_repeated_prompts_are_told(model, rows):
    rows.write_text(rows.read_text() + rows.read_text())
    options = {"confidence": 0.6, "loss": "agreement", "cdb": {"exit_rule": "gate"}, "thresholds": [1.0]}
    with pytest.warns(UserWarning, match="task 'rows': 48 examples have 24 different prompts"):
        calibrate(model, tokenizer(), task_of(rows), 0.5, progress=False, **options)


def test_texts(model, tmp_path):
    path = tmp_path / "texts.jsonl"
    lines = [{"text": f"And Moses said unto him, {k} times shall the sea be parted. " * 6} for k in range(8)]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    task = load_task(
        {"name": "t", "kind": "text", "data": str(path), "prompt": "{text}", "length": 40, "context": 20}, tokenizer()
    )
    options = {"loss": "agreement", "confidence": 0.5, "cdb": {"exit_rule": "confidence"}, "progress": False}
    found = calibrate(model, tokenizer(), task, 0.2, thresholds=[1.0, 0.01], **options)
    assert found.steps[0].loss == 0.0  # nothing leaves
    assert found.steps[0].mean_depth == 4
    assert 0 < found.steps[1].loss < 1
    assert found.steps[1].mean_depth < 4


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"quality": 1.0}, ["quality=1.0", "between 0 and 1"]),
        ({"confidence": 0}, ["confidence=0"]),
        ({"held_out": 1.0}, ["held_out=1.0"]),
        ({"loss": "tokens"}, ["loss='tokens'", "score, agreement"]),
        ({"metric": "bleu"}, ["metric='bleu'", "exact_match"]),
        ({"metric": "exact_match", "loss": "agreement"}, ["metric='exact_match'", "agreement"]),
        ({"cdb": {"exit_threshold": 0.5}}, ["exit_threshold", "0.5", "Drop it"]),
        ({"cdb": {"exit_rule": "never"}}, ["exit_rule='never'", "no threshold"]),
        ({"cdb": {"prefill_exit": True}}, ["prefill_exit", "full depth", "Drop it"]),
        ({"thresholds": [0.5, 2.0]}, ["exit_threshold=2.0", "(0, 1]"]),
        ({"quality": 0.99}, ["quality=0.99 with confidence=0.9", "takes", "has 12"]),
    ],
)
def test_what_cannot_be_calibrated(model, rows, given, words):
    options = {"quality": 0.5, "confidence": 0.9, "cdb": {"exit_rule": "gate"}, "progress": False, **given}
    refused(words, lambda: calibrate(model, tokenizer(), task_of(rows), options.pop("quality"), **options))


def test_tasks_without_a_loss(model, rows):
    text = load_task({"name": "t", "kind": "text", "data": str(rows), "length": 4, "context": 2}, tokenizer())
    refused(["loss='score'", "no metric"], lambda: calibrate(model, tokenizer(), text, 0.5))


@pytest.fixture
def folder(model, rows, tmp_path):
    model.save_pretrained(tmp_path / "model")
    tokenizer().save_pretrained(tmp_path / "model")
    config = tmp_path / "config.yaml"
    config.write_text(
        "model: tiny-ouro\ntasks:\n- {name: rows, kind: generate, data: ROWS, max_new_tokens: 6}\n".replace(
            "ROWS", str(rows)
        )
    )
    return tmp_path / "model", config


def command(folder, *more, quality="0.2"):
    model, config = folder
    return main([
        "calibrate", str(model), "--quality", quality, "--confidence", "0.7", "--config", str(config),
        "--loss", "agreement", "--rule", "confidence", *more,
    ])  # fmt: skip


def test_the_command_saves_what_it_found(folder, tmp_path, capsys):
    threads = torch.get_num_threads()
    report = tmp_path / "report.json"
    assert command(folder, "--thresholds", "0.9", "0.05", "--save", "--json", str(report)) == 0
    torch.set_num_threads(threads)
    told = capsys.readouterr().out
    chosen = json.loads(report.read_text())["calibration"]["chosen"]
    assert f"exit_threshold {chosen['exit_threshold']:g} has" in told
    model = AutoModelForCausalLM.from_pretrained(folder[0]).eval()
    assert model.generation_config.cdb_calibrated == [chosen]
    assert model.generation_config.cdb_config["quality"] == 0.2
    threshold = {"exit_rule": "confidence", "exit_threshold": chosen["exit_threshold"]}
    wanted = alone(model, "copy:AB=", cdb=threshold)
    assert alone(model, "copy:AB=", cdb={"quality": 0.1}) == alone(model, "copy:AB=", cdb=True) == wanted


def test_nothing_passes(folder, capsys):
    before = (folder[0] / "generation_config.json").read_text()
    assert command(folder, "--thresholds", "0.0001", "--save", quality="0.8") == NOTHING_PASSED
    assert "keep full depth" in capsys.readouterr().out
    assert (folder[0] / "generation_config.json").read_text() == before


def test_errors_of_the_command(folder, capsys):
    assert main(["calibrate", "tiny-ouro", "--quality", "0.9", "--save"]) == 2
    assert "model='tiny-ouro' is no folder" in capsys.readouterr().err
    assert main(["calibrate", str(folder[0]), "--quality", "0.9", "--task", "rows"]) == 2
    assert "task='rows' without config" in capsys.readouterr().err
    assert command(folder, "--task", "lines") == 2
    assert "task='lines'" in capsys.readouterr().err
