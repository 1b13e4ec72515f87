"""What launches would cost on a card that is not here, from its roofline: a prediction, nothing is measured.

The linear layers of a launch take as long as their arithmetic at the card's peak rate, or as reading their weights,
whichever is longer; attention comes after them and takes as long as reading the keys and values that the rows attend to
(roofline model: Williams, Waterman and Patterson, 2009). The arithmetic of attention, what a card misses of its peaks
and what launching costs are left out unless given.
"""

from dataclasses import dataclass

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from ..adapters import adapter_for
from ..cache import DepthCache
from ..checkpoints import model_path
from ..config import CDBConfig
from ..kv_policy import KVPolicy
from ..models import HuginnConfig, OuroConfig
from .costs import CostTable, StageCost

__all__ = ["CARDS", "PUBLISHED", "Card", "Shape"]

_BYTES = 2  # of a weight, a state, a key and a value in bfloat16


@dataclass(frozen=True)
class Card:
    """An accelerator.

    Attributes:
        rate: floating-point operations a second, bfloat16 without sparsity; a product and its sum are two.
        bandwidth: bytes of its memory a second.
        memory: bytes.
    """

    rate: float
    bandwidth: float
    memory: float

    @property
    def ridge(self) -> float:
        """Rows whose arithmetic takes as long as reading the weights that they share: two operations a row and weight,
        against the bytes of one."""
        return self.rate * _BYTES / (2 * self.bandwidth)


# NVIDIA's data sheets of H100 SXM5 and H200 SXM5.
CARDS = {
    "h100": Card(rate=989e12, bandwidth=3.35e12, memory=80e9),
    "h200": Card(rate=989e12, bandwidth=4.8e12, memory=141e9),
}

# ByteDance/Ouro-1.4B and tomg-group-umd/huginn-0125, which are the defaults, and ByteDance/Ouro-2.6B.
PUBLISHED = {
    "ouro-1.4b": OuroConfig(),
    "ouro-2.6b": OuroConfig(num_hidden_layers=48),
    "huginn-0125": HuginnConfig(),
}


@dataclass(frozen=True)
class Shape:
    """Sizes of a model in bfloat16 with its settings of cdb.

    Attributes:
        kv_policy: never "auto".
        full_depth: R.
        weights: parameters, all of them.
        prelude, loop, coda: parameters that a launch of the stage reads; an embedding lookup is free.
        hidden: width of a state.
        kv_loop, kv_prelude, kv_coda: bytes of keys and values that a launch of the stage reads of a position.
        kv_position: bytes that a position of a request takes, all layers and slots together.
        coda_layers_share: see `CostTable`.
    """

    kv_policy: str
    full_depth: int
    weights: int
    prelude: int
    loop: int
    coda: int
    hidden: int
    kv_loop: int
    kv_prelude: int
    kv_coda: int
    kv_position: int
    coda_layers_share: float

    @classmethod
    def of(
        cls, model: str, kv_policy: str = "auto", kv_slots: int | None = None, max_depth: int | None = None
    ) -> "Shape":
        """The sizes of a model; its configuration is read, its weights are not.

        Args:
            model: a name of `PUBLISHED`, "tiny-ouro", "tiny-huginn", a folder or a Hub id.
            kv_policy, kv_slots, max_depth: see `CDBConfig`.

        Raises:
            ValueError: settings that the model cannot follow, or a model that is not looped.
            OSError: no such folder, and no such model on the Hub.
        """
        settings = CDBConfig(exit_rule="never", kv_policy=kv_policy, kv_slots=kv_slots, max_depth=max_depth)
        config = PUBLISHED.get(model) or AutoConfig.from_pretrained(model_path(model))
        with torch.device("meta"):
            adapter = adapter_for(AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16))
        settings = settings.resolve(adapter)
        cache = DepthCache(adapter, KVPolicy.create(settings.kv_policy, settings.max_depth, settings.kv_slots))
        once, loop = adapter.parameter_counts()
        layer = 2 * adapter.kv_heads * adapter.head_dim * _BYTES
        return cls(
            kv_policy=settings.kv_policy,
            full_depth=settings.max_depth,
            weights=sum(parameter.numel() for parameter in adapter.model.parameters()),
            prelude=once - adapter.coda_parameter_count(),
            loop=loop,
            coda=adapter.coda_parameter_count(),
            hidden=adapter.model.get_input_embeddings().embedding_dim,
            kv_loop=adapter.core_layers * layer,
            kv_prelude=adapter.prelude_layers * layer,
            kv_coda=adapter.coda_layers * layer,
            kv_position=cache.bytes_per_position(),
            coda_layers_share=adapter.coda_layers_share(),
        )

    def positions_that_fit(self, card: Card, share: float) -> int:
        """Positions, of all requests together, whose keys and values fit beside the weights.

        Args:
            share: of the card's memory, for both.
        """
        return max(0, int((share * card.memory - _BYTES * self.weights) // self.kv_position))

    def costs(self, card: Card, reached: float = 1.0, per_launch: float = 0.0, per_row: float = 0.0) -> CostTable:
        """The cost table of this model on a card.

        Args:
            reached: share of its peaks, of rate and of bandwidth, that the card is taken to reach.
            per_launch, per_row: seconds that the host takes for a launch and for each of its rows while the card waits.
        """
        return CostTable(
            self.full_depth,
            prelude=self._stage(card, reached, self.prelude, self.kv_prelude),
            loop=self._stage(card, reached, self.loop, self.kv_loop),
            coda=self._stage(card, reached, self.coda, self.kv_coda),
            host_per_launch=per_launch,
            host_per_row=per_row,
            coda_layers_share=self.coda_layers_share,
        )

    def _stage(self, card: Card, reached: float, parameters: int, kv_bytes: int) -> StageCost:
        """Flat up to the ridge, then a straight line through the origin; states are read and written besides, which is
        all that a prelude without layers does."""
        widths = (1.0, card.ridge, 2 * card.ridge)
        weights, states = _BYTES * parameters, 2 * self.hidden * _BYTES
        seconds = [
            max(2 * parameters * rows / card.rate, weights / card.bandwidth) + rows * states / card.bandwidth
            for rows in widths
        ]
        return StageCost(widths, tuple(s / reached for s in seconds), kv_bytes / (reached * card.bandwidth))
