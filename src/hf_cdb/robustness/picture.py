"""The study in one picture: what errors, rules and positions cost on text."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from .study import NOISE, Table

__all__ = ["draw"]


def draw(tables: Mapping[str, Table], curve: Sequence[tuple[float, float]]) -> Callable[[Any, Sequence[Any]], None]:
    """What `save_plot` calls with a figure and three axes.

    Args:
        tables: by name, of the study.
        curve: (loops, share of tokens lost) of fixed depths on text.
    """

    def paint(figure: Any, axes: Sequence[Any]) -> None:
        errors, rules, places = axes
        _errors(errors, _on_text(tables["noise"]), curve)
        _rules(rules, _on_text(tables["rules"]))
        _positions(places, tables["places"])
        for axis in axes:
            axis.legend(fontsize="x-small")

    return paint


def _on_text(table: Table) -> list[dict[str, Any]]:
    return [row for row in table.rows if row["data"] == "text"]


def _errors(axis: Any, rows: Sequence[Mapping[str, Any]], curve: Sequence[tuple[float, float]]) -> None:
    axis.plot(*zip(*curve, strict=True), color="0.7", marker=".", label="fixed depths, mixed")
    for place, row in enumerate(rows):
        name = f"bias {row['bias']:+g}" if row["bias"] else f"noise {row['noise']:g}" if row["noise"] else "undisturbed"
        look = {"marker": "osDv^<>PX"[place % 9], "color": f"C{place % 10}", "capsize": 2}
        axis.errorbar(row["loops"], row["tokens lost"], yerr=row["±"], label=name, **look)
    # Fixed depths of one loop lose so much more that the rest would be a line.
    axis.set_ylim(0, 1.3 * max(row["tokens lost"] for row in rows) or None)
    axis.set(title="errors of the exit signal", xlabel="loops per token of text", ylabel="tokens lost")


def _rules(axis: Any, rows: Sequence[Mapping[str, Any]]) -> None:
    names = [f"{row['rule']}, {row['loops']:.2f} loops" for row in rows]
    lost, widths = ([row[key] for row in rows] for key in ("tokens lost", "±"))
    axis.errorbar(lost, names, xerr=widths, fmt="o", capsize=2, label="rule")
    axis.plot([row["mixed depths lose"] for row in rows], names, "x", color="0.5", label="fixed depths, mixed")
    axis.invert_yaxis()
    axis.set(title="exit rules", xlabel="tokens of text lost")


def _positions(axis: Any, table: Table) -> None:
    rows = [row for row in _on_text(table) if row["part"].startswith("position")]
    names = [row["part"].removeprefix("position ") for row in rows]
    for suffix, label in (("", "undisturbed"), (" with noise", f"noise {NOISE:g}")):
        lost, widths = ([row[f"{key}{suffix}"] for row in rows] for key in ("tokens lost", "±"))
        axis.errorbar(names, lost, yerr=widths, marker="o", capsize=2, label=label)
    axis.set_ylim(bottom=0)
    axis.set(title="position in the output", xlabel="token of the continuation", ylabel="tokens lost")
