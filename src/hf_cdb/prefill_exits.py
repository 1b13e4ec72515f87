"""Positions of a prompt leave the loop: who is asked, what they leave behind."""

from collections.abc import Callable

import numpy
import torch

from .batch import Batch
from .ragged import RaggedPrompt
from .request import Request
from .row_rules import RowRules
from .spans import Spans
from .stages import Stages
from .stats import CDBStats

__all__ = ["PrefillExits"]


class PrefillExits:
    """Lets positions of prompts leave: by the exit rule, or at depths that are known.

    Args:
        rules: of the requests.
        stages, stats, lookahead: of the engine.
    """

    def __init__(self, rules: RowRules, stages: Stages, stats: CDBStats, lookahead: int):
        self._rules, self._stages, self._stats, self._lookahead = rules, stages, stats, lookahead

    def plan(self, row: Request) -> RaggedPrompt | None:
        """How the positions of a request that starts leave the loop; None where all run to full depth.

        The positions of tokens that it was added with leave where they did before, and those of its prompt with them.
        """
        leaves = row.prefill_exit and row.rule.name != "never" and row.prefill_length > 1
        if not (leaves or row.tokens):
            return None
        depths = numpy.full(row.prefill_length, row.max_depth)
        if row.tokens:
            if row.prompt_depths is not None:
                depths[: row.prompt_length] = row.prompt_depths
            depths[row.prompt_length :] = row.exit_depths[1:]  # what a token ran gave the next one
            return None if (depths == row.max_depth).all() else RaggedPrompt(depths)
        return RaggedPrompt(depths, self._rules.of_prompt(row))

    def begin(self, batch: Batch, embeds: torch.Tensor, start: torch.Tensor) -> None:
        """Rules begin with the positions of a launch of the prelude.

        Args:
            embeds, start: see `Stages.prelude`.
        """
        for index in batch.prompts:
            row = batch.rows[index]
            if row.ragged is not None and row.ragged.rule is not None:
                first, end = batch.spans.first[index], batch.spans.last[index] + 1
                positions = batch.positions[0, first:end]
                self._rules.begin_prompt(row, positions, embeds[first:end], start[first:end])

    def leave(self, batch: Batch, previous: torch.Tensor, state: torch.Tensor) -> None:
        """After a launch of the loop: decide who leaves, and fill the deeper slots of those that have left.

        Args:
            previous, state: `[tokens, width]`, before and after it.
        """
        positions = batch.spans.positions()
        for index in batch.ragged:
            row, loop = batch.rows[index], batch.launch.depths[index]
            if loop == row.max_depth:
                continue
            first, end = batch.spans.first[index], batch.spans.last[index] + 1
            own, ragged = positions[first:end], row.ragged
            asked = numpy.flatnonzero(ragged.undecided[own])
            if len(asked):
                tokens, places = batch.tensor(first + asked), own[asked]
                said = self._rules.leave_prompt(
                    row, batch.tensor(places), loop, previous[tokens], state[tokens], self._logits(row, places, loop)
                )
                if loop + self._lookahead >= row.min_depth:
                    ragged.leave(places[said], loop + self._lookahead)
            left = own[ragged.depths[own] == loop]
            self._stages.cache.fill_prompt(row.key, batch.tensor(left), loop)

    def _logits(self, row: Request, positions: numpy.ndarray, loop: int) -> Callable[[], torch.Tensor]:
        """A function that gives the logits `[positions, vocab]` of positions after `loop`.

        The layers after the loop have keys of their own: a position reads those that its predecessors' states give
        after the same loop, or after the one where they left.
        """
        known: list[torch.Tensor] = []

        def logits() -> torch.Tensor:
            if not known:
                coda_layers = self._stages.adapter.coda_layers
                run = row.ragged.unshown(int(positions[-1]) + 1, loop) if coda_layers else positions
                gaps = {0: run} if run[-1] + 1 - run[0] > len(run) else None
                spans = Spans([row.key], run[:1], run[-1:] + 1, numpy.array([loop]), gaps)
                on_device = (
                    torch.from_numpy(x).to(row.state.device) for x in (run, numpy.searchsorted(run, positions))
                )
                run, keep = on_device
                self._stats.asked["launches"] += 1
                self._stats.asked["positions"] += len(positions)
                known.append(self._stages.coda(spans, row.state[run], keep))
            return known[0]

        return logits
