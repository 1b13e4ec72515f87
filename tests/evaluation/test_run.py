"""A whole evaluation against what the model itself, asked in plain ways, gives."""

import hashlib
import json
import re
from dataclasses import replace
from functools import partial

import pytest
import torch

from hf_cdb.adapters import adapter_for
from hf_cdb.config import CDBConfig, saved_settings
from hf_cdb.evaluation import records as records_module
from hf_cdb.evaluation.answers import answer
from hf_cdb.evaluation.config import System
from hf_cdb.evaluation.report import save_csv, save_picture, to_markdown
from hf_cdb.evaluation.rerun import rerun
from hf_cdb.evaluation.run import evaluate, load_model_to_evaluate
from hf_cdb.evaluation.tasks import load_task
from hf_cdb.training.forced import FixedDepth, cut_windows, read_text
from hf_cdb.training.measure import bits_per_byte
from hf_cdb.training.passes import logits_by_depth, states_by_depth

from .small import TEXTS, small_config

NAMES = ("tiny-ouro", "tiny-huginn")


@pytest.fixture(scope="module", params=NAMES)
def run(request, tmp_path_factory):
    """An evaluation of a checkpoint: configuration, folder, results, records by task and system."""
    folder = tmp_path_factory.mktemp(request.param)
    config = small_config(folder, request.param)
    results = evaluate(config, folder / "out", progress=False)
    records = {}
    for line in (folder / "out" / "records.jsonl").read_text().splitlines():
        record = json.loads(line)
        records.setdefault((record["task"], record["system"]), []).append(record)
    return config, folder / "out", results, records


def system_of(results, name):
    return next(system for system in results["systems"] if system["name"] == name)


def test_answers_are_those_of_the_model(run):
    """One prompt after the other, with stock `generate` and with cdb."""
    config, _, _, records = run
    model, tokenizer = load_model_to_evaluate(config.model)
    adapter = adapter_for(model)
    modes = {
        "stock": {"cdb": False},
        "engine": {"cdb": False},
        "default": {"cdb": True},
        "depth 1": {"cdb": False, **adapter.plain_arguments(1)},
    }
    for name, mode in modes.items():
        for record in records["tasks", name]:
            inputs = tokenizer([record["prompt"]], return_tensors="pt")
            stops = {"stop_strings": ["77"], "tokenizer": tokenizer}
            output = model.generate(**inputs, max_new_tokens=8, do_sample=False, **mode, **stops)
            tokens = output[0, inputs["input_ids"].shape[1] :].tolist()
            assert record["tokens"] == tokens
            text = tokenizer.decode(tokens, skip_special_tokens=True)
            assert record["completion"] == text.split("77")[0]
            assert record["ended"] == ("77" in text or tokens[-1] == tokenizer.eos_token_id)
            assert record["scores"] == {"exact_match": float(text.split("77")[0] == record["reference"])}
            if name == "default":
                assert len(record["depths"]) == len(tokens)
                assert record["depths"][0] == adapter.full_depth


def test_scores_are_those_of_the_records(run):
    _, _, results, records = run
    full = results["model"]["loops"]
    for name in ("stock", "engine", "default", "depth 1"):
        system, answers = system_of(results, name), records["tasks", name]
        right = [record["scores"]["exact_match"] for record in answers]
        score = system["scores"]["tasks/exact_match"]
        assert score["mean"] == pytest.approx(sum(right) / 7)
        assert score["count"] == 7
        assert system["groups"]["tasks/exact_match"]["add"]["mean"] == right[3]
        assert system["tasks"]["tasks"]["tokens"] == sum(len(record["tokens"]) for record in answers)
    default = system_of(results, "default")
    spent = [depth for record in records["tasks", "default"] for depth in record["depths"]]
    spent += [int(d) for r in records["psalm", "default"] for d, n in r["depths"].items() for _ in range(n)]
    assert default["mean_depth"] == pytest.approx(sum(spent) / len(spent))
    assert default["loops_ratio"] == pytest.approx(full * len(spent) / sum(spent))
    once, loop = results["model"]["parameters_once"], results["model"]["parameters_per_loop"]
    bound = (once + full * loop) / (once + loop * sum(spent) / len(spent))
    assert default["flop_bound"] == pytest.approx(bound)
    assert system_of(results, "stock")["flop_bound"] == 1
    assert system_of(results, "engine")["scores"]["tasks/identical"]["mean"] == 1
    assert system_of(results, "depth 1")["scores"]["tasks/exact_match"]["difference"]["mean"] <= 0


