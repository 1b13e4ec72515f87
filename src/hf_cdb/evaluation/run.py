"""A whole evaluation: every system on every task, example by example, in one process or several."""

import hashlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from accelerate import PartialState
from tqdm import tqdm
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerBase

from ..adapters import LoopAdapter, adapter_for
from ..bench.json_file import read_json
from ..bench.models import check_device
from ..bench.report import environment, model_sizes
from ..checkpoints import model_path
from ..generation import enable_cdb
from .answers import answer
from .config import EvaluationConfig, System, make_systems
from .fingerprint import inputs_hash, weights_hash
from .loglikelihood import score_choices
from .reading import check_signal, read_example
from .records import Key, RecordFile
from .summary import summarise
from .tasks import Example, Task, load_task

__all__ = ["Session", "evaluate", "load_model_to_evaluate"]


def load_model_to_evaluate(
    name: str, revision: str | None = None, dtype: str = "float32", device: str = "cpu"
) -> tuple[Any, PreTrainedTokenizerBase]:
    """A looped model in evaluation mode, with cdb and its own ends of sequence, and its tokenizer.

    Raises:
        ValueError: a model that is not looped, or a device that is not here.
        OSError: no such folder, and no such model on the Hub.
    """
    check_device(device)
    folder = model_path(name)
    model = AutoModelForCausalLM.from_pretrained(folder, revision=revision or "main", dtype=getattr(torch, dtype))
    return enable_cdb(model.to(device).eval()), AutoTokenizer.from_pretrained(folder, revision=revision or "main")


@dataclass
class Session:
    """A loaded model with the tasks and systems of an evaluation."""

    config: EvaluationConfig
    model: Any
    tokenizer: PreTrainedTokenizerBase
    adapter: LoopAdapter
    tasks: list[Task]
    systems: list[System]

    @classmethod
    def create(cls, config: EvaluationConfig, device: str | None = None) -> "Session":
        """Load everything, and refuse what cannot work before anything runs.

        Args:
            device: in place of the configuration's, for a process that has one of its own.
        """
        model, tokenizer = load_model_to_evaluate(config.model, config.revision, config.dtype, device or config.device)
        adapter = adapter_for(model)
        systems = make_systems(config, model, adapter)
        tasks = [load_task(spec, tokenizer, config.limit) for spec in config.task_specs]
        for task in tasks:
            for system in systems:
                if system.name in task.spec.signal:
                    check_signal(model, adapter, tokenizer, system, task)
        return cls(config, model, tokenizer, adapter, tasks, systems)

    def work(self) -> Iterator[tuple[Task, System]]:
        """What runs, in the order of the records."""
        for task in self.tasks:
            for system in self.systems:
                if task.spec.systems is None or system.name in task.spec.systems:
                    yield task, system

    def order(self) -> Iterator[Key]:
        """Keys of all records, in order."""
        for task, system in self.work():
            yield from ((task.name, system.name, example.id) for example in task.examples)

    def size(self, task: Task) -> int:
        """Examples that are computed, and saved, together."""
        return {"generate": 4 * self.config.batch_size, "loglikelihood": self.config.batch_size, "text": 1}[task.kind]

    def records(self, task: Task, system: System, examples: Sequence[Example]) -> list[dict[str, Any]]:
        """Run a system on examples of a task: their records, in order."""
        if task.kind == "generate":
            found = answer(self.model, self.tokenizer, system, task, examples, self.config.batch_size)
            scores = task.score_all(examples, [one["completion"] for one in found])
            found = [{**one, "scores": score} for one, score in zip(found, scores, strict=True)]
        elif task.kind == "loglikelihood":
            size = self.config.batch_size
            found = score_choices(self.model, self.adapter, self.tokenizer, system, task, examples, size)
        else:
            found = [read_example(self.model, self.adapter, self.tokenizer, system, task, one) for one in examples]
        run = self.run_of(task, system)
        return [
            {"task": task.name, "system": system.name, "kind": task.kind, **_given(example), **one, "run": run}
            for example, one in zip(examples, found, strict=True)
        ]

    def warm_up(self, task: Task, system: System, examples: Sequence[Example]) -> None:
        """Run a few tokens of a batch and forget them, so that what happens once is in no system's time."""
        if task.kind == "generate":
            short = replace(task, spec=replace(task.spec, max_new_tokens=min(2, task.max_new_tokens)))
            chosen = examples[: self.config.batch_size]
            answer(self.model, self.tokenizer, system, short, chosen, self.config.batch_size)

    @property
    def chat_template(self) -> str | None:
        """The tokenizer's, where a task is a chat."""
        return self.tokenizer.get_chat_template() if any(task.spec.chat for task in self.tasks) else None

    def state(self) -> dict[str, Any]:
        """What records depend on beside the configuration, which may have changed since a run began."""
        return {
            "versions": environment()["versions"],
            **{f"settings of {system.name}": system.described for system in self.systems},
            **{f"examples of {task.name}": inputs_hash(task, self.tokenizer) for task in self.tasks},
            "weights": weights_hash(self.model),
        }

    def run_of(self, task: Task, system: System) -> dict[str, Any]:
        """All that an example's prompt does not say of how it was run."""
        spec, config = task.spec, self.config
        return {
            "model": config.model,
            "revision": getattr(self.model.config, "_commit_hash", None) or config.revision,
            "dtype": config.dtype,
            "device": str(self.model.device),
            "attention": self.adapter.model.config._attn_implementation,
            "batch_size": config.batch_size,
            "seed": config.seed,
            "limit": min((n for n in (config.limit, spec.limit) if n is not None), default=None),
            "cdb": system.described,
            "max_depth": system.max_depth,
            "data": spec.data,
            "template": spec.prompt,
            "chat": spec.chat,
            "chat_template_sha256": hashlib.sha256(self.chat_template.encode()).hexdigest() if spec.chat else None,
            "system_prompt": spec.system_prompt,
            "chat_options": spec.chat_options,
            "shots": spec.shots,
            "metrics": spec.metrics,
            "stop": spec.stop,
            "max_new_tokens": spec.max_new_tokens,
            "add_special_tokens": task.add_special_tokens,
            "length": spec.length,
            "context": spec.context,
            "versions": environment()["versions"],
        }


