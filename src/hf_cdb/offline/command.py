"""`hf-cdb generate --input prompts.jsonl --output texts.jsonl`: a file of prompts, by one process or several."""

import argparse
import importlib.util
import os
import sys
from pathlib import Path

from ..bench.models import DTYPES, EMBEDDED
from ..bench.report import set_threads
from ..cdb_arguments import add_cdb_arguments, cdb_settings, json_object

__all__ = ["LINES_FAILED", "add_arguments", "run"]

LINES_FAILED = 3  # exit status
_MAX_NEW_TOKENS = 256


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--input",
        type=Path,
        required=True,
        metavar="FILE",
        help='JSON lines, each with "prompt", "messages" or "input_ids", and "id" and options of its own if it likes',
    )
    parser.add_argument(
        "--output", type=Path, required=True, metavar="FILE", help="JSON lines; a run that was stopped is gone on with"
    )
    parser.add_argument(
        "--model",
        default="tiny-ouro",
        help=f"{', '.join(EMBEDDED)}, a folder or a Hub id (default %(default)s)",
    )
    parser.add_argument("--revision", help="of the model on the Hub")
    parser.add_argument("--dtype", choices=DTYPES, default="float32", help="of the weights (default %(default)s)")
    parser.add_argument(
        "--device", default="cpu", help="such as cuda; each process of torchrun takes its own (default %(default)s)"
    )
    parser.add_argument("--threads", type=int, default=1, help="torch threads of a process (default %(default)s)")
    parser.add_argument(
        "--max-new-tokens", type=int, metavar="N", help=f"of a line at most (default {_MAX_NEW_TOKENS})"
    )
    parser.add_argument("--do-sample", action="store_true", help="draw tokens")
    parser.add_argument("--temperature", type=float, metavar="X", help="of sampling")
    parser.add_argument("--top-k", type=int, metavar="N", help="of sampling")
    parser.add_argument("--top-p", type=float, metavar="X", help="of sampling")
    parser.add_argument(
        "--seed", type=int, default=0, help="a line draws with this plus its number (default %(default)s)"
    )
    parser.add_argument("--options", metavar="JSON", help="further arguments of generate, for all lines")
    add_cdb_arguments(parser)
    parser.add_argument("--no-progress", action="store_true", help="show no bar")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Continue all lines.

    Returns:
        0, or, unless a launcher started it, `LINES_FAILED`.

    Raises:
        ValueError, OSError, RuntimeError: as `generate_file`.
    """
    if importlib.util.find_spec("fcntl") is None:
        raise ValueError("hf-cdb generate needs locks of files as POSIX has them, and this system has none.")
    from .run import FileSettings, generate_file

    set_threads(arguments.threads)
    own = {"do_sample": arguments.do_sample or None}
    own |= {name: getattr(arguments, name) for name in ("max_new_tokens", "temperature", "top_k", "top_p")}
    options = {name: value for name, value in own.items() if value is not None}
    options |= json_object("options", arguments.options, '{"repetition_penalty": 1.1}')
    if "max_length" not in options:
        options.setdefault("max_new_tokens", _MAX_NEW_TOKENS)
    settings = FileSettings(
        arguments.model,
        arguments.revision,
        arguments.dtype,
        arguments.device,
        arguments.seed,
        options,
        cdb_settings(arguments),
    )
    failed = generate_file(arguments.input, arguments.output, settings, progress=not arguments.no_progress)
    if failed:
        print(f"{failed} lines of {arguments.output} hold an error.", file=sys.stderr)
        # Launchers take it for a process that died: torchrun would start all of them again, and fail in the end.
        return 0 if "WORLD_SIZE" in os.environ else LINES_FAILED
    return 0
