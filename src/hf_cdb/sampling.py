"""Tokens from logits of ragged rows: processors, noise, stopping.

Rows of a launch are at different lengths. Processors that look at a row's scores alone run once on the whole block;
those that look at its history run row by row, each row with processors of its own and its own padded history, so that
every one sees what it would see in stock `generate`.
"""

import hashlib
from collections.abc import Callable, Sequence

import torch
from torch import nn
from transformers.generation import logits_process as stock
from transformers.generation import stopping_criteria as stock_criteria

from .request import Request

__all__ = ["Noise", "Sampler", "check_criteria", "check_processors"]

# These read scores only.
_BLOCK = (
    stock.TemperatureLogitsWarper,
    stock.TopKLogitsWarper,
    stock.TopPLogitsWarper,
    stock.TopHLogitsWarper,
    stock.MinPLogitsWarper,
    stock.TypicalLogitsWarper,
    stock.EpsilonLogitsWarper,
    stock.EtaLogitsWarper,
    stock.InfNanRemoveLogitsProcessor,
    stock.LogitNormalization,
    stock.SuppressTokensLogitsProcessor,
)
# These read a row's history, and nothing of other rows once each row has its own.
_ROW = (
    stock.MinLengthLogitsProcessor,
    stock.MinNewTokensLengthLogitsProcessor,
    stock.RepetitionPenaltyLogitsProcessor,
    stock.EncoderRepetitionPenaltyLogitsProcessor,
    stock.NoRepeatNGramLogitsProcessor,
    stock.EncoderNoRepeatNGramLogitsProcessor,
    stock.SequenceBiasLogitsProcessor,
    stock.NoBadWordsLogitsProcessor,
    stock.ForcedBOSTokenLogitsProcessor,
    stock.ForcedEOSTokenLogitsProcessor,
    stock.ExponentialDecayLengthPenalty,
    stock.SuppressTokensAtBeginLogitsProcessor,
)


def check_processors(processors: Sequence) -> None:
    """Raise a ValueError that names the first processor that cdb does not support."""
    for processor in processors:
        if type(processor) not in (*_BLOCK, *_ROW):
            raise ValueError(
                f"logits processor {type(processor).__name__} is not supported with cdb yet: rows of one launch are at "
                "different tokens, and it has not been shown to see each row alone. Generate with cdb=False, or leave "
                "the option out that asks for it."
            )


def check_criteria(criteria: Sequence) -> None:
    """Raise a ValueError that names the first stopping criterion that cdb does not support."""
    for criterion in criteria:
        if type(criterion) not in (
            stock_criteria.MaxLengthCriteria,
            stock_criteria.EosTokenCriteria,
            stock_criteria.StopStringCriteria,
        ):
            raise ValueError(
                f"stopping criterion {type(criterion).__name__} is not supported with cdb yet: rows reach a token at "
                "different times, and it may look at all of them. Generate with cdb=False, or leave it out."
            )


