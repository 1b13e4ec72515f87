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
    text = path.read_text(encoding="utf-8")
    try:
        if path.suffix == ".jsonl":
            return [json.loads(line) for line in text.splitlines() if line.strip()]
        return json.loads(text)
    except json.JSONDecodeError as error:
        raise ValueError(
            f"{argument}={str(path)!r} is no JSON: {error}. Files of a record a line end in .jsonl."
        ) from None
