"""Trained heads that say how deep a token should go, as files `exit_heads/<kind>.safetensors` beside a model.

Three kinds, all linear, of the horizons that arXiv 2608.09444 tells apart:

* `same-step` reads the core state after loop t: logit of the hazard of leaving at depth t.
* `lookahead` reads the core state after loop t: logit of the hazard of leaving at depth t + 1, so that the decision is
  known a loop before it takes effect (`CDBConfig(lookahead=1)`).
* `preloop` reads the prelude's output: logits of a distribution over the depths 1 to R.

Hazards become a decision as in arXiv 2510.25741: a token leaves when the cumulative exit probability reaches the
threshold. Heads are no part of a model's state dict: they are found by the name the model was loaded from.
"""

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import nn
from transformers.utils import cached_file, logging

from .adapters import LoopAdapter, adapter_for
from .transfer import to_device

__all__ = [
    "FOLDER",
    "KINDS",
    "ExitHead",
    "HazardHead",
    "PreloopHead",
    "attach_exit_head",
    "find_exit_head",
    "head_for",
    "load_exit_head",
    "make_exit_head",
    "save_exit_heads",
]

logger = logging.get_logger(__name__)

FOLDER = "exit_heads"
_METADATA = "hf_cdb.exit_head"


class ExitHead(nn.Module):
    """A linear head and what it was trained for; `HazardHead` and `PreloopHead` say what it computes.

    Weights are float32 and zero at first. The result is computed in at least float32, also under autocast: in half
    precision the probabilities that follow would round up to 1 before the last loop.

    Args:
        kind: one of `KINDS`.
        width: channels of the state that is read.
        depths: the model's full depth R.
        biases: see the subclasses.
        model_type: of the model's config, or None for any.
        target, training: what the head was trained towards, and a summary of how; JSON, kept in the file.
    """

    def __init__(
        self,
        kind: str,
        width: int,
        depths: int,
        biases: int,
        *,
        model_type: str | None = None,
        target: dict[str, Any] | None = None,
        training: dict[str, Any] | None = None,
    ):
        super().__init__()
        self.kind, self.width, self.depths, self.model_type = kind, width, depths, model_type
        self.target, self.training_summary = target or {}, training or {}
        self.weight = nn.Parameter(torch.zeros(self.rows(), width))
        self.bias = nn.Parameter(torch.zeros(biases))

    def rows(self) -> int:
        """Rows of the weight: numbers that come out."""
        return 1

    def project(self, state: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        """`state @ weight^T + bias` in at least float32: `[..., width]` to `[..., rows]`."""
        if state.shape[-1] != self.width:
            raise ValueError(
                f"the {self.kind} exit head reads states of width {self.width}, but these have {state.shape[-1]}. "
                f"Train one for this model: {_command(self.kind)}."
            )
        with torch.autocast(state.device.type, enabled=False):
            dtype = torch.promote_types(self.weight.dtype, state.dtype)
            return nn.functional.linear(state.to(dtype), self.weight.to(dtype)) + bias.to(dtype)

    def check(self, adapter: LoopAdapter) -> None:
        """Raise a ValueError where this head is not one for the adapter's model."""
        width = getattr(getattr(adapter.model, "config", None), "hidden_size", None)
        for what, own, theirs in (
            ("model type", self.model_type, adapter.model_type),
            ("width", self.width, width),
            ("full depth", self.depths, adapter.full_depth),
        ):
            if own is not None and theirs is not None and own != theirs:
                raise ValueError(
                    f"this {self.kind} exit head is for a model of {what} {own!r}, but {type(adapter.model).__name__} "
                    f"has {what} {theirs!r}. Train one for it: {_command(self.kind)}."
                )

    def metadata(self) -> dict[str, Any]:
        """What the file says beside the weights."""
        return {
            "kind": self.kind,
            "width": self.width,
            "depths": self.depths,
            "model_type": self.model_type,
            "target": self.target,
            "training": self.training_summary,
        }

    def save(self, folder: str | os.PathLike) -> Path:
        """Write `folder/<kind>.safetensors`, whole or not at all; the path."""
        path = Path(folder) / f"{self.kind}.safetensors"
        path.parent.mkdir(parents=True, exist_ok=True)
        tensors = {name: value.detach().cpu().contiguous() for name, value in self.state_dict().items()}
        unfinished = path.with_name(f"{path.name}.{os.getpid()}.tmp")
        save_file(tensors, unfinished, {"format": "pt", _METADATA: json.dumps(self.metadata())})
        unfinished.replace(path)
        return path


class HazardHead(ExitHead):
    """Logit of leaving, one a loop: `same-step` and `lookahead`.

    One weight serves all loops. The bias may differ from loop to loop (`biases` above 1); loops beyond the last one
    that has a bias share that one, so that a model that may deepen keeps working.
    """

    def forward(self, state: torch.Tensor, loops: Sequence[int] | torch.Tensor) -> torch.Tensor:
        """Logits `[...]` of states `[..., width]` after the given loops, integers `[...]` from 1."""
        if not isinstance(loops, torch.Tensor):
            loops = to_device(torch.tensor(loops), state.device)
        loops = loops.to(state.device, torch.long)
        bias = self.bias[(loops - 1).clamp(max=len(self.bias) - 1)]
        return self.project(state, bias[..., None]).squeeze(-1)


class PreloopHead(ExitHead):
    """Logits of a distribution over the depths 1 to R."""

    def rows(self) -> int:
        return self.depths

    def forward(self, embeds: torch.Tensor) -> torch.Tensor:
        """Logits `[..., depths]` of what the prelude gave, `[..., width]`."""
        return self.project(embeds, self.bias)


KINDS: dict[str, type[ExitHead]] = {"same-step": HazardHead, "lookahead": HazardHead, "preloop": PreloopHead}


def make_exit_head(kind: str, width: int, depths: int, *, depth_bias: bool = True, **description) -> ExitHead:
    """A head of the kind, all zeros.

    Args:
        kind, width, depths: as in `ExitHead`.
        depth_bias: a bias of its own for every loop whose signal is read: R - 1 for `same-step`, R - 2 for
            `lookahead`, where depth 1 cannot be chosen and R needs no signal. It fits Ouro better and decides whether
            a head of Huginn, whose states look alike at all depths, beats fixed depths at all. A preloop head has one
            per depth anyway.
        **description: `model_type`, `target` and `training` of `ExitHead`.

    Raises:
        ValueError: an unknown kind, or a model with too few loops to leave anything to decide.
    """
    if kind not in KINDS:
        raise ValueError(f"kind={kind!r} is no exit head. Choose one of {', '.join(KINDS)}.")
    signals = depths - 2 if kind == "lookahead" else depths - 1
    if signals < 1:
        raise ValueError(
            f"kind={kind!r}: with {depths} loops every token has the same depth and there is nothing to decide. "
            "Use a model with more loops."
        )
    biases = depths if kind == "preloop" else signals if depth_bias else 1
    return KINDS[kind](kind, width, depths, biases, **description)


def load_exit_head(path: str | os.PathLike) -> ExitHead:
    """The head in a file that `ExitHead.save` or `hf-cdb train gate` wrote.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: the file is no exit head, or its tensors are not those of the head it names.
    """
    path = Path(path)
    if not path.is_file():
        raise FileNotFoundError(
            f"path={str(path)!r} is no file. Name a head itself, such as MODEL/{FOLDER}/same-step.safetensors."
        )
    try:
        with safe_open(path, "pt") as file:
            text = (file.metadata() or {}).get(_METADATA)
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (no mapping)
    except SafetensorError as error:
        raise ValueError(f"path={str(path)!r} is no safetensors file ({error}). Train the head again.") from error
    if text is None:
        raise ValueError(f"path={str(path)!r} holds tensors but no exit head. Name a file that {_command()} wrote.")
    try:
        metadata = json.loads(text)
        kind, width, depths = (metadata[name] for name in ("kind", "width", "depths"))
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(
            f"path={str(path)!r}: its description is damaged ({error!r}). Train the head again."
        ) from error
    if kind not in KINDS:
        raise ValueError(f"path={str(path)!r} holds a head of kind {kind!r}; known are {', '.join(KINDS)}.")
    described = {name: metadata.get(name) for name in ("model_type", "target", "training")}
    biases = tensors["bias"].numel() if "bias" in tensors else 0
    head = KINDS[kind](kind, width, depths, biases, **described)
    expected = {name: tuple(value.shape) for name, value in head.state_dict().items()}
    found = {name: tuple(value.shape) for name, value in tensors.items()}
    if found != expected or not found["bias"][0]:
        raise ValueError(
            f"path={str(path)!r} says kind {kind!r}, width {head.width} and {head.depths} depths, which needs tensors "
            f"{expected}, but it holds {found}. Train the head again."
        )
    if not all(value.isfinite().all() for value in tensors.values()):
        raise ValueError(f"path={str(path)!r} holds numbers that are not finite. Train the head again.")
    head.load_state_dict(tensors)
    return head.requires_grad_(False).eval()


def attach_exit_head(model: nn.Module, head: ExitHead) -> nn.Module:
    """Let the model's `exit_rule="gate"` or `"preloop"` use this head, before any file beside the model.

    `save_pretrained` of the models here, and of others after `enable_cdb`, writes attached heads beside the weights.

    Returns:
        The model itself.

    Raises:
        ValueError: a head for another width, another number of loops or another type of model.
    """
    head.check(adapter_for(model))
    _attached(model)[head.kind] = head
    return model


def find_exit_head(model: nn.Module, kind: str) -> ExitHead | None:
    """The model's head of this kind: the attached one, else the file beside the model, else None.

    Beside a model means in the folder or the Hub repository that `from_pretrained` loaded its weights from; weights
    that came in another way have no heads but attached ones.
    """
    heads = _attached(model)
    if kind not in heads:
        name = getattr(model, "name_or_path", "")
        # A config names the folder that it is from also where the weights are new. Loading leaves its conversions in
        # the model, for saving.
        if not name or not hasattr(model, "_weight_conversions"):
            return None
        path = _beside(name, kind, getattr(model.config, "_commit_hash", None))
        if path is None and os.path.isdir(name):
            return None  # not remembered: a head may be trained and saved there later
        heads[kind] = None if path is None else load_exit_head(path)
    return heads[kind]


def head_for(adapter: LoopAdapter, kind: str) -> ExitHead | None:
    """As `find_exit_head`, on the device of the model, and checked to be for it.

    Raises:
        ValueError: as `attach_exit_head`.
    """
    head = find_exit_head(adapter.model, kind)
    if head is None:
        return None
    head.check(adapter)
    return head.to(adapter.device)


def save_exit_heads(model: nn.Module, folder: str | os.PathLike) -> list[Path]:
    """Write every head that the model has into `folder/exit_heads`; the paths."""
    heads = [find_exit_head(model, kind) for kind in KINDS]
    return [head.save(Path(folder) / FOLDER) for head in heads if head is not None]


def _attached(model: nn.Module) -> dict[str, ExitHead | None]:
    # In a dict, so that the heads are no submodules and stay out of the state dict.
    if "_exit_heads" not in model.__dict__:
        model._exit_heads = {}
    return model._exit_heads


def _beside(name: str, kind: str, revision: str | None) -> str | None:
    """Path of the file in the folder or repository `name`; None where it has none."""
    if os.path.isdir(name):
        path = Path(name) / FOLDER / f"{kind}.safetensors"
        return str(path) if path.is_file() else None
    try:
        return cached_file(
            name, f"{FOLDER}/{kind}.safetensors", revision=revision, _raise_exceptions_for_missing_entries=False
        )
    except OSError as error:
        logger.warning_once(
            f"Could not look for a {kind} exit head of {name!r} ({error}). Going on as if there were none; "
            "hf_cdb.attach_exit_head(model, head) gives one by hand."
        )
        return None


def _command(kind: str = "KIND") -> str:
    return f"`hf-cdb train gate MODEL --kind {kind}`"
