"""Log-likelihoods of given choices, in passes in which every token runs the same number of loops."""

import time
from collections.abc import Sequence
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase

from ..adapters import LoopAdapter
from ..precision import at_least_float32
from .config import System
from .tasks import Example, Task

__all__ = ["score_choices"]


@torch.no_grad()
def score_choices(
    model: Any,
    adapter: LoopAdapter,
    tokenizer: PreTrainedTokenizerBase,
    system: System,
    task: Task,
    examples: Sequence[Example],
    batch_size: int,
) -> list[dict[str, Any]]:
    """The parts of records that scoring fills in, in the order of the examples.

    `accuracy`: the right choice has the highest log-likelihood; `accuracy_norm`: the highest one per character, as
    acc_norm of the evaluation harness. Of equal ones the first counts.

    Raises:
        ValueError: a depth that the model has no such pass for.
    """
    loops = adapter.plain_arguments(system.max_depth)
    start = time.perf_counter()
    pairs = [
        _encode(tokenizer, example.prompt, choice, task.add_special_tokens)
        for example in examples
        for choice in example.choices
    ]
    # Alike lengths together: less padding.
    order = sorted(range(len(pairs)), key=lambda place: len(pairs[place][0]))
    found = [0.0] * len(pairs)
    for first in range(0, len(order), batch_size):
        chosen = order[first : first + batch_size]
        values = _loglikelihoods(model, [pairs[place] for place in chosen], loops)
        for place, value in zip(chosen, values, strict=True):
            found[place] = value
    seconds = time.perf_counter() - start
    records, place = [], 0
    for example in examples:
        own = slice(place, place + len(example.choices))
        place = own.stop
        values = found[own]
        per_character = [v / max(1, len(choice.strip())) for v, choice in zip(values, example.choices, strict=True)]
        records.append(
            {
                "loglikelihoods": values,
                "depths": {str(system.max_depth): sum(count for _, count in pairs[own])},
                "scores": {
                    "accuracy": float(values.index(max(values)) == example.answer),
                    "accuracy_norm": float(per_character.index(max(per_character)) == example.answer),
                },
                "seconds": seconds / len(examples),
            }
        )
    return records


def _encode(tokenizer: PreTrainedTokenizerBase, prompt: str, choice: str, special: bool) -> tuple[list[int], int]:
    """Ids of both, and how many of them are the choice's: those after as many as the prompt alone has."""
    bare = prompt.rstrip()
    whole = tokenizer(prompt + choice, add_special_tokens=special).input_ids
    count = len(whole) - len(tokenizer(bare, add_special_tokens=special).input_ids)
    if not 0 < count < len(whole):
        raise ValueError(
            f"choice {choice!r} after a prompt that ends in {bare[-20:]!r} has no tokens of its own, or nothing stands "
            "before it. Choices need text, and prompts a token at least."
        )
    return whole, count


def _loglikelihoods(model: Any, pairs: Sequence[tuple[list[int], int]], loops: dict[str, Any]) -> list[float]:
    """Sum of the log-probabilities of every choice. Padding on the right lies in nobody's past."""
    longest = max(len(ids) for ids, _ in pairs)
    rows = torch.tensor([ids + [0] * (longest - len(ids)) for ids, _ in pairs], device=model.device)
    logits = model(rows, **loops).logits
    values = []
    for row, (ids, count) in enumerate(pairs):
        lines = at_least_float32(logits[row, len(ids) - count - 1 : len(ids) - 1]).log_softmax(-1)
        values.append(float(lines.gather(1, rows[row, len(ids) - count : len(ids), None]).sum()))
    return values
