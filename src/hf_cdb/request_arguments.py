"""Are the arguments of a manager's request what they should be?

`generate` itself leaves much of that to what fails later: here that would be a launch that others share, or an error
that names no argument.
"""

import math
import numbers
import reprlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from transformers import PreTrainedTokenizerBase
from transformers.generation import BaseWatermarkingConfig, GenerationConfig

from .setting_checks import is_integer

__all__ = ["check_kind", "check_options", "check_prompts", "shown"]


class Kind(NamedTuple):
    """What an argument may be: `holds(value, vocab)`, and that in words."""

    holds: Callable[[Any, int], bool]
    words: str


class _Shown(reprlib.Repr):
    def repr_int(self, value: int, level: int) -> str:
        if value.bit_length() > 256:  # Python refuses to print those that are long
            return f"<an integer of {value.bit_length()} bits>"
        return super().repr_int(value, level)


_SHOWN = _Shown()


def shown(value: Any) -> str:
    """A value in an error: short, whatever it is."""
    return _SHOWN.repr(value)


def _is_number(value: Any) -> bool:
    """Whether it is a real number that a float can hold; nan is none."""
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        return False
    try:
        return not math.isnan(float(value))
    except OverflowError:
        return False


def _integer(least: int, most: int = 2**63 - 1) -> Kind:
    words = f"an integer of at least {least}" + ("" if most == 2**63 - 1 else f" and at most {most}")
    return Kind(lambda value, _: is_integer(value) and least <= value <= most, words)


def _number(least: float = -math.inf, most: float = math.inf, above: bool = False) -> Kind:
    """A finite number from `least` to `most`; with `above` more than `least`."""
    words = "a finite number" + ("" if least == -math.inf else f" {'above' if above else 'of at least'} {least}")
    words += "" if most == math.inf else f" and at most {most}"

    def holds(value: Any, _: int) -> bool:
        return _is_number(value) and math.isfinite(value) and least <= value <= most and not (above and value == least)

    return Kind(holds, words)


def _list(value: Any) -> Any:
    """A list in place of a tensor or an array."""
    return value.tolist() if hasattr(value, "tolist") else value


def _are_tokens(value: Any, vocab: float, least: int = 0) -> bool:
    """Whether it is a list of token ids, which may be none."""
    value = _list(value)
    if not isinstance(value, Sequence) or isinstance(value, bytes | bytearray):  # these hold integers, too
        return False
    return all(is_integer(token) and least <= token < vocab for token in value)


def _is_end(value: Any, vocab: float, least: int) -> bool:
    """Whether it is an integer from `least` to below `vocab`, or a list of them."""
    value = _list(value)
    return _are_tokens(value if isinstance(value, Sequence) else [value], vocab, least)


def _are_biases(value: Any, vocab: int) -> bool:
    """A dict from tuples of ids to numbers, or the same as a list of pairs, for JSON has no tuples as keys."""
    pairs = value.items() if isinstance(value, Mapping) else value
    if not isinstance(value, Mapping | Sequence) or isinstance(value, str) or not value:
        return False
    return all(
        isinstance(pair, Sequence) and len(pair) == 2 and _are_words([pair[0]], vocab) and _is_number(pair[1])
        for pair in pairs
    )


def _are_words(value: Any, vocab: int) -> bool:
    return (
        isinstance(value, Sequence)
        and len(value) > 0
        and all(_are_tokens(word, vocab) and len(word) > 0 for word in value)
    )


def _is_decay(value: Any, _: int) -> bool:
    return (
        isinstance(value, Sequence)
        and len(value) == 2
        and _integer(0).holds(value[0], 0)
        and _number(0, above=True).holds(value[1], 0)
    )


def _are_texts(value: Any, _: int) -> bool:
    texts = [value] if isinstance(value, str) else value
    return isinstance(texts, list | tuple) and bool(texts) and all(isinstance(text, str) and text for text in texts)


def _is_negative_prompt(value: Any, vocab: int) -> bool:
    return _is_matrix(value) and value.numel() > 0 and all(_are_tokens(row, vocab) for row in value)


