"""Cost tables: how long a launch takes, by its stage, its width and what it attends to. Imports no torch."""

import json
import math
from bisect import bisect_right
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy

from ..trace import STAGES, TracedLaunch
from .json_file import read_json

__all__ = ["CostTable", "StageCost", "width_of"]

_SEGMENTS = 8  # of a fitted line, where the launches have as many different widths
_ROUNDS = 20  # of reweighting, until outliers have lost their weight


def width_of(launch: TracedLaunch) -> int:
    """What a launch's cost goes by: its tokens; for the coda its rows, for the head runs on one token of each."""
    return launch.width if launch.stage == "coda" else launch.tokens


@dataclass(frozen=True)
class StageCost:
    """Seconds of a launch of one stage: linear between the widths that are given, and so much for every position read.

    Below the first width a launch costs what that one does, the floor; beyond the last it goes on as before it.

    Attributes:
        widths: at least two, increasing, from 1 on; see `width_of`.
        seconds: of a launch of each, positive and nowhere decreasing.
        per_context: seconds for each position that the rows attend to.

    Raises:
        ValueError: a value that is none of these.
    """

    widths: tuple[int, ...]
    seconds: tuple[float, ...]
    per_context: float = 0.0

    def __post_init__(self) -> None:
        widths, seconds = tuple(self.widths), tuple(self.seconds)
        object.__setattr__(self, "widths", widths)
        object.__setattr__(self, "seconds", seconds)
        if len(widths) < 2 or len(widths) != len(seconds):
            raise ValueError(
                f"widths={list(widths)} and seconds={list(seconds)}: give at least two widths, and seconds for each."
            )
        if not all(_is_number(width) and width >= 1 for width in widths) or sorted(set(widths)) != list(widths):
            raise ValueError(f"widths={list(widths)}: give increasing numbers of at least 1.")
        if not all(_is_number(value) and value > 0 for value in seconds) or sorted(seconds) != list(seconds):
            raise ValueError(
                f"seconds={list(seconds)}: give positive numbers, none below the one before it: a wider launch is "
                "never cheaper. Where noise says otherwise, raise it to its neighbour."
            )
        if not _is_number(self.per_context) or self.per_context < 0:
            raise ValueError(f"per_context={self.per_context!r}: give seconds for a position, 0 or more.")

    def __call__(self, width: float, context: float = 0.0) -> float:
        """Seconds of a launch of `width` that reads `context` positions in all."""
        right = min(max(bisect_right(self.widths, width), 1), len(self.widths) - 1)
        (w0, w1), (s0, s1) = self.widths[right - 1 : right + 1], self.seconds[right - 1 : right + 1]
        grown = max(width - w0, 0) * (s1 - s0) / (w1 - w0)
        return s0 + grown + self.per_context * context


