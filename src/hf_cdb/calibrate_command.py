"""`hf-cdb calibrate MODEL --quality Q`: the exit threshold that keeps a share of full depth's quality."""

import argparse
from pathlib import Path
from typing import Any

from .bench.models import DTYPES
from .bench.report import Report, check_outputs, set_threads
from .calibrated import remember
from .calibration import calibrate
from .checkpoints import EMBEDDED
from .evaluation.config import load_config
from .evaluation.run import load_model_to_evaluate
from .evaluation.tasks import Task, load_task
from .exits import RULES
from .kv_policy import POLICIES
from .losses import LOSSES

__all__ = ["NOTHING_PASSED", "add_arguments", "run"]

NOTHING_PASSED = 3  # exit status

_BUILTIN = {
    "name": "tasks",
    "kind": "generate",
    "reference": "{answer}",
    "max_new_tokens": 16,
    "metrics": ["exact_match"],
}
_EACH = 256  # examples of each of the seven


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", metavar="MODEL", help=f"{', '.join(EMBEDDED)}, a folder or a Hub id")
    parser.add_argument(
        "--quality",
        type=float,
        required=True,
        help="to keep: the expected loss per example against full depth is to be below 1 - QUALITY, in points of the "
        "score and not as a share of it",
    )
    parser.add_argument("--confidence", type=float, default=0.95, help="of that (default %(default)s)")
    parser.add_argument(
        "--loss",
        choices=LOSSES,
        default="score",
        help="score: of the task, lost net of what is gained; agreement: share of full depth's tokens that are not "
        "repeated (default %(default)s)",
    )
    parser.add_argument("--metric", help="the score; default the task's first metric")
    parser.add_argument(
        "--config", type=Path, metavar="FILE", help="evaluation that has the task (default the package's own tasks)"
    )
    parser.add_argument("--task", metavar="NAME", help="of the configuration (default its first)")
    parser.add_argument("--limit", type=int, help="examples at most, those held out included (default all)")
    parser.add_argument(
        "--held-out", type=float, default=0.5, metavar="SHARE", help="of the examples (default %(default)s)"
    )
    parser.add_argument("--seed", type=int, default=0, help="of the split (default %(default)s)")
    parser.add_argument(
        "--rule", choices=["auto", *(name for name in RULES if name not in ("never", "replay"))], default="auto"
    )
    parser.add_argument("--thresholds", type=float, nargs="+", help="to choose from (default a grid for the rule)")
    parser.add_argument("--lookahead", type=int, choices=(0, 1), default=0)
    parser.add_argument("--kv-policy", choices=["auto", *POLICIES], default="auto")
    parser.add_argument("--kv-slots", type=int, help="of first_then_shared and modular")
    parser.add_argument("--min-depth", type=int, default=1)
    parser.add_argument("--max-depth", type=int)
    parser.add_argument("--dtype", choices=DTYPES, default="float32", help="of the weights (default %(default)s)")
    parser.add_argument("--device", default="cpu", help="where it runs, such as cuda (default %(default)s)")
    parser.add_argument("--threads", type=int, default=1, help="torch threads (default %(default)s)")
    parser.add_argument(
        "--save", action="store_true", help="write what was found into generation_config.json of MODEL, a folder"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write settings and all figures to this file")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Calibrate, print what was found, save it where asked.

    Returns:
        0, or `NOTHING_PASSED`.

    Raises:
        ValueError, OSError: arguments that cannot work; before anything runs.
    """
    set_threads(arguments.threads)
    check_outputs(json=arguments.json)
    if arguments.limit is not None and arguments.limit < 1:
        raise ValueError(f"limit={arguments.limit}: choose at least 1.")
    if arguments.save and not (Path(arguments.model) / "config.json").is_file():
        raise ValueError(
            f"save: model={arguments.model!r} is no folder of yours that a generation_config.json could be written "
            "into. Save the model into one by save_pretrained, and calibrate that."
        )
    model, tokenizer = load_model_to_evaluate(arguments.model, dtype=arguments.dtype, device=arguments.device)
    settings = {
        "exit_rule": arguments.rule,
        **{name: getattr(arguments, name) for name in ("lookahead", "kv_policy", "kv_slots", "min_depth", "max_depth")},
    }
    found = calibrate(
        model,
        tokenizer,
        _task(arguments, tokenizer),
        arguments.quality,
        confidence=arguments.confidence,
        loss=arguments.loss,
        metric=arguments.metric,
        cdb=settings,
        thresholds=arguments.thresholds,
        held_out=arguments.held_out,
        seed=arguments.seed,
    )
    print(found)
    report = Report(arguments, model)
    report.add("calibration", found)
    report.write(arguments.json)
    if found.chosen is None:
        return NOTHING_PASSED
    if arguments.save:
        remember(model, found.chosen)
        model.generation_config.save_pretrained(arguments.model)
        print(f"Saved: cdb=True of {arguments.model} uses it, and so does CDBConfig(quality={arguments.quality}).")
    return 0


def _task(arguments: argparse.Namespace, tokenizer: Any) -> Task:
    if arguments.config is None:
        if arguments.task is not None:
            raise ValueError(f"task={arguments.task!r} without config: name the evaluation that has it.")
        # Not the test split, which evaluations report on.
        spec = {**_BUILTIN, "data": {"builder": "tasks", "split": "validation", "count": _EACH}}
        return load_task(spec, tokenizer, arguments.limit)
    specs = {spec.name: spec for spec in load_config(arguments.config).task_specs}
    name = arguments.task or next(iter(specs))
    if name not in specs:
        raise ValueError(f"task={name!r}: {arguments.config} has {', '.join(specs)}.")
    return load_task(specs[name], tokenizer, arguments.limit)
