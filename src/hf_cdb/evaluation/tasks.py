"""Tasks of an evaluation: prompts as they are sent, references, and scores of answers."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from transformers import PreTrainedTokenizerBase

from ..training.recipe_file import build
from .data import load_rows
from .metrics import score_answers
from .task_spec import TaskSpec

__all__ = ["Example", "Task", "load_task"]


@dataclass(frozen=True)
class Example:
    """One item of a task.

    Attributes:
        id: unique in the task.
        prompt: the text sent, shots and templates applied; of kind "text" the text itself.
        reference: what an answer is held against; of kind "loglikelihood" the right choice; empty without metrics.
        choices: of kind "loglikelihood", with the space that separates them from the prompt.
        answer: index of the right choice.
        group: name of the part of the task that it belongs to.
    """

    id: str
    prompt: str
    reference: str
    choices: tuple[str, ...] = ()
    answer: int | None = None
    group: str = ""


@dataclass(frozen=True)
class Task:
    """What `load_task` makes of a `TaskSpec`.

    Attributes:
        spec: what it was made of.
        examples: in the order of the data.
        add_special_tokens: whether the tokenizer adds its own, such as BOS; chat templates write theirs as text.
    """

    spec: TaskSpec
    examples: Sequence[Example] = field(repr=False)
    add_special_tokens: bool = True

    @property
    def name(self) -> str:
        return self.spec.name

    @property
    def kind(self) -> str:
        return self.spec.kind

    @property
    def max_new_tokens(self) -> int:
        return self.spec.max_new_tokens

    @property
    def stop(self) -> list[str]:
        return self.spec.stop

    def cut(self, completion: str) -> str:
        """A completion up to its first stop text."""
        return re.split("|".join(map(re.escape, self.stop)), completion, maxsplit=1)[0] if self.stop else completion

    def score(self, example: Example, completion: str) -> dict[str, float]:
        """Scores of an answer by metric, each in [0, 1]."""
        return score_answers(self.spec.metrics, [completion], [example.reference])[0]

    def score_all(self, examples: Sequence[Example], completions: Sequence[str]) -> list[dict[str, float]]:
        """`score` of many."""
        return score_answers(self.spec.metrics, completions, [example.reference for example in examples])


def load_task(spec: Mapping[str, Any] | TaskSpec, tokenizer: PreTrainedTokenizerBase, limit: int | None = None) -> Task:
    """Read a task's data and make its prompts.

    Args:
        spec: the values of a `TaskSpec`.
        tokenizer: its chat template is applied where the task asks for chat.
        limit: examples at most, beside the task's own limit.

    Raises:
        ValueError: values that cannot work, columns that the data lacks, or a tokenizer without a chat template.
        FileNotFoundError: no such data.
    """
    if not isinstance(spec, TaskSpec):
        spec = build(TaskSpec, spec, f"task {spec.get('name', '')!r}" if isinstance(spec, Mapping) else "task")
    if spec.chat and tokenizer.chat_template is None:
        raise ValueError(f"chat=True of task {spec.name!r}: the tokenizer has no chat template. Leave chat out.")
    limits = [one for one in (spec.limit, limit) if one is not None]
    rows = load_rows(spec.data, spec.layout, min(limits, default=None))
    shots = load_rows(spec.shot_data, spec.layout, spec.shots) if spec.shots else []
    if len(shots) < spec.shots:
        raise ValueError(f"shots={spec.shots} of task {spec.name!r}: shot_data has {len(shots)} rows. Ask for fewer.")
    turns = [(_fill(spec.prompt, row, spec), _answer(row, spec)) for row in shots]
    examples = []
    for index, row in enumerate(rows):
        asked = _fill(spec.prompt, row, spec)
        choices = _choices(row, spec) if spec.kind == "loglikelihood" else ()
        right = _right(row, spec) if choices else None
        if choices and not spec.chat:
            choices = tuple(f" {choice}" for choice in choices)
        reference = choices[right] if choices else _fill(spec.reference, row, spec) if spec.metrics else ""
        group = _fill(spec.group, row, spec) if spec.group else ""
        examples.append(Example(str(index), _sent(asked, turns, spec, tokenizer), reference, choices, right, group))
    if spec.kind == "text":
        examples = [one for one in examples if len(tokenizer.tokenize(one.prompt)) >= spec.length]
        if not examples:
            raise ValueError(
                f"length={spec.length} of task {spec.name!r}: none of its {len(rows)} texts has so many tokens. Choose "
                "shorter windows, or longer texts."
            )
    return Task(spec, examples, add_special_tokens=not spec.chat)


def _sent(asked: str, shots: Sequence[tuple[str, str]], spec: TaskSpec, tokenizer: PreTrainedTokenizerBase) -> str:
    """The text of a prompt: shots before it, or all as turns of the chat template."""
    if not spec.chat:
        return spec.separator.join([*(f"{prompt} {answer}" for prompt, answer in shots), asked])
    turns = [] if spec.system_prompt is None else [{"role": "system", "content": spec.system_prompt}]
    for prompt, answer in shots:
        turns += [{"role": "user", "content": prompt}, {"role": "assistant", "content": answer}]
    turns.append({"role": "user", "content": asked})
    return tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True, **spec.chat_options)


def _answer(row: Mapping[str, Any], spec: TaskSpec) -> str:
    """What a worked example answers."""
    if spec.kind == "loglikelihood":
        return _choices(row, spec)[_right(row, spec)]
    return _fill(spec.reference, row, spec)


def _fill(template: str, row: Mapping[str, Any], spec: TaskSpec) -> str:
    try:
        return template.format(**row)
    except (KeyError, IndexError, AttributeError, TypeError, ValueError) as error:
        raise ValueError(
            f"task {spec.name!r}: the template {template!r} cannot be filled ({type(error).__name__}: {error}). A row "
            f"has the columns {', '.join(row)}; braces that are text are written twice."
        ) from error


def _choices(row: Mapping[str, Any], spec: TaskSpec) -> tuple[str, ...]:
    return tuple(_at(row, spec.choices, spec))


def _right(row: Mapping[str, Any], spec: TaskSpec) -> int:
    answer = _at(row, spec.answer, spec)
    labels = list(_at(row, spec.labels, spec)) if spec.labels else range(len(_choices(row, spec)))
    if answer not in labels:
        raise ValueError(f"task {spec.name!r}: answer {answer!r} is none of {list(labels)}.")
    return labels.index(answer)


def _at(row: Mapping[str, Any], path: str, spec: TaskSpec) -> Any:
    """What lies at a dotted path in a row."""
    place: Any = row
    for name in path.split("."):
        if not isinstance(place, Mapping) or name not in place:
            raise ValueError(f"task {spec.name!r}: there is no {path!r} in a row of the columns {', '.join(row)}.")
        place = place[name]
    return place
