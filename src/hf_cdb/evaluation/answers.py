"""Answers of a system to the prompts of a task."""

import re
import time
from collections.abc import Sequence
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase

from ..adapters import adapter_for
from .config import System
from .tasks import Example, Task

__all__ = ["answer", "end_ids"]


def answer(
    model: Any,
    tokenizer: PreTrainedTokenizerBase,
    system: System,
    task: Task,
    examples: Sequence[Example],
    batch_size: int,
) -> list[dict[str, Any]]:
    """Greedy answers: the parts of records that generation fills in, in the order of the examples.

    Stock generation gets batches of prompts of like lengths, an engine all prompts at once.
    """
    ids = [tokenizer(example.prompt, add_special_tokens=task.add_special_tokens).input_ids for example in examples]
    if empty := [example.id for example, row in zip(examples, ids, strict=True) if not row]:
        raise ValueError(f"task {task.name!r}: the prompt of example {empty[0]} has no token.")
    order = sorted(range(len(ids)), key=lambda place: len(ids[place]))
    size = batch_size if system.config is None else len(order)
    found: dict[int, tuple[list[int], list[int] | None]] = {}
    start = time.perf_counter()
    for first in range(0, len(order), size):
        chosen = order[first : first + size]
        found.update(zip(chosen, _generate(model, tokenizer, system, task, [ids[k] for k in chosen]), strict=True))
    seconds = time.perf_counter() - start
    total = sum(len(tokens) for tokens, _ in found.values())
    ends = end_ids(model, tokenizer)
    records = []
    for place in range(len(ids)):
        tokens, depths = found[place]
        text = tokenizer.decode(tokens)  # with special tokens, which may be stop texts
        kept = task.cut(text)
        ended = kept != text or tokens[-1] in ends
        completion = _without_special(tokenizer, kept)
        share = seconds * len(tokens) / total
        records.append({"completion": completion, "tokens": tokens, "depths": depths, "ended": ended, "seconds": share})
    return records


def _without_special(tokenizer: PreTrainedTokenizerBase, text: str) -> str:
    special = [str(token) for token in tokenizer.added_tokens_decoder.values() if token.special]
    return re.sub("|".join(map(re.escape, special)), "", text) if special else text


def end_ids(model: Any, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Ids that end an answer: the model's, and the tokenizer's where chat templates end a turn with another."""
    ends = model.generation_config.eos_token_id
    return sorted({*(ends if isinstance(ends, list) else [ends]), tokenizer.eos_token_id} - {None})


def _generate(
    model: Any, tokenizer: PreTrainedTokenizerBase, system: System, task: Task, rows: Sequence[list[int]]
) -> list[tuple[list[int], list[int] | None]]:
    """New tokens of every prompt, and with cdb their depths."""
    ends = end_ids(model, tokenizer)
    pad = _fill_id(tokenizer, ends)
    longest = max(map(len, rows))
    ids = torch.tensor([[pad] * (longest - len(row)) + row for row in rows], device=model.device)
    mask = torch.tensor([[0] * (longest - len(row)) + [1] * len(row) for row in rows], device=model.device)
    mode = (
        {"cdb": system.config}
        if system.config
        else {"cdb": False, **adapter_for(model).plain_arguments(system.max_depth)}
    )
    stops = {"stop_strings": task.stop, "tokenizer": tokenizer} if task.stop else {}
    output = model.generate(
        input_ids=ids,
        attention_mask=mask,
        max_new_tokens=task.max_new_tokens,
        eos_token_id=ends or None,
        pad_token_id=pad,
        do_sample=False,
        return_dict_in_generate=True,
        **mode,
        **stops,
    )
    new = output.sequences[:, longest:].tolist()
    if system.config is None:
        return [(_own(row, ends, pad), None) for row in new]
    lengths = [row.tokens for row in output.row_stats]
    depths = output.exit_depths.tolist()
    return [(row[:length], depth[:length]) for row, depth, length in zip(new, depths, lengths, strict=True)]


def _fill_id(tokenizer: PreTrainedTokenizerBase, ends: Sequence[int]) -> int:
    """What fills rows that ended: no end itself, so that the fill can be told from the row's own end."""
    pad = tokenizer.pad_token_id
    return pad if pad is not None and pad not in ends else next(k for k in range(len(ends) + 1) if k not in ends)


def _own(row: list[int], ends: Sequence[int], pad: int) -> list[int]:
    """A row of stock generation without what fills it after its end; the first token is never fill."""
    for place, token in enumerate(row):
        if token in ends:
            return row[: place + 1]
    while len(row) > 1 and row[-1] == pad:
        row = row[:-1]
    return row