class Noise:
    """Exponential noise that belongs to (row, index of the token), never to the schedule.

    Stock sampling draws one `[batch, vocab]` matrix of it per token: on the CPU `multinomial(p, 1)` is
    `argmax(p / q)` with q exponential. Here line b of the same matrices, drawn in the same order and only when
    needed, belongs to row b, so the same seed gives the same tokens whatever the schedule.

    Args:
        rows: rows of the call. None draws every line from the row's own seed instead.
        vocab: columns.
        max_bytes: matrices kept for rows that lag behind; older ones are drawn again from the generator's state.
    """

    def __init__(self, rows: int | None, vocab: int, device: torch.device, max_bytes: int = 256 * 2**20):
        self.rows, self.vocab, self.device = rows, vocab, device
        self._kept = max(1, max_bytes // (4 * vocab * (rows or 1)))
        self._states: list[torch.Tensor] = []
        self._matrices: dict[int, torch.Tensor] = {}
        # Rows beyond the shared matrices, and the call's own randomness for them.
        self._base = int(torch.randint(2**62, ())) if rows is None else 0

    def line(self, row: int, seed: int | None, index: int) -> torch.Tensor:
        """float32 `[vocab]` for token `index` of `row`; a seed of the row's own decides it alone."""
        if seed is not None:
            return self._seeded(seed, index)
        if self.rows is None:
            return self._seeded(_hash(self._base, row), index)
        while len(self._states) <= index:
            self._states.append(torch.get_rng_state())
            self._keep(len(self._states) - 1, torch.empty(self.rows, self.vocab).exponential_())
        if index not in self._matrices:
            generator = torch.Generator().set_state(self._states[index])
            self._keep(index, torch.empty(self.rows, self.vocab).exponential_(generator=generator))
        return self._matrices[index][row].to(self.device)

    def _keep(self, index: int, matrix: torch.Tensor) -> None:
        while len(self._matrices) >= self._kept:
            del self._matrices[min(self._matrices)]
        self._matrices[index] = matrix

    def _seeded(self, seed: int, index: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed(_hash(seed, index))
        return torch.empty(self.vocab).exponential_(generator=generator).to(self.device)


def derive_seed(seed: int, copy: int) -> int:
    """Seed of return sequence `copy` of a prompt with `seed`; the first keeps it."""
    return seed if copy == 0 else _hash(seed, copy)


def _hash(*values: int) -> int:
    text = ",".join(map(str, values)).encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little") >> 1


class Sampler:
    """Chooses the next tokens of rows that are at different lengths.

    Args:
        processors: for every row of the call its own list, all of the same kinds in the same order.
        histories: for every row its padded prompt, int64 `[positions]`.
        do_sample: draw from the distribution; else take the most probable token.
        noise: for `do_sample`.
        keep_scores, keep_logits: record them in the requests.
    """

    def __init__(
        self,
        processors: Sequence[Sequence[Callable]],
        histories: Sequence[torch.Tensor],
        do_sample: bool,
        noise: Noise | None = None,
        keep_scores: bool = False,
        keep_logits: bool = False,
    ):
        self.processors, self.histories = processors, histories
        self.do_sample, self.noise = do_sample, noise
        self.keep_scores, self.keep_logits = keep_scores, keep_logits

    def choose(self, rows: Sequence[Request], logits: torch.Tensor) -> list[int]:
        """The next token of every row.

        Args:
            logits: `[rows, vocab]`.
        """
        logits = logits.float()  # as stock generate
        scores = self._process(rows, logits)
        if self.keep_logits:
            for row, line in zip(rows, logits, strict=True):
                row.logits.append(line.clone())
        if self.keep_scores:
            for row, line in zip(rows, scores, strict=True):
                row.scores.append(line.clone())
        if not self.do_sample:
            return scores.argmax(-1).tolist()
        probabilities = nn.functional.softmax(scores, dim=-1)
        noise = torch.stack([self.noise.line(row.row, row.seed, len(row.tokens)) for row in rows])
        return (probabilities / noise).argmax(-1).tolist()

    def _process(self, rows: Sequence[Request], scores: torch.Tensor) -> torch.Tensor:
        kinds = self.processors[rows[0].row]
        if not kinds:
            return scores
        scores = scores.clone()
        histories: list[torch.Tensor] | None = None
        for index, processor in enumerate(kinds):
            if type(processor) in _BLOCK:
                scores = processor(None, scores)
                continue
            histories = histories or [self.history(row)[None] for row in rows]
            scores = torch.cat(
                [
                    self.processors[row.row][index](history, scores[line : line + 1])
                    for line, (row, history) in enumerate(zip(rows, histories, strict=True))
                ]
            )
        return scores

    def history(self, row: Request) -> torch.Tensor:
        """The row's padded prompt and its tokens so far, int64 `[positions]`."""
        prompt = self.histories[row.row]
        return torch.cat((prompt, prompt.new_tensor(row.tokens)))
