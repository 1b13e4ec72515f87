"""Small evaluations that several tests share."""

import json
from pathlib import Path

import yaml

from hf_cdb.evaluation.config import EvaluationConfig

PSALM = "1 The LORD is my shepherd; I shall not want. 2 He maketh me to lie down in green pastures. "
TEXTS = [PSALM * 3, "Amen.", "And it came to pass in those days, that there went out a decree. " * 3]


def write_files(folder: Path) -> dict[str, str]:
    """Files of choices and of texts, by what they hold."""
    choices = [
        {"question": f"add:1{n}+2{n}=", "choices": {"text": ["57", str(30 + 2 * n)], "label": ["A", "B"]}, "key": "B"}
        for n in range(1, 4)
    ]
    files = {"choices": folder / "choices.jsonl", "texts": folder / "texts.jsonl"}
    files["choices"].write_text("".join(json.dumps(row) + "\n" for row in choices))
    files["texts"].write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXTS))
    return {name: str(path) for name, path in files.items()}


def small_config(folder: Path, model: str = "tiny-ouro", **changes) -> EvaluationConfig:
    """All three kinds of tasks, and the systems "default" and "depth 1" beside stock and engine."""
    files = write_files(folder)
    tasks = [
        {
            "name": "tasks",
            "kind": "generate",
            "data": {"builder": "tasks", "count": 1},
            "reference": "{answer}",
            "group": "{task}",
            "max_new_tokens": 8,
            "stop": ["77"],
            "metrics": ["exact_match"],
        },
        {
            "name": "arc",
            "kind": "loglikelihood",
            "data": files["choices"],
            "prompt": "{question}",
            "choices": "choices.text",
            "labels": "choices.label",
            "answer": "key",
            "systems": ["stock", "engine", "depth 1"],
        },
        {
            "name": "psalm",
            "kind": "text",
            "data": files["texts"],
            "prompt": "{text}",
            "length": 32,
            "context": 16,
            "signal": ["default"],
        },
    ]
    settings = {"default": True, "depth 1": {"exit_rule": "never", "max_depth": 1}}
    return EvaluationConfig(**{"model": model, "tasks": tasks, "cdb": settings, "draws": 100, **changes})


def write_config(config: EvaluationConfig, path: Path) -> Path:
    path.write_text(yaml.safe_dump(config.to_dict(), sort_keys=False))
    return path


def without_times(results: dict) -> dict:
    """Results as they are whatever the machine does beside: without what was measured by the clock."""
    systems = [
        {
            **{name: value for name, value in system.items() if name != "tokens_per_second"},
            "tasks": {
                task: {name: value for name, value in part.items() if name != "tokens_per_second"}
                for task, part in system["tasks"].items()
            },
        }
        for system in results["systems"]
    ]
    return {"systems": systems, "depth_curve": results["depth_curve"], "signal": results["signal"]}
