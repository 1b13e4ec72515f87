"""Logits processors of ragged rows: a list for every row, of what stock `generate` would build for the row alone."""

import copy
import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from transformers.generation import logits_process as stock

from .attention import AttentionSwitch
from .trial import copy_for_row, trial

__all__ = ["SCORES_ONLY", "processors_of_rows"]

# These read a row's scores and nothing else: one call serves all rows of a launch.
SCORES_ONLY = (
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
# These read the history that they are given and keep nothing of it: one object serves all rows, one after the other.
_HISTORY_ONLY = (
    stock.MinLengthLogitsProcessor,
    stock.MinNewTokensLengthLogitsProcessor,
    stock.NoRepeatNGramLogitsProcessor,
    stock.SequenceBiasLogitsProcessor,
    stock.NoBadWordsLogitsProcessor,
    stock.ForcedBOSTokenLogitsProcessor,
    stock.ForcedEOSTokenLogitsProcessor,
    stock.ExponentialDecayLengthPenalty,
    stock.SuppressTokensAtBeginLogitsProcessor,
    stock.WatermarkLogitsProcessor,  # sets its generator anew from the history in every call
)


def processors_of_rows(
    processors: Sequence[Callable], histories: torch.Tensor, copies: int, vocab: int
) -> list[list[Callable]]:
    """For every row its own list of processors, all of the same kinds in the same order.

    Args:
        processors: what stock `generate` builds for the batch, the user's own included.
        histories: the padded prompts, int64 `[rows, positions]`, each prompt as often as it has return sequences.
        copies: return sequences of a prompt.
        vocab: columns of the scores.

    Raises:
        ValueError: a processor of the user's mixes rows, or holds a state that cannot be copied for each of them.
    """
    rows = len(histories)
    makers = [_maker(processor, histories, copies, vocab) for processor in processors]
    return [[make(row) for make in makers] for row in range(rows)]


def _maker(processor: Callable, histories: torch.Tensor, copies: int, vocab: int) -> Callable[[int], Callable]:
    """A function from a row to the processor that the row has of its own."""
    rows = len(histories)
    if type(processor) in _PARTS:
        # What belongs to rows has a line for each of them, or one for each prompt.
        def lines_of(values: Any, row: int) -> Any:
            index = row if len(values) == rows else row // copies
            return values[index : index + 1]

        return lambda row: _PARTS[type(processor)](processor, row, lines_of)
    if rows == 1 or type(processor) in (*SCORES_ONLY, *_HISTORY_ONLY):
        return lambda row: processor
    name = type(processor).__name__ if not hasattr(processor, "__name__") else processor.__name__
    try:
        copy_for_row(processor)
    except Exception as error:
        raise ValueError(
            f"logits_processor {name} cannot be copied ({error}), but with cdb every row needs one of its own, since "
            "rows are at different tokens and it may keep a state. Give its class a __deepcopy__, pass a function of "
            "(input_ids, scores), or generate with cdb=False."
        ) from error
    found = trial(processor, histories, vocab)
    if found is not None:
        raise ValueError(
            f"logits_processor {name} does not treat every row by itself: {found}. With cdb rows are at different "
            "tokens, and each is shown to it as a batch of one. Change that, or generate with cdb=False."
        )
    return lambda row: copy_for_row(processor)


def _repetition(processor, row, lines_of):
    own = copy.copy(processor)
    if isinstance(own.prompt_ignore_length, torch.Tensor):
        own.prompt_ignore_length = lines_of(own.prompt_ignore_length, row)
    return own


def _encoder_repetition(processor, row, lines_of):
    own = copy.copy(processor)
    own.encoder_input_ids = lines_of(own.encoder_input_ids, row)
    return own


def _encoder_ngrams(processor, row, lines_of):
    own = copy.copy(processor)
    own.generated_ngrams, own.batch_size = lines_of(own.generated_ngrams, row), 1
    return own


def _prefix(processor, row, lines_of):
    # The function is told which prompt it is about, not which row.
    prompt = row // processor._num_beams
    allowed = functools.partial(_allowed, processor._prefix_allowed_tokens_fn, prompt)
    return stock.PrefixConstrainedLogitsProcessor(allowed, 1)


def _allowed(function: Callable, prompt: int, _: int, input_ids: torch.Tensor) -> list[int]:
    return function(prompt, input_ids)


def _synth_id(processor, row, lines_of):
    own = copy.copy(processor)
    own.state = None  # made at the first call, for as many rows as it sees
    return own


def _guidance(processor, row, lines_of):
    own = copy.copy(processor)
    own.unconditional_context = {
        name: lines_of(value, row) if isinstance(value, torch.Tensor) else value
        for name, value in processor.unconditional_context.items()
    }
    own.model = _SecondPass(processor.model)
    return own


class _SecondPass:
    """The model as classifier-free guidance calls it: whole forward passes, with the attention it was loaded with."""

    def __init__(self, model: nn.Module):
        self.model = model
        self._attention = AttentionSwitch(model, model.config._attn_implementation)

    def __call__(self, *args, **kwargs):
        with self._attention:
            return self.model(*args, **kwargs)


# How a row gets its part of what is made for a whole batch.
_PARTS = {
    stock.RepetitionPenaltyLogitsProcessor: _repetition,
    stock.EncoderRepetitionPenaltyLogitsProcessor: _encoder_repetition,
    stock.EncoderNoRepeatNGramLogitsProcessor: _encoder_ngrams,
    stock.PrefixConstrainedLogitsProcessor: _prefix,
    stock.SynthIDTextWatermarkLogitsProcessor: _synth_id,
    stock.UnbatchedClassifierFreeGuidanceLogitsProcessor: _guidance,
}
