"""Ouro: no prelude or coda layers; the state is normed by the loop itself."""

from typing import Any

import torch

from .base import LoopAdapter, count_parameters, register_adapter
from .head import apply_head
from .rotary import RotaryTable

__all__ = ["OuroAdapter"]


@register_adapter("ouro")
class OuroAdapter(LoopAdapter):
    has_gate = True
    reads_embeds = False

    def __init__(self, model):
        super().__init__(model)
        config = model.config
        self.core_layers = config.num_hidden_layers
        self.kv_heads, self.head_dim = config.num_key_value_heads, config.head_dim
        self.vocab_size = config.vocab_size
        self.full_depth = config.total_ut_steps
        self.default_threshold = config.early_exit_threshold
        self._rotary = RotaryTable(model.model.rotary_emb, self.dtype)

    def layer_inputs(self, position_ids: torch.Tensor, cache: Any, **extra) -> dict[str, Any]:
        return {"position_embeddings": self._rotary(position_ids), "cache": cache, **extra}

    def prelude(self, input_ids, inputs_embeds, layer_inputs):
        return self.model.prelude(input_ids, inputs_embeds)

    def loop(self, state, embeds, layer_inputs):
        return self.model.loop(state, 0, **layer_inputs)

    def coda(self, state, layer_inputs, keep=None):
        state = state[0] if keep is None else state[0, keep]
        return apply_head(self.model.lm_head, state)

    def plain_arguments(self, depth):
        return {"exit_at_step": depth - 1}

    def gate_logits(self, state):
        return self.model.model.early_exit_gate(state).squeeze(-1)

    @torch.no_grad()
    def set_gate(self, weight, bias):
        gate = self.model.model.early_exit_gate
        gate.weight.copy_(weight[None])
        gate.bias.copy_(bias)

    def parameter_counts(self):
        body = self.model.model
        return count_parameters(self.model.lm_head, body.early_exit_gate), count_parameters(body.layers, body.norm)
