"""The exit threshold that saves the most and is known to keep a share of full depth's quality.

Fixed-sequence testing, as in Learn then Test (Angelopoulos et al. 2021, arXiv 2110.01052): thresholds are tested in an
order that is fixed before the data is seen, from the deepest to the shallowest, each at the full level, and the first
one that fails ends the sequence. A wrong threshold can pass only if the first wrong one of the order does, so with the
stated confidence *all* that passed keep the quality, and the shallowest of them may be taken. The p-values are those of
`hf_cdb.risk`, which assume nothing of the losses but that examples are independent and like those to come.
"""

import dataclasses
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy
from tqdm import tqdm
from transformers import PreTrainedTokenizerBase

from .adapters import adapter_for
from .bench.report import markdown_table
from .calibrated import Calibrated
from .config import CDBConfig, rule_name
from .evaluation.tasks import Example, Task
from .exits import RULES
from .losses import LOSSES, LossRuns, Sample
from .risk import fewest, interval, p_value

__all__ = ["Calibration", "Step", "calibrate", "default_thresholds", "fixed_sequence"]

_PROBABILITIES = (0.99, 0.98, 0.95, 0.9, 0.85, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3, 0.2, 0.1)


@dataclass(frozen=True)
class Step:
    """A threshold that was tested: the mean loss, its p-value, loops per token, and whether it passed."""

    threshold: float
    loss: float
    p_value: float
    mean_depth: float
    passed: bool


@dataclass(frozen=True)
class Calibration:
    """What `calibrate` found.

    Attributes:
        quality, confidence, loss: as asked for.
        settings: that were calibrated for, as resolved for the model.
        full_depth: loops of the runs that losses are against.
        full_score: their mean score on the examples; None where the loss is no score.
        examples: that thresholds were tested on.
        steps: the thresholds in their order, up to the first that failed.
        chosen: what can be remembered; None where no threshold passed.
    """

    quality: float
    confidence: float
    loss: str
    settings: dict[str, Any]
    full_depth: int
    full_score: float | None
    examples: int
    steps: list[Step]
    chosen: Calibrated | None

    def __str__(self) -> str:
        columns = {"threshold": "g", "mean loss": ".4f", "p-value": ".2g", "mean depth": ".2f", "passed": ""}
        rows = [
            dict(zip(columns, (*dataclasses.astuple(step)[:-1], "yes" if step.passed else "no"), strict=True))
            for step in self.steps
        ]
        settings = ", ".join(f"{name} {value}" for name, value in self.settings.items() if value is not None)
        scoring = "" if self.full_score is None else f", which score {self.full_score:.4f}"
        lines = [f"{self.loss} lost against {self.full_depth} loops{scoring}, {self.examples} examples; {settings}", ""]
        lines += [markdown_table(columns, rows), "", self._verdict()]
        return "\n".join(lines)

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        return dataclasses.asdict(self)

    def _verdict(self) -> str:
        limit = f"a {self.loss} loss below {1 - self.quality:.4g} with confidence {self.confidence}"
        if self.chosen is None:
            return f"No threshold was shown to have {limit}: keep full depth, or give more examples."
        held = self.chosen.held_out
        return (
            f"exit_threshold {self.chosen.exit_threshold:g} has {limit}: mean depth {self.chosen.mean_depth:.2f} of "
            f"{self.full_depth}.\nHeld out, {held['examples']} other examples: loss {held['loss']:.4f} "
            f"({held['low']:.4f} to {held['high']:.4f}), mean depth {held['mean_depth']:.2f}."
        )


