"""What an exit head is trained towards: the hazard of leaving after every loop, from what the loops' outputs say."""

import dataclasses
import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

__all__ = [
    "TARGETS",
    "Agreement",
    "Improvement",
    "KLToFull",
    "LoopScores",
    "Target",
    "exit_distribution",
    "make_target",
]


@dataclass
class LoopScores:
    """How the output after every loop compares, float32 `[tokens, R]` each, R the full depth.

    Attributes:
        kl: `KL(p_R || p_t)` in nats, the divergence of the output after loop t from that at full depth.
        loss: negative log probability of the token that really follows, in nats.
        agrees: 1 where the most probable token is that of full depth, else 0.
    """

    kl: torch.Tensor
    loss: torch.Tensor
    agrees: torch.Tensor

    @classmethod
    def cat(cls, parts: "list[LoopScores]") -> "LoopScores":
        """The tokens of all parts, one after the other."""
        names = [field.name for field in dataclasses.fields(cls)]
        return cls(**{name: torch.cat([getattr(part, name) for part in parts]) for name in names})


class Target(ABC):
    """Hazards to imitate. Its fields are its options, checked on creation."""

    name: ClassVar[str]

    @abstractmethod
    def hazards(self, scores: LoopScores) -> torch.Tensor:
        """Probability of leaving after loop t if not before, float32 `[tokens, R]`; 1 in the last column."""

    def to_dict(self) -> dict[str, Any]:
        """Name and options, for a file."""
        return {"name": self.name, **dataclasses.asdict(self)}


@dataclass(frozen=True)
class KLToFull(Target):
    """Go on with probability `sigmoid(slope (log KL(p_R || p_t) - log scale))`: leave once the output is full depth's.

    Args:
        slope: how sharply the hazard turns, per unit of log KL.
        scale: KL in nats at which going on and leaving are equally likely.
    """

    name: ClassVar[str] = "kl"
    slope: float = 3.0
    scale: float = 0.03

    def __post_init__(self):
        _check_positive(self, "slope", "scale")

    def hazards(self, scores):
        # Rounding can leave a KL just below zero; that of zero is a hazard of 1.
        going_on = (self.slope * (scores.kl.clamp(min=0).log() - math.log(self.scale))).sigmoid()
        return _with_certain_end(1 - going_on)


@dataclass(frozen=True)
class Improvement(Target):
    """Go on with probability `sigmoid(slope (loss_t - min_{j>t} loss_j - margin))`: leave once no deeper loop gives the
    true next token more than `margin` nats less loss.

    Args:
        slope: how sharply the hazard turns, per nat.
        margin: improvement in nats that is not worth a loop.
    """

    name: ClassVar[str] = "improvement"
    slope: float = 20.0
    margin: float = 0.05

    def __post_init__(self):
        _check_positive(self, "slope")

    def hazards(self, scores):
        # Column t holds the least loss of loop t and all deeper ones.
        least = scores.loss.flip(-1).cummin(dim=-1).values.flip(-1)
        improvement = scores.loss[:, :-1] - least[:, 1:]
        going_on = (self.slope * (improvement - self.margin)).sigmoid()
        return torch.nn.functional.pad(1 - going_on, (0, 1), value=1.0)


@dataclass(frozen=True)
class Agreement(Target):
    """Leave, for certain, once the most probable token is that of full depth."""

    name: ClassVar[str] = "agreement"

    def hazards(self, scores):
        return _with_certain_end(scores.agrees)


TARGETS: dict[str, type[Target]] = {target.name: target for target in (KLToFull, Improvement, Agreement)}


def make_target(name: str, **options: float | None) -> Target:
    """The target called `name`; options that are None keep their default.

    Raises:
        ValueError: an unknown name, an option that the target does not have, or one off its range.
    """
    if name not in TARGETS:
        raise ValueError(f"target={name!r} is unknown. Choose one of {', '.join(TARGETS)}.")
    given = {option: value for option, value in options.items() if value is not None}
    known = [field.name for field in dataclasses.fields(TARGETS[name])]
    for option, value in given.items():
        if option not in known:
            raise ValueError(
                f"{option}={value} has no meaning for target={name!r}, whose options are {', '.join(known) or 'none'}. "
                "Drop it."
            )
    return TARGETS[name](**given)


def exit_distribution(hazards: torch.Tensor) -> torch.Tensor:
    """Probability of every depth, `h_t prod_{j<t} (1 - h_j)`, `[..., R]` of hazards `[..., R]` (arXiv 2510.25741).

    The last depth takes all that is left.
    """
    survival = torch.nn.functional.pad((1 - hazards[..., :-1]).cumprod(dim=-1), (1, 0), value=1.0)
    return survival * torch.nn.functional.pad(hazards[..., :-1], (0, 1), value=1.0)


def _with_certain_end(hazards: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.pad(hazards[:, :-1], (0, 1), value=1.0)


def _check_positive(target: Target, *names: str) -> None:
    for name in names:
        value = getattr(target, name)
        if not 0 < value < math.inf:
            raise ValueError(f"{name}={value!r}: target {target.name!r} needs a positive number.")
