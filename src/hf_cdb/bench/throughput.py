"""`hf-cdb bench throughput`: tokens per second of stock generation and of the engine, beside what depths allow.

All systems serve the same requests, in turn; ratios are taken within a turn. The figures are those of `comparison`.
"""

import argparse
from pathlib import Path
from typing import Any

import yaml
from transformers import PreTrainedModel

from ..adapters import LoopAdapter, adapter_for
from ..config import CDBConfig
from ..kv_policy import POLICIES
from .comparison import compare
from .models import add_model_arguments, check_device, load_model, load_tokenizer
from .ratios import Spread, in_turns
from .report import (
    Report,
    add_output_arguments,
    add_run_arguments,
    check_outputs,
    markdown_table,
    rate_text,
    save_plot,
    set_threads,
)
from .systems import SYSTEMS, Run, cdb_settings, check_settings, differ_in_depth_alone, serve
from .workloads import LIVE, Workload, add_workload_arguments, check_workload, make_workload, resolve_workload

__all__ = ["add_arguments", "run"]

# Settings of cdb that have arguments of their own.
_ASKED = ("kv_policy", "min_coda_batch", "lookahead", "exit_rule", "exit_threshold", "min_depth")
# What a run is asked to do, or the workload says; `seeds`, `token_limits` and `progress` are `generate`'s.
_DECIDED = ("trace", "refill", "progress", "seeds", "token_limits")