def test_texts_are_read_as_the_model_reads_them(run):
    config, _, results, records = run
    model, tokenizer = load_model_to_evaluate(config.model)
    adapter = adapter_for(model)
    kept = [TEXTS[0], TEXTS[2]]  # the other is shorter than a window
    assert [record["id"] for record in records["psalm", "stock"]] == ["0", "2"]
    windows = cut_windows(model, tokenizer, kept, length=32, context=16)
    full = read_text(model, windows, {"exit_rule": FixedDepth(adapter.full_depth), "exit_threshold": None}, context=16)
    early = read_text(model, windows, True, context=16)
    for name, text in (("stock", full), ("engine", full), ("default", early)):
        score = system_of(results, name)["scores"]["psalm/bits_per_byte"]
        assert score["mean"] == pytest.approx(text.bits_per_byte.mean, rel=1e-4)
        assert score["count"] == 2
        assert system_of(results, name)["tasks"]["psalm"]["mean_depth"] == pytest.approx(text.mean_depth)
    assert system_of(results, "default")["scores"]["psalm/agreement"]["mean"] == pytest.approx(early.agreement)
    curve = results["depth_curve"]["psalm"]
    assert list(curve) == [str(depth) for depth in range(1, adapter.full_depth + 1)]
    assert curve[str(adapter.full_depth)]["bits_per_byte"]["mean"] == pytest.approx(full.bits_per_byte.mean, rel=1e-4)
    assert curve["1"]["bits_per_byte"]["mean"] > curve[str(adapter.full_depth)]["bits_per_byte"]["mean"]


def test_the_signal_is_the_rule_s_own_score(run):
    """By hand: the head's cumulative probability after every loop of plain passes, and the tokens there."""
    config, _, results, records = run
    model, tokenizer = load_model_to_evaluate(config.model)
    adapter = adapter_for(model)
    saved = saved_settings(model.generation_config, adapter)
    rule = CDBConfig.create(True, saved, adapter).resolve(adapter).exit_rule
    windows = cut_windows(model, tokenizer, [TEXTS[0]], length=32, context=16)
    expected = []
    for window in windows:
        ids = torch.tensor([window.inputs])
        states, logits = states_by_depth(model, ids), logits_by_depth(model, ids)
        survival, reached = torch.ones(16), torch.zeros(16)
        for depth in range(1, adapter.full_depth):
            hazard = rule.head(states[depth][0, 16:], [depth] * 16).sigmoid()
            reached, survival = reached + hazard * survival, survival * (1 - hazard)
            same = logits[depth][0, 16:].argmax(-1) == logits[adapter.full_depth][0, 16:].argmax(-1)
            expected += zip(reached.tolist(), same.int().tolist(), strict=True)
    found = records["psalm", "default"][0]["signal"]
    pairs = sorted(zip(found["scores"], found["agrees"], strict=True))
    assert len(pairs) == len(expected)
    assert [score for score, _ in pairs] == pytest.approx([score for score, _ in sorted(expected)], abs=1e-4)
    # Near ties; and Huginn's last layers read keys of full depth there, but those of the same depth in plain passes.
    slack = {"tiny-ouro": 1, "tiny-huginn": 0.02 * len(pairs)}[config.model]
    assert abs(sum(found["agrees"]) - sum(agree for _, agree in expected)) <= slack
    bins = results["signal"]["psalm"]["default"]["bins"]
    assert sum(one["count"] for one in bins) == sum(len(r["signal"]["scores"]) for r in records["psalm", "default"])


def test_log_likelihoods_obey_the_depth(run):
    """D-02: scores are those of the depth asked for, and the report names it."""
    config, _, results, records = run
    model, tokenizer = load_model_to_evaluate(config.model)
    adapter = adapter_for(model)
    for name, depth in (("stock", adapter.full_depth), ("engine", adapter.full_depth), ("depth 1", 1)):
        assert system_of(results, name)["tasks"]["arc"]["mean_depth"] == depth
        for record in records["arc", name]:
            context = tokenizer(record["prompt"], return_tensors="pt")["input_ids"]
            values = []
            for choice in record["choices"]:
                ids = tokenizer(record["prompt"] + choice, return_tensors="pt")["input_ids"]
                with torch.no_grad():
                    lines = model(ids, **adapter.plain_arguments(depth)).logits[0].log_softmax(-1)
                places = range(context.shape[1], ids.shape[1])
                values.append(sum(float(lines[place - 1, ids[0, place]]) for place in places))
            assert record["loglikelihoods"] == pytest.approx(values, abs=1e-3)
            assert record["scores"]["accuracy"] == float(values[1] > values[0])
    shallow = [record["loglikelihoods"] for record in records["arc", "depth 1"]]
    assert shallow != [record["loglikelihoods"] for record in records["arc", "stock"]]


