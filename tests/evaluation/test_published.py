"""Every configuration of a published model, on a tiny checkpoint of the same format and data of the same columns."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

import hf_cdb
from hf_cdb.evaluation.config import load_config
from hf_cdb.evaluation.run import evaluate

CONFIGS = Path(__file__).parents[2] / "configs"
CHATML = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
ROWS = {
    "gsm8k": {"question": "What is 2 + 3?", "answer": "2 and 3 make 5.\n#### 5"},
    "arc": {"question": "Which?", "choices": {"text": ["no", "yes"], "label": ["A", "B"]}, "answerKey": "B"},
    "hellaswag": {
        "activity_label": "Baking",
        "ctx": "He bakes",
        "ctx_a": "He bakes",
        "ctx_b": "",
        "endings": ["bread.", "stones."],
        "label": "0",
    },
    "sharegpt": {"conversations": [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Hello"}]},
    "alpaca": {"instruction": "Greet.", "input": "", "output": "Hello"},
    "arxiv": {"article": "We study loops.", "abstract": "Loops."},
}


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """Data of every kind, 30 rows each, and the embedded checkpoints with the chat template of the published ones."""
    folder = tmp_path_factory.mktemp("published")
    for name, row in ROWS.items():
        (folder / f"{name}.jsonl").write_text((json.dumps(row) + "\n") * 30)
    for name in ("ouro", "huginn"):
        shutil.copytree(hf_cdb.tiny_checkpoint(name), folder / name)
        (folder / name / "chat_template.jinja").write_text(CHATML)
    return folder


@pytest.mark.parametrize(
    "name",
    [
        *("ouro-1.4b", "ouro-1.4b-arxiv", "ouro-2.6b", "ouro-2.6b-arxiv", "ouro-1.4b-thinking"),
        *("huginn-0125", "huginn-0125-arxiv"),
    ],
)
def test_a_published_configuration_runs(name, files, tmp_path):
    path = CONFIGS / f"{name}.yaml"
    tasks = [spec.name for spec in load_config(path).task_specs]
    data = {task: str(files / f"{task.split('-')[0]}.jsonl") for task in tasks}
    model = str(files / name.split("-")[0])
    overrides = ["device=cpu", "dtype=float32", "draws=10", "batch_size=2"]
    config = load_config(path, overrides, model=model, data=data, limit=1)
    short = [{**task, "max_new_tokens": 2} if task["kind"] == "generate" else task for task in config.tasks]
    sweeps = [{**sweep, "exit_threshold": sweep["exit_threshold"][:1]} for sweep in config.sweeps[:1]]
    results = evaluate(replace(config, tasks=short, sweeps=sweeps), tmp_path / "out", progress=False)
    *_, last = results["systems"]
    assert last["cdb"]["exit_rule"] in ("gate", "latent-diff")
    for task in short:
        for system in results["systems"]:
            assert (task["name"] in system["tasks"]) == (task["systems"] is None or system["name"] in task["systems"])
    stock = results["systems"][0]
    assert stock["mean_depth"] == (16 if "huginn" in name else 4)
    records = [json.loads(line) for line in (tmp_path / "out" / "records.jsonl").read_text().splitlines()]
    shots = {record["task"]: record["prompt"].count("2 and 3 make 5.") for record in records}
    for task in short:
        if task["name"].startswith("gsm8k"):
            assert shots[task["name"]] == task["shots"]
    chats = [record["prompt"] for record in records if record["task"] == "gsm8k-chat"]
    assert all(prompt.endswith("<|im_start|>assistant\n") for prompt in chats)
    if name == "huginn-0125":
        assert chats[0].startswith("<|im_start|>system\nYou are a helpful assistant")
        depths = [
            s["tasks"]["arc-challenge"]["mean_depth"] for s in results["systems"] if "arc-challenge" in s["tasks"]
        ]
        assert depths == [16, 16, 4, 8]


def test_rows_in_flight_are_those_that_were_published():
    """arXiv 2608.09444: 64, of ArXiv 8; a quarter of them wait for Huginn's coda."""
    for name in ("ouro-1.4b", "ouro-2.6b", "huginn-0125"):
        for suffix, rows in (("", 64), ("-arxiv", 8)):
            config = load_config(CONFIGS / f"{name}{suffix}.yaml")
            assert config.batch_size == rows
            assert ("arxiv" in [spec.name for spec in config.task_specs]) == (suffix == "-arxiv")
            if name == "huginn-0125":
                assert config.sweeps[0]["min_coda_batch"] == rows // 4
