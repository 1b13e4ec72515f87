"""Muon for the matrices of the body, AdamW for all other parameters, and the schedule of both learning rates."""

from torch import nn
from torch.optim import AdamW, Muon, Optimizer

from .recipe import OptimizerRecipe

__all__ = ["build_optimizers", "learning_rate_factor", "set_learning_rates", "split_parameters"]


def split_parameters(model: nn.Module) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    """The trainable parameters of Muon and of AdamW, every one in one of the lists.

    Muon orthogonalises a matrix that maps states to states. Embedding and head map tokens, and the gate has a single
    row: they go to AdamW with the norms and biases (Jordan et al. 2024, https://kellerjordan.github.io/posts/muon/).
    """
    outside = {id(model.get_input_embeddings().weight), id(model.get_output_embeddings().weight)}
    trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
    body = [p for p in trainable if p.ndim == 2 and min(p.shape) > 1 and id(p) not in outside]
    chosen = {id(parameter) for parameter in body}
    return body, [parameter for parameter in trainable if id(parameter) not in chosen]


def build_optimizers(model: nn.Module, recipe: OptimizerRecipe) -> tuple[Optimizer, Optimizer]:
    """Muon (5 Newton-Schulz iterations, momentum 0.95) and AdamW (betas 0.9 and 0.95) over the trainable parameters.

    Both carry their learning rate at the height of the schedule as `initial_lr` in every group.
    """
    body, rest = split_parameters(model)
    muon = Muon(body, lr=recipe.muon_lr, weight_decay=recipe.muon_weight_decay, momentum=0.95)
    adamw = AdamW(
        rest, lr=recipe.adamw_lr, weight_decay=recipe.adamw_weight_decay, betas=(0.9, 0.95), eps=1e-10, fused=True
    )
    for optimizer in (muon, adamw):
        for group in optimizer.param_groups:
            group["initial_lr"] = group["lr"]
    return muon, adamw


def learning_rate_factor(step: int, steps: int, recipe: OptimizerRecipe) -> float:
    """Factor on the learning rates in step `step`, counted from 0: linear rise, plateau, linear fall.

    The rise gives `(step + 1) / warmup_steps`; the fall starts at `flat_until * steps` and would reach
    `final_fraction` in step `steps`, the first one that does not run.
    """
    rise = min(1.0, (step + 1) / recipe.warmup_steps) if recipe.warmup_steps else 1.0
    start = recipe.flat_until * steps
    if step <= start:
        return rise
    fallen = (step - start) / (steps - start)
    return rise * (1 - (1 - recipe.final_fraction) * fallen)


def set_learning_rates(optimizers: tuple[Optimizer, ...], factor: float) -> None:
    """Set every group to `factor` times its learning rate at the height of the schedule."""
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["lr"] = group["initial_lr"] * factor