def test_a_record_runs_again_from_itself(run):
    """K-02: from the JSON alone, in every kind and for stock, engine and cdb."""
    _, _, _, records = run
    for key in [("tasks", "stock"), ("tasks", "default"), ("arc", "depth 1"), ("psalm", "default")]:
        record = json.loads(json.dumps(records[key][-1]))
        again = rerun(record)
        for name in ("completion", "tokens", "depths", "ended"):
            assert again.get(name) == record.get(name)
        for name in ("loglikelihoods", "bits"):
            if name in record:
                assert again[name] == pytest.approx(record[name], abs=1e-3)
    held = records["tasks", "default"][0]["run"]
    assert held["cdb"]["exit_rule"] == "gate"
    assert held["max_depth"] == held["cdb"]["max_depth"]
    assert {"torch", "transformers", "hf-cdb"} <= set(held["versions"])
    for name in ("template", "system_prompt", "shots", "stop", "limit", "dtype", "batch_size", "seed", "chat"):
        assert name in held
    assert held["stop"] == ["77"]
    documented = re.search(r'"run": \{(.*?)\}', records_module.__doc__, re.DOTALL)[1]
    assert set(held) == set(re.findall(r'"(\w+)"', documented))


def test_a_special_token_can_stop_an_answer(tmp_path):
    """As of a chat, whose turns end with a token that is not the model's end of sequence."""
    model, tokenizer = load_model_to_evaluate("tiny-ouro")
    stop, tokenizer.eos_token = tokenizer.eos_token, tokenizer.convert_ids_to_tokens(3)
    model.generation_config.eos_token_id = 3
    spec = {**small_config(tmp_path).tasks[0], "stop": [stop], "max_new_tokens": 12}
    task = load_task(spec, tokenizer)
    for system in (System("stock", None, None, 4), System("engine", CDBConfig(exit_rule="never"), None, 4)):
        for record, example in zip(
            answer(model, tokenizer, system, task, task.examples, 7), task.examples, strict=True
        ):
            assert stop in tokenizer.decode(record["tokens"])
            assert (record["completion"], record["ended"]) == (example.reference, True)
    task = load_task({**spec, "stop": [task.examples[0].reference[-1] + stop]}, tokenizer)
    (record,) = answer(model, tokenizer, system, task, task.examples[:1], 1)
    assert (record["completion"], record["ended"]) == (task.examples[0].reference[:-1], True)


@pytest.mark.filterwarnings("error::RuntimeWarning")
def test_signals_that_are_not_finite_are_counted(tmp_path):
    """The cosine of Huginn's start state, which is zero, is none."""
    config = small_config(tmp_path, "tiny-huginn", cdb={"cosine": {"exit_rule": "cosine"}})
    results = evaluate(replace(config, tasks=[{**config.tasks[2], "signal": ["cosine"]}]), tmp_path / "out", False)
    signal = results["signal"]["psalm"]["cosine"]
    scores = []
    for line in (tmp_path / "out" / "records.jsonl").read_text().splitlines():
        record = json.loads(line, parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))
        scores += record.get("signal", {"scores": []})["scores"]
    assert 0 < signal["not_finite"] == scores.count(None) < len(scores)
    assert sum(one["count"] for one in signal["bins"]) == len(scores) - scores.count(None)
    assert f"{signal['not_finite']} scores not finite" in to_markdown(results)


def test_a_rule_without_a_score_is_refused_before_anything_runs(tmp_path):
    config = small_config(tmp_path, cdb={"stable": {"exit_rule": "argmax-stability"}})
    config = replace(config, tasks=[config.tasks[0], {**config.tasks[2], "signal": ["stable"]}])
    with pytest.raises(ValueError, match="signal of task 'psalm': system 'stable': exit_rule='argmax-stability' holds"):
        evaluate(config, tmp_path / "out", progress=False)
    assert not (tmp_path / "out").exists()


