"""`hf-cdb bench throughput`: tokens per second of stock generation and of the engine, beside what depths allow.

All systems serve the same requests, in turn; ratios are taken within a turn. Two measures, which are never mixed:

* **decode share**: speed-up over our own full depth in seconds per decoded token (steady state, prompts left out; the
  rule is that of `launches`), over the FLOP bound at the mean depth of the decoded tokens;
* **end-to-end share**: speed-up over our own full depth in seconds of the whole run, over the prefill-adjusted bound
  (arXiv 2608.09444): `1 / (P + (1 - P) w)` with `w = (1 / s - f) / (1 - f)`, where P is the share of prefill in the
  time of the full-depth run, f the share of first tokens and s the FLOP bound.
"""

import argparse
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel

from ..adapters import adapter_for
from ..kv_policy import POLICIES
from ..stats import flop_bound
from .launches import decode_time, prefill_seconds, steady_state
from .models import add_model_arguments, load_model, load_tokenizer
from .ratios import Spread, in_turns
from .report import (
    Report,
    add_output_arguments,
    add_run_arguments,
    check_plot,
    markdown_table,
    save_plot,
    set_threads,
)
from .systems import SYSTEMS, Run, cdb_settings, serve
from .workloads import Workload, add_workload_arguments, make_workload

__all__ = ["add_arguments", "compare", "prefill_adjusted_bound", "run"]

