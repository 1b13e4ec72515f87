"""The evaluation harness with the whole queue in one engine."""

import json
import subprocess
import sys

import pytest
import torch
from transformers import PreTrainedTokenizerFast

from .dory import random_dory
from .test_generation import EARLY, letter_tokenizer, refused
from .tiny import RANDOM, random_ouro

lm_eval = pytest.importorskip("lm_eval", reason="lm_eval is not installed: pip install 'hf-cdb[eval]'")

from lm_eval.api.instance import Instance  # noqa: E402
from lm_eval.models.huggingface import HFLM  # noqa: E402

from hf_cdb.lm_eval_model import CDBHarnessModel  # noqa: E402

OFF = {"exit_rule": "never"}
PROMPTS = ["ABC", "HELLO", "Z", "QRSTUVW", "ab", "LOOP"]


def letters() -> PreTrainedTokenizerFast:
    """50 letters, of which the last two end and pad."""
    tokenizer = letter_tokenizer()
    tokenizer.eos_token, tokenizer.pad_token = "r", "q"
    return tokenizer


@pytest.fixture(params=RANDOM)
def model(request):
    return RANDOM[request.param](eos_token_id=49, pad_token_id=48).double()


def harness(cls, model, **kwargs):
    return cls(pretrained=model, tokenizer=letters(), device="cpu", **kwargs)


def requests(prompts, **kwargs):
    arguments = {"until": ["EF", "K"], "max_gen_toks": 12, "do_sample": False, **kwargs}
    return [
        Instance("generate_until", {}, (prompt, dict(arguments)), index, ("task", index, 1))
        for index, prompt in enumerate(prompts)
    ]


def test_the_queue_goes_to_one_engine_and_gives_what_hf_gives(model, engines):
    expected = harness(HFLM, model, batch_size=1).generate_until(requests(PROMPTS), disable_tqdm=True)
    ours = harness(CDBHarnessModel, model, cdb=OFF, max_num_seqs=2)
    assert ours.generate_until(requests(PROMPTS), disable_tqdm=True) == expected
    assert len(engines) == 1
    assert engines[0].stats.max_num_seqs == 2
    assert len(set(expected)) > 3
    # Rows stop at their own stop sequence: nothing runs on for the slowest.
    assert ours.cdb_stats[0].tokens < 6 * 12


def test_a_request_is_alone(model):
    ours = harness(CDBHarnessModel, model, cdb=EARLY)
    together = ours.generate_until(requests(PROMPTS), disable_tqdm=True)
    alone = [ours.generate_until(requests([prompt]), disable_tqdm=True)[0] for prompt in PROMPTS]
    assert together == alone
    info = ours.get_model_info()["cdb"]
    (run,) = info.pop("runs")
    assert run == {**run, **info, "requests": "generate_until", "exit_rule": "confidence", "exit_threshold": 0.1}
    assert info["tokens"] == sum(stats.tokens for stats in ours.cdb_stats)
    assert 1 <= info["mean_depth"] < run["max_depth"]


def test_kinds_of_requests_are_kept_apart(model):
    ours = harness(CDBHarnessModel, model, exit_rule="confidence", exit_threshold=0.1)
    mixed = requests(PROMPTS[:3]) + requests(PROMPTS[3:], until=["A"], max_gen_toks=5)
    answers = ours.generate_until(mixed, disable_tqdm=True)
    assert len(ours.cdb_stats) == 2
    assert answers == [ours.generate_until([request], disable_tqdm=True)[0] for request in mixed]
    assert ours.batch_size == 1


def test_settings_from_the_task(model):
    """`gen_kwargs` of a task overrule the settings of the model, those that they name; and what ran is recorded."""
    ours = harness(CDBHarnessModel, model, cdb={**EARLY, "max_num_seqs": 2})
    off = ours.generate_until(requests(PROMPTS, cdb=OFF), disable_tqdm=True)
    assert off == harness(CDBHarnessModel, model, cdb=OFF).generate_until(requests(PROMPTS), disable_tqdm=True)
    stock = ours.generate_until(requests(PROMPTS, cdb=False), disable_tqdm=True)
    assert stock == off
    deeper = ours.generate_until(requests(PROMPTS, cdb={"min_depth": 3}), disable_tqdm=True)
    whole = harness(CDBHarnessModel, model, cdb={**EARLY, "min_depth": 3})
    assert deeper == whole.generate_until(requests(PROMPTS), disable_tqdm=True)
    assert ours.generate_until(requests(PROMPTS, cdb=True), disable_tqdm=True) != deeper
    runs = ours.get_model_info()["cdb"]["runs"]
    assert [run.get("exit_rule") for run in runs] == ["never", None, "confidence", "confidence"]
    assert [run.get("exit_threshold") for run in runs] == [None, None, 0.1, 0.1]
    assert [run.get("min_depth") for run in runs] == [1, None, 3, 1]
    assert [run.get("max_num_seqs") for run in runs] == [2, None, 2, 2]
    assert [run.get("mean_depth") for run in runs] == [
        ours.cdb_stats[0].mean_depth,
        None,
        *(stats.mean_depth for stats in ours.cdb_stats[1:]),
    ]
    assert runs[1] == {"requests": "generate_until", "cdb": False}
    assert runs[2]["mean_depth"] >= 3


