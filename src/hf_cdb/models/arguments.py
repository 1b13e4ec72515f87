"""Checks of call arguments that both models share. They raise errors that name argument, value, reason and way out."""

import difflib
import math
import operator
from typing import Any

import torch
from torch import nn
from transformers.utils import TransformersKwargs

__all__ = ["as_integer", "as_number", "check_forward_kwargs", "check_labels"]

# generate hands its tokenizers to the decoding loop, which passes on what it does not know.
_FROM_GENERATE = {"tokenizer", "assistant_tokenizer"}
_KNOWN_KWARGS = frozenset(TransformersKwargs.__annotations__) | {"return_dict", "shift_labels"} | _FROM_GENERATE


def check_forward_kwargs(model: nn.Module, kwargs: dict[str, Any], named: tuple[str, ...] = ()) -> None:
    """Refuse keyword arguments that nothing downstream reads.

    Args:
        model: for the message; its config tells whether attention weights can be returned.
        kwargs: what the forward caught in `**kwargs`.
        named: the forward's own arguments, to suggest the one that was meant.

    Raises:
        TypeError: an unknown name.
        ValueError: `output_attentions` with an implementation that has no weights to return.
    """
    for name in kwargs:
        if name not in _KNOWN_KWARGS:
            near = difflib.get_close_matches(name, [*named, *_KNOWN_KWARGS], n=1)
            hint = f" Did you mean `{near[0]}`?" if near else ""
            raise TypeError(f"{type(model).__name__}.forward got an unexpected keyword argument `{name}`.{hint}")
    implementation = model.config._attn_implementation
    if (kwargs.get("output_attentions") or model.config.output_attentions) and implementation != "eager":
        raise ValueError(
            f"output_attentions=True: the attention implementation {implementation!r} never forms the weights. Load "
            "the model with `attn_implementation='eager'`, or call `model.set_attn_implementation('eager')`."
        )


def as_integer(name: str, value: Any) -> int:
    """`value` as an int; integers of NumPy and tensors of one integer count."""
    try:
        if isinstance(value, bool):
            raise TypeError
        return operator.index(value)
    except TypeError:
        raise ValueError(f"{name}={value!r} is no integer. Pass one.") from None


def as_number(name: str, value: Any) -> float:
    """`value` as a finite float; tensors of one number count."""
    number = None if isinstance(value, (bool, str)) else value
    try:
        number = float(number)
    except (TypeError, ValueError, RuntimeError):
        number = math.nan
    if not math.isfinite(number):
        raise ValueError(f"{name}={value!r} is no finite number. Pass one.")
    return number


def check_labels(
    labels: torch.Tensor | None,
    input_ids: torch.Tensor | None,
    inputs_embeds: torch.Tensor | None,
    logits_to_keep: int | torch.Tensor,
) -> None:
    """Refuse labels that do not belong to the input, token by token."""
    if labels is None:
        return
    given = inputs_embeds if input_ids is None else input_ids
    shape = tuple(given.shape[:2]) if isinstance(given, torch.Tensor) else None
    if labels.is_floating_point() or tuple(labels.shape) != shape:
        raise ValueError(
            f"labels has shape {tuple(labels.shape)} and dtype {labels.dtype}, but the input has {shape} tokens: one "
            "integer for each is needed, -100 where nothing is to be predicted."
        )
    if isinstance(logits_to_keep, torch.Tensor) or logits_to_keep:
        raise ValueError(
            f"logits_to_keep={logits_to_keep!r} beside labels: the loss needs the logits of every position. Leave it "
            "out."
        )
