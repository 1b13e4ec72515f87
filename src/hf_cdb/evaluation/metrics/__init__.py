"""Metrics as local modules of `evaluate`: `evaluate.load(metric_path("exact_match"))` from anywhere.

Each folder NAME holds NAME.py with one `evaluate.Metric`. Beside `compute`, which gives the mean, those that score
answers have `scores`, a value per example; they are in `ANSWER_METRICS`.
"""

from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import evaluate

__all__ = ["ANSWER_METRICS", "check_metric", "load_metric", "metric_path", "score_answers"]

# Name -> variants, as in "exact_match:strict"; the first is meant where none is named.
ANSWER_METRICS = {
    "exact_match": ("whole", "strict", "flexible"),
    "rouge": ("rougeL", "rouge1", "rouge2"),
    "chrf": ("chrF2", "chrF2++"),
}


def metric_path(name: str) -> str:
    """Folder of a metric, for `evaluate.load`.

    Raises:
        ValueError: there is none of this name.
    """
    folder = Path(__file__).parent / name
    if not (folder / f"{name}.py").is_file():
        names = sorted(one.parent.name for one in Path(__file__).parent.glob("*/*.py") if one.stem == one.parent.name)
        raise ValueError(f"metric={name!r} is unknown: choose one of {', '.join(names)}.")
    return str(folder)


@cache
def load_metric(name: str) -> "evaluate.Metric":
    """A metric of this package, loaded once.

    Raises:
        ValueError: there is none of this name, or what it needs is not installed.
    """
    import evaluate  # takes a second, which other commands need not wait for

    try:
        return evaluate.load(metric_path(name))
    except ImportError as error:
        raise ValueError(
            f"metric={name!r} needs a package that is not installed ({error}). Install it by `pip install "
            "'hf-cdb[eval]'`, or leave the metric out."
        ) from error


def check_metric(metric: Any) -> None:
    """Refuse a metric of answers that does not exist or cannot be loaded, before anything runs.

    Raises:
        ValueError: so.
    """
    name, variant = _split(metric) if isinstance(metric, str) else (metric, None)
    if name not in ANSWER_METRICS:
        raise ValueError(f"metric={metric!r} scores no answers: choose one of {', '.join(ANSWER_METRICS)}.")
    if variant not in ANSWER_METRICS[name]:
        raise ValueError(f"metric={metric!r}: {name} has the variants {', '.join(ANSWER_METRICS[name])}.")
    load_metric(name)


def score_answers(
    metrics: Sequence[str], predictions: Sequence[str], references: Sequence[str]
) -> list[dict[str, float]]:
    """Scores of every answer, by metric as it was named."""
    columns = {}
    for metric in metrics:
        name, variant = _split(metric)
        columns[metric] = load_metric(name).scores(predictions, references, variant)
    return [{metric: column[place] for metric, column in columns.items()} for place in range(len(predictions))]


def _split(metric: str) -> tuple[str, str]:
    name, _, variant = metric.partition(":")
    return name, variant or (ANSWER_METRICS[name][0] if name in ANSWER_METRICS else "")
