"""The random start state of Huginn, as a pure function of a seed and a position.

Drawn from a generator, the state of a token would depend on the shape of the call: a cached step and a pass over the
whole prefix, or a row alone and in a batch, would start from different noise and could never agree.
"""

import math

import torch

__all__ = ["random_start_state"]

_CUT = 3.0  # standard deviations, as published


def random_start_state(seeds: torch.Tensor, positions: torch.Tensor, width: int, std: float) -> torch.Tensor:
    """Truncated normal noise, cut at 3 standard deviations.

    Element (b, s, c) depends on `seeds[b, s]`, `positions[b, s]` and c alone: their hash gives a uniform number, the
    inverse of the truncated distribution function turns it into a normal one.

    Args:
        seeds: int64 `[batch or 1, positions or 1]`.
        positions: int64 `[batch or 1, positions]`.
        width: channels.
        std: standard deviation before the cut.

    Returns:
        float32 `[batch, positions, width]`, on the device of `positions`, the same for every dtype of the model.
    """
    channels = torch.arange(width, device=positions.device)
    bits = _mix(seeds.to(positions.device))
    bits = _mix(bits + positions)[..., None]
    bits = _mix(bits + channels)
    uniform = ((bits & 0xFFFFFF).float() + 0.5) / 2**24
    low, high = (0.5 * (1 + math.erf(x / math.sqrt(2))) for x in (-_CUT, _CUT))
    normal = math.sqrt(2) * torch.erfinv(2 * (low + uniform * (high - low)) - 1)
    return normal.clamp(-_CUT, _CUT) * std


def _mix(x: torch.Tensor) -> torch.Tensor:
    """The output function of SplitMix64 (Steele, Lea and Flood, OOPSLA 2014) in wrapping int64 arithmetic."""
    x = x + _signed(0x9E3779B97F4A7C15)
    x = (x ^ _shift_right(x, 30)) * _signed(0xBF58476D1CE4E5B9)
    x = (x ^ _shift_right(x, 27)) * _signed(0x94D049BB133111EB)
    return x ^ _shift_right(x, 31)


def _signed(constant: int) -> int:
    return constant - (1 << 64) if constant >= 1 << 63 else constant


def _shift_right(x: torch.Tensor, count: int) -> torch.Tensor:
    # Torch shifts int64 arithmetically; the mask drops the copies of the sign.
    return (x >> count) & ((1 << (64 - count)) - 1)
