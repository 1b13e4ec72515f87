"""Given texts, read by a system token after token."""

import math
import time
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedTokenizerBase

from ..adapters import LoopAdapter
from ..config import CDBConfig
from ..exits import Listening
from ..precision import at_least_float32
from ..training.forced import Window, cut_windows, read_text
from ..training.passes import logits_by_depth
from .config import System
from .tasks import Example, Task

__all__ = ["check_signal", "read_example"]


def read_example(
    model: Any, adapter: LoopAdapter, tokenizer: PreTrainedTokenizerBase, system: System, task: Task, example: Example
) -> dict[str, Any]:
    """The part of a record that reading fills in.

    Windows of `length` tokens: the first `context` of them are given at full depth, the others are scored, with the
    keys of the depths that the tokens before them left at.
    """
    spec = task.spec
    start = time.perf_counter()
    sizes = {"length": spec.length, "context": spec.context, "depth": system.max_depth}
    windows = cut_windows(model, tokenizer, [example.prompt], **sizes)
    size = sum(sum(window.sizes[spec.context :]) for window in windows)
    tokens = len(windows) * (spec.length - spec.context)
    if system.config is None:
        bits = _bits_by_depth(model, windows, spec.context, system.max_depth)
        full = str(system.max_depth)
        found = {"bits": bits[full], "bits_by_depth": bits, "agreement": 1.0, "depths": {full: tokens}}
    else:
        text = read_text(model, windows, system.config, context=spec.context)
        depths = {str(depth): count for depth, count in text.depths.items()}
        found = {"bits": text.bits[0], "agreement": text.agreement, "depths": depths}
    if system.name in spec.signal:
        found["signal"] = _signal(model, adapter, windows, system.config, spec.context)
    return {**found, "bytes": size, "tokens": tokens, "seconds": time.perf_counter() - start}


def _bits_by_depth(model: Any, windows: list[Window], context: int, full: int) -> dict[str, float]:
    """Bits of all scored tokens when everything runs the same depth, up to the full one, from plain passes."""
    depths = list(range(1, full + 1))
    bits: dict[str, float] = {}
    for window in windows:  # one at a time: the logits of all depths of a real model are large
        targets = torch.tensor(window.targets[context:])
        for depth, logits in logits_by_depth(model, torch.tensor([window.inputs]), depths=depths).items():
            lines = at_least_float32(logits[0, context:])
            loss = nn.functional.cross_entropy(lines, targets.to(lines.device), reduction="sum")
            bits[str(depth)] = bits.get(str(depth), 0.0) + float(loss) / math.log(2)
    return bits


def check_signal(
    model: Any, adapter: LoopAdapter, tokenizer: PreTrainedTokenizerBase, system: System, task: Task
) -> None:
    """Refuse a system whose exit rule has no score, by listening to it on the first window of a task.

    Raises:
        ValueError: so.
    """
    spec = task.spec
    windows = cut_windows(
        model, tokenizer, [task.examples[0].prompt], length=spec.length, context=spec.context, depth=system.max_depth
    )
    try:
        _signal(model, adapter, windows[:1], system.config, spec.context)
    except ValueError as error:
        raise ValueError(f"signal of task {task.name!r}: system {system.name!r}: {error}") from error


def _signal(
    model: Any, adapter: LoopAdapter, windows: list[Window], config: CDBConfig, context: int
) -> dict[str, list[float | int | None]]:
    """Scores of the rule after every loop but the last, and whether full depth's most probable token was there already.

    Of a rule that decides one loop ahead the score of a loop stands beside the next loop's token, for which it is
    meant; the last of these is full depth itself and left out. Scores that are not finite, as of a direction that a
    state of zeros does not have, are None.

    Raises:
        ValueError: the rule has no score.
    """
    rule = Listening(config.resolve(adapter).exit_rule, tokens=True)
    read_text(model, windows, replace(config, exit_rule=rule, exit_threshold=None), context=context)
    scores, agrees = [], []
    for (row, token), told in rule.scores.items():
        best = windows[row].best[context - 1 + token]
        seen = [first == best for first in rule.tokens[row, token]]
        if config.lookahead:
            told, seen = told[:-1], seen[1:]
        scores += [float(f"{score:.6g}") if math.isfinite(score) else None for score in told]
        agrees += map(int, seen)
    return {"scores": scores, "agrees": agrees}
