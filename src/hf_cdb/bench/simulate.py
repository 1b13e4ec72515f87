"""The real scheduler against a cost table: throughput and latency for thousands of rows and hours of traffic.

Costs come from a file, from traces of runs, or from short runs of a model on this machine. With `--check` the workload
is then served for real, and what was predicted stands beside what was measured.
"""

import argparse
import copy
import dataclasses
import statistics
from dataclasses import asdict, dataclass
from itertools import product
from operator import itemgetter
from typing import Any

from transformers import PreTrainedTokenizerBase

from ..adapters import LoopAdapter, adapter_for
from ..trace import Trace
from .cost_fit import fit_costs
from .costs import CostTable
from .models import load_model, load_tokenizer
from .report import Report, markdown_table, rate_text, save_plot, set_threads
from .served import PERCENTILES, Served
from .serving import draw_arrivals, serve_arrivals, with_depths
from .simulate_arguments import add_simulate_arguments, check_simulate_arguments
from .simulation import Settings, simulate
from .workloads import Workload, make_workload, resolve_workload

__all__ = ["System", "add_arguments", "run"]

SYSTEMS = ("full depth", "no refill", "refill")
_CHECKED = {"tokens_per_second": 1.0, "ttft": 1e3, "normalised_latency": 1e3}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_simulate_arguments(parser)
    parser.set_defaults(run=run)


@dataclass(frozen=True)
class System:
    """One line of the table: a name of `SYSTEMS` and its settings."""

    name: str
    settings: Settings


def run(arguments: argparse.Namespace) -> dict:
    """Find the costs, simulate every system, check where asked, print and write.

    Raises:
        ValueError: arguments out of their range, or that contradict each other.
        FileNotFoundError: a file that is not there.
    """
    check_simulate_arguments(arguments)
    set_threads(arguments.threads)
    given = _given_costs(arguments)
    measured = arguments.check or given is None
    model = load_model(arguments.model, arguments.dtype, arguments.device) if measured else None
    adapter = None if model is None else adapter_for(model)
    depth = given.full_depth if adapter is None else adapter.full_depth
    if given is not None and given.full_depth != depth:
        raise ValueError(
            f"the cost table is of {given.full_depth} loops, but {arguments.model} has {depth}. Choose the model that "
            "it was measured on, or leave --check out."
        )
    workload = _workload(arguments, depth, adapter)
    arrivals = draw_arrivals(len(workload), arguments.rate, arguments.seed)
    systems = _systems(arguments)
    traces, served = _measure(arguments, adapter, systems, workload, arrivals, given is None) if measured else ([], {})
    costs = given
    if costs is None:
        launches = [launch for trace in traces for launch in trace]
        costs = fit_costs(launches, depth, _about(arguments), adapter.coda_layers_share())
    if arguments.save_costs is not None:
        costs.save(arguments.save_costs)
    rows = [_simulated(costs, system, workload, arrivals) for system in systems]
    checks = [check for row, system in zip(rows, systems, strict=True) for check in _compare(row, served.get(system))]
    _print(arguments, workload, rows, checks)
    if costs.caveat is not None:
        print(f"\n{costs.caveat}")
    report = Report(arguments, model, workload.summary(), _resolved(arguments, workload, measured))
    report.add("costs", asdict(costs))
    report.add("systems", rows)
    report.add("check", checks)
    report.write(arguments.json)
    save_plot(arguments.plot, lambda _, axes: _draw(axes, rows), panels=2)
    return report.content


def _given_costs(arguments: argparse.Namespace) -> CostTable | None:
    """The table that the command line names, or the one that fits the traces it names."""
    if arguments.costs is not None:
        return CostTable.load(arguments.costs)
    if arguments.fit is None:
        return None
    launches = [launch for path in arguments.fit for launch in Trace.load(path)]
    # Prompts run at full depth, so the deepest loop is the last one.
    depth = max((max(launch.depths) for launch in launches if launch.stage == "loop"), default=1)
    return fit_costs(launches, depth, {"fitted to": [path.name for path in arguments.fit]})


def _workload(arguments: argparse.Namespace, depth: int, adapter: LoopAdapter | None) -> Workload:
    requests = 8 * max(arguments.width)
    if arguments.minutes is not None:
        requests = max(1, round(60 * arguments.minutes * arguments.rate))
    vocabulary = None if adapter is None else adapter.vocab_size
    workload = make_workload(arguments, requests, depth, vocabulary, _tokenizer(arguments))
    if arguments.minutes is not None and len(workload) < requests:
        raise ValueError(
            f"minutes={arguments.minutes:g} at rate={arguments.rate:g} are {requests} requests, but the file holds "
            f"{len(workload)}. Name fewer minutes or a longer file, or draw lengths by --prompt and --new."
        )
    return workload


