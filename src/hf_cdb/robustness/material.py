"""What the study runs on: task lines and text as prompts with given continuations."""

import string
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from transformers import PreTrainedTokenizerBase

from ..training.batches import encode_lines
from ..training.forced import ForcedRow, force
from ..training.measure import start_id
from ..training.tasks import TASKS, examples

__all__ = ["CLASSES", "Material", "task_material", "text_material", "token_class"]

CLASSES = ("digit", "letter", "punctuation", "space", "end")


@dataclass
class Material:
    """Prompts and their continuations.

    Attributes:
        name: "tasks" or "text".
        prompts, continuations: token ids.
        owners: for every prompt the index of the independent item that it belongs to: its example, or its chapter.
        classes: of every token of the continuations, see `token_class`.
        full: what the engine at full depth makes of them.
    """

    name: str
    prompts: list[list[int]]
    continuations: list[list[int]]
    owners: list[int]
    classes: list[list[str]]
    full: list[ForcedRow] = field(default_factory=list)


def task_material(model: Any, tokenizer: PreTrainedTokenizerBase, split: str, count: int) -> Material:
    """`count` examples of each of the package's tasks; a continuation is the answer and the end of sequence."""
    lines = encode_lines(tokenizer, [example for task in TASKS for example in examples(task, split, count)])
    return _material(
        "tasks",
        model,
        tokenizer,
        [line.inputs[: line.answer_start + 1] for line in lines],
        [line.targets[line.answer_start :] for line in lines],
        list(range(len(lines))),
    )


def text_material(
    model: Any,
    tokenizer: PreTrainedTokenizerBase,
    texts: Sequence[str],
    windows: int,
    *,
    context: int = 64,
    length: int = 48,
    by_window: bool = False,
) -> Material:
    """The first windows of every text.

    Args:
        texts: those without a whole window give none.
        windows: of every text at most.
        context: tokens of a prompt.
        length: tokens that are looked at, after the first one, which the prompt gives.
        by_window: take windows for independent items in place of texts.
    """
    prompts, continuations, owners = [], [], []
    for text_index, text in enumerate(texts):
        ids = [start_id(tokenizer), *tokenizer(text, add_special_tokens=False)["input_ids"]]
        for end in range(context + length + 1, len(ids) + 1, length)[:windows]:
            owners.append(len(owners) if by_window else text_index)
            prompts.append(ids[end - length - 1 - context : end - length - 1])
            continuations.append(ids[end - length - 1 : end])
    return _material("text", model, tokenizer, prompts, continuations, owners)


def _material(name, model, tokenizer, prompts, continuations, owners) -> Material:
    classes = [[token_class(tokenizer, token) for token in tokens] for tokens in continuations]
    return Material(
        name, prompts, continuations, owners, classes, force(model, prompts, continuations, {"exit_rule": "never"})
    )


def token_class(tokenizer: PreTrainedTokenizerBase, token: int) -> str:
    """Class of a token by its first character that is no space: one of `CLASSES`; marks and symbols are punctuation."""
    if token == tokenizer.eos_token_id:
        return "end"
    text = tokenizer.decode([token]).strip()
    if not text:
        return "space"
    if text[0] in string.digits:
        return "digit"
    return "letter" if text[0].isalpha() else "punctuation"