def test_the_chat_template_is_kept(tmp_path):
    """K-02: its text stands in the results, and every record says by a hash that it was this one."""
    config = small_config(tmp_path, cdb={})
    config = replace(config, tasks=[{**config.tasks[0], "chat": True}], limit=1)
    results = evaluate(config, tmp_path / "out", progress=False)
    _, tokenizer = load_model_to_evaluate(config.model)
    assert results["chat_template"] == tokenizer.chat_template
    record = json.loads((tmp_path / "out" / "records.jsonl").read_text().splitlines()[0])
    assert record["run"]["chat_template_sha256"] == hashlib.sha256(tokenizer.chat_template.encode()).hexdigest()


def test_no_system_pays_for_what_happens_once(tmp_path, monkeypatch):
    """Before every system's first batch that is timed runs a short one, of which nothing is kept."""
    calls = []

    def noted(model, tokenizer, system, task, examples, batch_size):
        calls.append((system.name, task.max_new_tokens, len(examples)))
        return answer(model, tokenizer, system, task, examples, batch_size)

    monkeypatch.setattr("hf_cdb.evaluation.run.answer", noted)
    config = small_config(tmp_path, cdb={}, batch_size=2)
    results = evaluate(replace(config, tasks=config.tasks[:1]), tmp_path / "out", progress=False)
    assert calls == [("stock", 2, 2), ("stock", 8, 7), ("engine", 2, 2), ("engine", 8, 7)]
    assert results["systems"][0]["scores"]["tasks/exact_match"]["count"] == 7


def test_reports(run, tmp_path):
    _, _, results, _ = run
    table = to_markdown(results)
    assert "| engine |" in table
    assert "psalm: exit signal of default (gate)" in table
    assert "Differences to stock" in table
    save_csv(tmp_path / "results.csv", results)
    lines = (tmp_path / "results.csv").read_text().splitlines()
    assert len(lines) == 1 + sum(len(system["scores"]) for system in results["systems"])
    save_picture(tmp_path / "results.png", results)
    assert (tmp_path / "results.png").read_bytes().startswith(b"\x89PNG")
    json.loads(json.dumps(results), parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))


def test_rules_that_ask_for_logits_pay_for_them(tmp_path):
    """The FLOP bound is that of the engine's own counts."""
    config = small_config(tmp_path, "tiny-huginn", cdb={"kl": {"exit_rule": "kl", "exit_threshold": 0.05}})
    config = replace(config, tasks=[{**config.tasks[0], "stop": [], "metrics": []}])
    results = evaluate(config, tmp_path / "out", progress=False)
    model, tokenizer = load_model_to_evaluate(config.model)
    tokenizer.padding_side = "left"
    prompts = [json.loads(line)["prompt"] for line in (tmp_path / "out" / "records.jsonl").read_text().splitlines()[:7]]
    inputs = tokenizer(prompts, return_tensors="pt", padding=True)
    settings = {"cdb": {"exit_rule": "kl", "exit_threshold": 0.05}, "do_sample": False}
    output = model.generate(**inputs, max_new_tokens=8, return_dict_in_generate=True, **settings)
    assert system_of(results, "kl")["flop_bound"] == pytest.approx(output.stats.flop_bound)
    save_picture(tmp_path / "speed.png", results)  # without a metric of answers


def test_bits_of_the_last_depth_are_those_of_plain_windows(tmp_path):
    """Windows without overlap of what is scored: `measure.bits_per_byte` scores the same tokens of one window."""
    text = TEXTS[0]
    model, tokenizer = load_model_to_evaluate("tiny-ouro")
    ids = tokenizer(text, add_special_tokens=False)["input_ids"][:32]
    piece = tokenizer.decode(ids)
    assert tokenizer(piece, add_special_tokens=False)["input_ids"] == ids
    both = bits_per_byte(partial(logits_by_depth, model), tokenizer, [piece], length=32, context=0)
    first = bits_per_byte(
        partial(logits_by_depth, model), tokenizer, [tokenizer.decode(ids[:16])], length=16, context=0
    )
    size, half = len(piece), len(tokenizer.decode(ids[:16]))
    config = small_config(tmp_path, cdb={})
    (tmp_path / "piece.jsonl").write_text(json.dumps({"text": piece}) + "\n")
    task = {**config.tasks[2], "data": str(tmp_path / "piece.jsonl"), "signal": []}
    results = evaluate(replace(config, tasks=[task]), tmp_path / "out", progress=False)
    for depth, score in results["depth_curve"]["psalm"].items():
        bits = both[int(depth)].mean * size - first[int(depth)].mean * half
        assert score["bits_per_byte"]["mean"] == pytest.approx(bits / (size - half), rel=1e-4)
