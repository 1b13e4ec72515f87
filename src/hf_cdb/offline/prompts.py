"""The lines of a file of prompts."""

import hashlib
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

__all__ = ["Prompt", "read_prompts"]

_KINDS = ("prompt", "messages", "input_ids")
# Arguments of add_request that a line cannot have, and why.
_REFUSED = {
    "request_id": "a line has an id, and what it likes there",
    "streaming": "outputs are whole",
    "record_timestamps": "outputs do not depend on when they came",
    "num_return_sequences": "a line has one output. Write it several times; each line draws with a seed of its own",
    "generation_config": "options stand by their own names",
    "tokenizer": "it is the model's",
}


@dataclass(frozen=True)
class Prompt:
    """One line.

    Attributes:
        line: its number in the file, from 1.
        length: bytes.
        given: what it holds; empty where it is no JSON object.
        error: why nothing can be run for it; None where that is not known yet.
    """

    line: int
    length: int
    given: dict[str, Any] = field(default_factory=dict)
    error: str | None = None

    @property
    def id(self) -> Any:
        """The line's own, or its number."""
        return self.given.get("id", self.line)

    @property
    def options(self) -> dict[str, Any]:
        """Arguments of `CDBManager.add_request`, as far as the line says."""
        return {name: value for name, value in self.given.items() if name not in (*_KINDS, "id") and value is not None}

    def token_ids(self, tokenizer: PreTrainedTokenizerBase) -> list[int]:
        """What the model continues.

        Raises:
            ValueError: the line is no prompt.
            Exception: what the tokenizer or its chat template raises.
        """
        if self.error is not None:
            raise ValueError(self.error)
        kinds = [name for name in _KINDS if name in self.given]
        if len(kinds) != 1:
            found = " and ".join(kinds) or "none of them"
            raise ValueError(f"a line has one of {', '.join(_KINDS)}; this one has {found}.")
        for name, reason in _REFUSED.items():
            if name in self.given:
                raise ValueError(f"{name}={self.given[name]!r} has no meaning for a line: {reason}.")
        value = self.given[kinds[0]]
        if kinds[0] == "input_ids":
            return value
        if kinds[0] == "messages":
            chat = tokenizer.apply_chat_template(value, add_generation_prompt=True, return_dict=True)
            return chat["input_ids"]
        if not isinstance(value, str):
            raise ValueError(f"prompt={value!r}: give a text; token ids are called input_ids.")
        return tokenizer(value).input_ids


def read_prompts(path: Path) -> tuple[list[Prompt], str]:
    """The prompts of a file of JSON lines, empty ones left out, and the SHA-256 of the file.

    Raises:
        OSError: no such file.
        ValueError: it is no text in UTF-8, or has no line.
    """
    content = path.read_bytes()
    try:
        lines = content.decode("utf-8-sig").split("\n")  # splitlines would cut texts at rarer ends of line
    except UnicodeDecodeError as error:
        raise ValueError(f"input={str(path)!r} is no text in UTF-8: {error}.") from None
    prompts = [_parse(number, line) for number, line in enumerate(lines, 1) if line.strip()]
    if not prompts:
        raise ValueError(f'input={str(path)!r} has no line. Write one for each prompt, as in {{"prompt": "Two and"}}.')
    return prompts, hashlib.sha256(content).hexdigest()


def _parse(number: int, line: str) -> Prompt:
    try:
        given = json.loads(line)
    except ValueError as error:
        return Prompt(number, len(line), error=f"the line is no JSON: {error}.")
    if not isinstance(given, dict):
        return Prompt(number, len(line), error="the line is no JSON object.")
    return Prompt(number, len(line), given)