# Figure -> heading and format in the table; those of several turns bring their own.
COLUMNS = {
    "system": ("system", ""),
    "tokens_per_second": ("tokens/s", ".0f"),
    "speedup": ("x full depth", ""),
    "speedup_over_stock": ("x stock", ""),
    "mean_depth": ("mean depth", ".2f"),
    "flop_bound": ("FLOP bound", ".3f"),
    "decode_share": ("decode share", ""),
    "prefill_adjusted_bound": ("prefill-adj. bound", ""),
    "end_to_end_share": ("end-to-end share", ""),
    "occupancy": ("occupancy", ".2f"),
    "steady_tokens_per_second": ("steady tokens/s", ""),
    "steady_speedup": ("steady x full depth", ""),
}
FIGURES = (
    "decode_speedup",
    "decode_flop_bound",
    "decode_share",
    "prefill_share",
    "prefill_adjusted_bound",
    "end_to_end_share",
    "steady_speedup",
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_model_arguments(parser)
    add_workload_arguments(parser)
    parser.add_argument(
        "--width", type=int, default=16, help="rows in flight, and rows of a stock batch, W (default 16)"
    )
    parser.add_argument(
        "--systems",
        nargs="+",
        choices=tuple(SYSTEMS),
        default=list(SYSTEMS),
        help="what to compare (default all); full is always among them",
    )
    parser.add_argument("--turns", type=int, default=5, help="turns of all systems (default %(default)s)")
    parser.add_argument("--kv-policy", choices=POLICIES, help="of the engine (default the exact one of the model)")
    parser.add_argument("--min-coda-batch", type=int, help="of the cdb systems (default 1)")
    parser.add_argument("--lookahead", type=int, choices=(0, 1), help="of the cdb systems (default 0)")
    parser.add_argument("--exit-rule", help="for --mix live (default the saved one)")
    parser.add_argument("--exit-threshold", type=float, help="for --mix live (default the saved one)")
    parser.add_argument("--min-depth", type=int, help="for --mix live (default the saved one)")
    parser.add_argument(
        "--record", type=Path, metavar="FILE", help="write the depths of the run with refill, for --trace"
    )
    add_run_arguments(parser)
    add_output_arguments(parser)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> dict[str, Any]:
    """Measure, print the table, write what was asked for, and return the content of the JSON.

    Raises:
        ValueError: arguments that contradict each other or name nothing.
    """
    _check(arguments)
    set_threads(arguments.threads)
    model = load_model(arguments.model, arguments.dtype, arguments.device)
    adapter = adapter_for(model)
    tokenizer = None if arguments.data is None else load_tokenizer(arguments.model)
    workload = make_workload(arguments, 8 * arguments.width, adapter.full_depth, adapter.vocab_size, tokenizer)
    names = ("kv_policy", "min_coda_batch", "lookahead", "exit_rule", "exit_threshold", "min_depth")
    settings = cdb_settings(model, workload, **{name: getattr(arguments, name) for name in names})
    systems = [name for name in SYSTEMS if name == "full" or name in arguments.systems]

    runs = measure(model, workload, systems, arguments.width, settings, arguments.turns)
    rows = [compare(name, runs, workload, arguments.width) for name in systems]

    shown = {name: value for name, value in settings.items() if name != "exit_depths"}
    resolved = {"systems": systems, "requests": len(workload), "cdb": {key: str(value) for key, value in shown.items()}}
    report = Report(arguments, model, workload.summary(), resolved)
    report.add("systems", rows)
    _print(arguments, report, rows)
    report.write(arguments.json)
    save_plot(arguments.plot, lambda figure, axes: _draw(axes, rows))
    if arguments.record is not None:
        workload.save(arguments.record, runs["refill"][-1].depths, model=arguments.model, cdb=resolved["cdb"])
    return report.content


def _check(arguments: argparse.Namespace) -> None:
    """What can be refused before a model is made."""
    if arguments.width < 1:
        raise ValueError(f"width={arguments.width}: choose at least 1.")
    if arguments.record is not None and "refill" not in arguments.systems:
        raise ValueError(f"record={str(arguments.record)!r}: the depths of refill are written. Add it to --systems.")
    check_plot(arguments.plot)


def measure(
    model: PreTrainedModel, workload: Workload, systems: list[str], width: int, settings: dict[str, Any], turns: int
) -> dict[str, list[Run]]:
    """The runs of every system, one per turn, after a short one to warm up."""
    rows = min(width, len(workload))
    first = Workload(workload.prompts[:rows], [2] * rows, None)
    warm = {name: value for name, value in settings.items() if name not in ("exit_depths", "exit_threshold")}
    warm["exit_rule"] = "never"
    return in_turns(
        {name: lambda name=name: serve(name, model, workload, width, settings) for name in systems},
        turns,
        warm_up=lambda name: serve(name, model, first, width, warm),
    )


def compare(name: str, runs: dict[str, list[Run]], workload: Workload, width: int) -> dict[str, Any]:
    """The figures of one system, ready for the table and the JSON; those of launches where launches were timed.

    Args:
        runs: by system its runs, one per turn; "full" among them.
    """
    own, full = runs[name], runs["full"]
    row: dict[str, Any] = {"system": SYSTEMS[name], "seconds": Spread.of(run.seconds for run in own)}
    row["tokens_per_second"] = workload.tokens / row["seconds"].median
    row["speedup"] = _ratio(full, own)
    row["speedup_over_stock"] = _ratio(runs["stock"], own) if "stock" in runs else None
    row["tokens_as_full_depth"] = _equal_tokens(own[-1], full[-1])
    stats = own[-1].stats
    if stats is None:
        return row
    row |= {"mean_depth": stats.mean_depth, "flop_bound": stats.flop_bound, "occupancy": stats.occupancy}
    row |= {"kv_bytes": stats.kv_bytes, "kv_bytes_outer": stats.kv_bytes_outer, "stats": stats.to_dict()}
    if stats.trace is None:
        return row
    steady = [steady_state(run.stats.trace, width) for run in own]
    row["steady_tokens_per_second"] = Spread.of(one and one.tokens_per_second for one in steady)
    if name != "full":
        pairs = [_against_full(mine, theirs, width) for mine, theirs in zip(own, full, strict=True)]
        row |= {figure: Spread.of(pair[figure] for pair in pairs) for figure in FIGURES}
    return row


def _ratio(reference: list[Run], own: list[Run]) -> Spread:
    return Spread.of(theirs.seconds / mine.seconds for theirs, mine in zip(reference, own, strict=True))


def _equal_tokens(own: Run, full: Run) -> float:
    """Share of the requests whose tokens are those of the engine at full depth: 1 for stock, but for rounding."""
    pairs = zip(own.tokens, full.tokens, strict=True)
    return sum(mine == theirs for mine, theirs in pairs) / len(full.tokens)


def _against_full(own: Run, full: Run, width: int) -> dict[str, float | None]:
    """What one run of the engine is beside the full-depth run of the same turn; None where it was too short to say."""
    times = [decode_time(run.stats.trace, width) for run in (own, full)]
    steady = [steady_state(run.stats.trace, width) for run in (own, full)]
    figures: dict[str, float | None] = dict.fromkeys(FIGURES)
    if None not in steady:
        figures["steady_speedup"] = steady[0].tokens_per_second / steady[1].tokens_per_second
    stats, full_depth = own.stats, full.stats.full_depth
    decoded = [depth for row in own.depths for depth in row[1:]]
    if None in times or not decoded:
        return figures
    depth = sum(decoded) / len(decoded)
    asked = stats.asked["rows"] * stats.coda / len(decoded)
    figures["decode_speedup"] = times[1].per_token(full_depth) / times[0].per_token(depth)
    figures["decode_flop_bound"] = flop_bound(stats.once, stats.per_loop, full_depth, depth, asked)
    figures["decode_share"] = figures["decode_speedup"] / figures["decode_flop_bound"]
    prefill = prefill_seconds(full.stats.trace, times[1]) / full.seconds
    bound = prefill_adjusted_bound(stats.flop_bound, prefill, len(own.depths) / stats.tokens)
    figures["prefill_share"], figures["prefill_adjusted_bound"] = prefill, bound
    figures["end_to_end_share"] = full.seconds / own.seconds / bound
    return figures


def prefill_adjusted_bound(bound: float, prefill_share: float, first_share: float) -> float:
    """Largest speed-up of a whole run: the FLOP bound holds for what is decoded, prompts stay at full depth.

    Args:
        bound: s, the FLOP bound over all tokens, those of the prompts at full depth included.
        prefill_share: P, of the full-depth run's time.
        first_share: f, first tokens among all tokens; less than 1.
    """
    decoded = (1 / bound - first_share) / (1 - first_share)
    return 1 / (prefill_share + (1 - prefill_share) * decoded)


def _print(arguments: argparse.Namespace, report: Report, rows: list[dict[str, Any]]) -> None:
    workload, model = report.content["workload"], report.content["model"]
    depths = arguments.mix or (f"recorded in {arguments.trace.name}" if arguments.trace else "the default mix")
    print(
        f"{arguments.model}, {model['dtype']}, {model['device']}, {arguments.threads} thread(s), "
        f"W = {arguments.width}, {workload['requests']} requests of {workload['prompt']['mean']:.0f} + "
        f"{workload['new_tokens']['mean']:.0f} tokens, depths: {depths}, {arguments.turns} turn(s); median (range)\n"
    )
    used = {key: cell for key, cell in COLUMNS.items() if any(row.get(key) is not None for row in rows)}
    shown = [{heading: _shown(row.get(key)) for key, (heading, _) in used.items()} for row in rows]
    print(markdown_table(dict(used.values()), shown))


def _shown(value: Any) -> Any:
    return str(value) if isinstance(value, Spread) else value


def _draw(axes: Any, rows: list[dict[str, Any]]) -> None:
    names = [row["system"] for row in rows]
    spreads = [row["speedup"] for row in rows]
    medians = [spread.median for spread in spreads]
    ranges = [[m - min(s.values), max(s.values) - m] for m, s in zip(medians, spreads, strict=True)]
    axes.bar(names, medians, yerr=list(zip(*ranges, strict=True)), capsize=4, label="measured")
    for index, row in enumerate(rows):
        bound = row.get("prefill_adjusted_bound")
        if bound is not None:
            label = "prefill-adjusted bound" if index == len(rows) - 1 else None
            axes.hlines(bound.median, index - 0.4, index + 0.4, colors="black", linestyles="dashed", label=label)
    axes.set_ylabel("speed-up over the engine at full depth")
    axes.tick_params(axis="x", rotation=20)
    axes.margins(y=0.2)
    axes.legend(loc="upper left")
