"""Settings of cdb on a command line."""

import argparse
import json
from typing import Any

from .config import CDBConfig
from .kv_policy import POLICIES
from .room import PREEMPTIONS
from .setting_checks import LAYOUTS

__all__ = ["add_cdb_arguments", "cdb_settings", "json_object"]


def bytes_or_share(text: str) -> int | float:
    """`max_kv_memory` from the command line: digits are bytes, anything else is a share. Its name stands in errors."""
    return int(text) if text.isdecimal() else float(text)


# Those with an argument of their own; the others, and these too, may stand in --cdb.
_OWN: dict[str, dict[str, Any]] = {
    "exit_rule": {"metavar": "RULE"},
    "exit_threshold": {"type": float, "metavar": "X"},
    "quality": {"type": float, "metavar": "X"},
    "min_depth": {"type": int, "metavar": "N"},
    "max_depth": {"type": int, "metavar": "N"},
    "kv_policy": {"choices": POLICIES},
    "kv_layout": {"choices": LAYOUTS},
    "max_num_seqs": {"type": int, "metavar": "N"},
    "min_coda_batch": {"type": int, "metavar": "N"},
    "lookahead": {"type": int, "choices": (0, 1)},
    "prefill_chunk_size": {"type": int, "metavar": "N"},
    "max_prefill_tokens": {"type": int, "metavar": "N"},
    "max_kv_memory": {"type": bytes_or_share, "metavar": "BYTES|SHARE"},
    "preemption": {"choices": PREEMPTIONS},
    "max_overtakes": {"type": int, "metavar": "N"},
}


def add_cdb_arguments(parser: argparse.ArgumentParser) -> None:
    """`--cdb` and an argument for every setting that is changed often."""
    parser.add_argument("--cdb", metavar="JSON", help="settings of cdb, over the saved ones of the model")
    for name, options in _OWN.items():
        parser.add_argument(f"--{name.replace('_', '-')}", help=f"the setting {name} of cdb", **options)


def cdb_settings(arguments: argparse.Namespace) -> dict[str, Any]:
    """The settings that are asked for.

    Raises:
        ValueError: settings that do not exist, are out of their range or contradict each other.
    """
    settings = json_object("cdb", arguments.cdb, '{"exit_threshold": 0.5}')
    settings |= {name: value for name in _OWN if (value := getattr(arguments, name)) is not None}
    CDBConfig.create(settings)
    return settings


def json_object(argument: str, text: str | None, example: str) -> dict[str, Any]:
    """The JSON object that an argument holds; an empty one where it is not given.

    Raises:
        ValueError: it is none.
    """
    try:
        found = json.loads(text or "{}")
    except (ValueError, RecursionError) as error:  # the latter where it is nested too deeply
        raise ValueError(f"{argument}={text!r} is no JSON: {error}") from error
    if not isinstance(found, dict):
        raise ValueError(f"{argument}={text!r}: give a JSON object, such as {example}.")
    return found
