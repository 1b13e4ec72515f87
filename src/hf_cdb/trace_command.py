"""`hf-cdb trace show FILE`: what a recorded run launched."""

import argparse
from pathlib import Path

from .bench.report import markdown_table
from .trace import Trace, TracedLaunch

__all__ = ["add_arguments", "run"]

_LAUNCHES = {
    "start ms": ".3f",
    "ms": ".3f",
    "stage": "",
    "rows": "d",
    "tokens": "d",
    "context": "d",
    "depths": "",
    "waiting": "d",
    "entering": "d",
    "looping": "d",
    "left": "d",
}
_STAGES = {"stage": "", "launches": "d", "seconds": ".4f", "share": ".1%", "ms a launch": ".3f", "mean width": ".2f"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("file", type=Path, metavar="FILE", help="what `stats.save_trace` wrote, in either format")
    parser.add_argument("--launches", type=int, default=20, metavar="N", help="to print (default %(default)s)")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> None:
    """Print the first launches and what the stages took in all.

    Raises:
        ValueError: the file holds no trace, or a negative number of launches is asked for.
    """
    if arguments.launches < 0:
        raise ValueError(f"launches={arguments.launches}: choose 0 or more.")
    trace = Trace.load(arguments.file)
    first = trace[: arguments.launches]
    if first:
        print(markdown_table(_LAUNCHES, [_launch(launch) for launch in first]), end="\n\n")
    stages, busy = trace.by_stage(), sum(launch.duration for launch in trace)
    rows = [
        {
            "stage": name,
            "launches": stage.launches,
            "seconds": stage.seconds,
            "share": stage.seconds / busy if busy else None,
            "ms a launch": 1e3 * stage.seconds / stage.launches,
            "mean width": stage.mean_width,
        }
        for name, stage in stages.items()
    ]
    print(f"{len(trace)} launches in {trace.seconds:.4f} s, {trace.seconds - busy:.4f} s of it between launches\n")
    print(markdown_table(_STAGES, rows))


def _launch(launch: TracedLaunch) -> dict:
    queues = {name: getattr(launch, name) for name in ("waiting", "entering", "looping", "left")}
    return {
        "start ms": 1e3 * launch.start,
        "ms": 1e3 * launch.duration,
        "stage": launch.stage,
        "rows": launch.width,
        "tokens": launch.tokens,
        "context": launch.context,
        "depths": _counts(launch.depths),
        **queues,
    }


def _counts(depths: tuple[int, ...]) -> str:
    """Depth and how many rows are at it, as in `1:3 4:1`."""
    return " ".join(f"{depth}:{depths.count(depth)}" for depth in sorted(set(depths)))