def _tokenizer(arguments: argparse.Namespace) -> PreTrainedTokenizerBase | None:
    return None if arguments.data is None else load_tokenizer(arguments.model)


def _resolved(arguments: argparse.Namespace, workload: Workload, measured: bool) -> dict[str, Any]:
    """Settings as they were in the end; None are those of a model where none was loaded."""
    return {
        **resolve_workload(arguments, workload, workload.depths[0][0]),
        **({} if measured else dict.fromkeys(("dtype", "device", "turns"))),
        **({} if measured or arguments.data is not None else {"model": None}),
    }


def _systems(arguments: argparse.Namespace) -> list[System]:
    found = []
    for width in sorted(set(arguments.width)):
        settings = Settings(width, prefill_chunk_size=arguments.chunk, late_signal=arguments.late_signal)
        for lookahead in sorted(set(arguments.lookahead)):
            own = dataclasses.replace(settings, lookahead=lookahead)
            found.append(System("full depth", own))
            found.append(System("no refill", dataclasses.replace(own, refill=False)))
            for coda in sorted(set(arguments.coda)):
                found.append(System("refill", dataclasses.replace(own, min_coda_batch=coda)))
    return found


def _about(arguments: argparse.Namespace) -> dict[str, Any]:
    return {name: getattr(arguments, name) for name in ("model", "dtype", "device", "threads")}


def _depths_of(system: System, workload: Workload) -> Workload:
    """Full depth is a matter of the requests, not of the scheduler."""
    return with_depths(workload, workload.depths[0][0]) if system.name == "full depth" else workload


