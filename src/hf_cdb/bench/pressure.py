"""A workload that needs more memory than there is: what waiting and preemption cost, and whether results stay the same.

All requests come at once. Without a limit all of them run together; under pressure their keys and values get a share of
what that takes. Depths are replayed, so that all systems do the same work, or decided by an exit rule.
"""

import argparse
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy
import torch

from ..adapters import LoopAdapter, adapter_for
from ..config import CDBConfig
from ..engine import Engine
from ..exits import Replay
from ..request import Request
from ..room import PREEMPTIONS
from ..sampling import Sampler
from .lengths import draw_lengths
from .mixes import default_mix, depth_shares, draw_depths
from .models import add_model_arguments, check_device, load_model
from .report import Report, add_run_arguments, check_outputs, check_seed, markdown_table, set_threads
from .served import PERCENTILES
from .workloads import check_count

__all__ = ["Outcome", "add_arguments", "run", "run_requests"]

UNLIMITED = "unlimited"
SYSTEMS: dict[str, dict[str, str]] = {
    **{preemption: {"preemption": preemption} for preemption in PREEMPTIONS},
    **{f"{preemption}, compact": {"preemption": preemption, "kv_layout": "compact"} for preemption in PREEMPTIONS},
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_model_arguments(parser, default="random-ouro-400k")
    # In float32 the two largest logits of a random model may be nearer than rounding.
    parser.set_defaults(dtype="float64", run=run)
    parser.add_argument("--requests", type=int, default=200, help="how many (default %(default)s)")
    for name, default in (("prompt", "lognormal:48:2.2:4096"), ("new", "1-512")):
        parser.add_argument(f"--{name}", default=default, help="lengths, as for `bench simulate` (default %(default)s)")
    parser.add_argument("--mix", help="depths, as for `bench simulate`")
    parser.add_argument("--exit-rule", metavar="RULE", help="in place of a mix: lets this rule decide")
    parser.add_argument("--exit-threshold", type=float, metavar="X", help="of that rule (default its own)")
    parser.add_argument("--share", type=float, default=0.25, help="of the memory that all need (default %(default)s)")
    parser.add_argument("--width", type=int, help="rows in flight at most (default: all requests)")
    parser.add_argument("--check", type=int, default=10, help="requests to run alone as well (default %(default)s)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write settings and all figures to this file")
    add_run_arguments(parser)


@dataclass
class Outcome:
    """What became of a workload under one system.

    Attributes:
        engine: after it.
        requests: all finished.
        started: by request, launches before its first one, and seconds.
        seconds: of the processor, all launches together.
    """

    engine: Engine
    requests: list[Request]
    started: dict[int, tuple[int, float]]
    seconds: float


def run_requests(adapter: LoopAdapter, prompts: Sequence[torch.Tensor], new: Sequence[int], **settings: Any) -> Outcome:
    """Run requests that come at once.

    Args:
        prompts: int64 token ids of each.
        new: tokens of each.
        settings: of cdb.
    """
    engine = Engine(adapter, CDBConfig(**settings).resolve(adapter))
    sampler = Sampler([[] for _ in prompts], prompts, do_sample=False)
    requests = [
        Request(key, count, sampler, prompt_ids=prompt, row=key)
        for key, (prompt, count) in enumerate(zip(prompts, new, strict=True))
    ]
    for request in requests:
        engine.add_request(request)
    started: dict[int, tuple[int, float]] = {}
    began, launches = time.process_time(), 0
    while (launch := engine.step()) is not None:
        if launch.stage == "prelude":
            for key in launch.keys:
                started.setdefault(key, (launches, time.process_time() - began))
        launches += 1
    return Outcome(engine, requests, started, time.process_time() - began)


def run(arguments: argparse.Namespace) -> dict[str, Any]:
    """Run the workload under every system, check, print the table, and return the content of the JSON.

    Raises:
        ValueError: arguments out of their range.
        RuntimeError: tokens or depths differ between systems, or from those of a request alone.
    """
    _check(arguments)
    adapter = adapter_for(load_model(arguments.model, arguments.dtype, arguments.device))
    rng = numpy.random.default_rng(arguments.seed)
    lengths, new = (draw_lengths(spec, arguments.requests, rng) for spec in (arguments.prompt, arguments.new))
    mix = "live" if arguments.exit_rule else arguments.mix or default_mix(adapter.full_depth)
    depths = []
    if mix != "live":
        depths = draw_depths(depth_shares(mix, adapter.full_depth), new, adapter.full_depth, rng)
    prompts = [torch.from_numpy(rng.integers(1, adapter.vocab_size, size=length)) for length in lengths]
    width = arguments.width or len(prompts)

    def serve(keys: Sequence[int], **settings: Any) -> Outcome:
        exits = {"exit_rule": arguments.exit_rule, "exit_threshold": arguments.exit_threshold}
        if mix != "live":
            exits = {"exit_rule": Replay([depths[key] for key in keys])}
        return run_requests(adapter, [prompts[key] for key in keys], [new[key] for key in keys], **exits, **settings)

    outcomes = {UNLIMITED: serve(range(len(prompts)), max_num_seqs=width)}
    position = outcomes[UNLIMITED].engine.cache.bytes_per_position()
    needs = [position * (length + count - 1) for length, count in zip(lengths, new, strict=True)]
    budget = max(*needs, int(arguments.share * sum(needs)))
    limits = {"max_num_seqs": width, "max_kv_memory": budget}
    for system, settings in SYSTEMS.items():
        outcomes[system] = serve(range(len(prompts)), **limits, **settings)
    rows = [_figures(system, outcome, outcomes[UNLIMITED]) for system, outcome in outcomes.items()]
    checked = _compare(outcomes, lambda key: serve([key], max_num_seqs=1).requests[0], arguments.check)

    print(
        f"{len(prompts)} requests of {min(lengths)}-{max(lengths)} + {min(new)}-{max(new)} tokens, {width} in flight "
        f"at most; all need {sum(needs) / 2**20:.1f} MiB, and {budget / 2**20:.1f} MiB are there.\n"
    )
    columns = {"system": "", "peak MiB": ".1f", "pool MiB": ".1f", "row waits": "d", "preemptions": "d"}
    columns |= {"offloaded MiB": ".1f", "run again": "d", "launches": "d", "x unlimited": ".2f"}
    columns |= {f"wait {name}": ".1f" for name in (*(f"p{q}" for q in PERCENTILES), "max")}
    print(markdown_table(columns, rows))
    print(
        "\npool: with gaps, and of the compact layout whole pages; row waits: launches in which a row stood for want "
        "of room, summed over rows; run again: positions; x unlimited: tokens a second; wait: processor seconds until "
        f"a request started. Tokens and depths of all requests are equal under all systems, and those of {checked} to "
        "them alone."
    )
    report = Report(arguments, adapter.model, resolved={"mix": mix, "width": width})
    report.add("needed_bytes", sum(needs))
    report.add("budget_bytes", budget)
    report.add("systems", rows)
    report.add("checked_alone", checked)
    report.write(arguments.json)
    return report.content


def _check(arguments: argparse.Namespace) -> None:
    check_count("requests", arguments.requests)
    if not 0 < arguments.share <= 1:
        raise ValueError(f"share={arguments.share}: choose more than 0 and at most 1.")
    if arguments.requests < 2 or (arguments.width is not None and arguments.width < 1) or arguments.check < 0:
        raise ValueError(
            f"requests={arguments.requests}, width={arguments.width}, check={arguments.check}: choose at least 2 "
            "requests, a width of at least 1, and 0 or more to check."
        )
    if arguments.exit_rule is None and arguments.exit_threshold is not None:
        raise ValueError(
            f"exit_threshold={arguments.exit_threshold} without --exit-rule: the depths of a mix are replayed. Name "
            "the rule, or drop it."
        )
    if arguments.exit_rule is not None and arguments.mix is not None:
        raise ValueError(f"mix={arguments.mix!r} beside --exit-rule {arguments.exit_rule}: one of them decides.")
    if arguments.exit_rule == "replay":
        raise ValueError("exit_rule='replay': leave it out, and name the depths by --mix.")
    check_seed(arguments.seed)
    check_device(arguments.device)
    check_outputs(json=arguments.json)
    set_threads(arguments.threads)


def _figures(system: str, outcome: Outcome, unlimited: Outcome) -> dict[str, Any]:
    stats, pressure = outcome.engine.stats, outcome.engine.stats.pressure
    launches, seconds = zip(*outcome.started.values(), strict=True)
    row = {
        "system": system,
        "peak MiB": stats.kv_bytes_peak / 2**20,
        "pool MiB": stats.kv_bytes_reserved / 2**20,
        "preemptions": pressure["preemptions"],
        "row waits": pressure["row_waits"],
        "offloaded MiB": pressure["offloaded_bytes"] / 2**20,
        "run again": pressure["recomputed_positions"],
        "launches": sum(stats.launches.values()),
        "x unlimited": unlimited.seconds / outcome.seconds,
        "seconds": outcome.seconds,
        "depths": stats.to_dict()["depths"],
        "most preemptions of one": max(request.preemptions for request in outcome.requests),
    }
    for name, q in (*((f"p{q}", q) for q in PERCENTILES), ("max", 100)):
        row[f"wait {name}"] = float(numpy.percentile(seconds, q))
        row[f"wait in launches {name}"] = float(numpy.percentile(launches, q))
    return row


def _compare(outcomes: dict[str, Outcome], alone: Callable[[int], Request], count: int) -> int:
    """Hold all systems to each other, and the requests that were preempted most often to a run alone; how many."""
    for system, outcome in outcomes.items():
        for one, other in zip(outcome.requests, outcomes[UNLIMITED].requests, strict=True):
            _hold(system, one, other)
    pressed = max(outcomes.values(), key=lambda outcome: outcome.engine.stats.pressure["preemptions"])
    chosen = sorted(pressed.requests, key=lambda request: -request.preemptions)[:count]
    for request in chosen:
        _hold("alone", request, alone(request.key))
    return len(chosen)


def _hold(system: str, one: Request, other: Request) -> None:
    told = [(each.status, each.tokens, each.exit_depths) for each in (one, other)]
    if one.status != "finished" or told[0] != told[1]:
        raise RuntimeError(
            f"request {one.key} differs ({system}): {one.status} {one.error}, tokens {one.tokens} and depths "
            f"{one.exit_depths}; against {other.status}, {other.tokens} and {other.exit_depths}."
        )
