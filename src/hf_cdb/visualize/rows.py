"""Rows of a generation with the text of every token and the depth it left at."""

import re
import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

__all__ = ["DepthRow", "depth_rows"]

# What stands for a blank, so that it is seen where a token begins or ends with one.
_BLANKS = {" ": "·", "\n": "⏎", "\t": "⇥"}
_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


@dataclass(frozen=True)
class DepthRow:
    """One row.

    Attributes:
        title: what it is called.
        prompt: visible text of the prompt's tokens, without the padding before them.
        tokens: visible text of every generated token.
        depths: loops that each of them ran.
    """

    title: str
    prompt: list[str]
    tokens: list[str]
    depths: list[int]


def depth_rows(
    tokenizer: Any, sequences: Any, exit_depths: Any, full_depth: int | None = None, titles: Sequence[str] | None = None
) -> tuple[list[DepthRow], int]:
    """The rows, and full depth; arguments as of `depth_html`."""
    sequences, exit_depths = _nested(sequences, "sequences"), _nested(exit_depths, "exit_depths")
    if len(sequences) != len(exit_depths):
        raise ValueError(
            f"sequences has {len(sequences)} rows and exit_depths {len(exit_depths)}: pass both of the same output."
        )
    if titles is None:
        titles = [f"row {row}" for row in range(len(sequences))]
    elif len(titles) != len(sequences):
        raise ValueError(f"titles={titles!r}: {len(titles)} for {len(sequences)} rows. Give one a row, or none.")
    for row, depths in enumerate(exit_depths):
        for depth in depths:
            if not isinstance(depth, int) or depth < 0 or (full_depth is not None and depth > full_depth):
                most = "R" if full_depth is None else f"full_depth={full_depth}"
                raise ValueError(
                    f"exit_depths[{row}] holds {depth!r}: depths are integers from 1 to {most}, and 0 where there is "
                    "no token."
                )
    if full_depth is None:
        full_depth = max((depth for depths in exit_depths for depth in depths), default=1) or 1
    if tokenizer is None and not all(isinstance(token, str) for ids in sequences for token in ids):
        raise ValueError("tokenizer=None, but sequences holds token ids. Pass the tokenizer, or each token's text.")
    visible = cache(lambda token: visible_text(token if tokenizer is None else token_text(tokenizer, token)))
    rows = []
    for row, (title, ids, depths) in enumerate(zip(titles, sequences, exit_depths, strict=True)):
        if len(ids) < len(depths):
            raise ValueError(
                f"sequences[{row}] has {len(ids)} tokens and exit_depths[{row}] {len(depths)} depths: sequences hold "
                "the prompt and all new tokens, as in the output of generate."
            )
        prompt, new = ids[: len(ids) - len(depths)], ids[len(ids) - len(depths) :]
        pad = getattr(tokenizer, "pad_token_id", None)
        start = next((place for place, token in enumerate(prompt) if token != pad), len(prompt))
        kept = [(token, depth) for token, depth in zip(new, depths, strict=True) if depth]
        rows.append(
            DepthRow(
                str(title),
                [visible(token) for token in prompt[start:]],
                [visible(token) for token, _ in kept],
                [depth for _, depth in kept],
            )
        )
    return rows, full_depth


def token_text(tokenizer: Any, token: int) -> str:
    """Text of one token, blanks included; of a token that is part of a character its bytes, as in `[f0 9f]`."""
    if token in tokenizer.all_special_ids:
        return tokenizer.convert_ids_to_tokens(token)
    # Decoders drop the blank before the first word of a text; behind a word it stays.
    once, twice = (
        tokenizer.decode([token] * times, clean_up_tokenization_spaces=False, skip_special_tokens=False)
        for times in (1, 2)
    )
    text = twice[len(once) :]
    if "\N{REPLACEMENT CHARACTER}" not in text:
        return text
    raw = _bytes_of(tokenizer.convert_ids_to_tokens(token))
    return text if raw is None else f"[{raw.hex(' ')}]"


def visible_text(text: str) -> str:
    """`text` with signs for blanks and codes for characters that print nothing or turn the text around."""
    shown = "".join(_BLANKS.get(c) or (c if c.isprintable() else f"[{ord(c):04x}]") for c in text)
    return f"◌{shown}" if shown and unicodedata.combining(shown[0]) else shown or "∅"


def _bytes_of(token: str) -> bytes | None:
    """Bytes behind a byte token `<0x0A>` or a token of a byte-level vocabulary; None where it is neither."""
    byte = _BYTE_TOKEN.fullmatch(token)
    if byte:
        return bytes([int(byte[1], 16)])
    table = _byte_level()
    return bytes(table[c] for c in token) if all(c in table for c in token) else None


@cache
def _byte_level() -> dict[str, int]:
    """Character that a byte-level vocabulary writes for a byte -> the byte (GPT-2's `bytes_to_unicode`)."""
    shown = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    hidden = [byte for byte in range(256) if byte not in shown]
    return {chr(byte): byte for byte in shown} | {chr(256 + place): byte for place, byte in enumerate(hidden)}


def _nested(value: Any, name: str) -> list[list[Any]]:
    """Lists in place of a tensor or an array of two dimensions, or of a sequence of such rows."""
    rows = value.tolist() if hasattr(value, "tolist") else list(value)
    rows = [row.tolist() if hasattr(row, "tolist") else row for row in rows]
    if not all(isinstance(row, list | tuple) for row in rows):
        raise ValueError(f"{name}: pass a row for every sequence, [rows, tokens]; for a single one {name}[None].")
    return [list(row) for row in rows]