def _measure(
    arguments: argparse.Namespace,
    adapter: LoopAdapter,
    systems: list[System],
    workload: Workload,
    arrivals: list[float],
    calibrate: bool,
) -> tuple[list[Trace], dict[System, list[Served]]]:
    """Time runs to fit costs to, and with `--check` the systems themselves, in turn.

    The runs for the fit serve other requests, so that nothing is predicted from itself: drawn with another seed, of a
    file those that come after. Where the file has too few more, its first ones serve again, and a line says so. Where
    one W is asked for they also run at half of it, at 2 beside 1: rows in lockstep make launches of one width, and no
    line.

    Raises:
        ValueError: requests from a file that are too few to make launches of two widths.
    """
    traces: list[Trace] = []
    served: dict[System, list[Served]] = {}
    other = copy.copy(arguments)
    widths = sorted(set(arguments.width))
    if len(widths) == 1:
        widths = [1, 2] if widths == [1] else [widths[0] // 2, *widths]
    other.seed, other.requests = arguments.seed + 1, 4 * max(widths)
    sizes = (other.requests, adapter.full_depth, adapter.vocab_size, _tokenizer(arguments))
    drawn = make_workload(other, *sizes, skip=len(workload))
    if len(drawn) < max(widths):
        drawn = make_workload(other, *sizes)
        if calibrate:
            print("The file has too few other requests to fit costs to: predictions rest on those that are checked.\n")
    if calibrate and len(drawn) < 2:
        raise ValueError(
            f"{len(drawn)} request in the file, and launches of one row give no costs of wider ones. Give a file of "
            "more, or a cost table by --costs (`hf-cdb bench step --save-costs FILE` writes one)."
        )
    at_once = [0.0] * len(drawn)
    serve_arrivals(adapter, systems[-1].settings, drawn, at_once)  # to warm up
    for _ in range(arguments.turns):
        for width, refill in product(widths if calibrate else (), (True, False)):
            settings = Settings(width, refill=refill, prefill_chunk_size=arguments.chunk)
            traces.append(serve_arrivals(adapter, settings, drawn, at_once, True, arguments.processor_time)[1])
        for system in systems if arguments.check else ():
            own = _depths_of(system, workload)
            run, _ = serve_arrivals(adapter, system.settings, own, arrivals, False, arguments.processor_time)
            served.setdefault(system, []).append(run)
    return traces, served


def _simulated(costs: CostTable, system: System, workload: Workload, arrivals: list[float]) -> dict[str, Any]:
    own = _depths_of(system, workload)
    run = simulate(costs, system.settings, [len(prompt) for prompt in own.prompts], own.depths, arrivals)
    return {"system": system.name, **asdict(system.settings), **run.figures()}


def _compare(row: dict[str, Any], runs: list[Served] | None) -> list[dict[str, Any]]:
    """What was predicted beside the median of what was measured, one entry a figure; none where nothing was."""
    if runs is None:
        return []
    names = {"system": row["system"], "W": row["max_num_seqs"], "coda": row["min_coda_batch"]}
    measured = [run.figures() for run in runs]
    found = []
    for figure, scale in _CHECKED.items():
        for q in (None,) if figure == "tokens_per_second" else ("p50", "p99"):
            predicted, *times = (
                scale * (entry[figure] if q is None else entry[figure][q]) for entry in (row, *measured)
            )
            middle = statistics.median(times)
            entry = {**names, "figure": figure.replace("_", " ") + (f" {q}, ms" if q else ""), "predicted": predicted}
            entry |= {"measured": middle, "least": min(times), "most": max(times), "error": predicted / middle - 1}
            found.append(entry)
    return found


def _print(arguments: argparse.Namespace, workload: Workload, rows: list[dict], checks: list[dict]) -> None:
    summary = workload.summary()
    arriving = "all at once" if arguments.rate is None else f"{arguments.rate:g} a second"
    print(
        f"{len(workload)} requests, {arriving}; prompts of {summary['prompt']['mean']:.0f} and "
        f"{summary['new_tokens']['mean']:.0f} new tokens in the mean, mean depth {summary['mean_depth']:.2f}.\n"
    )
    columns = {"system": "", "W": "d", "coda": "d", "lookahead": "d", "tokens/s": "", "steady": ""}
    columns |= {"speed-up": ".2f", "occupancy": ".2f"}
    columns |= {f"{name} p{q}": ".1f" for name in ("TTFT", "TPOT", "latency") for q in PERCENTILES}
    # Beside full depth with the same lookahead: what that hides of the host is no merit of depth.
    place = itemgetter("max_num_seqs", "lookahead")
    full = {place(row): row["tokens_per_second"] for row in rows if row["system"] == "full depth"}
    lines = []
    for row in rows:
        line = {"system": row["system"], "W": row["max_num_seqs"], "coda": row["min_coda_batch"]}
        line |= {"lookahead": row["lookahead"], "occupancy": row["occupancy"]}
        line |= {"tokens/s": rate_text(row["tokens_per_second"])}
        line |= {"steady": rate_text(row["steady_tokens_per_second"])}
        line |= {"speed-up": row["tokens_per_second"] / full[place(row)]}
        for name, figure in (("TTFT", "ttft"), ("TPOT", "tpot"), ("latency", "normalised_latency")):
            for q in PERCENTILES if row[figure] is not None else ():
                line[f"{name} p{q}"] = 1e3 * row[figure][f"p{q}"]
        lines.append(line)
    print(markdown_table(columns, lines))
    print(
        "\nTTFT and TPOT in ms; latency: until the last token, ms a token; speed-up over full depth at the same W "
        "and lookahead."
    )
    if checks:
        print(f"\nPrediction beside measurement, medians of {arguments.turns} runs:\n")
        columns = {"system": "", "W": "d", "coda": "d", "figure": "", "predicted": ".1f", "measured": ".1f"}
        print(markdown_table({**columns, "least": ".1f", "most": ".1f", "error": "+.1%"}, checks))


def _draw(axes: Any, rows: list[dict]) -> None:
    lines: dict[str, list[dict]] = {}
    for row in rows:
        name = row["system"]
        if name != "full depth":
            name += f", coda {row['min_coda_batch']}"
        name += f", lookahead {row['lookahead']}"
        lines.setdefault(name, []).append(row)
    for name, own in lines.items():
        widths = [row["max_num_seqs"] for row in own]
        axes[0].plot(widths, [row["tokens_per_second"] for row in own], "o-", label=name)
        for q, style in (("p50", "o-"), ("p99", "o:")):
            latency = [1e3 * row["normalised_latency"][q] for row in own]
            (line,) = axes[1].plot(widths, latency, style, color=axes[0].lines[-1].get_color())
            line.set_label(f"{name}, {q}")
    axes[0].set(ylabel="tokens per second")
    axes[1].set(yscale="log", ylabel="normalised latency, ms a token")
    widths = sorted({row["max_num_seqs"] for row in rows})
    for part in axes:
        part.set_xscale("log", base=2)
        part.set_xticks(widths, [str(width) for width in widths])
        part.set_xlabel("rows in flight, W")
        part.legend(fontsize="small")
