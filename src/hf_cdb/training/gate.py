"""Training of an exit head by distillation: the body is frozen, the head learns when the output is good enough."""

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import nn
from tqdm import tqdm

from ..adapters import adapter_for
from ..exit_heads import FOLDER, KINDS, ExitHead, make_exit_head
from .gate_data import GateData
from .gate_report import Report, report
from .gate_states import LoopCache, collect_states
from .gate_targets import KLToFull, Target, exit_distribution

__all__ = ["GateResult", "GateSettings", "train_gate"]

_LOG_EVERY = 50  # steps
_ALMOST = 1e-4  # least probability that the first bias stands for


@dataclass(frozen=True)
class GateSettings:
    """How a head is trained.

    Args:
        kind: `same-step`, `lookahead` or `preloop`.
        target: what it imitates.
        steps: of AdamW without weight decay. Fewer than 600 mislead on a small model.
        lr: learning rate, constant for half of the steps, then linear to zero.
        batch: states in a step, drawn anew each time.
        depth_bias: see `hf_cdb.exit_heads.make_exit_head`.
        seed: of the draws.
        thresholds: cumulative exit probabilities of the report, in (0, 1].
        max_memory: bytes of states that are kept in memory; more go to a temporary file.

    Raises:
        ValueError: a value out of its range.
    """

    kind: str = "same-step"
    target: Target = field(default_factory=KLToFull)
    steps: int = 600
    lr: float = 1e-2
    batch: int = 4096
    depth_bias: bool = True
    seed: int = 0
    thresholds: Sequence[float] = (0.1, 0.3, 0.5, 0.7, 0.9)
    max_memory: int = 2 << 30

    def __post_init__(self):
        if self.kind not in KINDS:
            raise ValueError(f"kind={self.kind!r} is no exit head. Choose one of {', '.join(KINDS)}.")
        for name in ("steps", "batch", "max_memory"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ValueError(f"{name}={value!r}: choose an integer of at least 1.")
        if not self.lr > 0:
            raise ValueError(f"lr={self.lr!r}: choose a positive learning rate.")
        for threshold in self.thresholds:
            if not 0 < threshold <= 1:
                raise ValueError(f"thresholds: {threshold!r} is outside (0, 1], the range of a probability.")


@dataclass
class GateResult:
    """What `train_gate` returns.

    Attributes:
        head: the trained head, on the CPU.
        log: loss of the batch at some steps, cross entropy in nats per state.
        report: depths, agreement and loss on the held-out rows.
    """

    head: ExitHead
    log: list[dict[str, float]]
    report: Report

    def save(self, folder: str | os.PathLike) -> list[Path]:
        """Write `exit_heads/<kind>.safetensors`, `.json` (log and report) and `.md` (the report to read) in `folder`.

        A killed process leaves no half file: each is written under another name first. The head comes last.
        """
        paths = self.save_report(folder)
        return [*paths, self.head.save(Path(folder) / FOLDER)]

    def save_report(self, folder: str | os.PathLike, name: str | None = None) -> list[Path]:
        """The log and the report of `save` without the head, under its kind or another name."""
        name = name or self.head.kind
        folder = Path(folder) / FOLDER
        folder.mkdir(parents=True, exist_ok=True)
        record = {**self.head.metadata(), "log": self.log, "report": self.report.to_dict()}
        return [
            _write(folder / f"{name}.json", json.dumps(record, indent=1) + "\n"),
            _write(folder / f"{name}.md", self.report.to_markdown()),
        ]


def train_gate(model: nn.Module, data: GateData, settings: GateSettings, *, progress: bool = True) -> GateResult:
    """Train an exit head for a looped model that has an adapter. The model itself is not changed.

    Args:
        model: loaded; runs in evaluation mode.
        data: rows to train on and rows to report on.
        settings: what to train, and how.
        progress: show bars.

    Raises:
        ValueError: a model without an adapter or with too few loops, or data without a counted token.
    """
    adapter = adapter_for(model)
    was_training = model.training
    model.eval()
    caches = []
    try:
        description = {"model_type": adapter.model_type, "target": settings.target.to_dict()}
        make_exit_head(settings.kind, 1, adapter.full_depth)  # refuses a model with too few loops before any work
        for rows in (data.train, data.held_out):
            options = {"max_memory": settings.max_memory, "progress": progress}
            caches.append(collect_states(adapter, rows, settings.kind, **options))
        train, held_out = caches
        head = make_exit_head(
            settings.kind, train.width, adapter.full_depth, depth_bias=settings.depth_bias, **description
        )
        wanted, held_out_wanted = (_wanted(settings, cache) for cache in caches)
        _start_at_mean(head, train, wanted)
        constant = _loss(head, held_out, held_out_wanted)
        log = _fit(head, train, wanted, settings, progress)
        head.training_summary = {
            "steps": settings.steps,
            "lr": settings.lr,
            "batch": settings.batch,
            "seed": settings.seed,
            "tokens": len(train),
            "states_mib": round(train.bytes / 2**20, 1),
            "held_out_tokens": len(held_out),
            "held_out_loss": _loss(head, held_out, held_out_wanted),
            "held_out_loss_of_a_constant": constant,
        }
        head.requires_grad_(False).eval()
        judged = report(head, held_out, settings.thresholds)
        return GateResult(head.cpu(), log, judged)
    finally:
        for cache in caches:
            cache.close()
        model.train(was_training)


def _wanted(settings: GateSettings, cache: LoopCache) -> torch.Tensor:
    """What the head should say: hazards `[tokens, inputs]`, or for preloop a distribution `[tokens, 1, R]`."""
    hazards = settings.target.hazards(cache.scores)
    if settings.kind == "preloop":
        return exit_distribution(hazards)[:, None]
    first = 1 if settings.kind == "lookahead" else 0
    return hazards[:, first : first + cache.inputs]


def _start_at_mean(head: ExitHead, cache: LoopCache, wanted: torch.Tensor) -> None:
    """Biases that give the mean of what is wanted, whatever the state; also puts the head where the model is."""
    shares = cache.weights / cache.weights.sum()
    mean = torch.einsum("t,ti...->i...", shares, wanted)
    if head.kind == "preloop":
        bias = mean[0].clamp(min=_ALMOST).log()
    else:
        bias = (mean if len(head.bias) > 1 else mean.mean()[None]).clamp(_ALMOST, 1 - _ALMOST).logit()
    head.bias.data.copy_(bias)
    head.to(cache.adapter.device)


def _fit(
    head: ExitHead, cache: LoopCache, wanted: torch.Tensor, settings: GateSettings, progress: bool
) -> list[dict[str, float]]:
    """AdamW on states scaled to mean 0 and deviation 1, so that one learning rate serves models of any scale."""
    mean, deviation = _moments(cache)
    weight = nn.Parameter(head.weight.detach() * deviation)
    bias = nn.Parameter(head.bias.detach().clone())
    generator = torch.Generator().manual_seed(settings.seed)
    optimizer = torch.optim.AdamW([weight, bias], lr=settings.lr, weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, 2 * (1 - step / settings.steps)))
    log = []
    for step in tqdm(range(1, settings.steps + 1), desc=f"{head.kind} head", unit="step", disable=not progress):
        indices = torch.randint(len(cache) * cache.inputs, (settings.batch,), generator=generator)
        states = (cache.states(indices) - mean) / deviation
        loss = _cross_entropy(head, weight, bias, states, indices, cache, wanted)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
        if step % _LOG_EVERY == 0 or step in (1, settings.steps):
            log.append({"step": step, "loss": loss.item(), "lr": schedule.get_last_lr()[0]})
    with torch.no_grad():
        head.weight.copy_(weight / deviation)
        head.bias.copy_(bias - head.weight @ mean)
    return log


