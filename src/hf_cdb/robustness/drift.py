"""Thresholds calibrated on one kind of data and run on another."""

from collections.abc import Mapping, Sequence
from typing import Any

from ..adapters import adapter_for
from ..calibration import default_thresholds, fixed_sequence
from ..exits import RULES
from ..losses import Sample
from ..risk import interval
from .material import Material
from .reading import read
from .study import Table

__all__ = ["drift"]

_COLUMNS = {
    "calibrated on": "",
    "quality": "g",
    "threshold": "g",
    "run on": "",
    "loops": ".2f",
    "tokens lost": ".4f",
    "low": ".4f",
    "high": ".4f",
    "kept": "",
}


def drift(
    model: Any,
    base: Mapping[str, Any],
    calibration: Mapping[str, Material],
    evaluation: Mapping[str, Material],
    qualities: Sequence[float] = (0.9, 0.95),
    confidence: float = 0.9,
) -> Table:
    """For every kind of data and quality the calibrated threshold, and what it loses on every kind.

    Args:
        model: one with an adapter.
        base: settings with an exit rule by name, as of `Study`.
        calibration, evaluation: materials by name; their items are taken for independent.
        qualities: shares of full depth's tokens to keep.
        confidence: of the calibration, and of the intervals.
    """
    rule = base["exit_rule"]
    depth = base.get("max_depth") or adapter_for(model).full_depth
    grid = default_thresholds(rule, depth, base.get("lookahead", 0))
    grid.sort(reverse=RULES[rule].higher_is_deeper)
    rows = []
    for name, material in calibration.items():
        samples: dict[float, Sample] = {}  # of thresholds that several qualities ask for

        def measure(threshold: float, material: Material = material, samples: dict = samples) -> Sample:
            if threshold not in samples:
                reading = read(model, material, {**base, "exit_threshold": threshold})
                samples[threshold] = Sample(reading.losses(), reading.mean_depth)
            return samples[threshold]

        for quality in qualities:
            steps = fixed_sequence(measure, grid, 1 - quality, confidence, signed=False)
            passed = [step for step in steps if step.passed]
            row = {"calibrated on": name, "quality": quality}
            if not passed:
                rows.append({**row, "kept": "no threshold passed"})
                continue
            best = min(passed, key=lambda step: step.mean_depth).threshold
            for other in evaluation.values():
                found = _run(model, base, best, other, 1 - quality, confidence)
                rows.append({**row, "threshold": best, **found})
    title = f"Thresholds of {rule} calibrated on one kind of data, with confidence {confidence:g}, and run on another"
    return Table("drift", title, _COLUMNS, rows)


def _run(model, base, threshold: float, material: Material, limit: float, confidence: float) -> dict[str, Any]:
    reading = read(model, material, {**base, "exit_threshold": threshold})
    losses = reading.losses()
    low, high = interval(losses, confidence, signed=False)
    kept = "yes" if high <= limit else "no" if low > limit else "open"
    return {
        "run on": material.name,
        "loops": reading.mean_depth,
        "tokens lost": float(losses.mean()),
        "low": low,
        "high": high,
        "kept": kept,
    }
