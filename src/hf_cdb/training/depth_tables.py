"""What a checkpoint is worth at every depth and at every threshold of its exit rules."""

import functools
import math
import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn
from tqdm import tqdm
from transformers import PreTrainedTokenizerBase

from ..adapters import adapter_for
from .forced import FixedDepth, ForcedText, cut_windows, read_text
from .measure import ExactMatch, Score, bits_per_byte, exact_match, teacher_forced_exact_match
from .passes import logits_by_depth
from .tasks import TASKS, Example, examples, heuristic_scores
from .text import chapters

__all__ = ["measure_depths", "measure_settings", "to_markdown"]


@dataclass
class _Run:
    """One setting: text read and tasks answered with it."""

    text: ForcedText
    answers: ExactMatch


def measure_depths(
    model: nn.Module, tokenizer: PreTrainedTokenizerBase, *, chapter_count: int | None = None, count: int = 512
) -> dict[str, Any]:
    """Bits per byte of held-out chapters and exact match of every task when all tokens run the same depth.

    Args:
        model: any model with an adapter, in evaluation mode.
        tokenizer: its own.
        chapter_count: held-out chapters, None for all.
        count: examples of every task, of the test split.

    Returns:
        For JSON: `bits_per_byte` depth -> score, `tasks` task -> depth -> score, `heuristics` task -> guess -> share;
        a score is `{"mean", "standard_error", "count"}`.
    """
    bits = bits_per_byte(functools.partial(logits_by_depth, model), tokenizer, limit=chapter_count)
    asked = _asked(count)
    matches = teacher_forced_exact_match(model, tokenizer, asked)
    known = [example for task in TASKS for example in examples(task, "train", count)]
    return {
        "bits_per_byte": {str(depth): vars(score) for depth, score in bits.items()},
        "tasks": {task: {str(depth): vars(scores[task]) for depth, scores in matches.items()} for task in TASKS},
        "heuristics": heuristic_scores(known, asked),
    }


def measure_settings(
    model: nn.Module,
    tokenizer: PreTrainedTokenizerBase,
    settings: Mapping[str, Mapping[str, Any]],
    *,
    chapter_count: int | None = None,
    count: int = 512,
    progress: bool = True,
) -> list[dict[str, Any]]:
    """Fixed depths and settings of cdb, each with the keys that such a run has; prompts at full depth throughout.

    Args:
        model, tokenizer, chapter_count, count: as in `measure_depths`.
        settings: by name, for `generate(cdb=...)`.
        progress: show a bar.

    Returns:
        Rows for JSON, fixed depths first. Differences are to full depth, paired by chapter or example, with the half
        width of a 95 % interval; `mix` is what fixed depths, mixed to the mean depth of the text, would give.
        `mean_depth` and `exits` count all tokens, those of the text and those of the answers, whose first one the
        prompt gives at full depth.
    """
    full = adapter_for(model).full_depth
    fixed = {f"depth {depth}": {"exit_rule": FixedDepth(depth)} for depth in range(1, full + 1)}
    windows = cut_windows(model, tokenizer, chapters("held-out")[:chapter_count])
    asked = _asked(count)
    # What is saved with the model must not mix with the settings that are measured.
    blank = {"lookahead": 0, "exit_threshold": None, "exit_depths": None}
    runs = {}
    for name, cdb in tqdm([*fixed.items(), *settings.items()], desc="settings", disable=not progress):
        cdb = {**blank, **cdb}
        runs[name] = _Run(read_text(model, windows, cdb), exact_match(model, tokenizer, asked, cdb=cdb))
    base = runs[f"depth {full}"]
    curve = [runs[name].text for name in fixed]
    return [_row(name, run, base, None if name in fixed else curve, full) for name, run in runs.items()]


def _asked(count: int) -> list[Example]:
    return [example for task in TASKS for example in examples(task, "test", count)]


