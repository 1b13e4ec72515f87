"""Time that the engine itself takes for a launch: everything but the model, attention, the writes of keys and values,
and the choice of tokens.

The engine is the real one, and so are its scheduler, its cache, its addressing and the exit rule, the gate. Only the
model is none: its stages hand out tensors that were made before. What is measured is the processor time of the thread
in `Engine.step`, in which other processes do not show, split by who spends it; what goes to the stand-in for the model
is left out.
"""

import argparse
import statistics
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy
import torch

from ..config import CDBConfig
from ..engine import Engine
from ..request import Request
from ..trace import STAGES
from .null_model import NullAdapter, NullSampler
from .part_clock import PartClock
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

__all__ = ["PARTS", "Fit", "add_arguments", "fit_line", "measure", "measure_requests", "run"]

# What a launch pays, in the order in which it does: choosing and committing it; spans, positions and places in the
# cache; making one tensor of the rows' states; the exit rule with its read; taking the results in.
PARTS = ("scheduler", "addressing", "gather", "rule", "results")
_TARGET_US = {"a": 60.0, "b": 5.0}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    widths = [16, 64, 256, 1024, 4096]
    parser.add_argument("--rows", type=int, nargs="+", default=widths, help="rows in flight (default %(default)s)")
    parser.add_argument("--launches", type=int, default=40, help="of the loop at every width (default %(default)s)")
    parser.add_argument("--prompt", type=int, default=8, help="tokens of a prompt (default %(default)s)")
    parser.add_argument("--hidden", type=int, default=512, help="width of a state (default %(default)s)")
    parser.add_argument("--depth", type=int, default=4, help="full depth (default %(default)s)")
    add_run_arguments(parser)
    add_output_arguments(parser)
    parser.set_defaults(run=run)


@dataclass(frozen=True)
class Fit:
    """`a + b * rows`, microseconds."""

    a: float
    b: float


def fit_line(rows: Sequence[float], microseconds: Sequence[float]) -> Fit:
    """The line with the least sum of squared relative residuals: narrow launches decide `a`, wide ones `b`.

    Raises:
        ValueError: fewer than two different widths.
    """
    if len(set(rows)) < 2:
        raise ValueError(f"rows={list(rows)}: a line needs two different widths at least. Give more.")
    x, y = numpy.asarray(rows, float), numpy.asarray(microseconds, float)
    (a, b), *_ = numpy.linalg.lstsq(numpy.stack((1 / y, x / y), axis=1), numpy.ones_like(y), rcond=None)
    return Fit(float(a), float(b))


def measure(rows: int, launches: int, prompt: int = 8, hidden: int = 512, depth: int = 4, seed: int = 0) -> list[dict]:
    """Run `rows` rows that decode, at mixed depths, for so many launches of the loop and the others between them.

    Returns:
        For every launch its "stage", its "rows", and the seconds of every part of `PARTS`.
    """
    # A row gets at most one token a launch of the loop, so none ends while we measure.
    engine, clock, requests = _engine(rows, launches + 3, prompt, hidden, depth, seed)
    for request in requests:
        engine.add_request(request)
    while engine.stats.launches["prelude"] < 2:  # until the prompts are through
        engine.step()
    found = []
    while engine.stats.launches["loop"] < depth + launches + 1:
        clock.start("gather")
        launch = engine.step()
        parts = clock.stop()
        found.append(_entry(launch.stage, len(launch), parts))
    engine.close()
    return found[1:]  # the first one meets memory that the rule has yet to make


def measure_requests(rows: int, prompt: int = 8, hidden: int = 512, depth: int = 4, seed: int = 0) -> dict[str, float]:
    """What a request costs once, when `rows` of them come together and end in no order.

    Returns:
        Seconds a request: "arrive" in the queue, "enter" by the first launch, "end" and give its memory back.
    """
    engine, clock, requests = _engine(rows, 1, prompt, hidden, depth, seed)
    began = clock.now()
    for request in requests:
        engine.add_request(request)
    arrived = clock.now()
    clock.start("gather")
    engine.step()
    entered = _entry("prelude", rows, clock.stop())["seconds"]
    order = numpy.random.default_rng(seed).permutation(rows).tolist()
    ending = clock.now()
    for key in order:
        engine.cancel(key)
    ended = clock.now()
    return {"arrive": (arrived - began) / rows, "enter": entered / rows, "end": (ended - ending) / rows}


