"""What a setting loses against full depth on the examples of a task."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy
from transformers import PreTrainedTokenizerBase

from .adapters import adapter_for
from .config import CDBConfig
from .evaluation.answers import answer
from .evaluation.config import System
from .evaluation.reading import read_example
from .evaluation.tasks import Example, Task

__all__ = ["LOSSES", "LossRuns", "Sample"]

# Name -> whether it can be negative; see `hf_cdb.calibration.calibrate`.
LOSSES = {"score": True, "agreement": False}


@dataclass(frozen=True)
class Sample:
    """What one threshold lost.

    Attributes:
        losses: of every example against full depth, `[examples]`.
        mean_depth: loops per token.
    """

    losses: numpy.ndarray
    mean_depth: float


class LossRuns:
    """Runs of a task, and what they lost against full depth, which runs once.

    Args:
        model, tokenizer, task: as of `hf_cdb.calibration.calibrate`.
        loss: a name of `LOSSES`.
        metric: of the task; for "score".
        full: settings of full depth.
    """

    def __init__(
        self,
        model: Any,
        tokenizer: PreTrainedTokenizerBase,
        task: Task,
        loss: str,
        metric: str | None,
        full: CDBConfig,
    ):
        self.model, self.adapter, self.tokenizer, self.task = model, adapter_for(model), tokenizer, task
        self.loss, self.metric, self.full = loss, metric, full
        self.of_full: dict[str, dict[str, Any]] = {}  # by the example's id

    def sample(self, config: CDBConfig, examples: Sequence[Example]) -> Sample:
        """Run settings on examples."""
        full = self._full(examples)
        records = self._records(config, examples)
        depths: Counter[int] = Counter()
        for record in records:
            depths.update({int(depth): count for depth, count in record["depths"].items()})
        mean = sum(depth * count for depth, count in depths.items()) / sum(depths.values())
        return Sample(numpy.array(self._losses(examples, records, full)), mean)

    def full_score(self, examples: Sequence[Example]) -> float | None:
        """Mean score of full depth; None where the loss is no score."""
        return float(numpy.mean(self._scores(examples, self._full(examples)))) if self.loss == "score" else None

    def _full(self, examples: Sequence[Example]) -> list[dict[str, Any]]:
        """Records of full depth."""
        missing = [example for example in examples if example.id not in self.of_full]
        if missing:
            self.of_full |= zip((e.id for e in missing), self._records(self.full, missing), strict=True)
        return [self.of_full[example.id] for example in examples]

    def _records(self, config: CDBConfig, examples: Sequence[Example]) -> list[dict[str, Any]]:
        system = System("calibrated", config, None, self.adapter.full_depth)
        if self.task.kind == "text":
            parts = (self.model, self.adapter, self.tokenizer, system, self.task)
            return [read_example(*parts, example) for example in examples]
        records = answer(self.model, self.tokenizer, system, self.task, examples, len(examples))
        return [{**record, "depths": Counter(record["depths"])} for record in records]

    def _losses(self, examples, records, full) -> list[float]:
        if self.task.kind == "text":
            return [1 - record["agreement"] for record in records]
        if self.loss == "agreement":
            return [_disagreement(*pair) for pair in zip(records, full, strict=True)]
        own, base = self._scores(examples, records), self._scores(examples, full)
        return [left - right for left, right in zip(base, own, strict=True)]

    def _scores(self, examples, records) -> list[float]:
        completions = [record["completion"] for record in records]
        return [score[self.metric] for score in self.task.score_all(examples, completions)]


def _disagreement(record: Mapping[str, Any], full: Mapping[str, Any]) -> float:
    """Share of full depth's tokens from the first one on that the other run does not have in its place."""
    pairs = zip(record["tokens"], full["tokens"], strict=False)
    agreed = next((place for place, (own, base) in enumerate(pairs) if own != base), None)
    if agreed is None:
        agreed = min(len(record["tokens"]), len(full["tokens"]))
    return 1 - agreed / len(full["tokens"])
