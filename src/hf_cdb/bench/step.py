"""`hf-cdb bench step`: seconds of one launch of the engine by width and context.

W rows decode one token after another at full depth, each with a cache that was filled with random keys and values, so
that no prompt has to run first. Every launch is a whole step of the engine, scheduling included. Keys and values have
one slot here, whatever the policy: a launch reads one, and so longer contexts fit. What a token that leaves early
copies into deeper slots is therefore not part of the coda.

Three figures sum up the loop at the shortest context:

* the **floor**, seconds of a launch of the smallest width; of one row, the default, most of it reads the weights;
* the **slope**, seconds that a row adds between the two largest widths;
* the **saturation width**, floor / slope: from there on rows cost more than weights, and wider launches gain little;
  a floor of many rows has their slope in it, and this figure is too large then.

The **attention share** is the part of a launch inside the attention function, which packs what it reads; storing new
keys and values is not part of it.
"""

import argparse
import math
from pathlib import Path
from typing import Any

from ..adapters import adapter_for
from .cells import Cell, fits, measure_cell
from .cost_fit import fit_costs
from .costs import CostTable
from .models import add_model_arguments, check_device, load_model
from .report import (
    Report,
    add_output_arguments,
    add_run_arguments,
    check_outputs,
    check_seed,
    markdown_table,
    save_plot,
    set_threads,
)

