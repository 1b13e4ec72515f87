"""What a looped model is trained to minimise, as modules from a batch to losses."""

from abc import ABC, abstractmethod

import torch
from torch import nn

from ..models.huginn import RavenForCausalLM
from ..models.ouro import OuroForCausalLM
from ..models.ouro.exit_distribution import exit_probabilities
from .batches import block_mask
from .recipe import ObjectiveRecipe

__all__ = ["HuginnObjective", "Objective", "OuroObjective", "build_objective"]


def token_losses(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Cross-entropy of every token in nats, 0 at target -100.

    Args:
        logits: `[rows, length, vocab]`.
        targets: int64 `[rows, length]`.

    Returns:
        float32 `[rows, length]`.
    """
    losses = nn.functional.cross_entropy(logits.float().flatten(0, 1), targets.flatten(), reduction="none")
    return losses.view_as(targets)


class Objective(nn.Module, ABC):
    """A loss of `model`. The forward is all that a step computes, so wrappers that hook into it see every gradient.

    Args:
        model: the model to train.
        compile: compile its layers and the token losses. In regions, not as a whole: a graph of all loops takes
            longer to compile and hardly less to run, and a random number of loops would need one for each.
    """

    def __init__(self, model: nn.Module, compile: bool = False):
        super().__init__()
        self.model = model
        self._token_losses = torch.compile(token_losses) if compile else token_losses
        if compile:
            for layer in self.layers():
                layer.compile()

    @abstractmethod
    def layers(self) -> list[nn.Module]:
        """The attention layers of the model."""

    @abstractmethod
    def forward(self, batch: dict[str, torch.Tensor], total_weight: float, step: int) -> tuple[torch.Tensor, ...]:
        """The loss, a scalar, and for the log `[losses]` without gradient.

        Args:
            batch: rows of a batch of `PackedBatches`.
            total_weight: what sums are divided by: the weight of the whole batch, of which this may be a share.
            step: number of the step, from 0.
        """


class OuroObjective(Objective):
    """Losses after every loop in one pass; logged: the weighted cross-entropy after each loop.

    `loops`: their mean, weighted with `loop_weights`. The gate is left out and stays as it is.
    `expected`: `sum_t p_t CE_t - beta H(p)` with the exit distribution p of the gate (arXiv 2510.25741), beta the
    config's `exit_entropy_weight`.
    """

    def __init__(self, model: OuroForCausalLM, recipe: ObjectiveRecipe, compile: bool = False):
        super().__init__(model, compile)
        self.expected = recipe.kind == "expected"
        loops = model.config.total_ut_steps
        weights = torch.tensor(recipe.loop_weights or [1.0] * loops)
        self.loop_weights = nn.Buffer(weights / weights.sum(), persistent=False)
        if not self.expected:
            model.model.early_exit_gate.requires_grad_(False)

    def layers(self) -> list[nn.Module]:
        return list(self.model.model.layers)

    def forward(self, batch: dict[str, torch.Tensor], total_weight: float, step: int) -> tuple[torch.Tensor, ...]:
        outputs = self.model.model(
            input_ids=batch["input_ids"],
            position_ids=batch["position_ids"],
            attention_mask=block_mask(batch["segments"]),
            output_loop_states=True,
            use_cache=False,
        )
        weights, targets = batch["weights"], batch["targets"]
        per_token = [self._token_losses(self.model.coda(state), targets) for state in outputs.loop_states]
        losses = torch.stack([(loss * weights).sum() for loss in per_token]) / total_weight
        if not self.expected:
            return losses @ self.loop_weights, losses.detach()
        pdf = exit_probabilities(outputs.gate_logits)
        expected = (pdf * torch.stack(per_token, dim=-1)).sum(-1)
        entropy = torch.special.entr(pdf).sum(-1)
        regularised = expected - self.model.config.exit_entropy_weight * entropy
        return (regularised * weights).sum() / total_weight, losses.detach()


class HuginnObjective(Objective):
    """Cross-entropy after a random number of loops, the last of which carry gradient; logged: that loss alone.

    The number is one for the whole batch, log-normal Poisson (arXiv 2502.05171), and depends on seed and step alone,
    so that all processes and a resumed run draw the same. The start state is the config's: zeros, or noise that is
    new in every step where `init_scale` is above 0.
    """

    def __init__(self, model: RavenForCausalLM, seed: int, compile: bool = False):
        super().__init__(model, compile)
        self.seed = seed

    def layers(self) -> list[nn.Module]:
        parts = self.model.transformer
        return [*parts.prelude, *parts.core_block, *parts.coda]

    def draw_num_steps(self, step: int) -> tuple[int, int]:
        """Loops without and with gradient in step `step`."""
        with torch.random.fork_rng(devices=[]):
            # The generator that the draw reads, alone; of a seed it takes 32 bits.
            torch.default_generator.manual_seed((self.seed * 1_000_003 + step) % 2**32)
            return self.model.sample_num_steps()

    def forward(self, batch: dict[str, torch.Tensor], total_weight: float, step: int) -> tuple[torch.Tensor, ...]:
        logits = self.model(
            input_ids=batch["input_ids"],
            position_ids=batch["position_ids"],
            attention_mask=block_mask(batch["segments"]),
            num_steps=self.draw_num_steps(step),
            init_seed=self.seed + step,
            use_cache=False,
        ).logits
        per_token = self._token_losses(logits, batch["targets"])
        loss = (per_token * batch["weights"]).sum() / total_weight
        return loss, loss.detach()[None]


def build_objective(
    model: OuroForCausalLM | RavenForCausalLM, recipe: ObjectiveRecipe, seed: int, compile: bool = False
) -> Objective:
    """The objective of a recipe for its model."""
    if isinstance(model, RavenForCausalLM):
        return HuginnObjective(model, seed, compile)
    return OuroObjective(model, recipe, compile)
