"""Logits processors of ragged rows: a list for every row, of what stock `generate` would build for the row alone."""

import copy
import functools
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import torch
from torch import nn
from transformers.generation import logits_process as stock

from .attention import AttentionSwitch
from .row_copies import Copier, PerRow
from .trial import trial

__all__ = ["SCORES_ONLY", "key_of_scores_only", "processors_of_rows"]

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


def key_of_scores_only(processors: Sequence[Callable]) -> Hashable | None:
    """Equal for lists of processors that do the same to scores, whichever row they are of; None for all others.

    Args:
        processors: what stock `generate` builds.
    """
    key = []
    for processor in processors:
        if type(processor) not in SCORES_ONLY:
            return None
        values = vars(processor)
        if not all(isinstance(value, int | float | str | None) for value in values.values()):  # a tensor has no hash
            return None
        key.append((type(processor), *values.items()))
    return tuple(key)


def processors_of_rows(processors: Sequence[Callable], histories: torch.Tensor, copies: int, vocab: int) -> PerRow:
    """For every row its own list of processors, all of the same kinds in the same order, made when the row needs them.

    Args:
        processors: what stock `generate` builds for the batch, the user's own included.
        histories: the padded prompts, int64 `[rows, positions]`, each prompt as often as it has return sequences.
        copies: return sequences of a prompt.
        vocab: columns of the scores.

    Raises:
        ValueError: a processor of the user's mixes rows, or holds a state that cannot be copied for each of them.
    """
    return PerRow(_maker(processor, histories, copies, vocab) for processor in processors)


def _maker(processor: Callable, histories: torch.Tensor, copies: int, vocab: int) -> Callable[[int], Callable]:
    """A function from a row to the processor that the row has of its own."""
    rows = len(histories)
    if type(processor) in _PARTS:
        # What belongs to rows has a line for each of them, or one for each prompt, or one for all.
        def lines_of(values: Any, row: int) -> Any:
            index = row if len(values) == rows else 0 if len(values) == 1 else row // copies
            return values[index : index + 1]

        if type(processor) is stock.UnbatchedClassifierFreeGuidanceLogitsProcessor:
            _check_negatives(processor.unconditional_context, histories, copies)

        return lambda row: _PARTS[type(processor)](processor, row, lines_of)
    if rows == 1 or type(processor) in (*SCORES_ONLY, *_HISTORY_ONLY):
        return lambda row: processor
    name = type(processor).__name__ if not hasattr(processor, "__name__") else processor.__name__
    try:
        copier = Copier(processor)
    except Exception as error:
        raise ValueError(
            f"logits_processor {name} cannot be copied ({error}), but with cdb every row needs one of its own, since "
            "rows are at different tokens and it may keep a state. Give its class a __deepcopy__, pass a function of "
            "(input_ids, scores), or generate with cdb=False."
        ) from error
    found = trial(copier, histories, vocab)
    if found is not None:
        raise ValueError(
            f"logits_processor {name} does not treat every row by itself: {found}. With cdb rows are at different "
            "tokens, and each is shown to it as a batch of one. Change that, or generate with cdb=False."
        )
    copier.warn_if_large(f"logits_processor {name}")
    return lambda row: copier()


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
    tokens = function(prompt, input_ids)
    if len(tokens) == 0:  # stock would name the batch that it sees, which is one row
        raise ValueError(
            f"prefix_allowed_tokens_fn allows no token for prompt {prompt} after {len(input_ids)} positions. Return at "
            "least one, that of the end of sequence for instance."
        )
    return tokens


def _synth_id(processor, row, lines_of):
    own = copy.copy(processor)
    own.state = None  # made at the first call, for as many rows as it sees
    return own


def _check_negatives(context: dict[str, Any], histories: torch.Tensor, copies: int) -> None:
    """Refuse negative prompts that do not fit the prompts; without them guidance begins with a prompt's last token."""
    ids, mask, prompts = context["input_ids"], context["attention_mask"], len(histories) // copies
    if ids is None and not histories.shape[1]:
        raise ValueError(
            "guidance_scale without negative_prompt_ids begins with the last token of every prompt, and prompts of "
            "inputs_embeds have none. Pass negative_prompt_ids."
        )
    shape = (len(histories), 1) if ids is None else tuple(ids.shape)
    if len(shape) != 2 or shape[0] not in (1, prompts, len(histories)) or not shape[1]:
        raise ValueError(
            f"negative_prompt_ids has shape {shape}, but there are {prompts} prompts. Give token ids [prompts, "
            "positions], a line for each prompt or one line for all."
        )
    if mask is not None and tuple(mask.shape) != shape:
        raise ValueError(
            f"negative_prompt_attention_mask has shape {tuple(mask.shape)}, but the negative prompts have {shape}. "
            "Give 1 for every token and 0 for all padding."
        )


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
        self._attention = AttentionSwitch(model, None)  # not by name: a launch in another thread may run now

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
