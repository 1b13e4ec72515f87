"""A record of an evaluation, run again from what it holds."""

from collections.abc import Mapping
from typing import Any

from ..adapters import adapter_for
from ..config import CDBConfig
from .answers import answer
from .config import System
from .loglikelihood import score_choices
from .reading import read_example
from .run import load_model_to_evaluate
from .task_spec import TaskSpec
from .tasks import Example, Task

__all__ = ["rerun"]


def rerun(record: Mapping[str, Any], device: str | None = None) -> dict[str, Any]:
    """What running the record's example again gives, alone: the parts of a record that the kind has.

    In float32 tokens are those of the record; in lower precision batches round otherwise.

    Args:
        record: a line of `records.jsonl`.
        device: in place of the record's.

    Raises:
        OSError: the model is no more where it was.
    """
    run = record["run"]
    model, tokenizer = load_model_to_evaluate(run["model"], run["revision"], run["dtype"], device or run["device"])
    spec = TaskSpec(
        record["task"],
        record["kind"],
        run["data"],
        length=run["length"],
        context=run["context"],
        max_new_tokens=run["max_new_tokens"],
        stop=run["stop"],
        metrics=run["metrics"],
    )
    example = Example(
        record["id"],
        record["prompt"],  # as it was sent, with shots and templates
        record["reference"],
        tuple(record.get("choices", ())),
        record.get("answer"),
        record["group"],
    )
    task = Task(spec, [example], run["add_special_tokens"])
    config = None if run["cdb"] is None else CDBConfig(**run["cdb"])
    system = System(record["system"], config, run["cdb"], run["max_depth"])
    if record["kind"] == "generate":
        return answer(model, tokenizer, system, task, [example], 1)[0]
    adapter = adapter_for(model)
    if record["kind"] == "loglikelihood":
        return score_choices(model, adapter, tokenizer, system, task, [example], len(example.choices))[0]
    return read_example(model, adapter, tokenizer, system, task, example)
