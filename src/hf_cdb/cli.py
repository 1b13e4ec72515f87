"""The command line, `hf-cdb COMMAND ...` or `python -m hf_cdb COMMAND ...`."""

import argparse
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from importlib.metadata import version
from typing import Any

from . import calibrate_command, trace_command
from .bench import overhead, predict, prefix, quick, schedule, serve, simulate, soak, step, throughput
from .evaluation import command as evaluation_command
from .hub import command as hub_command
from .offline import command as offline_command
from .robustness import command as robustness_command
from .serving import command as serve_command
from .training import gate_command, tables_command, tiny_command

__all__ = ["build_parser", "main"]

# What a command does, and what adds its arguments and sets its `run`.
Command = tuple[str, Callable[[argparse.ArgumentParser], None]]

# Group -> command; those of PLAIN are called by their name alone.
COMMANDS: dict[str, dict[str, Command]] = {
    "train": {
        "tiny": ("train a small looped model from a recipe file", tiny_command.add_arguments),
        "gate": ("train an exit head of a looped model and save it beside the model", gate_command.add_arguments),
    },
    "measure": {"depth": ("quality by depth and by exit threshold, as tables", tables_command.add_arguments)},
    "trace": {"show": ("what a recorded run launched, as tables", trace_command.add_arguments)},
    "hub": {
        "export": ("a folder to upload: weights, model card, custom_generate", hub_command.add_export_arguments),
        "card": ("the model card alone, into a model's folder", hub_command.add_card_arguments),
    },
    "bench": {
        "throughput": ("tokens per second of the engine and of stock generation", throughput.add_arguments),
        "step": ("time of one launch by rows and context", step.add_arguments),
        "quick": ("throughput at short prompts and outputs, in a few minutes", quick.add_arguments),
        "simulate": ("the scheduler against a cost table: throughput and latency", simulate.add_arguments),
        "schedule": ("what classes of requests wait, by the settings of the scheduler", schedule.add_arguments),
        "serve": ("what requests wait that come over time, up to overload", serve.add_arguments),
        "soak": ("many requests with cancels and faults through the manager, each checked", soak.add_arguments),
        "overhead": ("time of a launch that the engine takes itself", overhead.add_arguments),
        "predict": ("what cards that are not here would do, from their rooflines", predict.add_arguments),
        "prefix": ("prompts that begin alike: computing what they share once", prefix.add_arguments),
    },
}
PLAIN: dict[str, Command] = {
    "calibrate": ("choose the exit threshold that keeps a share of the quality", calibrate_command.add_arguments),
    "robustness": ("what wrong exit predictions cost, as tables and a picture", robustness_command.add_arguments),
    "generate": ("continue every line of a file of prompts, by one process or several", offline_command.add_arguments),
    "eval": ("quality beside speed: a model's tasks at full depth and with cdb", evaluation_command.add_arguments),
    "serve": ("serve a model to clients of OpenAI's interface", serve_command.add_arguments),
}
GROUPS = {
    "trace": "look at recorded runs",
    "train": "train models",
    "measure": "measure quality",
    "bench": "measure speed",
    "hub": "share models",
}


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="hf-cdb", description="Adaptive-depth inference of looped language models.")
    parser.add_argument("--version", action="version", version=f"hf-cdb {version('hf-cdb')}")
    parser.add_argument("--traceback", action="store_true", help="show where in the code an error arose")
    groups = parser.add_subparsers(dest="group", required=True, metavar="COMMAND")
    for group, commands in COMMANDS.items():
        parsers = groups.add_parser(group, help=GROUPS[group]).add_subparsers(
            dest="command", required=True, metavar="COMMAND"
        )
        _add_commands(parsers, commands)
    _add_commands(groups, PLAIN)
    return parser


def _add_commands(parsers: Any, commands: Mapping[str, Command]) -> None:
    for command, (summary, add_arguments) in commands.items():
        add_arguments(parsers.add_parser(command, help=summary, description=f"{summary.capitalize()}."))


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command; its exit status: 0, what the command says, or 2 after an error that the user can mend, told in one
    line."""
    parsed = build_parser().parse_args(arguments)
    try:
        status = parsed.run(parsed)
        sys.stdout.flush()
        return status if isinstance(status, int) else 0  # benchmarks return their figures
    except BrokenPipeError:
        # Who read the output, such as `head`, has enough. What is left must not fail once more at the end of Python.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except (ValueError, OSError, FloatingPointError) as error:
        if parsed.traceback:
            raise
        command = " ".join(["hf-cdb", parsed.group, *([parsed.command] if parsed.group in GROUPS else [])])
        print(f"{command}: error: {error}", file=sys.stderr)
        return 2
