"""JSON from a file that a user names."""

import json
from pathlib import Path
from typing import Any

__all__ = ["read_json"]


def read_json(path: Path, argument: str) -> Any:
    """What the file holds; of a `.jsonl` file the list of its lines.

    Args:
        argument: the name under which the user gave the file, for the message.

    Raises:
        FileNotFoundError: no such file.
        ValueError: it is no JSON.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{argument}={str(path)!r} is no text in UTF-8: {error}.") from None
    if path.suffix == ".jsonl":
        return [
            _parse(line, f"line {number} of {argument}={str(path)!r}")
            for number, line in enumerate(text.split("\n"), start=1)
            if line.strip()
        ]
    return _parse(text, f"{argument}={str(path)!r}")


def _parse(text: str, place: str) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        raise ValueError(f"{place} is no JSON: {error}. Files of a record a line end in .jsonl.") from None
