"""Rotary cosines and sines looked up in place of computed: a launch asks for them in every loop."""

import torch
from torch import nn

__all__ = ["RotaryTable"]

# Their frequencies depend on the longest position that is computed.
_CHANGING = ("dynamic", "longrope")


class RotaryTable:
    """What `rotary` computes, for positions `[1, tokens]` in any order.

    Args:
        rotary: a module `(like, position_ids) -> (cosines, sines)`, each `[1, tokens, size]`.
        dtype: of the hidden states.

    Raises:
        ValueError: frequencies that change with the length, so that rows of one launch would change each other.
    """

    def __init__(self, rotary: nn.Module, dtype: torch.dtype):
        if rotary.rope_type in _CHANGING:
            raise ValueError(
                f"rope_type={rotary.rope_type!r} takes its frequencies from the longest row of a batch, so a row would "
                "depend on its neighbours, which cdb rules out. Use linear or yarn scaling, or generate without cdb."
            )
        self.rotary, self.dtype = rotary, dtype
        self._table: tuple[torch.Tensor, torch.Tensor] | None = None

    def __call__(self, position_ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        # Elsewhere than on the CPU, reading the longest position would wait for the device.
        if position_ids.device.type != "cpu":
            return self._compute(position_ids)
        longest = int(position_ids.max()) + 1
        if self._table is None or self._table[0].shape[1] < longest:
            self._table = self._compute(torch.arange(2 * longest)[None])
        cos, sin = self._table
        return cos[:, position_ids[0]], sin[:, position_ids[0]]

    def _compute(self, position_ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        like = torch.empty(0, dtype=self.dtype, device=position_ids.device)
        return self.rotary(like, position_ids=position_ids)
