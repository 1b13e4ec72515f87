"""The command line of `hf-cdb bench simulate`, and what it can refuse before anything is measured."""

import argparse
from pathlib import Path

from .models import add_model_arguments, check_device
from .report import add_output_arguments, add_run_arguments, check_outputs
from .unused import refuse_unused
from .workloads import LIVE, add_workload_arguments, check_count, check_workload

__all__ = ["add_simulate_arguments", "check_simulate_arguments"]


def add_simulate_arguments(parser: argparse.ArgumentParser) -> None:
    add_model_arguments(parser)
    parser.add_argument("--costs", type=Path, metavar="FILE", help="a cost table in place of measuring the model")
    parser.add_argument("--fit", type=Path, nargs="+", metavar="TRACE", help="fit the costs to traces of runs instead")
    parser.add_argument("--save-costs", type=Path, metavar="FILE", help="write the cost table")
    parser.add_argument("--width", type=int, nargs="+", default=[16], help="rows in flight, W (default 16)")
    parser.add_argument("--coda", type=int, nargs="+", default=[1], help="values of min_coda_batch (default 1)")
    parser.add_argument("--lookahead", type=int, nargs="+", choices=(0, 1), default=[0], help="values (default 0)")
    parser.add_argument(
        "--late-signal",
        action="store_true",
        help="with lookahead the signal is one of the loop that ran, so that every token runs a loop too many",
    )
    parser.add_argument("--chunk", type=int, help="positions of a prompt per launch at most")
    parser.add_argument("--rate", type=float, help="requests a second, Poisson (default: all come at once)")
    parser.add_argument("--minutes", type=float, help="of such traffic, in place of --requests")
    parser.add_argument("--check", action="store_true", help="also serve the workload for real")
    parser.add_argument(
        "--processor-time",
        action="store_true",
        help="time runs by the clock of the thread, in which other processes do not show (one thread, on the CPU)",
    )
    parser.add_argument("--turns", type=int, default=3, help="runs of each that are timed (default %(default)s)")
    add_workload_arguments(parser)
    add_run_arguments(parser)
    add_output_arguments(parser)


def check_simulate_arguments(arguments: argparse.Namespace) -> None:
    """Refuse what no model and no cost table could serve.

    Raises:
        ValueError: arguments out of their range, or that contradict each other.
        FileNotFoundError: a file that is not there.
    """
    for name in ("width", "coda"):
        if min(getattr(arguments, name)) < 1:
            raise ValueError(f"{name}={getattr(arguments, name)}: choose at least 1.")
    if arguments.turns < 1:
        raise ValueError(f"turns={arguments.turns}: choose at least 1.")
    if arguments.chunk is not None and arguments.chunk < 1:
        raise ValueError(f"chunk={arguments.chunk}: choose at least 1.")
    for name in ("rate", "minutes"):
        value = getattr(arguments, name)
        if value is not None and not 0 < value < float("inf"):
            raise ValueError(f"{name}={value}: choose a positive number.")
    if arguments.minutes is not None:
        if arguments.rate is None or arguments.requests is not None:
            raise ValueError(f"minutes={arguments.minutes} goes with --rate and without --requests.")
        asked = max(1.0, 60 * arguments.minutes * arguments.rate)
        check_count(f"minutes={arguments.minutes:g} at rate={arguments.rate:g}: requests", asked)
    if arguments.costs is not None and arguments.fit is not None:
        raise ValueError("--costs and --fit both say what launches cost. Give one of them.")
    given = arguments.costs is not None or arguments.fit is not None
    if not given and arguments.device != "cpu":
        raise ValueError(
            f"device={arguments.device!r}: launches are timed on the CPU only, where they end when they return. Write "
            "a cost table by `hf-cdb bench step --save-costs FILE` there, and give it by --costs."
        )
    if arguments.processor_time and (arguments.threads != 1 or arguments.device != "cpu"):
        raise ValueError(
            f"--processor-time with threads={arguments.threads} on {arguments.device}: the clock of a thread does not "
            "see the others and no device. Use --threads 1 on the CPU, or leave it out."
        )
    if arguments.mix == LIVE:
        raise ValueError(f"mix={LIVE!r}: a simulation runs no model whose rule could decide. Name a mix, or --trace.")
    check_workload(arguments)
    if arguments.late_signal and 1 not in arguments.lookahead:
        raise ValueError(
            f"--late-signal with lookahead={arguments.lookahead}: without lookahead no signal comes late. Add "
            "--lookahead 1, or leave it out."
        )
    if arguments.check and 1 in arguments.lookahead:
        raise ValueError(
            "lookahead=1 beside --check: here nothing computes while the host works, so that a real run hides nothing, "
            "and replays no depth of 1. Leave one out."
        )
    if given and not arguments.check:
        names = ["dtype", "device", "threads", "turns", "processor_time"]
        names += ["model"] if arguments.data is None else []  # whose tokenizer counts the texts
        refuse_unused(arguments, names, "beside a cost table: no model runs. Leave it out, or add --check")
    else:
        check_device(arguments.device)
    check_outputs(json=arguments.json, plot=arguments.plot, save_costs=arguments.save_costs)
