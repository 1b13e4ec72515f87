"""Does a user's processor or stopping criterion treat every row by itself? Tried on copies, before anything runs.

In stock `generate` a processor sees all rows at once. Here rows reach a token at different times, so each is shown its
own row, as in a batch of one. That is the same thing unless it mixes rows, or keeps one state for all of them.
"""

from collections.abc import Callable
from typing import Any

import torch

from .row_copies import Copier

__all__ = ["trial"]

_ALONE = 4  # rows are tried alone: more of them would find nothing else
_SCORES = 2**26  # numbers in the scores of a trial at most, 256 MB; a call of more rows is tried with fewer
_LONGER = 4  # histories with one more token, for criteria that look at the last one


def trial(copier: Copier, histories: torch.Tensor, vocab: int, scores_in_tuple: bool | None = False) -> str | None:
    """Call copies of a thing on rows together and on each of them alone.

    A finding is certain, its absence is not: what mixes rows for a few tokens only may come through. The state of
    torch's generators is left as it was, and so are the variables of a function around it.

    Args:
        copier: of what is called as `thing(histories, scores)`.
        histories: the padded prompts, int64 `[rows, positions]`.
        vocab: columns of the scores that it is given.
        scores_in_tuple: False for processors, which are given a tensor; True for stopping criteria, which are given a
            tuple of them; None for criteria that are given None.

    Returns:
        What differs, in words; None where nothing does.
    """
    cells = [cell for cell in getattr(copier.thing, "__closure__", None) or () if _content(cell) is not cell]
    before = [_content(cell) for cell in cells]
    found = _try(copier, histories, vocab, scores_in_tuple)
    rebound = [cell for cell, content in zip(cells, before, strict=True) if _content(cell) is not content]
    for cell, content in zip(cells, before, strict=True):
        cell.cell_contents = content
    if rebound:
        return "it rebinds a variable of the function around it, a state that all rows would share"
    return found


def _content(cell: Any) -> Any:
    """What a variable of a surrounding function holds; the cell itself where it is not bound yet."""
    try:
        return cell.cell_contents
    except ValueError:
        return cell


def _try(copier: Copier, histories: torch.Tensor, vocab: int, scores_in_tuple: bool | None) -> str | None:
    generator = torch.Generator().manual_seed(0)
    histories = histories[: max(_ALONE, _SCORES // vocab)]
    rows, device = len(histories), histories.device
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        # A criterion always sees a token at the least.
        for longer in range(scores_in_tuple is not False, _LONGER + 1):
            ids = histories
            if longer:
                tokens = torch.randint(vocab, (rows, 1), generator=generator)
                ids = torch.cat((histories, tokens.to(histories)), dim=1)
            scores = torch.randn(rows, vocab, generator=generator).to(device)
            found = _compare(copier, ids, scores, scores_in_tuple)
            if found is not None:
                return found
    return None


def _compare(copier: Copier, ids: torch.Tensor, scores: torch.Tensor, in_tuple: bool | None) -> str | None:
    together = _call(copier(), ids, scores, in_tuple, "rows together")
    lines = [
        _call(copier(), ids[row : row + 1], scores[row : row + 1], in_tuple, f"row {row} of them alone")
        for row in range(min(len(ids), _ALONE))
    ]
    if isinstance(together, Exception) and len(ids) > _ALONE:
        # It may raise for one of the other rows, which is then the failure of that row.
        together = _call(copier(), ids[:_ALONE], scores[:_ALONE], in_tuple, "rows together")
    if isinstance(together, Exception):
        # Where it raises for a row alone as well, that is the failure of this row, which it will meet by itself.
        raises_alone = any(isinstance(alone, Exception) for alone in lines)
        return None if raises_alone else f"given rows together it raises {together!r}, and for none of them alone"
    for row, alone in enumerate(lines):
        if isinstance(alone, Exception):
            return f"given row {row} of them alone it raises {alone!r}, and not given all"
        for answer in (together, alone):
            if isinstance(answer, str):
                return answer
        own = together[row : row + 1]
        # Not bit by bit: sums over the columns may round by the shape of the block.
        if own.shape != alone.shape or not torch.allclose(own.double(), alone.double(), 1e-4, 1e-5, equal_nan=True):
            return "it gives a row together with others something else than the row alone"
    return None


def _call(
    thing: Callable, ids: torch.Tensor, scores: torch.Tensor, in_tuple: bool | None, which: str
) -> torch.Tensor | str | Exception:
    """What it returns, a tensor with a line per row; why that is none; or what it raises."""
    scores = scores.clone()
    try:
        result: Any = thing(ids.clone(), {False: scores, True: (scores,), None: None}[in_tuple])
    except Exception as error:
        return error  # a user's code may raise anything
    if not isinstance(result, torch.Tensor) or result.ndim == 0 or len(result) != len(ids):
        shape = tuple(result.shape) if isinstance(result, torch.Tensor) else f"a {type(result).__name__}"
        return f"given {which} it returns {shape}, and not a tensor with an entry for each"
    return result