def fixed_sequence(
    measure: Callable[[float], Sample], thresholds: Sequence[float], limit: float, confidence: float, signed: bool
) -> list[Step]:
    """Fixed-sequence testing: with this confidence all that pass have an expected loss below the limit.

    Args:
        measure: runs a threshold on the calibration examples; called for those that are tested, in order.
        thresholds: in an order that the examples had no part in.
        limit: of the expected loss.
        confidence, signed: as of `risk.upper_limit`.
    """
    steps: list[Step] = []
    for threshold in thresholds:
        sample = measure(threshold)
        p = p_value(sample.losses, limit, signed)
        steps.append(Step(threshold, float(sample.losses.mean()), p, sample.mean_depth, p <= 1 - confidence))
        if not steps[-1].passed:
            break
    return steps


def default_thresholds(rule: str, max_depth: int, lookahead: int = 0) -> list[float]:
    """A grid for a rule by name: thirteen probabilities, or three a decade around the rule's default."""
    if rule in ("gate", "preloop", "confidence"):
        return list(_PROBABILITIES)
    if rule == "argmax-stability":
        return list(range(1, max(2, max_depth - 1 - lookahead)))
    default = RULES[rule].default_threshold
    return [float(f"{default * 10 ** (third / 3):.2g}") for third in range(-3, 7)]


