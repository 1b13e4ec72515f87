"""`hf-cdb eval`, and `python -m eval.run` from a clone: quality beside speed."""

import argparse
from pathlib import Path

from ..bench.report import check_plot, set_threads
from .config import EvaluationConfig, load_config
from .report import save_csv, save_picture, to_markdown
from .run import evaluate

__all__ = ["add_arguments", "add_config_arguments", "config_of", "run"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_config_arguments(parser)
    parser.add_argument("--no-plot", action="store_true", help="draw no picture, which needs matplotlib")
    parser.set_defaults(run=run)


def add_config_arguments(parser: argparse.ArgumentParser) -> None:
    """What says which evaluation runs and where it goes."""
    parser.add_argument("--config", required=True, help="YAML file, such as configs/tiny-ouro.yaml")
    parser.add_argument(
        "--output", type=Path, required=True, help="folder for results; one that holds a part of them is completed"
    )
    parser.add_argument("--model", help="tiny-ouro, tiny-huginn, a folder or a Hub id, in place of the file's")
    parser.add_argument(
        "--data", action="append", default=[], metavar="TASK=FILE", help="data of the same columns for a task"
    )
    parser.add_argument("--task", action="append", metavar="NAME", help="run this one alone; may be given again")
    parser.add_argument("--limit", type=int, help="examples of every task at most")
    parser.add_argument(
        "--set", action="append", default=[], metavar="KEY=VALUE", help="another value of the file, as dtype=bfloat16"
    )
    parser.add_argument("--threads", type=int, default=1, help="torch threads (default %(default)s)")


def config_of(arguments: argparse.Namespace) -> EvaluationConfig:
    """The configuration that the arguments name; sets the threads too.

    Raises:
        ValueError, FileNotFoundError: as `load_config`.
    """
    set_threads(arguments.threads)
    data = {}
    for text in arguments.data:
        task, equals, path = text.partition("=")
        if not (task and equals and path):
            raise ValueError(f"data={text!r}: write TASK=FILE, as in gsm8k=questions.jsonl.")
        data[task] = path
    return load_config(
        arguments.config,
        arguments.set,
        model=arguments.model,
        tasks=arguments.task,
        data=data,
        limit=arguments.limit,
    )


def run(arguments: argparse.Namespace) -> None:
    """Evaluate, print the table, write results.json, records.jsonl, results.csv, results.md and results.png.

    Raises:
        ValueError: arguments that cannot work; before anything runs where possible.
    """
    config = config_of(arguments)
    picture = None if arguments.no_plot else arguments.output / "results.png"
    check_plot(picture)
    results = evaluate(config, arguments.output)
    if results is None:
        return
    table = to_markdown(results)
    print(table)
    (arguments.output / "results.md").write_text(table, encoding="utf-8")
    save_csv(arguments.output / "results.csv", results)
    if picture is not None:
        save_picture(picture, results)
