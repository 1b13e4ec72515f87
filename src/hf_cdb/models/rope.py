"""Rotary position embeddings whose angles never leave float32, whatever the dtype of the model."""

from collections.abc import Callable

import torch
from torch import nn
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS, dynamic_rope_update

from ..precision import at_least_float32

__all__ = ["LoopRotaryEmbedding", "rotate_halves", "rotate_pairs"]


class LoopRotaryEmbedding(nn.Module):
    """Cosines and sines of the angles `position * theta^(-2j/d)`, j = 0 .. d/2 - 1 (arXiv 2104.09864).

    A config with `rope_parameters` in the Transformers form may name any scaled kind (linear, dynamic, yarn, ...). The
    plain kind is computed here, because the library's table of initialisers has no entry for it.

    Args:
        config: gives `rope_parameters` or `rope_theta`, `head_dim` and `max_position_embeddings`.
    """

    def __init__(self, config):
        super().__init__()
        self.config = config
        self.rope_type = _rope_settings(config)["rope_type"]
        self.original_max_seq_len = config.max_position_embeddings
        self.inv_freq = nn.Buffer(torch.empty(0), persistent=False)
        self.original_inv_freq = nn.Buffer(torch.empty(0), persistent=False)
        self._reset_frequencies(None)

    @staticmethod
    def compute_default_rope_parameters(config, device=None, **kwargs) -> tuple[torch.Tensor, float]:
        """Plain inverse frequencies `theta^(-2j/d)`, float32 `[d/2]`, and the scale 1 of their cosines and sines."""
        exponents = torch.arange(0, config.head_dim, 2, dtype=torch.float32, device=device) / config.head_dim
        return 1.0 / (_rope_settings(config)["rope_theta"] ** exponents), 1.0

    def _reset_frequencies(self, device: torch.device | None) -> None:
        initialise: Callable = self.compute_default_rope_parameters
        if self.rope_type != "default":
            initialise = ROPE_INIT_FUNCTIONS[self.rope_type]
        inv_freq, self.attention_scaling = initialise(self.config, device)
        self.max_seq_len_cached = self.original_max_seq_len
        self.inv_freq, self.original_inv_freq = inv_freq, inv_freq.clone()

    def _apply(self, fn, recurse=True):
        super()._apply(fn, recurse)
        if self.inv_freq.dtype != torch.float32 and not self.inv_freq.is_meta:
            # `model.to(bfloat16)` would round the frequencies; a later cast back could not restore them.
            self._reset_frequencies(self.inv_freq.device)
        return self

    @torch.no_grad()
    @dynamic_rope_update
    def forward(self, x: torch.Tensor, position_ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Cosines and sines `[batch, positions, d/2]` for `position_ids` `[batch, positions]`.

        Both are float32, float64 for a float64 `x`; `x` gives dtype and device only.
        """
        dtype = torch.promote_types(x.dtype, torch.float32)
        angles = position_ids[..., None].to(dtype) * self.inv_freq.to(device=x.device, dtype=dtype)
        return angles.cos() * self.attention_scaling, angles.sin() * self.attention_scaling


def _rope_settings(config) -> dict:
    settings = getattr(config, "rope_parameters", None)
    return settings or {"rope_type": "default", "rope_theta": config.rope_theta}


def rotate_halves(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotate the pairs `(x[j], x[j + d/2])`, the layout of Ouro.

    Args:
        x: `[batch, heads, positions, d]`.
        cos, sin: `[batch, positions, d/2]`.

    Returns:
        As `x`, in its dtype; the rotation runs in the dtype of the angles where that is wider.
    """
    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    first, second = at_least_float32(x).chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(x.dtype)


def rotate_pairs(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotate the pairs `(x[2j], x[2j + 1])`, the layout of Huginn. Shapes and dtypes as in `rotate_halves`."""
    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    even, odd = at_least_float32(x).unflatten(-1, (-1, 2)).unbind(-1)
    return torch.stack((even * cos - odd * sin, odd * cos + even * sin), dim=-1).flatten(-2).to(x.dtype)
