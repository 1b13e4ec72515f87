"""Tokens in the colour of the depth they left at, as HTML."""

import html
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .colours import depth_colours, ink_on
from .rows import DepthRow, depth_rows

__all__ = ["DepthHTML", "depth_html"]

_PAGE = """<!doctype html>
<html lang="en">
<head><meta charset="utf-8"><title>Exit depths</title></head>
<body>
{}
</body>
</html>
"""
_BOX = "border-radius:0.2em;padding:0 0.15em;margin:0 0.05em"


@dataclass(frozen=True)
class DepthHTML:
    """A piece of HTML that notebooks show; `str` of it is the text.

    Attributes:
        text: the markup.
    """

    text: str

    def __str__(self) -> str:
        return self.text

    def _repr_html_(self) -> str:
        return self.text

    def save(self, path: str | Path) -> None:
        """Write a page of its own, in UTF-8."""
        Path(path).write_text(_PAGE.format(self.text), encoding="utf-8")


def depth_html(
    tokenizer: Any,
    sequences: Any,
    exit_depths: Any,
    *,
    full_depth: int | None = None,
    titles: Sequence[str] | None = None,
) -> DepthHTML:
    """Every generated token in the colour of its depth, the depth itself as a small number behind it.

    Prompts stand before them in grey, without padding on the left. Blanks are shown as `·`, ends of lines as `⏎`, and
    a token that is only part of a character as its bytes, such as `[f0 9f]`.

    Args:
        tokenizer: of the model; None where `sequences` holds the text of each token in place of its id.
        sequences: int64 `[rows, prompt + new tokens]`, as in the output of `generate`, or a list of rows.
        exit_depths: int64 `[rows, new tokens]`, loops of each new token; a token of depth 0 is none and left out.
        full_depth: loops at most, R; default the deepest that is found, as prompts run at full depth.
        titles: what to call the rows.

    Raises:
        ValueError: rows that do not belong together, or a depth beyond `full_depth`.
    """
    rows, full_depth = depth_rows(tokenizer, sequences, exit_depths, full_depth, titles)
    colours = depth_colours(full_depth)
    lines = "\n".join(_row(row, colours) for row in rows)
    counts = Counter(depth for row in rows for depth in row.depths)
    return DepthHTML(
        f'<div role="figure" aria-label="{html.escape(_summary(counts, full_depth))}" '
        'style="font-family:monospace;line-height:1.9;overflow-wrap:anywhere">\n'
        f"{_legend(counts, colours)}\n{lines}\n</div>"
    )


def _row(row: DepthRow, colours: list[str]) -> str:
    prompt = html.escape("".join(row.prompt))
    tokens = "".join(
        _token(token, depth, f"token {place}, depth {depth} of {len(colours)}", colours)
        for place, (token, depth) in enumerate(zip(row.tokens, row.depths, strict=True))
    )
    return (
        f'<div><b>{html.escape(row.title)}</b> <span style="color:#767676" title="prompt">{prompt}</span>'
        f"{tokens or ' <i>no tokens</i>'}</div>"
    )


def _token(text: str, depth: int, title: str, colours: list[str]) -> str:
    colour = colours[depth - 1]
    style = f"background:{colour};color:{ink_on(colour)};{_BOX}"
    return f'<span style="{style}" title="{title}">{html.escape(text)}<sub>{depth}</sub></span>'


def _legend(counts: Counter, colours: list[str]) -> str:
    """A box for every depth, and how many tokens left there."""
    boxes = " ".join(
        f'<span style="background:{colour};color:{ink_on(colour)};{_BOX}">{depth}</span>&nbsp;×&nbsp;{counts[depth]}'
        for depth, colour in enumerate(colours, start=1)
    )
    return f"<div>{_summary(counts, len(colours))}. Tokens by depth: {boxes}</div>"


def _summary(counts: Counter, full_depth: int) -> str:
    tokens = counts.total()
    if not tokens:
        return "No tokens"
    loops = sum(depth * count for depth, count in counts.items())
    return f"{tokens} tokens, {loops / tokens:.2f} of {full_depth} loops in the mean"
