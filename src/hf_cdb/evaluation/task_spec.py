"""What a task of an evaluation is, as its YAML says it."""

from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from .metrics import check_metric

__all__ = ["KINDS", "TaskSpec"]

KINDS = ("generate", "loglikelihood", "text")


@dataclass(frozen=True)
class TaskSpec:
    """A task.

    Templates are for `str.format` with the columns of a row, as in "Question: {question}\\nAnswer:".

    Attributes:
        name: in reports.
        kind: "generate": answers are generated and scored; "loglikelihood": the most probable of given choices counts;
            "text": bits per byte of given texts.
        data: where rows come from: a file (.json, .jsonl, .parquet, .csv), a folder saved by `datasets`, or a mapping,
            see `data.load_rows`.
        layout: what makes columns of rows that are not flat, see `data.LAYOUTS`.
        prompt, reference: templates; of kind "text" the prompt is the text.
        choices: for "loglikelihood": path to the list of choices in a row, as "choices.text".
        answer: for "loglikelihood": column of the index or the label of the right choice.
        labels: for "loglikelihood": path to the list of labels; without it `answer` is an index from 0.
        group: template of a name by which scores are reported too, such as "{task}".
        shots: worked examples before every prompt: the first ones of `shot_data`.
        shot_data: as `data`, never the split that is asked.
        separator: between the shots of a prompt without chat template.
        chat: the prompt is a user's turn of the tokenizer's chat template, and shots are turns before it.
        system_prompt: with `chat`.
        chat_options: with `chat`: arguments of the template, such as enable_thinking.
        max_new_tokens: of an answer.
        stop: texts that end an answer, which is cut before them.
        metrics: of answers; a name or NAME:VARIANT, such as "exact_match:strict".
        limit: the first so many examples; None is all.
        length, context: of kind "text": tokens of a window, of which the first `context` are given and not scored.
            Texts of fewer tokens than a window are left out.
        signal: of kind "text": names of systems whose exit signal is held against full depth; each costs one more
            reading at full depth.
        systems: names of the systems that run it; None is all.

    Raises:
        ValueError: values that cannot work together.
    """

    name: str
    kind: str
    data: str | dict
    layout: str | None = None
    prompt: str = "{prompt}"
    reference: str = "{reference}"
    choices: str = "choices"
    answer: str = "answer"
    labels: str | None = None
    group: str | None = None
    shots: int = 0
    shot_data: str | dict | None = None
    separator: str = "\n\n"
    chat: bool = False
    system_prompt: str | None = None
    chat_options: dict = field(default_factory=dict)
    max_new_tokens: int = 256
    stop: list = field(default_factory=list)
    metrics: list = field(default_factory=list)
    limit: int | None = None
    length: int = 128
    context: int = 64
    signal: list = field(default_factory=list)
    systems: list | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.name, str) or not self.name or "/" in self.name:
            raise ValueError(f"name={self.name!r} of a task: choose a text without '/', which TASK/METRIC is split at.")
        if self.kind not in KINDS:
            raise ValueError(f"kind={self.kind!r} of task {self.name!r}: choose one of {', '.join(KINDS)}.")
        for name, least in (("shots", 0), ("max_new_tokens", 1), ("limit", 1), ("length", 2), ("context", 1)):
            value = getattr(self, name)
            if value is not None and value < least:
                raise ValueError(f"{name}={value} of task {self.name!r}: choose at least {least}.")
        if self.shots and self.shot_data is None:
            raise ValueError(
                f"shots={self.shots} of task {self.name!r} without shot_data: name the split that they come from, "
                "other than the one that is asked."
            )
        if self.shots and self.shot_data == self.data:
            raise ValueError(
                f"shot_data={self.shot_data!r} of task {self.name!r} is the data itself, so that a prompt would hold "
                "its own answer. Name another split."
            )
        if self.system_prompt is not None and not self.chat:
            raise ValueError(
                f"system_prompt={self.system_prompt!r} of task {self.name!r} has no effect without chat: set "
                "chat: true, or write it into the prompt."
            )
        if self.chat_options and not self.chat:
            raise ValueError(f"chat_options={self.chat_options} of task {self.name!r} have no effect without chat.")
        if self.context >= self.length:
            raise ValueError(
                f"context={self.context} of task {self.name!r} leaves nothing of length={self.length} to score. "
                "Choose less."
            )
        self._check_kind()
        for text in self.stop:
            if not isinstance(text, str) or not text:
                raise ValueError(f"stop={self.stop!r} of task {self.name!r}: give texts of a character at least.")
        for metric in self.metrics:
            check_metric(metric)

    def _check_kind(self) -> None:
        """Refuse what this kind does not read."""
        of_kind = {
            "generate": ("max_new_tokens", "stop", "metrics"),
            "loglikelihood": ("choices", "answer", "labels"),
            "text": ("length", "context", "signal"),
        }
        of_kind["generate"] += (shared := ("shots", "shot_data", "chat", "system_prompt", "chat_options"))
        of_kind["loglikelihood"] += shared
        defaults = TaskSpec.__dataclass_fields__
        for kind, names in of_kind.items():
            for name in names:
                default = defaults[name].default_factory() if name in _LISTS else defaults[name].default
                if name not in of_kind[self.kind] and getattr(self, name) != default:
                    raise ValueError(
                        f"{name}={getattr(self, name)!r} of task {self.name!r}: kind {self.kind!r} does not read it, "
                        f"{kind!r} does. Leave it out."
                    )

    @property
    def qualities(self) -> list[str]:
        """Metrics by which a system can be better or worse than another, example by example."""
        of_kind = {
            "generate": ["cut_off"],
            "loglikelihood": ["accuracy", "accuracy_norm"],
            "text": ["bits_per_byte", "agreement"],
        }
        return [*self.metrics, *of_kind[self.kind]]

    def to_dict(self) -> dict[str, Any]:
        """Plain values, which make the same task again."""
        return asdict(self)

    def with_data(self, path: str | Path) -> dict[str, Any]:
        """The values with another file in place of the data; shots come from there too, so from rows that are asked.

        For trying a task on little data of the same columns: such scores mean nothing.
        """
        values = self.to_dict()
        values["data"] = str(path)
        if self.shots:
            values["shot_data"] = {"path": str(path), "skip": 1}
        return values


_LISTS = ("stop", "metrics", "signal", "chat_options")
