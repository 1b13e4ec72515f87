"""Text read by the engine itself, token after token with the depths that a rule gives, to see what exits cost.

A pass over whole rows sees the keys of full depth everywhere. Here every token reads what a run that leaves early
really has: the keys of the depths that the tokens before it left at.
"""

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedTokenizerBase

from ..adapters import adapter_for
from ..config import CDBConfig
from ..engine import Engine
from ..exits import ExitRule
from ..request import Request
from .measure import Score, start_id
from .passes import logits_by_depth

__all__ = ["FixedDepth", "ForcedRow", "ForcedText", "Window", "cut_windows", "force", "read_text"]


class FixedDepth(ExitRule):
    """Every token leaves after loop `depth`."""

    name = "fixed-depth"

    def __init__(self, depth: int):
        self.depth = depth
        super().__init__()

    def leave(self, places, depths, previous, state, logits):
        return [depth >= self.depth for depth in depths]


@dataclass
class Window:
    """A piece of a text.

    Attributes:
        text: index of the text.
        inputs, targets: tokens, and the one after each.
        sizes: bytes of every target; a character that several tokens make up counts with the first of them.
        best: for every input the most probable successor at full depth.
    """

    text: int
    inputs: list[int]
    targets: list[int]
    sizes: list[int]
    best: list[int] = field(default_factory=list)


@dataclass
class ForcedText:
    """What `read_text` found.

    Attributes:
        bits, sizes: of every text, the bits it took and its bytes.
        depths: scored tokens by the loop they left at.
        agreement: share of the scored tokens whose most probable successor is that of full depth.
    """

    bits: list[float]
    sizes: list[int]
    depths: dict[int, int]
    agreement: float

    @property
    def bits_per_byte(self) -> Score:
        """Over all texts, which are the independent items."""
        return Score.of_ratio(self.bits, self.sizes)

    @property
    def mean_depth(self) -> float:
        return sum(depth * count for depth, count in self.depths.items()) / sum(self.depths.values())

    def excess(self, other: "ForcedText") -> Score:
        """Bits per byte above those of another reading of the same texts, text by text."""
        return Score.of_ratio([own - base for own, base in zip(self.bits, other.bits, strict=True)], self.sizes)


def cut_windows(
    model: nn.Module,
    tokenizer: PreTrainedTokenizerBase,
    texts: Sequence[str],
    *,
    length: int = 128,
    context: int = 64,
    depth: int | None = None,
) -> list[Window]:
    """Windows of `length` tokens, of which all after the first `context` are scored, each token once.

    The first `context` tokens of a text and what does not fill a window at its end are not scored, nor is the end.

    Args:
        model: gives the successors at full depth.
        tokenizer: a fast one; `measure.start_id` stands before the first token.
        texts: to cut; those shorter than a window give none.
        length: tokens of a window.
        context: less than `length`, at least 1.
        depth: loops of full depth, where they are not the model's own number.

    Raises:
        ValueError: a context that leaves nothing to score, texts that are all too short, or a tokenizer without BOS
            and EOS.
    """
    if not 1 <= context < length:
        raise ValueError(f"context={context}: choose at least 1 and less than length={length}.")
    windows = []
    for index, text in enumerate(texts):
        encoded = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
        ids = encoded["input_ids"]
        sizes = _byte_counts(text, encoded["offset_mapping"])
        inputs = [start_id(tokenizer), *ids[:-1]]
        for start in range(0, len(ids) - length + 1, length - context):
            part = slice(start, start + length)
            windows.append(Window(index, inputs[part], ids[part], sizes[part]))
    if not windows:
        raise ValueError(f"texts: none of {len(texts)} has length={length} tokens. Give longer texts.")
    depth = adapter_for(model).full_depth if depth is None else depth
    for first in range(0, len(windows), 16):
        chosen = windows[first : first + 16]
        logits = logits_by_depth(model, torch.tensor([window.inputs for window in chosen]), depths=[depth])[depth]
        for window, best in zip(chosen, logits.argmax(-1).tolist(), strict=True):
            window.best = best
    return windows