def _engine(
    rows: int, new_tokens: int, prompt: int, hidden: int, depth: int, seed: int
) -> tuple[Engine, PartClock, list[Request]]:
    """An engine without a model, the clock that watches it, and the requests for it."""
    adapter = NullAdapter(rows, hidden, depth, rows * prompt, seed)
    config = CDBConfig(exit_rule="gate", exit_threshold=0.5, max_num_seqs=rows)
    engine, sampler = Engine(adapter, config.resolve(adapter)), NullSampler()
    ids = torch.zeros(prompt, dtype=torch.long)
    requests = [Request(key, new_tokens, sampler, prompt_ids=ids, row=key) for key in range(rows)]
    return engine, _watch(engine, adapter, sampler), requests


def _watch(engine: Engine, adapter: NullAdapter, sampler: NullSampler) -> PartClock:
    """Have a clock told whose turn it is. What comes after the model is its results' and no longer gathering."""
    clock = adapter.clock
    for name in ("next", "commit"):
        clock.watch(engine.scheduler, name, "scheduler")
    clock.watch(engine, "_batch", "addressing")
    clock.watch(engine.cache, "bind", "addressing")
    clock.watch(engine.cache, "bound_places", "addressing")
    clock.watch(engine, "_decide", "rule")
    clock.watch(engine.rule, "begin", "rule")
    for stage in STAGES:
        clock.watch(adapter, stage, "model", then="results")
    for name in ("start", "gate_logits", "layer_inputs"):
        clock.watch(adapter, name, "model")
    clock.watch(sampler, "choose", "sampling")
    return clock


def _entry(stage: str, rows: int, parts: dict[str, float]) -> dict:
    own = {name: parts.get(name, 0.0) for name in PARTS}
    return {"stage": stage, "rows": rows, "seconds": sum(own.values()), **own}


def run(arguments: argparse.Namespace) -> dict:
    """Measure every width, print medians, fits and the split, write what was asked for.

    Raises:
        ValueError: an argument out of its range, or launches too few or too alike for a fit.
    """
    for name in ("launches", "prompt", "hidden"):
        if getattr(arguments, name) < 1:
            raise ValueError(f"{name}={getattr(arguments, name)}: choose at least 1.")
    if arguments.depth < 2:
        raise ValueError(f"depth={arguments.depth}: at depth 1 no rule is asked. Choose at least 2.")
    if min(arguments.rows) < 1 or len(set(arguments.rows)) < 2:
        raise ValueError(f"rows={arguments.rows}: choose two different positive widths at least.")
    check_seed(arguments.seed)
    check_outputs(json=arguments.json, plot=arguments.plot)
    set_threads(arguments.threads)
    sizes = {name: getattr(arguments, name) for name in ("launches", "prompt", "hidden", "depth", "seed")}
    medians = [entry for rows in sorted(set(arguments.rows)) for entry in _medians(rows, measure(rows, **sizes))]
    fits = {}
    for stage in STAGES:
        own = [entry for entry in medians if entry["stage"] == stage]
        widths = [entry["rows"] for entry in own]
        if len(set(widths)) < 2:
            seen = f"launches of width {widths[0]:g} only" if widths else "no launch"
            raise ValueError(
                f"launches={arguments.launches}: with rows={arguments.rows} the {stage} had {seen}, and a line needs "
                "two widths. Raise --launches, or take --rows that are further apart."
            )
        fits[stage] = fit_line([entry["rows"] for entry in own], [entry["us"] for entry in own])
        for before, after in pairwise(own):
            after["slope"] = (after["us"] - before["us"]) / (after["rows"] - before["rows"])
    once = {name: value for name, value in sizes.items() if name != "launches"}
    requests = [{"in_flight": rows, **measure_requests(rows, **once)} for rows in sorted(set(arguments.rows))]
    _print(arguments, medians, fits)
    _print_requests(requests)
    report = Report(arguments)
    report.add("medians", medians)
    report.add("requests_seconds", requests)
    report.add("fits_us", {stage: vars(fit) for stage, fit in fits.items()})
    report.write(arguments.json)
    save_plot(arguments.plot, lambda _, axes: _draw(axes, medians, fits))
    return report.content


