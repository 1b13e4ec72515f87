"""Does cdb give the tokens that it should, and where it does not, how close was the decision?"""

import dataclasses
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers.generation.utils import GenerateDecoderOnlyOutput

from .adapters import adapter_for
from .config import CDBConfig, saved_settings
from .exits import ExitRule, Replay, Wrapped
from .row_copies import Copier

__all__ = ["Comparison", "Diagnosis", "Difference", "diagnose"]

_STATEFUL = ("logits_processor", "stopping_criteria")  # lists of what a user may have written


@dataclass(frozen=True)
class Difference:
    """Where a row first has another token, or another exit depth, than it should.

    Attributes:
        row, token: of the batch, and index of the new token, both from 0.
        kind: "token" or "depth"; where both differ the depth came first.
        got, expected: token ids or depths.
        margin: how close the expected decision was. Token: its score less that of the next best one. Depth: distance of
            the exit score from its threshold after the loop that one of the two left at. None where the exit rule has
            no score.
        rounding: how much scores of this kind differ elsewhere, where tokens and depths still agree.
    """

    row: int
    token: int
    kind: str
    got: int
    expected: int
    margin: float | None
    rounding: float

    @property
    def near_tie(self) -> bool:
        """Whether rounding of the size seen elsewhere can have tipped the decision: both sides may move."""
        return self.margin is not None and self.margin <= 2 * self.rounding

    def __str__(self) -> str:
        if self.margin is None:
            why = "the exit rule has no score to judge it by"
        else:
            why = f"margin {self.margin:.3g}, rounding elsewhere {self.rounding:.3g}: "
            why += "a near tie" if self.near_tie else "NO near tie"
        return f"row {self.row}, token {self.token}: {self.kind} {self.got} in place of {self.expected}; {why}"


@dataclass(frozen=True)
class Comparison:
    """Rows of one run against those of another that should be the same.

    Attributes:
        name: what is compared.
        rows: how many.
        tokens: of all rows, and `agreeing` those before a row's first difference.
        differences: the first one of every row that has one.
        rounding: largest difference of the scores where tokens and depths agree.
    """

    name: str
    rows: int
    tokens: int
    agreeing: int
    differences: list[Difference]
    rounding: float

    def __str__(self) -> str:
        equal = self.rows - len(self.differences)
        head = (
            f"{self.name}: {equal} of {self.rows} rows are equal, {self.agreeing} of {self.tokens} tokens come before "
            f"a first difference; where rows agree, scores are {self.rounding:.3g} apart at most"
        )
        return "\n".join([head, *(f"  {difference}" for difference in self.differences)])


@dataclass(frozen=True)
class Diagnosis:
    """What `diagnose` found; `str` of it is a report.

    Attributes:
        model, dtype: class and dtype of the weights.
        exits_off: cdb with exits off against stock `generate` at full depth; None where the KV policy is not exact, so
            that they may differ.
        alone: rows of the batch against the same padded rows alone, with the given settings.
        mean_depth: loops per token with the given settings.
    """

    model: str
    dtype: torch.dtype
    exits_off: Comparison | None
    alone: Comparison
    mean_depth: float

    @property
    def differences(self) -> list[Difference]:
        """Of both comparisons."""
        return [*(self.exits_off.differences if self.exits_off else ()), *self.alone.differences]

    @property
    def explained(self) -> bool:
        """Whether rows agree but for near ties."""
        return all(difference.near_tie for difference in self.differences)

    def __str__(self) -> str:
        lines = [f"{self.model}, {str(self.dtype).removeprefix('torch.')}, mean depth {self.mean_depth:.2f}"]
        lines.append(
            str(self.exits_off) if self.exits_off else "exits off: not compared, the KV policy is not the exact one"
        )
        lines.append(str(self.alone))
        if not self.differences:
            lines.append("No difference.")
        elif self.explained:
            lines.append("All differences are near ties, which rounding decides by the shape of the batch.")
        else:
            lines.append("Some differences are more than rounding: please report them, with these settings.")
        return "\n".join(lines)


