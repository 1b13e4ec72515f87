"""What a looped language model knows at each depth: bits per byte of text, exact match of tasks."""

import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedTokenizerBase

from ..precision import at_least_float32
from .batches import encode_lines, pack_lines
from .passes import logits_by_depth
from .tasks import Example
from .text import chapters

__all__ = [
    "ExactMatch",
    "Score",
    "bits_per_byte",
    "exact_match",
    "start_id",
    "teacher_forced_exact_match",
]


@dataclass(frozen=True)
class Score:
    """A mean with what is needed to judge it.

    Attributes:
        mean: the score.
        standard_error: of the mean; nan for a single text.
        count: independent items: examples, or texts.
    """

    mean: float
    standard_error: float
    count: int

    @property
    def half_width_95(self) -> float:
        """Half of a 95 % interval, by the normal distribution."""
        return 1.96 * self.standard_error

    @classmethod
    def of_shares(cls, right: int, count: int) -> "Score":
        """Binomial: `sqrt(p (1 - p) / n)`."""
        share = right / count
        return cls(share, math.sqrt(share * (1 - share) / count), count)

    @classmethod
    def of_ratio(cls, tops: Sequence[float], bottoms: Sequence[float]) -> "Score":
        """Sum over sum, `r = sum t / sum b`; the error is that of the ratio estimator over independent items,
        `sqrt(n / (n - 1) * sum (t - r b)^2) / sum b` (Cochran, Sampling Techniques, 6.4)."""
        total, n = sum(bottoms), len(bottoms)
        ratio = sum(tops) / total
        squares = sum((top - ratio * bottom) ** 2 for top, bottom in zip(tops, bottoms, strict=True))
        return cls(ratio, math.sqrt(n / (n - 1) * squares) / total if n > 1 else math.nan, n)


def bits_per_byte(
    logits_of: Callable[[torch.Tensor], Mapping[int, torch.Tensor]],
    tokenizer: PreTrainedTokenizerBase,
    texts: Sequence[str] | None = None,
    *,
    limit: int | None = None,
    length: int = 128,
    context: int = 64,
    rows: int = 16,
) -> dict[int, Score]:
    """Bits that a model needs per byte of text, by depth: `sum -log2 p(token | context) / bytes`.

    Each text is `start_id` and its tokens, cut into windows of `length` inputs that overlap: the first window scores
    all its targets, the others those after their first `context` tokens, so that each token is scored once and with at
    least `context` tokens before it, or with the whole text before it. The last window is moved back to be as long as
    the others. The end of a text is not predicted.

    Args:
        logits_of: input_ids int64 `[rows, length]` -> depth -> logits `[rows, length, vocab]`, such as
            `functools.partial(logits_by_depth, model)`.
        tokenizer: byte-level, so that tokens account for all bytes.
        texts: default the held-out chapters.
        limit: of `texts`, the first so many.
        length: tokens of a window; more than the model was trained on asks for more than it learned.
        context: less than `length`.
        rows: windows per call of `logits_of`.

    Returns:
        By depth the score; its standard error takes texts as the independent items.

    Raises:
        ValueError: a context as long as the window, or no text.
    """
    if not 0 <= context < length:
        raise ValueError(f"context={context}: windows of length={length} leave nothing to score. Choose less.")
    texts = (chapters("held-out") if texts is None else list(texts))[:limit]
    if not texts or not all(texts):
        raise ValueError(f"texts: {len(texts)} given, limit={limit}; each has to have at least one character.")
    bits: dict[int, list[float]] = {}
    for text in texts:
        spent = Counter()
        for inputs, targets in _windows(tokenizer, text, length, context, rows):
            scored = targets >= 0
            for depth, logits in logits_of(inputs).items():
                losses = nn.functional.cross_entropy(
                    at_least_float32(logits[scored.to(logits.device)]),
                    targets[scored].to(logits.device),
                    reduction="sum",
                )
                spent[depth] += float(losses) / math.log(2)
        for depth, spent_here in spent.items():
            bits.setdefault(depth, []).append(spent_here)
    sizes = [len(text.encode()) for text in texts]
    return {depth: Score.of_ratio(values, sizes) for depth, values in bits.items()}


