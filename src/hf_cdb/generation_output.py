"""What `generate(cdb=...)` returns, and the error it raises where rows failed."""

from dataclasses import dataclass
from typing import Any

import torch
from transformers.generation.utils import GenerateDecoderOnlyOutput

from .request import Request
from .stats import CDBStats, RowStats

__all__ = ["GenerateCDBOutput", "RowsFailedError", "gather"]


@dataclass
class GenerateCDBOutput(GenerateDecoderOnlyOutput):
    """Output of `generate(..., cdb=True, return_dict_in_generate=True)`.

    Attributes:
        sequences: int64 `[batch, prompt + new tokens]`, finished rows filled with the pad token.
        scores, logits: with `output_scores` and `output_logits`, a float32 `[batch, vocab]` per new token, after and
            before the processors. Finished rows have logits 0, and scores of -inf but for 0 at the pad token.
        exit_depths: int64 `[batch, new tokens]`, loops run for each token, from 1; 0 where the row has none.
        stats: counts of the run.
        row_stats: tokens, loops and status of every row.
    """

    exit_depths: torch.Tensor | None = None
    stats: CDBStats | None = None
    row_stats: list[RowStats] | None = None


class RowsFailedError(RuntimeError):
    """Rows of a `generate` call failed: a logits processor, a stopping criterion or a callback of theirs raised, or
    their keys and values could never fit. The other rows ran to their end.

    Attributes:
        errors: what was raised, by row; the first is the cause of this error too.
        output: what `generate` would have returned. Failed rows hold the tokens they had.
    """

    def __init__(self, errors: dict[int, BaseException], output: GenerateCDBOutput | torch.Tensor):
        super().__init__(errors, output)
        self.errors, self.output = errors, output
        self.__cause__ = next(iter(errors.values()))

    def __str__(self) -> str:
        sequences = self.output if isinstance(self.output, torch.Tensor) else self.output.sequences
        causes = "; ".join(f"row {row}: {error!r}" for row, error in list(self.errors.items())[:5])
        more = f"; and {len(self.errors) - 5} more" if len(self.errors) > 5 else ""
        return (
            f"{len(self.errors)} of {len(sequences)} rows failed: {causes}{more}. The tokens of all rows are in the "
            "`output` of this error, the causes in its `errors`."
        )


def gather(
    input_ids: torch.Tensor, requests: list[Request], generation_config: Any, stats: CDBStats
) -> GenerateCDBOutput | torch.Tensor:
    """Pad rows to the longest, as stock generate leaves them."""
    pad = generation_config._pad_token_tensor
    pad = int(pad) if pad is not None else 0
    longest = max(len(request.tokens) for request in requests)
    new = input_ids.new_full((len(requests), longest), pad)
    depths = input_ids.new_zeros((len(requests), longest))
    for row, request in enumerate(requests):
        new[row, : len(request.tokens)] = new.new_tensor(request.tokens)
        depths[row, : len(request.tokens)] = depths.new_tensor(request.exit_depths)
    sequences = torch.cat((input_ids, new), dim=1)
    if not generation_config.return_dict_in_generate:
        return sequences
    scores = logits = None
    if generation_config.output_scores:
        scores = _stack([request.scores for request in requests], longest, -torch.inf)
        for step, block in enumerate(scores):
            ended = [row for row, request in enumerate(requests) if len(request.tokens) <= step]
            if 0 <= pad < block.shape[-1]:  # a pad token beyond the vocabulary has no score
                block[ended, pad] = 0.0
    if generation_config.output_logits:
        logits = _stack([request.logits for request in requests], longest, 0.0)
    return GenerateCDBOutput(
        sequences=sequences,
        scores=scores,
        logits=logits,
        exit_depths=depths,
        stats=stats,
        row_stats=[RowStats(len(r.tokens), sum(r.exit_depths), r.status, r.error) for r in requests],
    )


def _stack(rows: list[list[torch.Tensor]], length: int, fill: float) -> tuple[torch.Tensor, ...]:
    """A `[batch, vocab]` per token; rows that ended give `fill`."""
    steps = []
    for step in range(length):
        like = next(row[step] for row in rows if step < len(row))
        ended = torch.full_like(like, fill)
        steps.append(torch.stack([row[step] if step < len(row) else ended for row in rows]))
    return tuple(steps)
