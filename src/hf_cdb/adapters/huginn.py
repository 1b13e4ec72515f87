"""Huginn: layers before and after the loop; every loop is given the prelude's output again."""

from typing import Any

import torch

from .base import LoopAdapter, count_parameters, register_adapter
from .rotary import RotaryTable

__all__ = ["HuginnAdapter"]


@register_adapter("huginn_raven")
class HuginnAdapter(LoopAdapter):
    may_deepen = True

    def __init__(self, model):
        super().__init__(model)
        config = model.config
        self.prelude_layers = config.n_layers_in_prelude
        self.core_layers = config.n_layers_in_recurrent_block
        self.coda_layers = config.n_layers_in_coda
        self.kv_heads, self.head_dim = config.n_heads, config.head_dim
        self.vocab_size = config.padded_vocab_size
        self.full_depth = config.mean_recurrence
        self._rotary = RotaryTable(model.rotary_emb, self.dtype)

    def _layout(self):
        coda = self.prelude_layers
        core = coda + self.coda_layers
        return (
            ("prelude", 0, self.prelude_layers),
            ("coda", coda, self.coda_layers),
            ("core", core, self.core_layers),
        )

    def layer_inputs(self, position_ids: torch.Tensor, cache: Any, **extra) -> dict[str, Any]:
        return {"position_embeddings": self._rotary(position_ids), "cache": cache, **extra}

    def prelude(self, input_ids, inputs_embeds, layer_inputs):
        return self.model.prelude(input_ids, inputs_embeds, **layer_inputs)

    def start(self, embeds, position_ids, init_scale=None, init_seed=None):
        """See `RavenForCausalLM.start`; `init_seed` may be int64 `[1, tokens]`, one per token."""
        return self.model.start(embeds, position_ids, init_scale, init_seed)

    def loop(self, state, embeds, layer_inputs):
        return self.model.loop(state, embeds, 0, **layer_inputs)

    def coda(self, state, layer_inputs, keep=None):
        return self.model.coda(state, keep=keep, **layer_inputs)[0]

    def plain_arguments(self, depth):
        return {"num_steps": depth}

    def parameter_counts(self):
        parts = self.model.transformer
        once = count_parameters(parts["prelude"], parts["coda"], parts["ln_f"], self.model.lm_head)
        return once, count_parameters(parts["adapter"], parts["core_block"])

    def coda_parameter_count(self):
        parts = self.model.transformer
        return count_parameters(parts["coda"], parts["ln_f"], self.model.lm_head)
