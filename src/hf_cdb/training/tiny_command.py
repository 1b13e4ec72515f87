"""`hf-cdb train tiny`: train a small looped model from a recipe file."""

import argparse
from pathlib import Path

import torch

__all__ = ["add_arguments", "run"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--config", required=True, type=Path, help="recipe, a YAML file")
    parser.add_argument("--output", required=True, type=Path, help="folder for log, checkpoints and model")
    parser.add_argument("--resume", action="store_true", help="go on from the newest checkpoint in the output folder")
    parser.add_argument("--threads", type=int, help="torch threads (default torch's own)")
    parser.add_argument(
        "--set",
        nargs="+",
        action="extend",
        default=[],
        metavar="KEY=VALUE",
        help="change the recipe, as in optimizer.muon_lr=0.01",
    )
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> None:
    """Train, and print the metrics of the saved model."""
    # They import accelerate and pyyaml, which `--help` need not wait for.
    from .allocator import keep_freed_memory
    from .evaluation import table
    from .pretrain import MODEL, train
    from .recipe_file import load_recipe

    if arguments.threads is not None:
        if arguments.threads < 1:
            raise ValueError(f"threads={arguments.threads}: at least one thread is needed.")
        torch.set_num_threads(arguments.threads)
    keep_freed_memory()
    recipe = load_recipe(arguments.config, arguments.set)
    metrics = train(recipe, arguments.output, resume=arguments.resume)
    print(f"{arguments.output / MODEL}: {metrics['parameters']} parameters, {metrics['steps']} steps")
    print(table(metrics))