def _given(example: Example) -> dict[str, Any]:
    given = {name: getattr(example, name) for name in ("id", "group", "prompt", "reference")}
    return {**given, "choices": list(example.choices), "answer": example.answer} if example.choices else given


def evaluate(config: EvaluationConfig, output: Path, progress: bool = True) -> dict[str, Any] | None:
    """Run an evaluation, or the rest of one that was stopped.

    Started by `torchrun`, every process runs its share of the examples of every task and system, and the first one
    puts the records together. Rows do not depend on each other, so that the scores are those of one process; times are
    those of processes side by side.

    Args:
        output: folder for `results.json` and `records.jsonl`, see `records`. One that holds a part of the same
            evaluation, of the same examples, weights and versions, is completed.
        progress: show bars.

    Returns:
        What `results.json` holds; None in processes other than the first.

    Raises:
        ValueError: a configuration that cannot work, or a folder that holds another evaluation.
        OSError: no such model or data.
    """
    if output.exists() and not output.is_dir():
        raise ValueError(f"output={str(output)!r} is a file. Name a folder, which need not exist yet.")
    state = PartialState(cpu=config.device == "cpu")
    several = state.num_processes > 1
    session = Session.create(config, str(state.device) if several else None)
    settings = json.loads(json.dumps(config.to_dict()))
    if state.is_main_process:
        output.mkdir(parents=True, exist_ok=True)
        _claim(output, settings, session.state())
    state.wait_for_everyone()
    file = RecordFile(output, state.process_index)
    file.repair()
    state.wait_for_everyone()
    done = file.read()
    state.wait_for_everyone()  # all have read the same records before anyone writes more
    shown = progress and state.is_main_process
    for task, system in session.work():
        missing = [one for one in task.examples if (task.name, system.name, one.id) not in done]
        own = missing[state.process_index :: state.num_processes]
        size = session.size(task)
        if own:
            session.warm_up(task, system, own)
        with tqdm(total=len(own), desc=f"{task.name}: {system.name}", disable=not shown) as bar:
            for first in range(0, len(own), size):
                chosen = own[first : first + size]
                file.append(session.records(task, system, chosen))
                bar.update(len(chosen))
    state.wait_for_everyone()
    if not state.is_main_process:
        return None
    records = file.merge(session.order())
    sizes = model_sizes(session.model)
    results = {
        "schema": 1,
        "model": {"name": config.model, "revision": session.run_of(*next(session.work()))["revision"], **sizes},
        "settings": settings,
        "chat_template": session.chat_template,
        "environment": environment(),
        "processes": state.num_processes,
        "tasks": [
            {"name": task.name, "kind": task.kind, "examples": len(task.examples), "metrics": task.spec.metrics}
            for task in session.tasks
        ],
        **summarise(config, sizes, session.adapter.coda_parameter_count(), session.tasks, session.systems, records),
    }
    (output / "results.json").write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    return results


def _claim(output: Path, settings: dict[str, Any], state: dict[str, Any]) -> None:
    """Say in the folder whose records it holds.

    Raises:
        ValueError: those of other settings, or of another state of `Session.state`.
    """
    own = json.loads(json.dumps({**settings, **state}))
    path = output / "settings.json"
    if not path.exists():
        path.write_text(json.dumps(own, indent=1) + "\n", encoding="utf-8")
        return
    held = read_json(path, "output")
    different = [key for key in own if own[key] != held.get(key)]
    if different := [key for key in different if key in settings] or different:  # settings explain the others
        key = different[0]
        raise ValueError(
            f"output={str(output)!r} holds an evaluation with another {', '.join(different)} ({key}: {held.get(key)!r} "
            f"there, {own[key]!r} here). Name another folder, or run that one to its end with its own settings."
        )