@dataclass(frozen=True)
class CostTable:
    """What the launches of one model on one machine cost; measured, or made up for hardware that is not here.

    Attributes:
        full_depth: the model's loops, R.
        prelude, loop, coda: seconds of a launch.
        host_per_launch, host_per_row: seconds that the engine takes beside that, which a decision with lookahead lets
            it spend while the device computes; `hf-cdb bench overhead` measures them. 0 where the stages' seconds are
            those of whole steps.
        about: where the figures come from, for people.

    Raises:
        ValueError: a value out of its range.
    """

    full_depth: int
    prelude: StageCost
    loop: StageCost
    coda: StageCost
    host_per_launch: float = 0.0
    host_per_row: float = 0.0
    about: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if isinstance(self.full_depth, bool) or not isinstance(self.full_depth, int) or self.full_depth < 1:
            raise ValueError(f"full_depth={self.full_depth!r}: give the model's loops, an integer of at least 1.")
        for name in ("host_per_launch", "host_per_row"):
            if not _is_number(getattr(self, name)) or getattr(self, name) < 0:
                raise ValueError(f"{name}={getattr(self, name)!r}: give seconds, 0 or more.")

    def __call__(self, stage: str, width: int, rows: int, context: int, overlapped: bool = False) -> float:
        """Seconds of a launch.

        Args:
            stage: "prelude", "loop" or "coda".
            width: see `width_of`.
            rows: for the host.
            context: positions that the rows attend to, in all.
            overlapped: the host works while the device computes, so that the slower one counts.
        """
        device = getattr(self, stage)(width, context)
        host = self.host_per_launch + self.host_per_row * rows
        return max(device, host) if overlapped else device + host

    @classmethod
    def fit(
        cls, launches: Iterable[TracedLaunch], full_depth: int, about: Mapping[str, Any] | None = None
    ) -> "CostTable":
        """The table that explains launches which were run: robust least squares.

        Raises:
            ValueError: a stage did not run at two different widths.
        """
        launches = list(launches)
        stages = {}
        for stage in STAGES:
            own = [launch for launch in launches if launch.stage == stage]
            try:
                stages[stage] = fit_stage(
                    [width_of(launch) for launch in own],
                    [launch.context for launch in own],
                    [launch.duration for launch in own],
                )
            except ValueError as error:
                raise ValueError(f"{stage}: {error}") from None
        return cls(full_depth, **stages, about=dict(about or {}))

    def save(self, path: Path) -> None:
        """Write the table as JSON. Folders on the way are made."""
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(asdict(self), indent=1) + "\n", encoding="utf-8")

    @classmethod
    def load(cls, path: Path) -> "CostTable":
        """The table in a file that `save` or somebody else wrote.

        Raises:
            FileNotFoundError: no such file.
            ValueError: it holds something else, or values out of their range.
        """
        content = read_json(path, "costs")
        try:
            stages = {stage: StageCost(**content.pop(stage)) for stage in STAGES}
            return cls(**content, **stages)
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise ValueError(
                f"costs={str(path)!r} holds no cost table ({error}): it needs full_depth, and for each of "
                f"{', '.join(STAGES)} widths, seconds and, where attention counts, per_context."
            ) from error


def fit_stage(widths: list[int], contexts: list[int], seconds: list[float]) -> StageCost:
    """A stage's costs from launches that were timed: the line between their widths, or between quantiles of them where
    they are many, and the slope of the context. Least squares of the relative residuals, outliers counting little.

    Raises:
        ValueError: fewer than two different widths.
    """
    if len(set(widths)) < 2:
        raise ValueError(
            f"launches of {len(set(widths))} different widths: two at least give a line. Time more, of other widths."
        )
    x, context, y = (numpy.asarray(values, float) for values in (widths, contexts, seconds))
    knots = numpy.unique(x)
    if len(knots) > _SEGMENTS + 1:
        knots = numpy.unique(numpy.quantile(x, numpy.linspace(0, 1, _SEGMENTS + 1), method="nearest"))
    # Column k is 1 at knot k, 0 at the others, and linear between: its factor is the seconds at the knot.
    columns = [numpy.interp(x, knots, row) for row in numpy.eye(len(knots))]
    factors = _robust(numpy.stack([*columns, context], axis=1), y)
    if factors[-1] < 0 or numpy.ptp(context) == 0:
        factors = numpy.append(_robust(numpy.stack(columns, axis=1), y), 0.0)
    # What noise puts below a narrower launch, or below nothing, costs as much as that one.
    values = numpy.maximum.accumulate(numpy.maximum(factors[:-1], y.min() / 2))
    return StageCost(tuple(knots.astype(int).tolist()), tuple(values.tolist()), float(factors[-1]))


def _robust(columns: numpy.ndarray, y: numpy.ndarray) -> numpy.ndarray:
    """Factors of the columns that give `y`: least squares reweighted by what they give (relative residuals) and by how
    far off a value is (Huber 1964)."""
    scale = numpy.maximum(numpy.abs(columns).max(axis=0), 1e-300)
    weights = numpy.ones_like(y)
    for _ in range(_ROUNDS):
        factors, *_ = numpy.linalg.lstsq(columns / scale * weights[:, None], y * weights, rcond=None)
        given = columns / scale @ factors
        # By what is given and not by what was seen: that would favour launches that noise made short.
        given = numpy.maximum(given, y.min() / 2)
        residuals = numpy.abs(y / given - 1)
        # 1.345 standard deviations, which is 1.4826 times the median residual for normal noise.
        limit = max(1.345 * 1.4826 * float(numpy.median(residuals)), 1e-9)
        weights = numpy.sqrt(numpy.minimum(1.0, limit / numpy.maximum(residuals, 1e-12))) / given
    return factors / scale


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
