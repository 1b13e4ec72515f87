"""The results of an evaluation to read: a Markdown table, a CSV file and a picture."""

import csv
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..bench.report import markdown_table, save_plot
from .config import ENGINE, STOCK

__all__ = ["LOWER_IS_BETTER", "save_csv", "save_picture", "to_markdown"]

LOWER_IS_BETTER = ("bits_per_byte", "perplexity", "cut_off")
_NO_QUALITY = ("length", "cut_off", "agreement", "perplexity", "identical", "first_divergence")
_MOST_METRICS = 3


def to_markdown(results: Mapping[str, Any]) -> str:
    """A row for every system; below, the curve by depth and the exit signal where there are any."""
    systems = results["systems"]
    metrics = list(dict.fromkeys(metric for system in systems for metric in system["scores"]))
    shown = [metric for metric in metrics if not metric.endswith(("/identical", "/first_divergence"))]
    columns = {"system": "", "mean depth": ".2f", "fewer loops": ".2f", "FLOP bound": ".2f", "tokens/s": ".0f"}
    columns |= dict.fromkeys(shown, "")
    rows = []
    for system in systems:
        row = {"system": system["name"], "mean depth": system["mean_depth"], "fewer loops": system["loops_ratio"]}
        row |= {"FLOP bound": system["flop_bound"], "tokens/s": system["tokens_per_second"]}
        rows.append({**row, **{metric: _score(system["scores"].get(metric)) for metric in shown}})
    parts = [markdown_table(columns, rows)]
    if differences := _differences(systems, shown):
        parts.append("Differences to stock, paired by example:\n\n" + differences)
    for task, curve in results["depth_curve"].items():
        body = {"bits per byte": [f"{one['bits_per_byte']['mean']:.4f}" for one in curve.values()]}
        body["perplexity"] = [f"{one['perplexity']:.3f}" for one in curve.values()]
        head = f"{task}, all tokens at depth"
        rows = [{head: name, **dict(zip(curve, line, strict=True))} for name, line in body.items()]
        parts.append(markdown_table(dict.fromkeys([head, *curve], ""), rows))
    for task, signals in results["signal"].items():
        for name, signal in signals.items():
            rows = [{"score": f"{b['low']:.3g} to {b['high']:.3g}", "loops": b["count"], **b} for b in signal["bins"]]
            auc = "undefined" if signal["auc"] is None else f"{signal['auc']:.3f}"
            left_out = f", {signal['not_finite']} scores not finite and left out" if signal.get("not_finite") else ""
            parts.append(
                f"{task}: exit signal of {name} ({signal['rule']}), area under the curve {auc}{left_out}\n\n"
                + markdown_table({"score": "", "loops": "d", "agreement": ".3f"}, rows)
            )
    return "\n\n".join(parts) + "\n"


def _score(score: Mapping[str, Any] | None) -> str | None:
    return None if score is None else f"{score['mean']:.4g} [{score['low']:.4g}, {score['high']:.4g}]"


def _differences(systems: list[Mapping[str, Any]], metrics: list[str]) -> str | None:
    rows, columns = [], ["system"]
    for system in systems:
        row: dict[str, Any] = {"system": system["name"]}
        for metric in metrics:
            difference = system["scores"].get(metric, {}).get("difference")
            if difference is not None:
                row[metric] = f"{difference['mean']:+.4f} [{difference['low']:+.4f}, {difference['high']:+.4f}]"
        columns += [metric for metric in row if metric not in columns]
        rows += [row] if len(row) > 1 else []
    return markdown_table(dict.fromkeys(columns, ""), rows) if rows else None


def save_csv(path: Path, results: Mapping[str, Any]) -> None:
    """A line for every system, task and metric, with all that belongs to the system."""
    costs = ("mean_depth", "loops_ratio", "flop_bound", "tokens", "tokens_per_second")
    spread = ("mean", "low", "high", "count")
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file)
        changes = [f"difference_{name}" for name in spread[:3]]
        writer.writerow(["system", "task", "metric", *spread, *changes, *costs])
        for system in results["systems"]:
            for key, score in system["scores"].items():
                task, _, metric = key.partition("/")
                difference = score["difference"] or {}
                values = [*(score[name] for name in spread), *(difference.get(name) for name in spread[:3])]
                writer.writerow([system["name"], task, metric, *values, *(system[name] for name in costs)])


def save_picture(path: Path, results: Mapping[str, Any]) -> None:
    """Quality against mean depth, and against tokens per second with what the FLOP bound would allow.

    One row of panels: two for each of the first three metrics that tell quality; those of tasks that generate nothing
    have depth alone. Bars are 95 % intervals: of stock that of its score, of others that of their difference to stock,
    example by example.

    Raises:
        ValueError: matplotlib is not installed.
    """
    panels = _panels(results)

    def draw(figure: Any, axes: Any) -> None:
        axes = axes if len(panels) > 1 else [axes]
        for axis, (metric, against) in zip(axes, panels, strict=True):
            _draw(axis, results["systems"], metric, against)
        axes[0].legend(fontsize="x-small")

    save_plot(path, draw, panels=len(panels))


def _panels(results: Mapping[str, Any]) -> list[tuple[str, str]]:
    generating = {task["name"] for task in results["tasks"] if task["kind"] == "generate"}
    found = dict.fromkeys(metric for system in results["systems"] for metric in system["scores"])
    metrics = [metric for metric in found if metric.rpartition("/")[2] not in _NO_QUALITY]
    # Where nothing else tells quality, agreement with full depth does.
    metrics = [metric for metric in metrics if not metric.endswith("/token_agreement")] or metrics
    panels = []
    for metric in metrics[:_MOST_METRICS]:
        speeds = ["tokens_per_second"] if metric.rpartition("/")[0] in generating else []
        panels += [(metric, against) for against in ["mean_depth", *speeds]]
    return panels


def _draw(axis: Any, systems: list[Mapping[str, Any]], metric: str, against: str) -> None:
    task = metric.rpartition("/")[0]
    speed = against == "tokens_per_second"
    speeds = {s["name"]: s["tasks"][task]["tokens_per_second"] for s in systems if task in s["tasks"]}
    for system in systems:
        score = system["scores"].get(metric)
        if score is None:
            continue
        x, full = system["tasks"][task][against], system["name"] in (STOCK, ENGINE)
        spread = score["difference"] or score
        error = [[spread["mean"] - spread["low"]], [spread["high"] - spread["mean"]]]
        marker = "s" if full else "o"
        bars = axis.errorbar([x], [score["mean"]], yerr=error, marker=marker, capsize=3, label=system["name"])
        if speed and not full and ENGINE in speeds:
            bound = speeds[ENGINE] * system["tasks"][task]["flop_bound"]
            color = bars.lines[0].get_color()
            axis.plot([x, bound], [score["mean"]] * 2, ":|", color=color, linewidth=1)
    worse = " (less is better)" if metric.rpartition("/")[2] in LOWER_IS_BETTER else ""
    axis.set_ylabel(metric + worse)
    axis.set_xlabel("tokens per second; | is engine times the FLOP bound" if speed else "mean depth (loops per token)")
    axis.grid(alpha=0.3)