__all__ = ["add_arguments", "run", "summarise"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_model_arguments(parser)
    parser.add_argument("--width", type=int, nargs="+", default=[1, 4, 16, 64, 256], help="rows (default 1 to 256)")
    contexts = [128, 512, 2048, 8192]
    parser.add_argument("--context", type=int, nargs="+", default=contexts, help="of a row (default 128 to 8192)")
    parser.add_argument("--turns", type=int, default=3, help="turns of all cells (default %(default)s)")
    parser.add_argument(
        "--memory", type=float, default=4.0, help="GiB of keys and values; what needs more is left out (default 4)"
    )
    parser.add_argument("--save-costs", type=Path, metavar="FILE", help="write the cost table, for bench simulate")
    add_run_arguments(parser)
    add_output_arguments(parser)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> dict[str, Any]:
    """Measure, print the tables, write what was asked for, and return the content of the JSON.

    Raises:
        ValueError: arguments out of range, or nothing that fits into the memory.
    """
    widths, contexts = sorted(set(arguments.width)), sorted(set(arguments.context))
    for name, values in (("width", widths), ("context", contexts), ("turns", [arguments.turns])):
        if values[0] < 1:
            raise ValueError(f"{name}={values[0]}: choose at least 1.")
    if not arguments.memory > 0:
        raise ValueError(f"memory={arguments.memory}: choose more than 0 GiB.")
    if len(widths) < 2:
        raise ValueError(f"width={widths[0]} alone gives no slope. Choose at least two widths.")
    check_seed(arguments.seed)
    check_device(arguments.device)
    check_outputs(json=arguments.json, plot=arguments.plot, save_costs=arguments.save_costs)
    set_threads(arguments.threads)
    model = load_model(arguments.model, arguments.dtype, arguments.device)
    cells = [
        Cell(width, context)
        for context in contexts
        for width in widths
        if fits(model, width, context, arguments.memory)
    ]
    if len({cell.width for cell in cells if cell.context == contexts[0]}) < 2:
        raise ValueError(
            f"memory={arguments.memory} GiB holds fewer than two widths of context {contexts[0]}. Allow more, or "
            "choose shorter contexts."
        )
    for _ in range(arguments.turns):
        for cell in cells:
            measure_cell(model, cell, arguments.seed)

    adapter = adapter_for(model)
    about = {"command": "hf-cdb bench step", "model": arguments.model, "dtype": arguments.dtype}
    launches = [launch for cell in cells for launch in cell.launches()]
    costs = fit_costs(launches, adapter.full_depth, about, adapter.coda_layers_share())
    summary = summarise(cells, adapter.parameter_counts()[1] * adapter.dtype.itemsize, costs)
    report = Report(arguments, model, resolved={"width": widths, "context": contexts})
    report.add("summary", summary)
    report.add("cells", [_figures(cell) for cell in cells])
    _print(arguments, cells, widths, contexts, summary)
    report.write(arguments.json)
    if arguments.save_costs is not None:
        costs.save(arguments.save_costs)
        if costs.caveat is not None:
            print(f"\n{costs.caveat} Several values of --context tell it.")
    save_plot(arguments.plot, lambda figure, axes: _draw(axes, cells, contexts), panels=2)
    return report.content


def summarise(cells: list[Cell], core_bytes: int, costs: CostTable) -> dict[str, float | None]:
    """Floor, slope and saturation width of the loop at the shortest context; see the head of the module.

    Args:
        core_bytes: weights that a loop reads.
        costs: fitted to the cells, for what a position of context costs.
    """
    context = min(cell.context for cell in cells)
    line = sorted((cell.width, cell.median("loop")) for cell in cells if cell.context == context)
    (first, floor), (before, lower), (last, upper) = line[0], line[-2], line[-1]
    slope = (upper - lower) / (last - before)
    return {
        "context": context,
        "floor_width": first,
        "floor_seconds": floor,
        "weight_bytes": core_bytes,
        "weight_bytes_per_second": core_bytes / floor,
        "slope_seconds": slope,
        # Noise can make the wider launch the faster one; then nothing is saturated up to it.
        "saturation_width": floor / slope if slope > 0 else None,
        "context_seconds": costs.loop.per_context if costs.tells_context("loop") else None,
    }


def _figures(cell: Cell) -> dict[str, Any]:
    """Ready for the JSON."""
    return {
        "width": cell.width,
        "context": cell.context,
        "median_seconds": {stage: cell.median(stage) for stage in cell.seconds},
        "attention_share": cell.attention_share,
        "seconds": cell.seconds,
    }


def _print(
    arguments: argparse.Namespace, cells: list[Cell], widths: list[int], contexts: list[int], summary: dict[str, Any]
) -> None:
    by_place = {(cell.width, cell.context): cell for cell in cells}
    print(
        f"{arguments.model}, {arguments.dtype}, {arguments.device}, {arguments.threads} thread(s), {arguments.turns} "
        "turn(s). One launch of the loop in milliseconds (share of attention in per cent), by rows and context:\n"
    )
    rows = []
    for width in widths:
        row: dict[str, Any] = {"rows": width}
        for context in contexts:
            cell = by_place.get((width, context))
            if cell is not None:
                share = "" if cell.attention_share is None else f" ({cell.attention_share * 100:.0f})"
                row[str(context)] = f"{cell.median('loop') * 1e3:.2f}{share}"
        shortest = by_place.get((width, contexts[0]))
        if shortest is not None:
            row["prelude"], row["coda"] = (shortest.median(stage) * 1e3 for stage in ("prelude", "coda"))
        rows.append(row)
    columns = {"rows": "d", **{str(context): "" for context in contexts}, "prelude": ".2f", "coda": ".2f"}
    print(markdown_table(columns, rows))
    saturation = summary["saturation_width"]
    print(
        f"\nAt context {summary['context']}: floor, a launch of {_rows(summary['floor_width'])}, "
        f"{summary['floor_seconds'] * 1e3:.2f} ms ({summary['weight_bytes_per_second'] / 1e9:.1f} GB/s of weights), "
        f"slope {summary['slope_seconds'] * 1e6:.0f} us a row, saturation width "
        f"{'beyond what was measured' if saturation is None else f'{saturation:.0f}'}."
    )
    if summary["context_seconds"] is not None:
        print(f"A position of context costs {summary['context_seconds'] * 1e9:.1f} ns.")
    if summary["floor_width"] > 1:
        print("The saturation width is that floor / slope; add --width 1 for the floor of one row.")
    left_out = len(widths) * len(contexts) - len(cells)
    if left_out:
        print(f"{left_out} cell(s) left out: their keys and values need more than --memory {arguments.memory} GiB.")


def _rows(width: int) -> str:
    return "1 row" if width == 1 else f"{width} rows"


def _draw(axes: Any, cells: list[Cell], contexts: list[int]) -> None:
    for context in contexts:
        own = [cell for cell in cells if cell.context == context]
        widths = [cell.width for cell in own]
        axes[0].plot(widths, [cell.median("loop") * 1e3 for cell in own], marker="o", label=f"context {context}")
        shares = [math.nan if cell.attention_share is None else cell.attention_share for cell in own]
        axes[1].plot(widths, shares, marker="o", label=f"context {context}")
    for panel, label in zip(axes, ("one launch of the loop, ms", "share of attention"), strict=True):
        panel.set_xscale("log", base=2)
        panel.xaxis.set_major_formatter("{x:g}")
        panel.set_xlabel("rows")
        panel.set_ylabel(label)
        panel.legend()
    axes[0].set_yscale("log")
    axes[0].yaxis.set_major_formatter("{x:g}")
    axes[0].yaxis.set_minor_formatter("{x:g}")