def test_another_rule_leaves_the_saved_threshold_behind(model):
    """As in `generate`: the threshold belongs to the rule that it was saved with."""
    model.generation_config.cdb_config = {"exit_rule": "confidence", "exit_threshold": 0.1, "min_depth": 2}
    for given in ({"exit_rule": "never"}, {"cdb": OFF}, {"cdb": EARLY, "exit_rule": "never"}):
        config = harness(CDBHarnessModel, model, **given).cdb_config
        assert (config.exit_rule, config.exit_threshold, config.min_depth) == ("never", None, 2)
    config = harness(CDBHarnessModel, model, exit_rule="cosine").cdb_config
    assert (config.exit_rule, config.exit_threshold) == ("cosine", None)
    config = harness(CDBHarnessModel, model, exit_threshold=0.2).cdb_config
    assert (config.exit_rule, config.exit_threshold) == ("confidence", 0.2)


@pytest.mark.parametrize("depth", [1, 2, None])
def test_scores_are_those_of_the_depth(model, depth):
    """And the depth is recorded: by hand from whole passes, a text at a time."""
    texts = [("ABC", "DE"), ("HELLO", "Z")]
    scored = [Instance("loglikelihood", {}, text, index, ("task", index, 1)) for index, text in enumerate(texts)]
    ours = harness(CDBHarnessModel, model, exit_rule="never", max_depth=depth)
    answers = ours.loglikelihood(scored, True)
    tokenizer = letters()
    full = {"ouro": 4, "huginn_raven": 6}[model.config.model_type]
    loops = {"exit_at_step": (depth or full) - 1} if full == 4 else {"num_steps": depth or full}
    for (context, continuation), (found, greedy) in zip(texts, answers, strict=True):
        ids = torch.tensor([tokenizer(context + continuation)["input_ids"]])
        with torch.no_grad():
            lines = model(ids, **loops).logits[0, -len(continuation) - 1 : -1].log_softmax(-1)
        ends = ids[0, -len(continuation) :]
        assert found == pytest.approx(float(lines.gather(1, ends[:, None]).sum()), abs=1e-4)
        assert greedy == bool((lines.argmax(-1) == ends).all())
    (run,) = ours.get_model_info()["cdb"]["runs"]
    assert run == {**run, "requests": "loglikelihood", "exit_rule": "never", "max_depth": depth or full}
    assert run["mean_depth"] == (depth or full)
    whole = harness(HFLM, model).loglikelihood(scored, True)
    assert (answers == whole) == (depth is None)


def test_a_depth_that_no_pass_has_is_refused():
    dory = random_dory(eos_token_id=49, pad_token_id=48)
    scored = [Instance("loglikelihood", {}, ("ABC", "DE"), 0, ("task", 0, 1))]
    ours = harness(CDBHarnessModel, dory, exit_rule="never", max_depth=1)
    refused(["max_depth=1", "DoryForCausalLM"], lambda: ours.loglikelihood(scored, True))


def test_depth_acts_or_is_refused():
    """D-02: scoring runs at full depth, so a rule that would leave early is refused there."""
    model = random_ouro(eos_token_id=49, pad_token_id=48).double()
    scored = [Instance("loglikelihood", {}, ("ABC", "DE"), 0, ("task", 0, 1))]
    refused(
        ["'confidence'", "loglikelihood", "exit_rule=never"],
        lambda: harness(CDBHarnessModel, model, cdb=EARLY).loglikelihood(scored, True),
    )
    ours = harness(CDBHarnessModel, model, cdb=OFF).loglikelihood(scored, True)
    assert ours == harness(HFLM, model).loglikelihood(scored, True)
    refused(["'exit_treshold'"], lambda: harness(CDBHarnessModel, model, cdb={"exit_treshold": 1}))
    refused(["exit_threshold=3"], lambda: harness(CDBHarnessModel, model, exit_rule="confidence", exit_threshold=3))


TASK = """
task: letters
dataset_path: json
dataset_kwargs:
  data_files: {data}
output_type: generate_until
test_split: train
doc_to_text: "{{{{question}}}}"
doc_to_target: "{{{{answer}}}}"
generation_kwargs:
  until: ["EF"]
  max_gen_toks: 6
metric_list:
  - metric: exact_match
"""


def test_the_command_line(tmp_path):
    """A local task from model folder to result file, with plain `--model_args`."""
    model = random_ouro(eos_token_id=49, pad_token_id=48)
    model.save_pretrained(tmp_path / "model")
    tokenizer = letters()
    tokenizer.save_pretrained(tmp_path / "model")
    ids = torch.tensor([tokenizer("ABC")["input_ids"]])
    settings = {"exit_rule": "confidence", "exit_threshold": 0.1}
    output = model.generate(ids, max_new_tokens=6, do_sample=False, cdb=settings, return_dict_in_generate=True)
    answer = tokenizer.decode(output.sequences[0, 3:], skip_special_tokens=True).split("EF")[0]
    (tmp_path / "data.jsonl").write_text(
        "".join(json.dumps({"question": "ABC", "answer": text}) + "\n" for text in (answer, "wrong"))
    )
    (tmp_path / "letters.yaml").write_text(TASK.format(data=tmp_path / "data.jsonl"))
    command = [sys.executable, "-m", "hf_cdb.lm_eval_model", "--model", "hf-cdb", "--device", "cpu"]
    command += [
        "--model_args",
        f"pretrained={tmp_path / 'model'},dtype=float32,exit_rule=confidence,exit_threshold=0.1",
    ]
    command += ["--tasks", "letters", "--include_path", str(tmp_path), "--output_path", str(tmp_path / "out")]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 0, done.stderr[-2000:]
    (file,) = (tmp_path / "out").rglob("results*.json")
    results = json.loads(file.read_text())
    assert results["results"]["letters"]["exact_match,none"] == 0.5
    assert results["config"]["cdb"]["mean_depth"] == pytest.approx(output.stats.mean_depth)
    (run,) = results["config"]["cdb"]["runs"]
    assert run["exit_threshold"] == 0.1
    assert f"generate_until with exit_rule=confidence: mean depth {output.stats.mean_depth:.3f}" in done.stderr