def _is_matrix(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.ndim == 2 and not value.is_meta


def _are_callable(value: Any, _: int) -> bool:
    return isinstance(value, list | tuple) and all(map(callable, value))


_FLAG = Kind(lambda value, _: isinstance(value, bool), "True or False")
# Not that of a token: where nothing should end a sequence, or be padding.
_SPECIAL = "an integer of at least -1, which is no token"
_TOKEN_LIST = Kind(lambda value, _: _are_tokens(value, math.inf, -1), "a list of token ids")
_CALLABLES = Kind(_are_callable, "a list of functions of (input_ids, scores)")

# Arguments of generate for which stock has no check, or one that does not name them; None is always what is left out.
_KINDS: dict[str, Kind] = {
    **dict.fromkeys(("max_new_tokens", "num_beams"), _integer(1)),
    "num_return_sequences": _integer(1, 2**16),
    **dict.fromkeys(("max_length", "min_length", "min_new_tokens", "top_k"), _integer(0)),
    **dict.fromkeys(("no_repeat_ngram_size", "encoder_no_repeat_ngram_size"), _integer(0)),
    **dict.fromkeys(("temperature", "guidance_scale"), _number()),
    "max_time": _number(0),
    **dict.fromkeys(("top_p", "min_p", "typical_p", "top_h", "epsilon_cutoff", "eta_cutoff"), _number(0, 1)),
    **dict.fromkeys(("repetition_penalty", "encoder_repetition_penalty"), _number(0, above=True)),
    **dict.fromkeys(("do_sample", "renormalize_logits", "remove_invalid_values", "use_cache"), _FLAG),
    "eos_token_id": Kind(lambda value, _: _is_end(value, 2**63, -1), f"{_SPECIAL}, or a list of them"),
    **dict.fromkeys(("pad_token_id", "bos_token_id"), _integer(-1)),
    "forced_bos_token_id": Kind(lambda value, vocab: is_integer(value) and 0 <= value < vocab, "a token id"),
    "forced_eos_token_id": Kind(lambda value, vocab: _is_end(value, vocab, 0), "a token id, or a list of them"),
    **dict.fromkeys(("suppress_tokens", "begin_suppress_tokens"), _TOKEN_LIST),
    "bad_words_ids": Kind(_are_words, "a list of lists of token ids, none of them empty"),
    "sequence_bias": Kind(_are_biases, "a dict from tuples of token ids to numbers"),
    "exponential_decay_length_penalty": Kind(_is_decay, "a pair: the token it begins at, and a factor"),
    "watermarking_config": Kind(lambda value, _: isinstance(value, dict | BaseWatermarkingConfig), "such a config"),
    "stop_strings": Kind(_are_texts, "a text, or a list of texts, none of them empty"),
    "tokenizer": Kind(lambda value, _: isinstance(value, PreTrainedTokenizerBase), "a tokenizer of Transformers"),
    **dict.fromkeys(("logits_processor", "stopping_criteria"), _CALLABLES),
    "prefix_allowed_tokens_fn": Kind(lambda value, _: callable(value), "a function of (row, input_ids)"),
    # Of add_request alone.
    "generation_config": Kind(lambda value, _: isinstance(value, GenerationConfig), "a GenerationConfig"),
    **dict.fromkeys(("streaming", "record_timestamps", "progress_bar", "persistent_manager"), _FLAG),
    **dict.fromkeys(("min_depth", "max_depth"), _integer(1)),
    "exit_threshold": _number(),
    # The models' own, and guidance's.
    "exit_at_step": _integer(0),
    "num_steps": Kind(lambda value, _: _is_end(value, 2**63, 0), "an integer of at least 1, or a pair of integers"),
    "init_scale": _number(0),
    "init_seed": Kind(lambda value, _: _is_end(value, 2**63, -(2**63)), "an integer of 64 bits, or a list of them"),
    "negative_prompt_ids": Kind(_is_negative_prompt, "a tensor of token ids, [1, positions]"),
    "negative_prompt_attention_mask": Kind(lambda value, _: _is_matrix(value), "a tensor [1, positions]"),
    "seed": _integer(-(2**63)),
    "deadline": _number(0, above=True),
    "created": _number(),
    "priority": Kind(lambda value, _: is_integer(value), "an integer; higher ones start first"),
}


def check_kind(name: str, value: Any, vocab: int = 0) -> None:
    """Refuse an argument that is not what it should be.

    Args:
        vocab: ids of tokens lie below.

    Raises:
        ValueError: it is not.
    """
    kind = _KINDS.get(name)
    if kind is not None and value is not None and not kind.holds(value, vocab):
        of = f" Ids of tokens lie between 0 and {vocab - 1}." if vocab and "token id" in kind.words else ""
        raise ValueError(f"{name}={shown(value)}: choose {kind.words}, or leave it out.{of}")


def check_options(options: Mapping[str, Any], vocab: int) -> None:
    """Refuse arguments of `generate`, alone or together, that a request cannot have.

    Args:
        options: by name, with what the generation config holds.
        vocab: ids of tokens lie below.

    Raises:
        ValueError: one is not what it should be.
    """
    for name, value in options.items():
        check_kind(name, value, vocab)
    if options.get("stop_strings") and options.get("tokenizer") is None:
        raise ValueError(
            f"stop_strings={shown(options['stop_strings'])} without a tokenizer: nothing tells which tokens they are "
            "made of. Give tokenizer=..., or leave it out."
        )
    decay = options.get("exponential_decay_length_penalty")
    if decay is not None and options.get("eos_token_id") is None:
        raise ValueError(
            f"exponential_decay_length_penalty={shown(decay)} without an end of sequence, which it makes likelier. "
            "Give eos_token_id, or leave it out."
        )


def check_prompts(inputs: Any) -> None:
    """Refuse what is no collection of prompts.

    Raises:
        ValueError: it has no length, or is a text or a dict.
    """
    if not hasattr(inputs, "__len__") or not hasattr(inputs, "__iter__") or isinstance(inputs, str | bytes | Mapping):
        raise ValueError(f"inputs={shown(inputs)}: give the prompts, a list of lists of token ids.")