def _cross_entropy(
    head: ExitHead,
    weight: torch.Tensor,
    bias: torch.Tensor,
    states: torch.Tensor,
    indices: torch.Tensor,
    cache: LoopCache,
    wanted: torch.Tensor,
) -> torch.Tensor:
    """Mean over the states `indices`, weighted as their tokens are, with these parameters in the head."""
    tokens, inputs = indices // cache.inputs, indices % cache.inputs
    parameters = {"weight": weight, "bias": bias}
    expected = wanted[tokens, inputs].to(states.device)
    if head.kind == "preloop":
        logits = torch.func.functional_call(head, parameters, (states,))
        losses = -(expected * logits.log_softmax(-1)).sum(-1)
    else:
        logits = torch.func.functional_call(head, parameters, (states, inputs + 1))
        losses = nn.functional.binary_cross_entropy_with_logits(logits, expected, reduction="none")
    weights = cache.weights[tokens].to(states.device)
    return (weights * losses).sum() / weights.sum()


@torch.no_grad()
def _loss(head: ExitHead, cache: LoopCache, wanted: torch.Tensor) -> float:
    """Cross entropy in nats over all states."""
    total = count = 0.0
    for indices in torch.arange(len(cache) * cache.inputs).split(4096):
        weight = cache.weights[indices // cache.inputs].sum().item()
        part = _cross_entropy(head, head.weight, head.bias, cache.states(indices), indices, cache, wanted)
        total, count = total + weight * part.item(), count + weight
    return total / count


def _moments(cache: LoopCache) -> tuple[torch.Tensor, torch.Tensor]:
    """Mean and deviation of every channel; the deviation of a channel that never changes is taken as 1."""
    total = square = 0.0
    for indices in torch.arange(len(cache) * cache.inputs).split(4096):
        states = cache.states(indices).double()
        total, square = total + states.sum(0), square + states.square().sum(0)
    count = len(cache) * cache.inputs
    mean = total / count
    variance = (square / count - mean.square()).clamp(min=0)
    deviation = torch.where(variance > 1e-12 * square / count, variance.sqrt(), 1.0)
    return mean.float(), deviation.float()


def _write(path: Path, text: str) -> Path:
    unfinished = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    unfinished.write_text(text, encoding="utf-8")
    return unfinished.replace(path)
