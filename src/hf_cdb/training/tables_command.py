"""`hf-cdb measure depth MODEL`: what a checkpoint is worth by depth and by threshold."""

import argparse
import json
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from ..adapters import adapter_for
from ..checkpoints import EMBEDDED, model_path
from ..config import CDBConfig
from .depth_tables import measure_depths, measure_settings, to_markdown

__all__ = ["add_arguments", "run"]

_LOOKAHEAD = {"lookahead": 1}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", metavar="MODEL", help=f"{', '.join(EMBEDDED)}, a folder or a Hub id")
    parser.add_argument(
        "--rule",
        action="append",
        nargs="+",
        metavar=("RULE", "THRESHOLD"),
        default=[],
        help="an exit rule and thresholds for it, such as gate 0.3 0.5; `lookahead` is the gate with lookahead=1",
    )
    parser.add_argument("--min-depth", type=int, default=1, help="of all these rules (default %(default)s)")
    parser.add_argument("--chapters", type=int, help="held-out chapters to read (default all)")
    parser.add_argument("--examples", type=int, default=512, help="of every task (default %(default)s)")
    parser.add_argument("--output", type=Path, help="folder to write depth.json and depth.md into")
    parser.add_argument("--threads", type=int, default=1, help="torch threads (default %(default)s)")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> None:
    """Measure, print the tables, write them where asked.

    Raises:
        ValueError: a rule without a threshold, or one that is no number.
    """
    for name in ("threads", "examples", "chapters"):
        value = getattr(arguments, name)
        if value is not None and value < 1:
            raise ValueError(f"{name}={value}: choose at least 1.")
    torch.set_num_threads(arguments.threads)
    settings = {}
    for rule, *thresholds in arguments.rule:
        settings |= _settings(rule, thresholds, arguments.min_depth)
    folder = model_path(arguments.model)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    for cdb in settings.values():
        CDBConfig(**cdb).resolve(adapter_for(model))  # before minutes of measuring
    tokenizer = AutoTokenizer.from_pretrained(folder)
    sizes = {"chapter_count": arguments.chapters, "count": arguments.examples}
    depths = measure_depths(model, tokenizer, **sizes)
    rows = measure_settings(model, tokenizer, settings, **sizes)
    table = to_markdown(depths, rows)
    print(table)
    if arguments.output is not None:
        arguments.output.mkdir(parents=True, exist_ok=True)
        (arguments.output / "depth.md").write_text(table, encoding="utf-8")
        found = json.dumps({**sizes, "min_depth": arguments.min_depth, "depths": depths, "settings": rows}, indent=1)
        (arguments.output / "depth.json").write_text(found + "\n", encoding="utf-8")


def _settings(rule: str, thresholds: list[str], min_depth: int) -> dict[str, dict[str, Any]]:
    """Settings of cdb by the name they have in the table."""
    if not thresholds:
        raise ValueError(f"rule {rule!r} has no threshold. Give at least one, as in --rule gate 0.3 0.5.")
    options = {"exit_rule": "gate", **_LOOKAHEAD} if rule == "lookahead" else {"exit_rule": rule}
    options["min_depth"] = min_depth
    try:
        return {f"{rule} {text}": {**options, "exit_threshold": float(text)} for text in thresholds}
    except ValueError as error:
        raise ValueError(f"rule {rule!r}: thresholds {thresholds} are not all numbers.") from error
