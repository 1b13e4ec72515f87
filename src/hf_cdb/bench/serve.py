"""`hf-cdb bench serve`: what requests wait when they come over time, at rates up to more than can be served.

All systems are sent the same requests at the same times, one system after the other. Rates are multiples of what the
engine serves at full depth when there is always something to do.
"""

import argparse
import statistics
from typing import Any

import numpy
from transformers import PreTrainedModel

from ..adapters import adapter_for
from .arrivals import check_arrivals, make_arrivals
from .models import add_model_arguments, load_model, load_tokenizer
from .online import ONLINE, OWN_THREAD, serve_online
from .report import (
    Report,
    add_output_arguments,
    add_run_arguments,
    check_plot,
    markdown_table,
    save_plot,
    set_threads,
)
from .served import Served
from .simulation import Settings
from .workloads import LIVE, Workload, add_workload_arguments, check_workload, make_workload

__all__ = ["add_arguments", "run"]

RATES = [0.5, 0.7, 0.9, 1.0, 1.1, 1.3]
GOOD = 0.9  # share of the requests that have to be in time at a rate, for it to count as served
SLACK = 5  # times what a request takes alone, where no target is given

# Heading -> figure, its statistic, and what it is multiplied by.
LATENCIES = {
    "latency": ("normalised_latency", "mean", 1e3),
    "latency p99": ("normalised_latency", "p99", 1e3),
    "TTFT p50": ("ttft", "p50", 1e3),
    "TTFT p99": ("ttft", "p99", 1e3),
    "TPOT p50": ("tpot", "p50", 1e3),
    "TPOT p99": ("tpot", "p99", 1e3),
    "ITL p99": ("inter_token", "p99", 1e3),
    "queue p99": ("queue", "p99", 1e3),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_model_arguments(parser)
    add_workload_arguments(parser, new="8-128")
    parser.add_argument("--width", type=int, default=16, help="rows in flight, W (default %(default)s)")
    parser.add_argument(
        "--systems",
        nargs="+",
        choices=tuple(ONLINE),
        default=["stock", "full", "no-refill", "refill"],
        help="what to compare (default %(default)s); full is always among them",
    )
    parser.add_argument(
        "--rates", type=float, nargs="+", default=RATES, help="multiples of the capacity (default %(default)s)"
    )
    parser.add_argument("--capacity", type=float, help="requests a second of full depth (default: measured)")
    parser.add_argument(
        "--arrivals", default="poisson", help="poisson, burst:K, or a JSON file of seconds (default %(default)s)"
    )
    for name, text in (("ttft", "time to the first token"), ("tpot", "mean time of a later token")):
        parser.add_argument(
            f"--{name}-target",
            type=float,
            metavar="SECONDS",
            help=f"most {text} of a request in time (default {SLACK} times what requests take alone at full depth)",
        )
    parser.add_argument("--coda", type=int, default=1, help="min_coda_batch of refill (default %(default)s)")
    parser.add_argument("--chunk", type=int, help="positions of a prompt per launch at most")
    parser.add_argument(
        "--processor-time",
        action="store_true",
        help="by the clock of the thread, in which other processes do not show (one thread, on the CPU, and without "
        f"{' and '.join(OWN_THREAD)})",
    )
    add_run_arguments(parser)
    add_output_arguments(parser)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> dict[str, Any]:
    """Measure, print the table, write what was asked for, and return the content of the JSON.

    Raises:
        ValueError: arguments out of their range, or that contradict each other.
        FileNotFoundError: a file that is not there.
    """
    _check(arguments)
    set_threads(arguments.threads)
    model = load_model(arguments.model, arguments.dtype, arguments.device)
    adapter = adapter_for(model)
    tokenizer = None if arguments.data is None else load_tokenizer(arguments.model)
    workload = make_workload(arguments, 16 * arguments.width, adapter.full_depth, adapter.vocab_size, tokenizer)
    make_arrivals(arguments.arrivals, len(workload), 1.0, arguments.seed)  # refuses a file that is too short
    settings = Settings(arguments.width, min_coda_batch=arguments.coda, prefill_chunk_size=arguments.chunk)
    systems = [name for name in ONLINE if name == "full" or name in arguments.systems]

    ttft, tpot = _targets(arguments, model, settings, workload)
    capacity = arguments.capacity or _capacity(arguments, model, settings, workload)
    rows = [
        row
        for rate in sorted(set(arguments.rates))
        for row in _at_rate(arguments, model, settings, workload, systems, rate, capacity, ttft, tpot)
    ]
    summary = {name: _served_rate(rows, name) for name in systems}

    about = {
        "requests": len(workload),
        "systems": systems,
        "capacity": capacity,
        "targets": {"ttft": ttft, "tpot": tpot},
    }
    report = Report(arguments, model, workload.summary(), about)
    report.add("rates", rows)
    report.add("served_rate", summary)
    _print(arguments, workload, rows, summary, about)
    report.write(arguments.json)
    save_plot(arguments.plot, lambda _, axes: _draw(axes, rows), panels=3)
    return report.content


def _check(arguments: argparse.Namespace) -> None:
    """What can be refused before a model is made."""
    for name in ("width", "coda", "chunk"):
        value = getattr(arguments, name)
        if value is not None and value < 1:
            raise ValueError(f"{name}={value}: choose at least 1.")
    for name in ("capacity", "ttft_target", "tpot_target"):
        value = getattr(arguments, name)
        if value is not None and not 0 < value < float("inf"):
            raise ValueError(f"{name}={value}: choose a positive number.")
    for rate in arguments.rates:
        if not 0 < rate < float("inf"):
            raise ValueError(f"rates={rate}: choose positive multiples of the capacity.")
    if arguments.mix == LIVE:
        raise ValueError(f"mix={LIVE!r}: depths are replayed, so that all systems do the same. Name a mix, or --trace.")
    threaded = [name for name in OWN_THREAD if name in arguments.systems]
    if arguments.processor_time and (threaded or arguments.threads != 1 or arguments.device != "cpu"):
        raise ValueError(
            f"--processor-time with --systems {' '.join(arguments.systems)} --threads {arguments.threads} on "
            f"{arguments.device}: the clock of a thread does not see the others and no device. Leave out "
            f"{' and '.join(OWN_THREAD)}, and use --threads 1 on the CPU."
        )
    check_arrivals(arguments.arrivals)
    check_plot(arguments.plot)
    check_workload(arguments)


def _targets(
    arguments: argparse.Namespace, model: PreTrainedModel, settings: Settings, workload: Workload
) -> tuple[float, float]:
    """Seconds to the first token and for a later one that a request in time may take."""
    depths = [row[:16] for row in workload.depths[:8]]
    few = Workload(workload.prompts[:8], list(map(len, depths)), depths)
    alone = Settings(1, prefill_chunk_size=settings.prefill_chunk_size)
    for _ in range(2):  # the first time is to warm up
        served = serve_online("full", model, alone, few, [0.0] * len(few), arguments.processor_time)
    ttft = statistics.median(numpy.subtract(served.first, served.admitted))
    tpot = float(numpy.nanmedian(served.waits()["tpot"]))
    return arguments.ttft_target or SLACK * ttft, arguments.tpot_target or SLACK * tpot


def _capacity(arguments: argparse.Namespace, model: PreTrainedModel, settings: Settings, workload: Workload) -> float:
    """Requests a second of the engine at full depth when all come at once, between its start and its end."""
    served = serve_online("full", model, settings, workload, [0.0] * len(workload), arguments.processor_time)
    tokens = served.steady() or served.tokens / served.seconds
    return tokens * len(workload) / workload.tokens


def _at_rate(
    arguments: argparse.Namespace,
    model: PreTrainedModel,
    settings: Settings,
    workload: Workload,
    systems: list[str],
    rate: float,
    capacity: float,
    ttft: float,
    tpot: float,
) -> list[dict[str, Any]]:
    """Every system at one rate."""
    arrivals = make_arrivals(arguments.arrivals, len(workload), rate * capacity, arguments.seed)
    found = {
        name: serve_online(name, model, settings, workload, arrivals, arguments.processor_time) for name in systems
    }
    full = found["full"].figures()["normalised_latency"]["mean"]
    rows = []
    for name, served in found.items():
        figures, share = served.figures(), _in_time(served, ttft, tpot)
        row = {"system": name, "rate": rate, "requests_per_second": rate * capacity, **figures, "in_time": share}
        row["goodput"] = share * len(workload) / served.seconds
        row["lower_than_full"] = 1 - figures["normalised_latency"]["mean"] / full
        rows.append(row)
    return rows


def _in_time(served: Served, ttft: float, tpot: float) -> float:
    """Share of the requests within both targets; one token alone has no time of a later one."""
    waits = served.waits()
    return float(numpy.mean((waits["ttft"] <= ttft) & ~(waits["tpot"] > tpot)))


def _served_rate(rows: list[dict[str, Any]], name: str) -> float | None:
    """The highest rate up to which the system served `GOOD` of the requests in time; None where it did at none."""
    best = None
    for row in rows:
        if row["system"] == name:
            if row["in_time"] < GOOD:
                break
            best = row["rate"]
    return best


def _print(
    arguments: argparse.Namespace,
    workload: Workload,
    rows: list[dict[str, Any]],
    summary: dict[str, float | None],
    about: dict[str, Any],
) -> None:
    described, targets = workload.summary(), about["targets"]
    print(
        f"{arguments.model}, {arguments.dtype}, {arguments.device}, {arguments.threads} thread(s), "
        f"W = {arguments.width}, {len(workload)} requests of {described['prompt']['mean']:.0f} + "
        f"{described['new_tokens']['mean']:.0f} tokens, mean depth {described['mean_depth']:.2f}, arrivals: "
        f"{arguments.arrivals}; full depth serves {about['capacity']:.2f} requests a second\n"
    )
    columns = {"rate": ".2f", "system": "", "lower": ".0%"} | dict.fromkeys(LATENCIES, ".1f")
    columns |= {"in time": ".0%", "goodput": ".2f"}
    lines = []
    for row in rows:
        line = {"rate": row["rate"], "system": row["system"], "lower": row["lower_than_full"]}
        for heading, (figure, statistic, scale) in LATENCIES.items():
            if row[figure] is not None:
                line[heading] = scale * row[figure][statistic]
        lines.append({**line, "in time": row["in_time"], "goodput": row["goodput"]})
    print(markdown_table(columns, lines))
    print(
        "\nrate: times the capacity of full depth. latency: until the last token, ms a token, mean; lower: than that "
        "of full.\nTTFT, TPOT, ITL (time between tokens) and queue in ms. in time: "
        f"TTFT <= {1e3 * targets['ttft']:.0f} ms and TPOT <= {1e3 * targets['tpot']:.1f} ms; goodput: such requests a "
        "second."
    )
    rates = ", ".join(f"{name} {'none' if rate is None else format(rate, 'g')}" for name, rate in summary.items())
    print(f"Highest rate with {GOOD:.0%} of the requests in time: {rates}.")


def _draw(axes: Any, rows: list[dict[str, Any]]) -> None:
    panels = (("normalised_latency", "normalised latency, ms a token"), ("ttft", "TTFT, ms"), ("tpot", "TPOT, ms"))
    for part, (figure, label) in zip(axes, panels, strict=True):
        for name in dict.fromkeys(row["system"] for row in rows):
            own = [row for row in rows if row["system"] == name and row[figure] is not None]
            rates = [row["rate"] for row in own]
            middle = "mean" if figure == "normalised_latency" else "p50"
            (line,) = part.plot(rates, [1e3 * row[figure][middle] for row in own], "o-", label=f"{name}, {middle}")
            tail = [1e3 * row[figure]["p99"] for row in own]
            part.plot(rates, tail, "o:", color=line.get_color(), label=f"{name}, p99")
        part.set(yscale="log", xlabel="requests, times the capacity of full depth", ylabel=label)
        part.axvline(1.0, color="grey", linewidth=0.8)
    axes[0].legend(fontsize="small")