def calibrate(
    model: Any,
    tokenizer: PreTrainedTokenizerBase,
    task: Task,
    quality: float,
    *,
    confidence: float = 0.95,
    loss: str = "score",
    metric: str | None = None,
    cdb: Mapping[str, Any] | None = None,
    thresholds: Sequence[float] | None = None,
    held_out: float = 0.5,
    seed: int = 0,
    progress: bool = True,
) -> Calibration:
    """Choose the threshold of the lowest mean depth that keeps the quality of the model's own full depth.

    Args:
        model: one whose `generate` takes `cdb`.
        tokenizer: its own.
        task: of kind "generate" or "text"; its examples have to be independent, and like what the model is used for.
        quality: in (0, 1); the expected loss per example has to be below `1 - quality`.
        confidence: in (0, 1), of the whole procedure.
        loss: "score": the score at full depth less that of the answer, from -1 to 1, so that what is gained pays for
            what is lost. "agreement": of an answer, the share of full depth's tokens from the first one on that
            differs, from 0 to 1; of a text, the share of its tokens whose most probable successor is not that of full
            depth.
        metric: the score, a metric of the task; default its first. Not with "agreement".
        cdb: settings to calibrate for: `exit_rule`, `lookahead`, `kv_policy` and the like, without a threshold. Those
            saved with the model are not read.
        thresholds: to choose from, in any order; default `default_thresholds`.
        held_out: share of the examples that takes no part in the choice and is reported on; at least one example.
        seed: of the split.
        progress: show a bar.

    Raises:
        ValueError: values that cannot work, settings that the model cannot follow, so few examples that no threshold
            could pass, or a score at full depth so low that any would.

    Warns:
        UserWarning: prompts that come more than once.
    """
    adapter = adapter_for(model)
    for name, value in (("quality", quality), ("confidence", confidence), ("held_out", held_out)):
        if not 0 < value < 1:
            raise ValueError(f"{name}={value}: choose a number between 0 and 1.")
    metric = _check_loss(task, loss, metric)
    given = dict(cdb or {})
    for name in ("exit_threshold", "quality", "exit_depths"):
        if given.get(name) is not None:
            raise ValueError(f"cdb={{{name!r}: {given[name]!r}}}: it is the threshold that calibrating finds. Drop it.")
    config = CDBConfig(**given)
    if config.prefill_exit:
        raise ValueError("cdb={'prefill_exit': True}: thresholds are calibrated with prompts at full depth. Drop it.")
    rule = rule_name(config.exit_rule, adapter)
    if rule not in RULES or rule in ("never", "replay"):
        raise ValueError(f"exit_rule={config.exit_rule!r} has no threshold that could be saved. Choose a rule by name.")
    depth = config.max_depth or adapter.full_depth
    grid = sorted(
        set(thresholds or default_thresholds(rule, depth, config.lookahead)), reverse=RULES[rule].higher_is_deeper
    )
    configs = {value: dataclasses.replace(config, exit_threshold=value) for value in grid}
    for one in configs.values():
        one.resolve(adapter)  # refused before minutes of measuring
    first, second = _split(task, held_out, seed)
    limit, signed = 1 - quality, LOSSES[loss]
    needed = fewest(limit, confidence, signed)
    if len(first) < needed:
        raise ValueError(
            f"quality={quality} with confidence={confidence} takes {needed} examples at least, even if nothing is "
            f"lost; task {task.name!r} has {len(first)} to calibrate on, and {len(second)} held out. Give more "
            "examples, ask for less, or hold out a smaller share."
        )
    distinct = len({example.prompt for example in task.examples})
    if distinct < len(task.examples):
        warnings.warn(
            f"task {task.name!r}: {len(task.examples)} examples have {distinct} different prompts. Repeated ones are "
            "not independent, and the confidence is less than stated. Leave them out.",
            stacklevel=2,
        )
    full = CDBConfig(exit_rule="never", max_depth=config.max_depth)
    runs = LossRuns(model, tokenizer, task, loss, metric, full)
    full_score = runs.full_score(first)
    if full_score is not None and full_score <= limit:
        way_out = f"Ask for more than {1 - full_score:.4g}, choose" if full_score > 0 else "Choose"
        raise ValueError(
            f"quality={quality} allows a loss of {limit:.4g}, and {metric} of task {task.name!r} is {full_score:.4g} "
            f"at full depth: wrong answers only would keep that. {way_out} a task that the model does better, or "
            "loss='agreement'."
        )
    with tqdm(total=len(grid), desc="thresholds", disable=not progress) as bar:

        def measure(threshold: float) -> Sample:
            sample = runs.sample(configs[threshold], first)
            bar.update()
            return sample

        steps = fixed_sequence(measure, grid, limit, confidence, signed)
    settings = config.calibrated_for(adapter)
    chosen = None
    if passed := [step for step in steps if step.passed]:
        best = min(passed, key=lambda step: step.mean_depth)
        check = runs.sample(configs[best.threshold], second)
        low, high = interval(check.losses, confidence, signed)
        chosen = Calibrated(
            quality=quality,
            exit_threshold=best.threshold,
            **settings,
            loss=loss if metric is None else f"{loss}: {metric}",
            confidence=confidence,
            data=task.name,
            examples=len(first),
            mean_depth=best.mean_depth,
            held_out={
                "examples": len(second),
                "loss": float(check.losses.mean()),
                "low": low,
                "high": high,
                "mean_depth": check.mean_depth,
            },
            full_score=full_score,
        )
    return Calibration(quality, confidence, loss, settings, depth, full_score, len(first), steps, chosen)


def _check_loss(task: Task, loss: str, metric: str | None) -> str | None:
    """The metric of the loss."""
    if loss not in LOSSES:
        raise ValueError(f"loss={loss!r}: choose one of {', '.join(LOSSES)}.")
    if task.kind not in ("generate", "text"):
        raise ValueError(f"task {task.name!r} of kind {task.kind!r} runs at one depth: nothing leaves early there.")
    if loss == "agreement":
        if metric is not None:
            raise ValueError(f"metric={metric!r} beside loss='agreement', which reads no metric. Drop one.")
        return None
    metrics = task.spec.metrics
    if not metrics:
        raise ValueError(f"loss='score': task {task.name!r} has no metric. Give it one, or choose loss='agreement'.")
    if metric is not None and metric not in metrics:
        raise ValueError(f"metric={metric!r}: task {task.name!r} has {', '.join(metrics)}.")
    return metric or metrics[0]


def _split(task: Task, held_out: float, seed: int) -> tuple[list[Example], list[Example]]:
    """Examples to calibrate on, and others to report on."""
    order = numpy.random.default_rng(seed).permutation(len(task.examples))
    kept = max(1, round(held_out * len(order)))
    return [task.examples[k] for k in order[kept:]], [task.examples[k] for k in order[:kept]]
