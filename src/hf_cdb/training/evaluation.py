"""A model's scores by depth: what a training run reports."""

import functools
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedTokenizerBase

from .measure import bits_per_byte, teacher_forced_exact_match
from .passes import logits_by_depth
from .tasks import TASKS, examples

__all__ = ["evaluate", "table"]


def evaluate(
    model: nn.Module, tokenizer: PreTrainedTokenizerBase, *, chapters: int | None, count: int, length: int
) -> dict[str, Any]:
    """Bits per byte and teacher-forced exact match by depth, uncompiled and in the model's dtype.

    Args:
        model: in any mode; left in that mode.
        tokenizer: the model's.
        chapters: held-out chapters to read, None for all.
        count: examples of the validation split of every task.
        length: tokens of a window of text.

    Returns:
        `bits_per_byte` and `exact_match` (mean of the tasks), by depth; `tasks`, by task and depth. Depths are text,
        as JSON has them.
    """
    training = model.training
    model.eval()
    # Compiled for the shapes of training; here it would compile anew.
    with torch.compiler.set_stance("force_eager"):
        logits_of = functools.partial(logits_by_depth, model)
        bits = bits_per_byte(logits_of, tokenizer, limit=chapters, length=length, context=length // 2)
        asked = [example for task in TASKS for example in examples(task, "validation", count)]
        matches = teacher_forced_exact_match(model, tokenizer, asked)
    model.train(training)
    return {
        "bits_per_byte": {str(depth): score.mean for depth, score in bits.items()},
        "exact_match": {
            str(depth): sum(score.mean for score in scores.values()) / len(scores) for depth, scores in matches.items()
        },
        "tasks": {task: {str(depth): scores[task].mean for depth, scores in matches.items()} for task in TASKS},
    }


def table(found: dict[str, Any]) -> str:
    """An evaluation as lines of text, a column for each depth."""
    depths = list(found["bits_per_byte"])
    lines = [f"{'depth':>14} " + " ".join(f"{depth:>6}" for depth in depths)]
    rows = {name: found[name] for name in ("bits_per_byte", "exact_match")} | found["tasks"]
    lines += [f"{name:>14} " + " ".join(f"{scores[depth]:6.3f}" for depth in depths) for name, scores in rows.items()]
    return "\n".join(lines)
