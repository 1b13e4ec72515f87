"""What launches would cost on a card that is not here, from its roofline: a prediction, nothing is measured.

A launch takes as long as its arithmetic at the card's peak rate or as reading its weights, whichever is longer, and on
top of that as long as reading the keys and values that it attends to (roofline model: Williams, Waterman and Patterson,
2009). What a card reaches of its peaks, what launching costs, and attention's arithmetic are left out unless given.
"""

from dataclasses import dataclass

import torch
from transformers import AutoModelForCausalLM

from ..adapters import adapter_for
from ..cache import DepthCache
from ..kv_policy import KVPolicy
from ..models import HuginnConfig, OuroConfig
from .costs import CostTable, StageCost

__all__ = ["CARDS", "SHAPES", "Card", "Shape"]


@dataclass(frozen=True)
class Card:
    """An accelerator.

    Attributes:
        rate: multiplications and additions in bfloat16 without sparsity, a second.
        bandwidth: bytes of its memory, a second.
        memory: bytes.
    """

    rate: float
    bandwidth: float
    memory: float


# NVIDIA's data sheets of H100 SXM and H200 SXM.
CARDS = {
    "h100": Card(rate=989e12, bandwidth=3.35e12, memory=80e9),
    "h200": Card(rate=989e12, bandwidth=4.8e12, memory=141e9),
}

# Configurations of published models. Their sizes are those of the Hub: ByteDance/Ouro-1.4B, ByteDance/Ouro-2.6B,
# tomg-group-umd/huginn-0125 with the 16 loops of arXiv 2608.09444.
_CONFIGS = {
    "ouro-1.4b": OuroConfig(),
    "ouro-2.6b": OuroConfig(num_hidden_layers=48),
    "huginn-0125": HuginnConfig(mean_recurrence=16),
}
SHAPES = tuple(_CONFIGS)
_BYTES = 2  # of a weight, a key and a value in bfloat16


@dataclass(frozen=True)
class Shape:
    """Sizes of a model in bfloat16; see `LoopAdapter.parameter_counts` for what runs when.

    Attributes:
        weights: parameters, the embeddings too.
        prelude, loop, coda: parameters that a launch of the stage reads.
        width: of a state.
        kv_loop, kv_prelude, kv_coda: bytes of keys and values of a position that the stage's layers read.
        kv_position: bytes that a position of a request takes, all layers and slots together.
        kv_core: those of them that belong to the core.
        coda_layers_share: see `CostTable`.
    """

    full_depth: int
    weights: int
    prelude: int
    loop: int
    coda: int
    width: int
    kv_loop: int
    kv_prelude: int
    kv_coda: int
    kv_position: int
    kv_core: int
    coda_layers_share: float

    @classmethod
    def of(cls, name: str, kv_policy: str = "last_exited", kv_slots: int | None = None) -> "Shape":
        """The sizes of a published model; no weights are made.

        Args:
            name: one of `SHAPES`.
            kv_policy, kv_slots: see `CDBConfig`.

        Raises:
            ValueError: another name.
        """
        if name not in _CONFIGS:
            raise ValueError(f"model={name!r}: sizes are known of {', '.join(SHAPES)}. Name one of them.")
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(_CONFIGS[name], dtype=torch.bfloat16)
        adapter = adapter_for(model)
        cache = DepthCache(adapter, KVPolicy.create(kv_policy, adapter.full_depth, kv_slots))
        once, loop = adapter.parameter_counts()
        layer = 2 * adapter.kv_heads * adapter.head_dim * _BYTES
        outer = (adapter.prelude_layers + adapter.coda_layers) * layer
        return cls(
            adapter.full_depth,
            sum(parameter.numel() for parameter in model.parameters()),
            once - adapter.coda_parameter_count(),
            loop,
            adapter.coda_parameter_count(),
            model.get_input_embeddings().embedding_dim,
            adapter.core_layers * layer,
            adapter.prelude_layers * layer,
            adapter.coda_layers * layer,
            cache.bytes_per_position(),
            cache.bytes_per_position() - outer,
            adapter.coda_layers_share(),
        )

    def rows_that_fit(self, card: Card, positions: int, share: float) -> int:
        """Requests of so many positions whose keys and values fit beside the weights into a share of the memory."""
        left = share * card.memory - _BYTES * self.weights
        return max(0, int(left // (self.kv_position * positions)))

    def costs(self, card: Card, reached: float = 1.0, per_launch: float = 0.0) -> CostTable:
        """The cost table of this model on a card.

        Args:
            reached: share of its peaks, both of them, that the card is taken to reach.
            per_launch: seconds that every launch takes beside that.
        """
        stages = {
            "prelude": self._stage(card, reached, self.prelude, self.kv_prelude),
            "loop": self._stage(card, reached, self.loop, self.kv_loop),
            "coda": self._stage(card, reached, self.coda, self.kv_coda),
        }
        share = self.coda_layers_share
        return CostTable(self.full_depth, **stages, host_per_launch=per_launch, coda_layers_share=share)

    def _stage(self, card: Card, reached: float, parameters: int, kv_bytes: int) -> StageCost:
        rate, bandwidth = reached * card.rate, reached * card.bandwidth
        # As many rows as take as long to compute as the weights to read: beyond it arithmetic counts.
        ridge = rate * _BYTES / (2 * bandwidth)
        widths = (1.0, ridge, 2 * ridge)
        states = 2 * self.width * _BYTES / bandwidth  # read and written
        seconds = [
            max(2 * parameters * rows / rate, _BYTES * parameters / bandwidth) + rows * states for rows in widths
        ]
        return StageCost(widths, tuple(seconds), kv_bytes / bandwidth)