def diagnose(
    model: Any,
    prompts: str | Sequence[str] | Sequence[torch.Tensor] | Sequence[Sequence[int]],
    tokenizer: Any = None,
    cdb: Any = True,
    max_new_tokens: int = 32,
    **kwargs,
) -> Diagnosis:
    """Compare greedy runs that should be equal: exits off with stock `generate`, rows in a batch with rows alone.

    Runs the prompts three times as a batch or row by row; for a handful of prompts.

    Args:
        model: one whose `generate` takes `cdb`.
        prompts: texts, or token ids of each; a single text is one prompt.
        tokenizer: for texts.
        cdb: the settings to look at, as for `generate`.
        max_new_tokens: per prompt.
        **kwargs: for all runs of `generate`. Each run has copies of its own of `logits_processor` and
            `stopping_criteria`, so that a state which they keep does not pass from one to the next.

    Raises:
        ValueError: texts without a tokenizer, no prompts, sampling, an exit rule that replays depths, or a processor
            or criterion that cannot be copied.
    """
    if kwargs.get("do_sample"):
        raise ValueError("do_sample=True: diagnose compares greedy runs. Leave it out.")
    adapter = adapter_for(model)
    settings = CDBConfig.create(cdb, saved_settings(model.generation_config, adapter), adapter).resolve(adapter)
    # Nothing is drawn, and all rows are compared over the same tokens.
    settings = dataclasses.replace(settings, seeds=None, token_limits=None)
    if isinstance(settings.exit_rule, Replay):
        raise ValueError("exit_rule='replay': given depths leave nothing to diagnose. Choose the rule that decides.")
    ids, mask = _padded(model, prompts, tokenizer)
    kwargs = {
        **kwargs,
        "max_new_tokens": max_new_tokens,
        "do_sample": False,
        "num_return_sequences": 1,
        "tokenizer": tokenizer,
        "return_dict_in_generate": True,
        "output_scores": True,
    }

    copiers = {name: _copiers(name, kwargs.pop(name)) for name in _STATEFUL if kwargs.get(name) is not None}

    def run(cdb: CDBConfig | bool, rows: slice = slice(None), **more) -> GenerateDecoderOnlyOutput:
        fresh = {name: [copier() for copier in of_name] for name, of_name in copiers.items()}
        return model.generate(input_ids=ids[rows], attention_mask=mask[rows], cdb=cdb, **kwargs, **fresh, **more)

    exits_off = None
    if settings.kv_policy == adapter.default_kv_policy == "last_exited":
        plain = _rows(run(False, **adapter.plain_arguments(settings.max_depth)), ids)
        off = _rows(run(dataclasses.replace(settings, exit_rule="never")), ids)
        for row, (left, right) in enumerate(zip(off, plain, strict=True)):
            right.depths = [settings.max_depth] * len(right.tokens)
            # Stock generate fills rows that ended; cdb says how long they are.
            if left.tokens == right.tokens[: len(left.tokens)]:
                plain[row] = right.cut(len(left.tokens))
        exits_off = _compare("exits off against stock generate", off, plain, settings)
    watched = _Watched(settings.exit_rule)
    settings = dataclasses.replace(settings, exit_rule=watched)
    output = run(settings)
    together = _rows(output, ids, watched.scores)
    alone = []
    for row in range(len(ids)):
        watched.scores = {}
        alone += _rows(run(settings, slice(row, row + 1)), ids, watched.scores)
    return Diagnosis(
        type(model).__name__,
        model.dtype,
        exits_off,
        _compare("rows of the batch against rows alone", together, alone, settings),
        output.stats.mean_depth,
    )


@dataclass
class _Row:
    tokens: list[int]
    depths: list[int]
    scores: list[torch.Tensor]  # `[vocab]` for every token
    exit_scores: list[list[float]]  # for every token, after each loop that was asked

    def cut(self, length: int) -> "_Row":
        return _Row(*(part[:length] for part in (self.tokens, self.depths, self.scores, self.exit_scores)))


class _Watched(Wrapped):
    """A rule whose scores are written down, by row and token."""

    def __init__(self, rule: ExitRule):
        self.scores: dict[tuple[int, int], list[float]] = {}
        super().__init__(rule)

    def bind(self, adapter, places):
        super().bind(adapter, places)
        self._tokens: dict[int, tuple[int, int]] = {}

    def begin(self, places, embeds, start, tokens):
        self._tokens.update(zip(places.tolist(), tokens, strict=True))
        super().begin(places, embeds, start, tokens)

    def leave(self, places, depths, previous, state, logits):
        flags = super().leave(places, depths, previous, state, logits)
        if self.rule.score is not None:
            for place, score in zip(places.tolist(), self.rule.score.tolist(), strict=True):
                self.scores.setdefault(self._tokens[place], []).append(score)
        return flags


def _copiers(name: str, things: Iterable) -> list[Copier]:
    """What makes the processors or criteria of each run."""
    copiers = []
    for thing in things:
        try:
            copiers.append(Copier(thing))
        except Exception as error:
            raise ValueError(
                f"{name} {type(thing).__name__} cannot be copied ({error}), but each of the runs that are compared "
                "needs one of its own, since it may keep a state. Give its class a __deepcopy__, or leave it out."
            ) from error
    return copiers


