"""What the engine needs to know of a looped model, and the registry of models that it knows."""

from abc import ABC, abstractmethod
from collections.abc import Callable
from functools import cached_property
from typing import Any, ClassVar

import torch
from torch import nn

__all__ = ["LoopAdapter", "adapter_for", "count_parameters", "register_adapter"]

_ADAPTERS: dict[str, type["LoopAdapter"]] = {}


class LoopAdapter(ABC):
    """The stages and sizes of one looped model.

    Stages work on a flat launch: tensors `[1, tokens, width]` whose tokens may belong to different rows at different
    positions and depths. What a token attends to is the cache's business: layers call `cache.update` and the
    attention registry as they always do.

    Attributes:
        model: the model.
        prelude_layers, core_layers, coda_layers: attention layers before, inside and after the loop.
        kv_heads, head_dim: sizes of a key or value.
        vocab_size: columns of the logits.
        full_depth: the model's own number of loops, R.
        may_deepen: whether more loops than `full_depth` are meaningful.
        default_kv_policy: the exact one for this model.
        has_gate: whether `gate_logits` works.
        default_threshold: the checkpoint's own exit threshold for its gate, or None.
        reads_embeds: whether `loop` reads `embeds`; False spares carrying them from launch to launch.
    """

    model_type: ClassVar[str]
    may_deepen: ClassVar[bool] = False
    reads_embeds: ClassVar[bool] = True
    has_gate: bool = False
    default_kv_policy: str = "last_exited"
    default_threshold: float | None = None

    prelude_layers: int = 0
    core_layers: int
    coda_layers: int = 0
    kv_heads: int
    head_dim: int
    vocab_size: int
    full_depth: int

    def __init__(self, model: nn.Module):
        self.model = model

    @cached_property
    def device(self) -> torch.device:
        """Where the model computes; offloaded weights wait elsewhere."""
        device = self.model.device
        if device.type != "meta":
            return device
        hooks = (getattr(module, "_hf_hook", None) for module in self.model.modules())
        devices = [hook.execution_device for hook in hooks if getattr(hook, "execution_device", None) is not None]
        return torch.device(devices[0]) if devices else device

    @property
    def dtype(self) -> torch.dtype:
        return self.model.dtype

    def section(self, layer_idx: int) -> tuple[str, int]:
        """Section ("prelude", "core" or "coda") and index in it of the layer that calls `cache.update` with
        `layer_idx` in loop 1."""
        for name, first, count in self._layout():
            if first <= layer_idx < first + count:
                return name, layer_idx - first
        raise IndexError(f"layer_idx={layer_idx} belongs to no section of {type(self.model).__name__}.")

    def _layout(self) -> tuple[tuple[str, int, int], ...]:
        """Sections as (name, first layer_idx, layers). Default: in the order they run."""
        core = self.prelude_layers
        coda = core + self.core_layers
        return (
            ("prelude", 0, self.prelude_layers),
            ("core", core, self.core_layers),
            ("coda", coda, self.coda_layers),
        )

    @abstractmethod
    def layer_inputs(self, position_ids: torch.Tensor, cache: Any, **extra) -> dict[str, Any]:
        """Keyword arguments that all stages of one launch share; a stage without layers is given none.

        Args:
            position_ids: int64 `[1, tokens]`.
            cache: what the layers call `update` on.
            **extra: handed on to the layers: what the attention function takes, and `attention_mask` where the caller
                has one (dory: a dict by layer type).
        """

    @abstractmethod
    def prelude(
        self, input_ids: torch.Tensor | None, inputs_embeds: torch.Tensor | None, layer_inputs: dict[str, Any]
    ) -> torch.Tensor:
        """`[1, tokens, width]` for token ids `[1, tokens]` or embeddings `[1, tokens, width]`: what every loop is
        given beside its state."""

    def start(self, embeds: torch.Tensor, position_ids: torch.Tensor, **start_options) -> torch.Tensor:
        """The state before loop 1, `[1, tokens, width]`; default the prelude's output itself."""
        if start_options:
            raise TypeError(f"{type(self).__name__} takes no start options, got {sorted(start_options)}.")
        return embeds

    @abstractmethod
    def loop(self, state: torch.Tensor, embeds: torch.Tensor, layer_inputs: dict[str, Any]) -> torch.Tensor:
        """Run the core once: `[1, tokens, width]` to the same; `embeds` may be None where `reads_embeds` is False."""

    @abstractmethod
    def coda(self, state: torch.Tensor, layer_inputs: dict[str, Any], keep: torch.Tensor | None = None) -> torch.Tensor:
        """Logits `[kept, vocab]` of the tokens `keep` (int64), or of all; layers after the loop see all tokens."""

    def plain_arguments(self, depth: int) -> dict[str, Any]:
        """Arguments of stock `generate` with which every token runs `depth` loops.

        Raises:
            ValueError: the model has none for this depth.
        """
        if depth != self.full_depth:
            raise ValueError(
                f"max_depth={depth}: stock generation of {type(self.model).__name__} runs {self.full_depth} loops and "
                "no other number. Leave max_depth out."
            )
        return {}

    def gate_logits(self, state: torch.Tensor) -> torch.Tensor:
        """Logit of leaving, `[...]` of a state `[..., width]`, at least float32."""
        raise TypeError(f"{type(self.model).__name__} has no exit gate.")

    def set_gate(self, weight: torch.Tensor, bias: torch.Tensor) -> None:
        """Give the model's own gate these parameters: `[width]` and a scalar."""
        raise TypeError(f"{type(self.model).__name__} has no exit gate.")

    @abstractmethod
    def parameter_counts(self) -> tuple[int, int]:
        """Parameters that run once per token (prelude, coda, head; an embedding lookup is free), and per loop."""

    def coda_parameter_count(self) -> int:
        """Parameters of the layers after the loop and the head; default all that run once."""
        return self.parameter_counts()[0]

    def coda_layers_share(self) -> float:
        """Of the parameters after the loop, those that every token of a prompt runs; the head runs on its last one."""
        if not self.coda_layers:
            return 0.0
        head = count_parameters(self.model.get_output_embeddings())
        return max(0.0, 1 - head / self.coda_parameter_count())


def count_parameters(*modules: nn.Module | None) -> int:
    """Parameters of `modules`, each counted once a module."""
    return sum(parameter.numel() for module in modules if module is not None for parameter in module.parameters())


def register_adapter(model_type: str) -> Callable[[type[LoopAdapter]], type[LoopAdapter]]:
    """Class decorator: use this adapter for models whose config has `model_type`.

    Registering a type again replaces its adapter.
    """

    def register(cls: type[LoopAdapter]) -> type[LoopAdapter]:
        cls.model_type = model_type
        _ADAPTERS[model_type] = cls
        return cls

    return register


def adapter_for(model: nn.Module) -> LoopAdapter:
    """An adapter of `model`; of the one inside, where PEFT has wrapped it.

    Raises:
        ValueError: no adapter is registered for the model's type.
    """
    if hasattr(model, "get_base_model"):
        model = model.get_base_model()
    model_type = getattr(getattr(model, "config", None), "model_type", None)
    if model_type not in _ADAPTERS:
        raise ValueError(
            f"{type(model).__name__} (model_type={model_type!r}) is not known as a looped model; known are "
            f"{', '.join(sorted(_ADAPTERS))}. Write a LoopAdapter and decorate it with "
            f"@hf_cdb.register_adapter({model_type!r}), or generate without cdb."
        )
    return _ADAPTERS[model_type](model)