def _byte_counts(text: str, offsets: Sequence[tuple[int, int]]) -> list[int]:
    """Bytes of a text by token, each once: offsets overlap within a character and may leave out spaces."""
    ends = list(accumulate((end for _, end in offsets), max, initial=0))
    ends[-1] = len(text)
    return [len(text[start:end].encode()) for start, end in pairwise(ends)]


@dataclass
class ForcedRow:
    """What the engine made of one given continuation.

    Attributes:
        best: at each of its tokens the most probable one.
        bits: that each of its tokens took, `-log2 p`.
        depths: loops that each was predicted after; the first follows the prompt, at full depth.
    """

    best: list[int] = field(default_factory=list)
    bits: list[float] = field(default_factory=list)
    depths: list[int] = field(default_factory=list)


class _Given:
    """A sampler that takes the given tokens, and notes what it is shown."""

    def __init__(self, continuations: Sequence[Sequence[int]]):
        self.continuations = continuations
        self.rows = [ForcedRow() for _ in continuations]

    def choose(self, rows: Sequence[Request], logits: torch.Tensor) -> list[int]:
        tokens = [self.continuations[row.key][len(row.tokens)] for row in rows]
        losses = nn.functional.cross_entropy(logits, torch.tensor(tokens, device=logits.device), reduction="none")
        for row, loss, best in zip(rows, losses.tolist(), logits.argmax(-1).tolist(), strict=True):
            self.rows[row.key].bits.append(loss / math.log(2))
            self.rows[row.key].best.append(best)
        return tokens


def force(
    model: nn.Module, prompts: Sequence[Sequence[int]], continuations: Sequence[Sequence[int]], cdb: Any
) -> list[ForcedRow]:
    """Run the engine over given continuations of prompts, token by token.

    Args:
        model: any model with an adapter, in evaluation mode.
        prompts, continuations: token ids, at least one each.
        cdb: settings as for `generate`.

    Returns:
        A row for every prompt. A continuation that `best` repeats is what greedy generation gives.
    """
    adapter = adapter_for(model)
    saved = getattr(model.generation_config, "cdb_config", None)
    engine = Engine(adapter, CDBConfig.create(cdb, saved, adapter).resolve(adapter))
    given = _Given(continuations)
    requests = []
    for key, (prompt, continuation) in enumerate(zip(prompts, continuations, strict=True)):
        ids = torch.tensor(prompt, device=adapter.device)
        requests.append(Request(key=key, row=key, max_new_tokens=len(continuation), sampler=given, prompt_ids=ids))
        engine.add_request(requests[-1])
    engine.run()
    for request, row in zip(requests, given.rows, strict=True):
        row.depths = request.exit_depths
    return given.rows


def read_text(model: nn.Module, windows: Sequence[Window], cdb: Any, *, context: int = 64) -> ForcedText:
    """Read the windows with the engine: `context` tokens as a prompt at full depth, the others one by one.

    Args:
        model: any model with an adapter, in evaluation mode.
        windows: of `cut_windows`, with the same `context`.
        cdb: settings as for `generate`.
    """
    # What follows the context is the target of its last input; it is the window before's to score.
    rows = force(
        model,
        [window.inputs[:context] for window in windows],
        [window.targets[context - 1 :] for window in windows],
        cdb,
    )
    texts = max(window.text for window in windows) + 1
    bits, sizes, hits = [0.0] * texts, [0] * texts, 0
    for window, row in zip(windows, rows, strict=True):
        bits[window.text] += sum(row.bits[1:])
        sizes[window.text] += sum(window.sizes[context:])
        hits += sum(best == full for best, full in zip(row.best[1:], window.best[context:], strict=True))
    depths = Counter(depth for row in rows for depth in row.depths[1:])
    kept = [index for index, size in enumerate(sizes) if size]
    return ForcedText(
        [bits[index] for index in kept],
        [sizes[index] for index in kept],
        dict(sorted(depths.items())),
        hits / sum(depths.values()),
    )
