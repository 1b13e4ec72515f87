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
        for axis, title in ((errors, "errors of the exit signal"), (rules, "exit rules")):
            axis.plot(*zip(*curve, strict=True), color="0.7", marker=".", label="fixed depths, mixed")
            axis.set(title=title, xlabel="loops per token of text", ylabel="tokens lost")
        _points(errors, _on_text(tables["noise"]), _name_of_error)
        _points(rules, _on_text(tables["rules"]), lambda row: row["rule"])
        _positions(places, tables["places"])
        for axis in axes:
            axis.set_ylim(bottom=0)
            axis.legend(fontsize="x-small")
        # Fixed depths of one loop lose so much more that the rest would be a line.
        highest = max(row["tokens lost"] for name in ("noise", "rules") for row in _on_text(tables[name]))
        for axis in (errors, rules):
            axis.set_ylim(0, 1.3 * highest)

    return paint


def _on_text(table: Table) -> list[dict[str, Any]]:
    return [row for row in table.rows if row["data"] == "text"]


def _name_of_error(row: Mapping[str, Any]) -> str:
    if row["bias"]:
        return f"bias {row['bias']:+g}"
    return f"noise {row['noise']:g}" if row["noise"] else "undisturbed"


def _points(axis: Any, rows: Sequence[Mapping[str, Any]], name_of: Callable[[Mapping[str, Any]], str]) -> None:
    for place, row in enumerate(rows):
        axis.errorbar(
            row["loops"],
            row["tokens lost"],
            yerr=row["±"],
            marker="osDv^<>PX*dph"[place % 13],
            color=f"C{place % 10}",
            capsize=2,
            label=name_of(row),
        )


def _positions(axis: Any, table: Table) -> None:
    rows = [row for row in _on_text(table) if row["part"].startswith("position")]
    names = [row["part"].removeprefix("position ") for row in rows]
    for suffix, label in (("", "undisturbed"), (" with noise", f"noise {NOISE:g}")):
        lost, widths = ([row[f"{key}{suffix}"] for row in rows] for key in ("tokens lost", "±"))
        axis.errorbar(names, lost, yerr=widths, marker="o", capsize=2, label=label)
    axis.set(title="position in the output", xlabel="token of the continuation", ylabel="tokens lost")
