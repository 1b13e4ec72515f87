"""`hf-cdb robustness MODEL`: what wrong exit predictions cost."""

import argparse
import csv
from pathlib import Path
from typing import Any

from ..adapters import adapter_for
from ..bench.report import Report, check_plot, markdown_table, save_plot, set_threads
from ..calibrated import SETTINGS
from ..checkpoints import EMBEDDED
from ..config import CDBConfig, rule_name, saved_settings
from ..evaluation.run import load_model_to_evaluate
from ..training.text import chapters
from .drift import drift
from .material import task_material, text_material
from .picture import draw
from .study import Study, Table

__all__ = ["add_arguments", "run"]

PARTS = ("noise", "drift", "rules", "policies", "places")
_DRIFT = {"windows": 8, "length": 16, "by_window": True}  # many short windows: a bound lives on their number


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", metavar="MODEL", help=f"{', '.join(EMBEDDED)}, a folder or a Hub id")
    parser.add_argument("--output", type=Path, metavar="FOLDER", help="write tables, figures and picture there")
    parser.add_argument("--rule", help="exit rule with a score, to be disturbed (default the one saved with the model)")
    parser.add_argument("--threshold", type=float, help="of the rule (default the saved one, or the rule's)")
    parser.add_argument("--lookahead", type=int, choices=(0, 1), help="of the base setting (default the saved one)")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS, help="of the study (default all)")
    parser.add_argument("--examples", type=int, default=24, help="of each task (default %(default)s)")
    parser.add_argument("--chapters", type=int, default=32, help="of held-out text (default %(default)s)")
    parser.add_argument("--windows", type=int, default=1, help="of each chapter (default %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of the noise (default %(default)s)")
    parser.add_argument("--threads", type=int, default=1, help="torch threads (default %(default)s)")
    parser.add_argument("--no-plot", action="store_true", help="draw no picture, which needs matplotlib")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> None:
    """Study, print the tables, and write them where asked: robustness.md, .json and .png, and a CSV for each table.

    Raises:
        ValueError: arguments that cannot work; before anything runs where possible.
    """
    set_threads(arguments.threads)
    for name, least in (("examples", 1), ("chapters", 2), ("windows", 1)):  # intervals need two chapters
        if getattr(arguments, name) < least:
            raise ValueError(f"{name}={getattr(arguments, name)}: choose at least {least}.")
    whole = {"noise", "rules", "places"} <= set(arguments.parts)  # what the picture shows
    folder = arguments.output
    picture = folder / "robustness.png" if folder and whole and not arguments.no_plot else None
    check_plot(picture)
    model, tokenizer = load_model_to_evaluate(arguments.model)
    given = {"exit_rule": arguments.rule, "exit_threshold": arguments.threshold, "lookahead": arguments.lookahead}
    base = _base(model, {name: value for name, value in given.items() if value is not None})
    texts = chapters("held-out")
    study = Study(
        model,
        base,
        {
            "tasks": task_material(model, tokenizer, "test", arguments.examples),
            "text": text_material(model, tokenizer, texts[: arguments.chapters], arguments.windows),
        },
        arguments.seed,
    )
    tables = []
    for part in arguments.parts:
        if part == "drift":
            # Every other chapter, for the book changes from its beginning to its end.
            calibration, evaluation = (
                {
                    "tasks": task_material(model, tokenizer, split, arguments.examples),
                    "text": text_material(model, tokenizer, texts[first::2], **_DRIFT),
                }
                for first, split in ((0, "validation"), (1, "test"))
            )
            tables.append(drift(model, base, calibration, evaluation))
        else:
            tables.append(getattr(study, part)())
    setting = ", ".join(f"{name} {value}" for name, value in base.items())
    told = "\n".join([f"Base setting: {setting}.", *map(_section, tables)]) + "\n"
    print(told)
    if folder is not None:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "robustness.md").write_text(told, encoding="utf-8")
        for table in tables:
            _write_csv(folder / f"{table.name}.csv", table)
        report = Report(arguments, model, resolved={"base": base})
        for table in tables:
            report.add(table.name, {"title": table.title, "rows": table.rows})
        report.write(folder / "robustness.json")
    curve = [(one.mean_depth, one.disagreement().mean) for one in study.curves["text"]]
    save_plot(picture, draw({table.name: table for table in tables}, curve), panels=3, dpi=80)


def _base(model: Any, given: dict[str, Any]) -> dict[str, Any]:
    """The setting to study: what the command line names, in place of that in what is saved with the model."""
    adapter = adapter_for(model)
    config = CDBConfig.create(given or True, saved_settings(model.generation_config, adapter), adapter)
    name = rule_name(config.exit_rule, adapter)
    if name in ("never", "replay", "preloop", "argmax-stability") or not isinstance(name, str):
        raise ValueError(
            f"rule={config.exit_rule!r} holds no score against its threshold that errors could be added to. Name "
            "gate, confidence or a rule of differences by --rule."
        )
    others = {key: value for key, value in config.changed().items() if key in SETTINGS}
    return {**others, "exit_rule": name, "exit_threshold": config.resolve(adapter).exit_rule.threshold}


def _section(table: Table) -> str:
    return f"\n### {table.title}\n\n{markdown_table(table.columns, table.rows)}"


def _write_csv(path: Path, table: Table) -> None:
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, list(table.columns))
        writer.writeheader()
        writer.writerows(table.rows)
