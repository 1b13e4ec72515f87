"""What classes of requests wait, by the settings of the scheduler: the real one, against a cost table."""

import argparse
import dataclasses
from collections.abc import Sequence
from itertools import product
from pathlib import Path
from typing import Any

from .costs import CostTable
from .mixes import MIXES, check_mix, default_mix
from .report import Report, check_outputs, check_seed, markdown_table
from .served import PERCENTILES, Served
from .serving import draw_arrivals
from .simulation import Settings, simulate
from .traffic import Traffic, TrafficClass, draw_traffic
from .workloads import check_count

__all__ = ["add_arguments", "run"]

ORDERS = ("arrival", "priority")
# Figure -> heading, and what is shown of it.
_SHOWN = {
    "ttft": ("TTFT", (*(f"p{q}" for q in PERCENTILES), "max")),
    "inter_token": ("gap", ("p50", "p99", "max")),
    "tpot": ("TPOT", (*(f"p{q}" for q in PERCENTILES), "max")),
    "normalised_latency": ("latency", (*(f"p{q}" for q in PERCENTILES), "max")),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--costs", type=Path, metavar="FILE", required=True, help="a cost table, see `bench simulate`")
    parser.add_argument(
        "--class",
        dest="classes",
        action="append",
        required=True,
        metavar="NAME,share=..,prompt=..,new=..[,priority=..][,deadline=..]",
        help="a class of requests; lengths as for `bench simulate`, the deadline in seconds; may be given again",
    )
    parser.add_argument("--rate", type=float, help="requests a second, Poisson (default: all come at once)")
    parser.add_argument("--requests", type=int, default=1000, help="how many (default %(default)s)")
    parser.add_argument("--mix", help=f"depths: {', '.join(MIXES)}:MEAN, or shares (default: as for `bench simulate`)")
    parser.add_argument("--width", type=int, default=64, help="rows in flight, W (default %(default)s)")
    parser.add_argument("--chunk", type=int, help="positions of one prompt per launch at most")
    parser.add_argument(
        "--max-prefill-tokens", type=int, nargs="+", default=[0], help="values, 0 is no bound (default %(default)s)"
    )
    parser.add_argument("--kv-positions", type=int, help="positions that rows in flight hold at most (default: any)")
    parser.add_argument("--max-overtakes", type=int, nargs="+", default=[0], help="values (default %(default)s)")
    parser.add_argument(
        "--order",
        nargs="+",
        choices=ORDERS,
        default=["priority"],
        help="whether priorities and deadlines say who is admitted next, or the arrival alone (default priority)",
    )
    parser.add_argument("--ageing", type=int, default=Settings.ageing, help="requests of a round (default %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of the requests (default %(default)s)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write settings and all figures to this file")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> dict:
    """Draw the requests, simulate every combination of settings, print a line for each class, and write.

    Raises:
        ValueError: arguments out of their range, or a request that the positions could never hold.
        FileNotFoundError: no such cost table.
    """
    _check(arguments)
    classes = [TrafficClass.parse(text) for text in arguments.classes]
    costs = CostTable.load(arguments.costs)
    arrivals = draw_arrivals(arguments.requests, arguments.rate, arguments.seed)
    mix = arguments.mix or default_mix(costs.full_depth)
    traffic = draw_traffic(classes, arrivals, mix, costs.full_depth, arguments.seed)
    longest = max(prompt + len(row) - 1 for prompt, row in zip(traffic.prompts, traffic.depths, strict=True))
    if arguments.kv_positions is not None and longest > arguments.kv_positions:
        raise ValueError(
            f"kv_positions={arguments.kv_positions}: a request holds {longest} positions and could never start. Allow "
            "more, or make the requests shorter."
        )
    rows = []
    for bound, overtakes, order in product(arguments.max_prefill_tokens, arguments.max_overtakes, arguments.order):
        settings = Settings(
            arguments.width,
            prefill_chunk_size=arguments.chunk,
            max_prefill_tokens=bound or None,
            max_kv_positions=arguments.kv_positions,
            max_overtakes=overtakes,
            # Rounds of one request: no deadline goes before another.
            ageing=arguments.ageing if order == "priority" else 1,
        )
        served = simulate(
            costs,
            settings,
            traffic.prompts,
            traffic.depths,
            arrivals,
            priorities=traffic.priorities if order == "priority" else None,
            deadlines=traffic.deadlines,
        )
        about = {"bound": bound, "overtakes": overtakes, "order": order}
        rows += [{**about, **row} for row in _by_class(served, traffic, classes)]
    _print(arguments, rows)
    report = Report(arguments, workload=dataclasses.asdict(traffic), resolved={"mix": mix})
    report.add("costs", dataclasses.asdict(costs))
    report.add("classes", rows)
    report.write(arguments.json)
    return report.content


def _check(arguments: argparse.Namespace) -> None:
    least = {"requests": 1, "width": 1, "chunk": 1, "max_prefill_tokens": 0, "kv_positions": 1, "max_overtakes": 0}
    for name, smallest in {**least, "ageing": 1}.items():
        value = getattr(arguments, name)
        if value is not None and min(value if isinstance(value, list) else [value]) < smallest:
            raise ValueError(f"{name}={value}: choose at least {smallest}.")
    check_count("requests", arguments.requests)
    check_seed(arguments.seed)
    check_outputs(json=arguments.json)
    if arguments.rate is not None and not 0 < arguments.rate < float("inf"):
        raise ValueError(f"rate={arguments.rate}: choose a positive number.")
    if any(arguments.max_overtakes) and arguments.kv_positions is None:
        raise ValueError(
            f"max_overtakes={arguments.max_overtakes} without --kv-positions: no request ever waits for room, so none "
            "can be overtaken. Give --kv-positions, or leave it out."
        )
    if arguments.mix is not None:
        check_mix(arguments.mix)


def _by_class(served: Served, traffic: Traffic, classes: Sequence[TrafficClass]) -> list[dict[str, Any]]:
    """A line for each class; `missed` is the share of requests that were not done at their deadline."""
    found = []
    for number, one in enumerate(classes):
        keys = traffic.of_class(number)
        if not keys:
            continue
        missed = None
        if one.deadline is not None:
            missed = sum(not served.finished[key] <= traffic.deadlines[key] for key in keys) / len(keys)
        found.append({"class": one.name, "requests": len(keys), "missed": missed, **served.distributions(keys)})
    return found


def _print(arguments: argparse.Namespace, rows: list[dict]) -> None:
    arriving = "all at once" if arguments.rate is None else f"{arguments.rate:g} a second"
    print(f"{arguments.requests} requests, {arriving}, {arguments.width} in flight.\n")
    columns = {"bound": "d", "overtakes": "d", "order": "", "class": "", "requests": "d", "missed": ".1%"}
    columns |= {f"{heading} {part}": ".1f" for heading, parts in _SHOWN.values() for part in parts}
    lines = []
    for row in rows:
        line = dict(row)
        for figure, (heading, parts) in _SHOWN.items():
            if row[figure] is not None:
                line |= {f"{heading} {part}": 1e3 * row[figure][part] for part in parts}
        lines.append(line)
    print(markdown_table(columns, lines))
    print("\nMilliseconds; gap: between two tokens; latency: until the last token, ms a token.")
