"""The lines of a file of prompts."""

import hashlib
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from ..request_arguments import shown

__all__ = ["Prompt", "check_defaults", "read_prompts", "refuse_meaningless"]

_KINDS = ("prompt", "messages", "input_ids")
_TIME = "outputs do not depend on time. Leave it out, and limit tokens instead"
# Arguments of add_request that a line cannot have, why, and what to do.
_REFUSED = {
    "request_id": "it has an id, which stands in the output. Give that",
    "streaming": "outputs are whole. Leave it out",
    "record_timestamps": "outputs do not depend on time. Leave it out",
    **dict.fromkeys(("deadline", "created", "max_time"), _TIME),
    "num_return_sequences": "it has one output. Write it several times; each draws with a seed of its own",
    "generation_config": "options stand by their own names. Give those",
    "tokenizer": "it is the model's. Leave it out",
}
# What a line may have, but no default of all lines.
_OF_LINES = {
    **dict.fromkeys(_KINDS, "each has its own. Write it into the input"),
    "id": "each has its own. Write it into the input",
    "seed": "each draws with a seed of its own. Give --seed, to which the number of the line is added",
}


def refuse_meaningless(given: Mapping[str, Any], where: str = "") -> None:
    """Refuse arguments of `CDBManager.add_request` that a line cannot have.

    Args:
        given: by name; None is what is left out.
        where: what they stand in, if that is not the line, for the error.

    Raises:
        ValueError: it holds one.
    """
    _refuse(given, _REFUSED, where)


def check_defaults(options: Mapping[str, Any]) -> None:
    """Refuse options for all lines that a line cannot have, or that cannot be those of all.

    Raises:
        ValueError: there is one.
    """
    _refuse(options, _REFUSED | _OF_LINES, "options: ")


def _refuse(given: Mapping[str, Any], reasons: Mapping[str, str], where: str) -> None:
    for name, reason in reasons.items():
        if given.get(name) is not None:
            raise ValueError(f"{where}{name}={shown(given[name])} has no meaning for a line: {reason}.")


@dataclass(frozen=True)
class Prompt:
    """One line.

    Attributes:
        line: its number in the file, from 1.
        length: characters.
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
        own = self.given.get("id")
        return self.line if own is None else own

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
        refuse_meaningless(self.given)
        value = self.given[kinds[0]]
        if kinds[0] == "input_ids":
            return value
        if kinds[0] == "messages":
            chat = tokenizer.apply_chat_template(value, add_generation_prompt=True, return_dict=True)
            return chat["input_ids"]
        if not isinstance(value, str):
            raise ValueError(f"prompt={shown(value)}: give a text; token ids are called input_ids.")
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
    except (ValueError, RecursionError) as error:  # the latter where it is nested too deeply
        return Prompt(number, len(line), error=f"the line is no JSON: {error}.")
    if not isinstance(given, dict):
        return Prompt(number, len(line), error="the line is no JSON object.")
    own = given.get("id")
    # Infinity and nan, which Python reads, are no JSON in the output, and what is nested might be too deep to write.
    if not (own is None or isinstance(own, str) or (_is_number(own) and abs(own) < math.inf)):
        return Prompt(number, len(line), error=f"id={shown(own)}: choose a text or a finite number, or leave it out.")
    return Prompt(number, len(line), given)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