# Figure -> heading and format in the table; those of several turns bring their own.
COLUMNS = {
    "system": ("system", ""),
    "tokens_per_second": ("tokens/s", ""),
    "speedup": ("x full depth", ""),
    "speedup_over_stock": ("x stock", ""),
    "speedup_over_refill": ("x refill", ""),
    "mean_depth": ("mean depth", ".2f"),
    "mean_prompt_depth": ("prompt depth", ".2f"),
    "flop_bound": ("FLOP bound", ".3f"),
    "decode_share": ("decode share", ""),
    "prefill_adjusted_bound": ("prefill-adj. bound", ""),
    "end_to_end_share": ("end-to-end share", ""),
    "occupancy": ("occupancy", ".2f"),
    "steady_tokens_per_second": ("steady tokens/s", ""),
    "steady_speedup": ("steady x full depth", ""),
}


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
    parser.add_argument(
        "--also",
        nargs="+",
        action="append",
        metavar="SETTING=VALUE",
        default=[],
        help="also compare cdb with refill and these settings changed, such as kv_policy=shared; may be repeated",
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
    asked = _asked(arguments)
    settings = cdb_settings(model, workload, **asked)
    systems = {name: (name, settings) for name in SYSTEMS if name == "full" or name in arguments.systems}
    for pairs in arguments.also:
        changed = cdb_settings(model, workload, **{**asked, **_parse_settings(pairs)})
        systems[" ".join(pairs)] = ("refill", changed)

    runs = measure(model, workload, systems, arguments.width, arguments.turns)
    rows = [compare(name, runs, workload, differ_in_depth_alone(own, settings)) for name, (_, own) in systems.items()]

    resolved = {
        "systems": list(systems),
        **resolve_workload(arguments, workload, adapter.full_depth),
        "cdb": _resolved({"max_num_seqs": arguments.width, **settings}, adapter),
    }
    resolved |= {name: resolved["cdb"][name] for name in _ASKED}
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
    for name in ("width", "turns"):
        if getattr(arguments, name) < 1:
            raise ValueError(f"{name}={getattr(arguments, name)}: choose at least 1.")
    if arguments.record is not None and "refill" not in arguments.systems:
        raise ValueError(f"record={str(arguments.record)!r}: the depths of refill are written. Add it to --systems.")
    if arguments.min_coda_batch is not None and not (arguments.also or {"no-refill", "refill"} & {*arguments.systems}):
        raise ValueError(
            f"min_coda_batch={arguments.min_coda_batch} has no effect on systems={' '.join(arguments.systems)}: in "
            "none of them rows leave early. Leave it out, or add refill to --systems."
        )
    check_outputs(json=arguments.json, plot=arguments.plot, record=arguments.record)
    check_device(arguments.device)
    check_workload(arguments)
    for pairs in ([], *arguments.also):
        settings = {**_asked(arguments), **_parse_settings(pairs)}
        CDBConfig.create(settings)
        check_settings(settings, replayed=arguments.mix != LIVE)


def _asked(arguments: argparse.Namespace) -> dict[str, Any]:
    """The settings of cdb that were given by arguments of their own, such as `--kv-policy`."""
    return {name: getattr(arguments, name) for name in _ASKED if getattr(arguments, name) is not None}


def _resolved(settings: dict[str, Any], adapter: LoopAdapter) -> dict[str, Any]:
    """All settings of cdb as the model makes them, but for the depths, of which the workload has a checksum."""
    described = CDBConfig(**settings).described(adapter)
    return {name: value for name, value in described.items() if name not in ("exit_depths", *_DECIDED)}


def _parse_settings(pairs: list[str]) -> dict[str, Any]:
    """Settings of cdb from `NAME=VALUE`, values as in YAML.

    Raises:
        ValueError: no setting and value, or a setting that the benchmark decides itself.
    """
    settings = {}
    for pair in pairs:
        name, equals, value = pair.partition("=")
        if not equals:
            raise ValueError(f"also={pair!r}: give a setting and its value, such as kv_policy=shared.")
        if name in ("exit_depths", *_DECIDED):
            raise ValueError(f"also={pair!r}: the benchmark decides {name} itself. Choose another setting.")
        try:
            settings[name] = yaml.safe_load(value)
        except yaml.YAMLError:
            raise ValueError(f"also={pair!r}: {value!r} is no value in YAML, such as shared, 4 or [1, 2].") from None
    return settings


def measure(
    model: PreTrainedModel,
    workload: Workload,
    systems: dict[str, tuple[str, dict[str, Any]]],
    width: int,
    turns: int,
) -> dict[str, list[Run]]:
    """The runs of every system, one per turn, after a short one to warm up.

    Args:
        systems: by name the system of `SYSTEMS` that it is, and its settings of cdb.
        width: W where the settings name no other.
    """
    rows = min(width, len(workload))
    first = Workload(workload.prompts[:rows], [2] * rows, None)

    def warm_up(name: str) -> None:
        kind, settings = systems[name]
        kept = {key: value for key, value in settings.items() if key not in ("exit_depths", "exit_threshold")}
        serve(kind, model, first, width, {**kept, "exit_rule": "never"})

    return in_turns(
        {
            name: lambda kind=kind, settings=settings: serve(kind, model, workload, width, settings)
            for name, (kind, settings) in systems.items()
        },
        turns,
        warm_up,
    )


def _print(arguments: argparse.Namespace, report: Report, rows: list[dict[str, Any]]) -> None:
    workload, model = report.content["workload"], report.content["model"]
    depths = report.content["settings"]["mix"] or f"recorded in {arguments.trace.name}"
    print(
        f"{arguments.model}, {model['dtype']}, {model['device']}, {arguments.threads} thread(s), "
        f"W = {arguments.width}, {workload['requests']} requests of {workload['prompt']['mean']:.0f} + "
        f"{workload['new_tokens']['mean']:.0f} tokens, depths: {depths}, {arguments.turns} turn(s); median (range)\n"
    )
    used = {key: cell for key, cell in COLUMNS.items() if any(row.get(key) is not None for row in rows)}
    rates = [{**row, "tokens_per_second": rate_text(row["tokens_per_second"])} for row in rows]
    shown = [{heading: _shown(row.get(key)) for key, (heading, _) in used.items()} for row in rates]
    print(markdown_table(dict(used.values()), shown))


def _shown(value: Any) -> Any:
    return str(value) if isinstance(value, Spread) else value


def _draw(axes: Any, rows: list[dict[str, Any]]) -> None:
    names = [row["system"] for row in rows]
    spreads = [row["speedup"] for row in rows]
    medians = [spread.median for spread in spreads]
    ranges = [[m - min(s.values), max(s.values) - m] for m, s in zip(medians, spreads, strict=True)]
    axes.bar(names, medians, yerr=list(zip(*ranges, strict=True)), capsize=4, label="measured")
    bounds = [
        (index, row["prefill_adjusted_bound"])
        for index, row in enumerate(rows)
        if row.get("prefill_adjusted_bound") is not None
    ]
    if bounds:
        places = [index for index, _ in bounds]
        heights = [bound.median for _, bound in bounds]
        left, right = [place - 0.4 for place in places], [place + 0.4 for place in places]
        axes.hlines(heights, left, right, colors="black", linestyles="dashed", label="prefill-adjusted bound")
    axes.set_ylabel("speed-up over the engine at full depth")
    axes.tick_params(axis="x", rotation=20)
    axes.margins(y=0.2)
    axes.legend(loc="upper left")
