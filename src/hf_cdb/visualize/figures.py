"""Depths of tokens and of launches, drawn with matplotlib."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy

from ..trace import Trace
from .colours import depth_colours, ink_on
from .rows import depth_rows

__all__ = ["depth_figure", "schedule_figure", "schedule_grid"]

_CELL = 0.24  # inches, of a token's width and of a request's height
_LETTER = 0.08  # inches of a letter in a cell
_TEXT = 14  # letters of a token that are shown at most


def depth_figure(
    tokenizer: Any,
    sequences: Any,
    exit_depths: Any,
    *,
    full_depth: int | None = None,
    titles: Sequence[str] | None = None,
) -> Any:
    """A cell for every generated token, in the colour of its depth and with its text; a line for every row.

    Args:
        tokenizer, sequences, exit_depths, full_depth, titles: as of `depth_html`. For long outputs pass the first
            columns of both, `sequences[:, : prompt + n]` and `exit_depths[:, :n]`: every token takes a quarter inch.

    Returns:
        A `matplotlib.figure.Figure`.

    Raises:
        ImportError: matplotlib is not installed.
        ValueError: as `depth_html`, or there is no token to draw.
    """
    rows, full_depth = depth_rows(tokenizer, sequences, exit_depths, full_depth, titles)
    longest = max((len(row.tokens) for row in rows), default=0)
    if not longest:
        raise ValueError("exit_depths has no depth above 0: there is no token to draw.")
    grid = numpy.zeros((len(rows), longest), dtype=int)
    for line, row in enumerate(rows):
        grid[line, : len(row.depths)] = row.depths
    letters = min(_TEXT, max(len(text) for row in rows for text in row.tokens))
    titled = _LETTER * max(len(row.title) for row in rows)
    height = max(0.4, 0.15 + _LETTER * letters) * len(rows)
    figure = _figure(width=1.5 + titled + _CELL * longest, height=0.8 + height)
    axes = figure.subplots()
    colours = _draw(axes, grid, full_depth)
    for line, row in enumerate(rows):
        for place, (text, depth) in enumerate(zip(row.tokens, row.depths, strict=True)):
            text = text if len(text) <= _TEXT else text[: _TEXT - 1] + "…"
            # Dollar signs would start a formula.
            axes.text(
                place, line, text, rotation=90, ha="center", va="center", size=7, parse_math=False,
                color=ink_on(colours[depth - 1]),
            )  # fmt: skip
    axes.set_yticks(range(len(rows)), [row.title for row in rows], parse_math=False)
    axes.set_xlabel("new token")
    _legend(figure, axes, full_depth)
    return figure


def schedule_grid(trace: Trace) -> numpy.ndarray:
    """What the launches of the core ran: int `[requests, launches of the core]`, the loop that each request ran in
    each launch, from 1, and 0 where it took no part. Requests stand in the order of their keys."""
    launches = [launch for launch in trace if launch.stage == "loop"]
    lines = {key: line for line, key in enumerate(sorted({key for launch in trace for key in launch.rows}))}
    grid = numpy.zeros((len(lines), len(launches)), dtype=int)
    for column, launch in enumerate(launches):
        for key, depth in zip(launch.rows, launch.depths, strict=True):
            grid[lines[key], column] = depth
    return grid


def schedule_figure(traces: Mapping[str, Trace], *, full_depth: int | None = None) -> Any:
    """Requests over launches of the core, in the colour of the loop that each ran; runs side by side on one scale.

    A prompt's pass is a staircase through all depths. Where a request is blank it waited, or was done; columns with
    few cells are launches that ran half empty.

    Args:
        traces: title -> trace of a run with `cdb={"trace": True}`, such as `{"refill": output.stats.trace, ...}`.
        full_depth: loops at most, R; default the deepest that is found.

    Returns:
        A `matplotlib.figure.Figure`.

    Raises:
        ImportError: matplotlib is not installed.
        ValueError: no traces, or one without a launch of the core.
    """
    if not isinstance(traces, Mapping) or not traces:
        raise ValueError(
            f"traces={traces!r:.80}: pass a title and a trace for every run, as in {{'refill': output.stats.trace}}."
        )
    for title, trace in traces.items():
        if not isinstance(trace, Trace):
            raise ValueError(f"traces[{title!r}]={trace!r:.80} is no trace. Generate with cdb={{'trace': True}}.")
    grids = {title: schedule_grid(trace) for title, trace in traces.items()}
    for title, grid in grids.items():
        if not grid.any():
            raise ValueError(f"traces[{title!r}] has no launch of the core: there is nothing to draw.")
    deepest = max(int(grid.max()) for grid in grids.values())
    full_depth = deepest if full_depth is None else full_depth
    if deepest > full_depth:
        raise ValueError(f"full_depth={full_depth}: a launch ran loop {deepest}. Leave it out, or give as many.")
    requests, launches = (max(grid.shape[side] for grid in grids.values()) for side in (0, 1))
    figure = _figure(width=1.0 + 5.2 * len(grids), height=min(max(2.8, 1.4 + _CELL * requests), 7.4))
    panels = figure.subplots(1, len(grids), sharex=True, sharey=True, squeeze=False)[0]
    for axes, (title, grid) in zip(panels, grids.items(), strict=True):
        _draw(axes, grid, full_depth)
        axes.set_title(
            f"{title}: {grid.shape[1]} launches, {(grid > 0).sum() / grid.shape[1]:.1f} rows each", parse_math=False
        )
        axes.set_xlabel("launch of the core")
    panels[0].set_ylabel("request")
    panels[0].set_xlim(-0.5, launches - 0.5)
    panels[0].set_ylim(requests - 0.5, -0.5)
    panels[0].yaxis.get_major_locator().set_params(integer=True)
    _legend(figure, panels[-1], full_depth)
    return figure


def _figure(width: float, height: float) -> Any:
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError(
            "Figures need matplotlib, which is not installed. Install it by `pip install 'hf-cdb[bench]'`; depth_html "
            "needs nothing."
        ) from error
    # Without pyplot there is no window system to choose and no global list of figures to clean up.
    return Figure(figsize=(width, height), layout="constrained")


def _draw(axes: Any, grid: numpy.ndarray, full_depth: int) -> list[str]:
    """Cells of a grid of depths, 0 blank; the colours by depth."""
    from matplotlib.colors import BoundaryNorm, ListedColormap

    colours = depth_colours(full_depth)
    norm = BoundaryNorm([depth + 0.5 for depth in range(full_depth + 1)], full_depth)
    shown = numpy.ma.masked_equal(grid, 0)
    axes.imshow(shown, cmap=ListedColormap(colours), norm=norm, aspect="auto", interpolation="none")
    return colours


def _legend(figure: Any, axes: Any, full_depth: int) -> None:
    """A bar of the colours, with ten numbers at most."""
    bar = figure.colorbar(axes.images[0], ax=axes, label="loop", fraction=0.05, aspect=30)
    bar.set_ticks(range(1, full_depth + 1, -(-full_depth // 10)))