def _medians(rows: int, entries: list[dict]) -> list[dict]:
    """By stage: the median width, and the medians of microseconds a launch, in all and by part."""
    groups: dict[str, list[dict]] = defaultdict(list)
    for entry in entries:
        groups[entry["stage"]].append(entry)
    found = []
    for stage in STAGES:
        own = groups[stage]
        if not own:  # few launches of the loop need not have any of the others between them
            continue
        parts = {name: 1e6 * statistics.median(entry[name] for entry in own) for name in PARTS}
        us = 1e6 * statistics.median(entry["seconds"] for entry in own)
        width = statistics.median(entry["rows"] for entry in own)
        found.append({"stage": stage, "in_flight": rows, "launches": len(own), "rows": width, "us": us, "parts": parts})
    return found


def _print(arguments: argparse.Namespace, medians: list[dict], fits: dict[str, Fit]) -> None:
    print("Processor time of the engine for a launch, without model, attention, KV writes and sampling.")
    print(f"Medians, microseconds; states of {arguments.hidden} float32, {arguments.depth} loops, the gate as rule.\n")
    columns = {"stage": "", "in flight": "d", "rows": ".0f", "us": ".0f", "us a row": ".2f", "slope": ".2f"}
    rows: list[dict[str, Any]] = []
    for entry in medians:
        rows.append({"stage": entry["stage"], "in flight": entry["in_flight"], "rows": entry["rows"]})
        rows[-1] |= {"us": entry["us"], "us a row": entry["us"] / entry["rows"], "slope": entry.get("slope")}
        rows[-1] |= entry["parts"]
    rows.sort(key=lambda row: (STAGES.index(row["stage"]), row["in flight"]))
    print(markdown_table({**columns, **dict.fromkeys(PARTS, ".0f")}, rows))
    print("\nslope: microseconds for a row more, from the width in the line above; fit: a + b * rows\n")
    lines = [
        {
            "stage": stage,
            "a us": fit.a,
            "b us a row": fit.b,
            "within target": "yes" if fit.a <= _TARGET_US["a"] and fit.b <= _TARGET_US["b"] else "no",
        }
        for stage, fit in fits.items()
    ]
    print(markdown_table({"stage": "", "a us": ".1f", "b us a row": ".2f", "within target": ""}, lines))
    print(f"\ntarget: a <= {_TARGET_US['a']:.0f} us, b <= {_TARGET_US['b']:.0f} us a row")


def _print_requests(requests: list[dict]) -> None:
    print("\nOnce a request, microseconds: to be queued, to enter by the first launch, to end in no order.\n")
    columns = {"in flight": "d", "arrive": ".0f", "enter": ".0f", "end": ".0f"}
    stages = ("arrive", "enter", "end")
    rows = [{"in flight": entry["in_flight"], **{name: 1e6 * entry[name] for name in stages}} for entry in requests]
    print(markdown_table(columns, rows))


def _draw(axes: Any, medians: list[dict], fits: dict[str, Fit]) -> None:
    for stage, fit in fits.items():
        own = [entry for entry in medians if entry["stage"] == stage]
        rows = [entry["rows"] for entry in own]
        (line,) = axes.plot(rows, [entry["us"] for entry in own], "o", label=f"{stage}: {fit.a:.0f} + {fit.b:.2f} rows")
        many = numpy.geomspace(min(rows), max(rows), 100)
        axes.plot(many, fit.a + fit.b * many, color=line.get_color())
    axes.set(xscale="log", yscale="log", xlabel="rows of the launch", ylabel="engine time of a launch, microseconds")
    axes.legend()