def _padded(model: Any, prompts: Sequence, tokenizer: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Token ids and mask, int64 `[prompts, longest]`, padding on the left."""
    if len(prompts) == 0:
        raise ValueError(f"prompts={prompts!r}: give at least one.")
    if isinstance(prompts, str):
        prompts = [prompts]
    if not isinstance(prompts[0], str) and torch.as_tensor(prompts[0]).ndim != 1:
        raise ValueError(
            f"prompts[0]={prompts[0]!r} is no prompt: pass a sequence of texts, or of token ids for each prompt, as in "
            "[[3, 1, 4], [1, 5]]."
        )
    if isinstance(prompts[0], str):
        if tokenizer is None:
            raise ValueError(f"prompts[0]={prompts[0]!r} is text, and there is no tokenizer. Pass one, or token ids.")
        prompts = [tokenizer(prompt)["input_ids"] for prompt in prompts]
    rows = [torch.as_tensor(prompt, dtype=torch.long) for prompt in prompts]
    longest = max(map(len, rows))
    pad = model.generation_config.pad_token_id
    ids = torch.stack([torch.nn.functional.pad(row, (longest - len(row), 0), value=pad or 0) for row in rows])
    mask = torch.stack([torch.arange(longest) >= longest - len(row) for row in rows]).long()
    return ids.to(model.device), mask.to(model.device)


def _rows(output: GenerateDecoderOnlyOutput, ids: torch.Tensor, exit_scores: dict | None = None) -> list[_Row]:
    """The rows of an output; of stock generate's all tokens, of cdb's those that the rows have."""
    rows = []
    for row, tokens in enumerate(output.sequences[:, ids.shape[1] :].tolist()):
        depths = [] if not hasattr(output, "exit_depths") else [d for d in output.exit_depths[row].tolist() if d]
        length = len(depths) or len(tokens)
        scores = [block[row] for block in output.scores[:length]]
        own = [(exit_scores or {}).get((row, token), []) for token in range(length)]
        rows.append(_Row(tokens[:length], depths, scores, own))
    return rows


def _compare(name: str, got: list[_Row], expected: list[_Row], settings: CDBConfig) -> Comparison:
    """First differences, judged by how far scores are apart where rows still agree."""
    firsts = [_first_difference(*pair) for pair in zip(got, expected, strict=True)]
    agreeing = [
        (left, right, token)
        for left, right, first in zip(got, expected, firsts, strict=True)
        for token in range(len(right.tokens) if first is None else first)
    ]
    rounding = max((_apart(left.scores[t], right.scores[t]) for left, right, t in agreeing), default=0.0)
    exit_rounding = max(
        (
            abs(one - other)
            for left, right, t in agreeing
            for one, other in zip(left.exit_scores[t], right.exit_scores[t], strict=True)
        ),
        default=0.0,
    )
    differences = []
    for row, (left, right, t) in enumerate(zip(got, expected, firsts, strict=True)):
        if t is not None and left.depths[t] != right.depths[t]:
            margin = _exit_margin(right.exit_scores[t], min(left.depths[t], right.depths[t]), settings)
            differences.append(Difference(row, t, "depth", left.depths[t], right.depths[t], margin, exit_rounding))
        elif t is not None:
            best = right.scores[t].topk(2).values
            margin = float(best[0] - best[1])
            differences.append(Difference(row, t, "token", left.tokens[t], right.tokens[t], margin, rounding))
    return Comparison(name, len(got), sum(len(row.tokens) for row in expected), len(agreeing), differences, rounding)


def _first_difference(left: _Row, right: _Row) -> int | None:
    """Index of the first token that the rows do not share; rows that share all of them are equally long."""
    tokens = zip(left.tokens, left.depths, right.tokens, right.depths, strict=False)
    return next((t for t, (token, depth, *other) in enumerate(tokens) if [token, depth] != other), None)


def _exit_margin(scores: list[float], depth: int, settings: CDBConfig) -> float | None:
    """Distance from the threshold of the score that one run left at `depth` by, and the other did not."""
    asked = depth - settings.lookahead  # the loop whose signal that was
    return abs(scores[asked - 1] - settings.exit_rule.threshold) if scores else None


def _apart(left: torch.Tensor, right: torch.Tensor) -> float:
    """Largest difference of two lines of scores; columns that a processor has ruled out are the same in both."""
    both = left.isfinite() & right.isfinite()
    return float((left[both] - right[both]).abs().max()) if both.any() else 0.0