def start_id(tokenizer: PreTrainedTokenizerBase) -> int:
    """What stands before the first token of a text: BOS, or EOS of a tokenizer without one, as lm_eval does.

    Raises:
        ValueError: it has neither.
    """
    for token in (tokenizer.bos_token_id, tokenizer.eos_token_id):
        if token is not None:
            return token
    raise ValueError(
        "tokenizer: it has neither BOS nor EOS, from which the first token of a text could be predicted. Set "
        "tokenizer.bos_token."
    )


def _windows(
    tokenizer: PreTrainedTokenizerBase, text: str, length: int, context: int, rows: int
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Inputs and targets `[rows, length]` of one text; targets below 0 are another window's."""
    ids = torch.tensor(tokenizer(text, add_special_tokens=False)["input_ids"])
    inputs, targets = torch.cat([torch.tensor([start_id(tokenizer)]), ids[:-1]]), ids
    length = min(length, len(ids))
    starts, scored = [0], length
    windows = [targets[:length]]
    while scored < len(ids):
        start = min(scored - context, len(ids) - length)
        window = targets[start : start + length].clone()
        window[: scored - start] = -1
        starts.append(start)
        windows.append(window)
        scored = start + length
    for first in range(0, len(starts), rows):
        chosen = range(first, min(first + rows, len(starts)))
        yield (
            torch.stack([inputs[starts[k] : starts[k] + length] for k in chosen]),
            torch.stack([windows[k] for k in chosen]),
        )


def teacher_forced_exact_match(
    model: nn.Module,
    tokenizer: PreTrainedTokenizerBase,
    examples: Sequence[Example],
    depths: Sequence[int] | None = None,
    *,
    length: int = 256,
) -> dict[int, dict[str, Score]]:
    """Exact match at every depth from one pass: depth -> task -> score.

    An example counts where every token of its answer, EOS included, is the most probable one after the right tokens
    before it. A greedy run that is right sees just these, so this equals greedy exact match, ties and rounding apart,
    when all tokens run that depth.

    Args:
        model, depths: as of `states_by_depth`.
        tokenizer: with BOS and EOS.
        examples: of any tasks.
        length: tokens of the rows that examples are packed into.
    """
    lines = encode_lines(tokenizer, examples)
    packed = pack_lines(lines, length, pad=tokenizer.pad_token_id, prompt_weight=0.0)
    answers = packed["weights"] > 0
    # Examples lie in the rows in the order given.
    row, place = answers.nonzero(as_tuple=True)
    key = row * length + packed["segments"][row, place]
    example = key.unique_consecutive(return_inverse=True)[1]
    right: dict[int, torch.Tensor] = {}
    for first in range(0, len(answers), 8):
        rows = slice(first, first + 8)
        inputs = (packed[name][rows] for name in ("input_ids", "position_ids", "segments"))
        for depth, logits in logits_by_depth(model, *inputs, depths=depths).items():
            here = answers[rows]
            hit = logits.argmax(-1).cpu()[here] == packed["targets"][rows][here]
            right.setdefault(depth, []).append(hit)
    scores = {}
    for depth, hits in right.items():
        whole = torch.ones(len(lines), dtype=torch.bool).scatter_reduce(0, example, torch.cat(hits), "amin")
        scores[depth] = _by_task(examples, whole.tolist())
    return scores


def _by_task(examples: Sequence[Example], right: Sequence[bool]) -> dict[str, Score]:
    counts, hits = Counter(example.task for example in examples), Counter()
    for example, hit in zip(examples, right, strict=True):
        hits[example.task] += hit
    return {task: Score.of_shares(hits[task], count) for task, count in counts.items()}


@dataclass(frozen=True)
class ExactMatch:
    """What `exact_match` found.

    Attributes:
        tasks: score of every task.
        right: for every example, in order, whether its answer was right.
        depths: with cdb, how many generated tokens left after each loop, the first of an answer at full depth
            included.
    """

    tasks: dict[str, Score]
    right: list[bool]
    depths: dict[int, int] | None = None

    @property
    def mean(self) -> float:
        """Mean of the tasks' scores."""
        return sum(score.mean for score in self.tasks.values()) / len(self.tasks)

    @property
    def mean_depth(self) -> float | None:
        """Loops per generated token."""
        if self.depths is None:
            return None
        return sum(depth * count for depth, count in self.depths.items()) / sum(self.depths.values())


# The forward argument that fixes the depth, by model type.
_FIXED_DEPTH: dict[str, Callable[[int], dict[str, int]]] = {
    "ouro": lambda depth: {"exit_at_step": depth - 1},
    "huginn_raven": lambda depth: {"num_steps": depth},
}


def exact_match(
    model: nn.Module,
    tokenizer: PreTrainedTokenizerBase,
    examples: Sequence[Example],
    *,
    depth: int | None = None,
    cdb: Any = None,
    batch_size: int = 64,
) -> ExactMatch:
    """Greedy answers, compared token by token up to and including EOS.

    Args:
        model: a model with `generate`.
        tokenizer: with pad, BOS and EOS.
        examples: of any tasks.
        depth: loops of every token, without cdb; Ouro and Huginn only.
        cdb: settings for `generate(cdb=...)`; True for the model's saved ones. Without both, plain full depth.
        batch_size: prompts per call of `generate`, padded on the left.

    Raises:
        ValueError: both depth and cdb, or a model whose depth cannot be fixed.
    """
    if depth is not None and cdb:
        raise ValueError(f"depth={depth} and cdb={cdb!r} contradict each other: each decides the depth. Pass one.")
    options: dict[str, Any] = {"cdb": cdb or False}
    if depth is not None:
        model_type = model.config.model_type
        if model_type not in _FIXED_DEPTH:
            raise ValueError(
                f"depth={depth}: the depth of a {model_type!r} model cannot be fixed without cdb. Pass "
                f"cdb={{'exit_rule': 'never', 'max_depth': {depth}}}."
            )
        options.update(_FIXED_DEPTH[model_type](depth))
    lines = encode_lines(tokenizer, examples)
    # Alike lengths together: less padding, and a batch is done when its longest answer is.
    order = sorted(range(len(lines)), key=lambda k: (len(lines[k].inputs), k))
    right, depths = [False] * len(lines), Counter()
    for first in range(0, len(order), batch_size):
        chosen = order[first : first + batch_size]
        answers = [lines[k].targets[lines[k].answer_start :] for k in chosen]
        prompts = [lines[k].inputs[: lines[k].answer_start + 1] for k in chosen]
        widest = max(map(len, prompts))
        ids = torch.tensor([[tokenizer.pad_token_id] * (widest - len(prompt)) + prompt for prompt in prompts])
        kept = torch.tensor([[0] * (widest - len(prompt)) + [1] * len(prompt) for prompt in prompts])
        output = model.generate(
            ids.to(model.device),
            attention_mask=kept.to(model.device),
            max_new_tokens=max(map(len, answers)),
            do_sample=False,
            eos_token_id=tokenizer.eos_token_id,
            pad_token_id=tokenizer.pad_token_id,
            return_dict_in_generate=True,
            **options,
        )
        generated = output.sequences[:, widest:].tolist()
        for k, answer, tokens in zip(chosen, answers, generated, strict=True):
            right[k] = tokens[: len(answer)] == answer
        if cdb:
            depths.update(output.exit_depths.flatten().tolist())
    del depths[0]  # where a row has no token
    return ExactMatch(_by_task(examples, right), right, dict(sorted(depths.items())) if cdb else None)
