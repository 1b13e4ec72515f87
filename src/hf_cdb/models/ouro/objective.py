"""The training objective of Ouro (arXiv 2510.25741, section on entropy-regularised training)."""

from collections.abc import Iterable

import torch
from torch import nn

from ...precision import at_least_float32

__all__ = ["expected_exit_loss"]


def expected_exit_loss(
    loop_logits: Iterable[torch.Tensor],
    pdf: torch.Tensor,
    labels: torch.Tensor,
    entropy_weight: float,
    num_items_in_batch: torch.Tensor | int | None = None,
    shift_labels: torch.Tensor | None = None,
    **kwargs,
) -> torch.Tensor:
    """Mean over the predicted tokens of `sum_t p_t * CE_t - entropy_weight * H(p)`, natural logarithms.

    Gradient flows into the logits and into the exit distribution; the entropy term keeps the latter from collapsing
    to one loop before the loops have learned to differ.

    Args:
        loop_logits: per loop `[batch, positions, vocab]`. An iterator keeps one of them alive at a time in inference.
        pdf: `[batch, positions, loops]`, probability of leaving after each loop.
        labels: int64 `[batch, positions]`, -100 where nothing is predicted; shifted here by one position.
        entropy_weight: weight of the entropy.
        num_items_in_batch: divisor in place of the number of predicted tokens (gradient accumulation).
        shift_labels: labels already shifted, in place of `labels`.

    Returns:
        A scalar, at least float32.
    """
    if shift_labels is None:
        shift_labels = nn.functional.pad(labels, (0, 1), value=-100)[..., 1:]
    shift_labels = shift_labels.to(pdf.device)
    per_loop = [
        nn.functional.cross_entropy(at_least_float32(logits).flatten(0, -2), shift_labels.flatten(), reduction="none")
        for logits in loop_logits
    ]
    expected = (pdf * torch.stack(per_loop, dim=-1).view_as(pdf)).sum(-1)
    entropy = torch.special.entr(pdf).sum(-1)
    predicted = shift_labels != -100
    total = ((expected - entropy_weight * entropy) * predicted).sum()
    return total / (predicted.sum() if num_items_in_batch is None else num_items_in_batch)