def _row(name: str, run: _Run, base: _Run, curve: Sequence[ForcedText] | None, full: int) -> dict[str, Any]:
    text, answers = run.text, run.answers
    everything = Counter(text.depths) + Counter(answers.depths)
    total = sum(everything.values())
    row = {
        "name": name,
        "mean_depth": sum(depth * count for depth, count in everything.items()) / total,
        "exits": [everything[depth] / total for depth in range(1, full + 1)],
        "text_mean_depth": text.mean_depth,
        "answers_mean_depth": answers.mean_depth,
        "bits_per_byte": vars(text.bits_per_byte),
        "bits_difference": _interval(text.excess(base.text)),
        "agreement": text.agreement,
        "exact_match": vars(_over_tasks(answers)),
        "exact_match_difference": _interval(_paired(answers, base.answers)),
        "tasks": {task: vars(score) for task, score in answers.tasks.items()},
    }
    if curve is not None:
        below = min(math.floor(text.mean_depth), full - 1)
        share = text.mean_depth - below
        for key, value in (("bits_per_byte", lambda x: x.bits_per_byte.mean), ("agreement", lambda x: x.agreement)):
            row[f"mix_{key}"] = (1 - share) * value(curve[below - 1]) + share * value(curve[below])
    return row


def _over_tasks(answers: ExactMatch) -> Score:
    """Mean of the tasks' scores, whose errors are independent."""
    scores = list(answers.tasks.values())
    error = math.sqrt(sum(score.standard_error**2 for score in scores)) / len(scores)
    return Score(answers.mean, error, sum(score.count for score in scores))


def _paired(own: ExactMatch, base: ExactMatch) -> Score:
    """Mean difference over examples that both answered; tasks have equally many."""
    differences = [int(left) - int(right) for left, right in zip(own.right, base.right, strict=True)]
    error = statistics.stdev(differences) / math.sqrt(len(differences))
    return Score(statistics.fmean(differences), error, len(differences))


def _interval(score: Score) -> dict[str, float]:
    return {"mean": score.mean, "half_width_95": score.half_width_95}


def to_markdown(depths: Mapping[str, Any], rows: Sequence[Mapping[str, Any]]) -> str:
    """Both tables, to read."""
    loops = list(depths["bits_per_byte"])
    lines = [
        "| all tokens at depth | " + " | ".join(loops) + " | best shallow guess |",
        "|---" * (len(loops) + 2) + "|",
    ]
    lines.append("| bits per byte | " + " | ".join(_score(depths["bits_per_byte"][d], 3) for d in loops) + " | |")
    for task, scores in depths["tasks"].items():
        guess = max(depths["heuristics"][task].values())
        lines.append(f"| {task} | " + " | ".join(_score(scores[d], 3) for d in loops) + f" | {guess:.2f} |")
    means = [statistics.fmean(scores[d]["mean"] for scores in depths["tasks"].values()) for d in loops]
    lines.append("| **mean of the tasks** | " + " | ".join(f"{mean:.3f}" for mean in means) + " | |")
    heads = ["setting", "mean depth", f"exits 1-{len(loops)}", "of the text", "bits per byte", "to full depth", "mix"]
    heads += ["agreement", "mix", "exact match", "to full depth"]
    table = [heads, ["---"] * len(heads), *map(_cells, rows)]
    return "\n".join(lines) + "\n\n" + "\n".join(f"| {' | '.join(cells)} |" for cells in table) + "\n"


def _cells(row: Mapping[str, Any]) -> list[str]:
    return [
        row["name"],
        f"{row['mean_depth']:.2f}",
        " ".join(f"{share:.2f}".removeprefix("0") for share in row["exits"]),
        f"{row['text_mean_depth']:.2f}",
        _score(row["bits_per_byte"], 3),
        _difference(row["bits_difference"], 4),
        f"{row['mix_bits_per_byte']:.3f}" if "mix_bits_per_byte" in row else "",
        f"{row['agreement']:.3f}",
        f"{row['mix_agreement']:.3f}" if "mix_agreement" in row else "",
        _score(row["exact_match"], 3),
        _difference(row["exact_match_difference"], 3),
    ]


def _score(score: Mapping[str, float], digits: int) -> str:
    return f"{score['mean']:.{digits}f} ± {score['standard_error']:.{digits}f}"


def _difference(interval: Mapping[str, float], digits: int) -> str:
    return f"{interval['mean']:+.{digits}f} ± {interval['half_width_95']:.{digits}f}"
