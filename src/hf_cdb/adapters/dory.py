"""Dory, a looped model that ships with Transformers: fixed loops, no gate, sliding and full attention layers."""

from typing import Any

import torch

from .base import LoopAdapter, count_parameters, register_adapter
from .head import apply_head

__all__ = ["DoryAdapter"]


@register_adapter("dory")
class DoryAdapter(LoopAdapter):
    """Runs dory's own layers in the order of its forward: input section, loops, output section.

    `recurrent_kv_cache_mode="last_loop"` keeps the last loop's keys only, which is the policy `shared`.
    """

    def __init__(self, model):
        super().__init__(model)
        config = model.config
        self.prelude_layers = config.n_input_layers
        self.core_layers = config.n_recurrent_layers
        self.coda_layers = config.n_output_layers
        self.kv_heads, self.head_dim = config.num_key_value_heads, config.head_dim
        self.vocab_size = config.vocab_size
        self.full_depth = config.n_recurrent_loops
        self.default_kv_policy = "shared" if config.recurrent_kv_cache_mode == "last_loop" else "last_exited"

    def layer_inputs(self, position_ids: torch.Tensor, cache: Any, **extra) -> dict[str, Any]:
        body = self.model.model
        like = torch.empty(0, dtype=self.dtype, device=position_ids.device)
        kinds = {layer.attention_type for layer in body.layers}
        embeddings = {kind: body.rotary_emb(like, position_ids, kind) for kind in kinds}
        return {"position_embeddings": embeddings, "attention_mask": None, "cache": cache, **extra}

    def _run(self, layers, state, layer_inputs):
        embeddings = layer_inputs["position_embeddings"]
        masks = layer_inputs["attention_mask"]
        for layer in layers:
            kind = layer.attention_type
            mask = masks[kind] if isinstance(masks, dict) else masks
            state = layer(state, **{**layer_inputs, "position_embeddings": embeddings[kind], "attention_mask": mask})
        return state

    def _sections(self):
        layers = self.model.model.layers
        coda = self.prelude_layers + self.core_layers
        return layers[: self.prelude_layers], layers[self.prelude_layers : coda], layers[coda:]

    def prelude(self, input_ids, inputs_embeds, layer_inputs):
        state = self.model.model.embed_tokens(input_ids) if inputs_embeds is None else inputs_embeds
        return self._run(self._sections()[0], state, layer_inputs)

    def loop(self, state, embeds, layer_inputs):
        norm = self.model.model.norm
        return self._run(self._sections()[1], norm(state) + norm(embeds), layer_inputs)

    def coda(self, state, layer_inputs, keep=None):
        state = self._run(self._sections()[2], state, layer_inputs)[0]
        return apply_head(self.model.lm_head, self.model.model.norm(state if keep is None else state[keep]))

    def parameter_counts(self):
        prelude, core, coda = self._sections()
        return count_parameters(prelude, coda, self.model.lm_head), count_parameters(core)

    def coda_parameter_count(self):
        return count_parameters(self._sections()[2], self.model.lm_head)
