"""Huginn (arXiv 2502.05171) as a native Transformers model: prelude, a core run several times, coda."""

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import initialization as init
from transformers.cache_utils import Cache, DynamicCache
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_outputs import CausalLMOutputWithPast
from transformers.modeling_utils import slice_logits_to_keep
from transformers.utils.generic import merge_with_config_defaults
from transformers.utils.output_capturing import capture_outputs

from ..arguments import as_number, check_forward_kwargs, check_labels
from ..attention import attend
from ..inputs import accepts_past_key_values, embed_inputs, resolve_mask, resolve_positions
from ..loop_slots import prepare_loop_slots
from ..norm import LoopRMSNorm
from ..pretrained import LoopedGenerationMixin, LoopedPreTrainedModel
from ..rope import LoopRotaryEmbedding, rotate_pairs
from .configuration_huginn import HuginnConfig
from .loop_count import draw_num_steps, parse_num_steps
from .start_state import random_start_state

__all__ = ["HuginnCausalLMOutput", "HuginnPreTrainedModel", "RavenForCausalLM"]


@dataclass
class HuginnCausalLMOutput(CausalLMOutputWithPast):
    """Output of `RavenForCausalLM`.

    Attributes:
        loss: cross-entropy, with `labels`.
        logits: `[batch, kept positions, padded_vocab_size]`.
        cache: keys and values; slots: prelude layers, coda layers, then the core layers of loop 1, 2, ...
        hidden_states: with `output_hidden_states`, the scaled embedding and the output of every layer in the order
            they run.
        attentions: with `output_attentions`, the weights of every layer in that order.
        latent_states: `[batch, positions, n_embd]`, the normed state after the last loop.
    """

    latent_states: torch.Tensor | None = None


class HuginnAttention(nn.Module):
    """Causal self-attention with fused projections and a bias on queries and keys; `layer_idx` is its cache slot."""

    def __init__(self, config: HuginnConfig, layer_idx: int):
        super().__init__()
        self.config = config
        self.layer_idx = layer_idx
        self.head_dim = config.head_dim
        self.num_key_value_groups = 1
        self.scaling = config.head_dim**-0.5
        self.is_causal = True
        self.Wqkv = nn.Linear(config.n_embd, 3 * config.n_embd, bias=False)
        self.proj = nn.Linear(config.n_embd, config.n_embd, bias=False)
        self.proj.init_value = "out_proj"
        if config.qk_bias:
            self.qk_bias = nn.Parameter(torch.zeros(2, 1, config.n_heads, config.head_dim))
        else:
            self.register_parameter("qk_bias", None)

    def forward(
        self,
        hidden_states: torch.Tensor,
        position_embeddings: tuple[torch.Tensor, torch.Tensor],
        attention_mask: Any = None,
        cache: Cache | None = None,
        cache_offset: int = 0,
        **kwargs,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        batch, length = hidden_states.shape[:2]
        query, key, value = self.Wqkv(hidden_states).view(batch, length, 3, -1, self.head_dim).unbind(2)
        if self.qk_bias is not None:
            query, key = query + self.qk_bias[0], key + self.qk_bias[1]
        query, key, value = (x.transpose(1, 2) for x in (query, key, value))
        query, key = rotate_pairs(query, *position_embeddings), rotate_pairs(key, *position_embeddings)
        if cache is not None:
            key, value = cache.update(key, value, self.layer_idx + cache_offset, kwargs=kwargs)
        output, weights = attend(self, query, key, value, attention_mask, dropout=0.0, **kwargs)
        return self.proj(output.reshape(batch, length, -1)), weights


class HuginnMLP(nn.Module):
    """`proj(silu(gate) * up)` with gate and up as the two halves of one projection."""

    def __init__(self, config: HuginnConfig):
        super().__init__()
        self.fc = nn.Linear(config.n_embd, 2 * config.intermediate_size, bias=False)
        self.proj = nn.Linear(config.intermediate_size, config.n_embd, bias=False)
        self.proj.init_value = "out_proj"

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gate, up = self.fc(x).chunk(2, dim=-1)
        return self.proj(nn.functional.silu(gate) * up)


class HuginnBlock(GradientCheckpointingLayer):
    """Attention and MLP, each with a norm before it and a norm around the sum with the state ("sandwich")."""

    def __init__(self, config: HuginnConfig, layer_idx: int):
        super().__init__()
        self.norm_1 = LoopRMSNorm(config.n_embd, config.norm_eps)
        self.attn = HuginnAttention(config, layer_idx)
        self.norm_2 = LoopRMSNorm(config.n_embd, config.norm_eps)
        self.norm_3 = LoopRMSNorm(config.n_embd, config.norm_eps)
        self.mlp = HuginnMLP(config)
        self.norm_4 = LoopRMSNorm(config.n_embd, config.norm_eps)

    def forward(self, hidden_states: torch.Tensor, **kwargs) -> torch.Tensor:
        attended, _ = self.attn(self.norm_1(hidden_states), **kwargs)
        hidden_states = self.norm_2(attended + hidden_states)
        return self.norm_4(self.mlp(self.norm_3(hidden_states)) + hidden_states)


class HuginnPreTrainedModel(LoopedPreTrainedModel):
    """Loading, saving and the library's flags."""

    config: HuginnConfig
    base_model_prefix = "model"  # the class is its own base model; no parameter name starts with this
    _no_split_modules = ["HuginnBlock"]  # noqa: RUF012 (flags by the library's convention)
    _keep_in_fp32_modules_strict = ["freqs_cis"]  # noqa: RUF012
    _can_record_outputs = {"hidden_states": HuginnBlock, "attentions": HuginnAttention}  # noqa: RUF012

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        super()._init_weights(module)
        values = self.config.init_values
        if isinstance(module, nn.Embedding):
            init.normal_(module.weight, std=values["embedding"])
        elif isinstance(module, nn.Linear):
            # The library visits modules with parameters of their own only, so a layer cannot speak for its parts.
            init.normal_(module.weight, std=values[getattr(module, "init_value", "std")])
        elif isinstance(module, HuginnAttention) and module.qk_bias is not None:
            init.zeros_(module.qk_bias)
        elif isinstance(module, RavenForCausalLM):
            init.copy_(module.freqs_cis, module.compute_freqs_cis())


class RavenForCausalLM(LoopedGenerationMixin, HuginnPreTrainedModel):
    """Huginn with its language modelling head, under the published class name.

    The stages `prelude`, `start`, `loop` and `coda` together are the forward; an engine that advances rows one loop at
    a time calls the same four.

    The start state is zero unless `init_scale` asks for noise. The published code draws noise in every call; only
    without it, or with noise that depends on the position alone as here, does a cached pass equal an uncached one.
    """

    _tied_weights_keys = {"lm_head.weight": "transformer.wte.weight"}  # noqa: RUF012
    # The MLPs hold most of the parameters. Attention stays whole on every rank: 55 heads divide by 5 and 11 only.
    _tp_plan = {  # noqa: RUF012
        "lm_head": "colwise_gather_output",
        "transformer.prelude.*.mlp.fc": "packed_colwise",
        "transformer.prelude.*.mlp.proj": "rowwise",
        "transformer.core_block.*.mlp.fc": "packed_colwise",
        "transformer.core_block.*.mlp.proj": "rowwise",
        "transformer.coda.*.mlp.fc": "packed_colwise",
        "transformer.coda.*.mlp.proj": "rowwise",
    }

    def __init__(self, config: HuginnConfig):
        super().__init__(config)
        prelude, core = config.n_layers_in_prelude, config.n_layers_in_recurrent_block
        outside = prelude + config.n_layers_in_coda
        self.transformer = nn.ModuleDict(
            {
                "wte": nn.Embedding(config.padded_vocab_size, config.n_embd),
                "prelude": nn.ModuleList([HuginnBlock(config, idx) for idx in range(prelude)]),
                "adapter": nn.Linear(2 * config.n_embd, config.n_embd, bias=False),
                "core_block": nn.ModuleList([HuginnBlock(config, outside + idx) for idx in range(core)]),
                "coda": nn.ModuleList([HuginnBlock(config, idx) for idx in range(prelude, outside)]),
                "ln_f": LoopRMSNorm(config.n_embd, config.norm_eps),
            }
        )
        self.lm_head = nn.Linear(config.n_embd, config.padded_vocab_size, bias=False)
        self.rotary_emb = LoopRotaryEmbedding(config)
        # Part of the published checkpoint layout, so it is loaded and saved. Angles do not come from it: it may be
        # rounded to bfloat16 in the file.
        self.freqs_cis = nn.Buffer(self.compute_freqs_cis(), persistent=True)
        self.gradient_checkpointing = False
        self.post_init()

    def compute_freqs_cis(self) -> torch.Tensor:
        """The published table of cosines and sines, float32 `[1, block_size, 1, head_dim / 2, 2]`."""
        inv_freq, _ = LoopRotaryEmbedding.compute_default_rope_parameters(self.config)
        angles = torch.outer(torch.arange(self.config.block_size, dtype=torch.float32), inv_freq)
        return torch.stack((angles.cos(), angles.sin()), dim=-1)[None, :, None]

    def get_input_embeddings(self) -> nn.Embedding:
        return self.transformer.wte

    def set_input_embeddings(self, value: nn.Embedding) -> None:
        self.transformer.wte = value

    def resize_token_embeddings(self, *args, **kwargs) -> nn.Embedding:
        embedding = super().resize_token_embeddings(*args, **kwargs)
        self.config.padded_vocab_size = embedding.num_embeddings
        return embedding

    def prelude(
        self,
        input_ids: torch.Tensor | None = None,
        inputs_embeds: torch.Tensor | None = None,
        **layer_inputs,
    ) -> torch.Tensor:
        """The state `[batch, positions, n_embd]` that every loop is given beside its own.

        Args:
            input_ids: integer `[batch, positions]`, or
            inputs_embeds: `[batch, positions, n_embd]`, as `get_input_embeddings()` returns it (scaled here).
            **layer_inputs: as in `loop`.
        """
        return self._run_prelude(self._embed(input_ids, inputs_embeds), **layer_inputs)

    def start(
        self,
        embeds: torch.Tensor,
        position_ids: torch.Tensor,
        init_scale: float | None = None,
        init_seed: int | torch.Tensor | None = None,
    ) -> torch.Tensor:
        """The state before loop 1, `[batch, positions, n_embd]`: zeros, or noise where `init_scale` is above 0.

        Args:
            embeds: what `prelude` returned, for shape, dtype and device.
            position_ids: int64 `[batch or 1, positions]`, padding not counted.
            init_scale: factor on noise of standard deviation `sqrt(2 / 5)`; default `config.init_scale`.
            init_seed: an integer, or int64 `[batch]`, one per row, or `[batch, positions]`; default
                `config.init_seed`.
        """
        scale = as_number("init_scale", self.config.init_scale if init_scale is None else init_scale)
        if scale < 0:
            raise ValueError(f"init_scale={init_scale!r} is no scale: choose 0 (start at zero) or more.")
        if scale == 0:
            return torch.zeros_like(embeds)
        seed = self.config.init_seed if init_seed is None else init_seed
        seeds = torch.as_tensor(seed, device=embeds.device)
        if seeds.is_floating_point() or seeds.dtype == torch.bool:
            raise ValueError(f"init_seed={init_seed!r} is no seed: pass an integer, or a tensor of them, one per row.")
        seeds = seeds.long()
        seeds = seeds if seeds.ndim == 2 else seeds.reshape(-1, 1)
        if seeds.shape[0] not in (1, embeds.shape[0]) or seeds.shape[1] not in (1, embeds.shape[1]):
            raise ValueError(
                f"init_seed has {seeds.numel()} values, but the input has {embeds.shape[0]} rows. Pass one seed, or "
                "one per row."
            )
        # sqrt(2 / (5 n)) of the fresh weights times the embedding's factor sqrt(n): the scale of an embedding.
        std = scale * math.sqrt(2 / 5)
        noise = random_start_state(seeds, position_ids, self.config.n_embd, std)
        return noise.to(embeds.dtype).expand_as(embeds)

    def loop(self, state: torch.Tensor, embeds: torch.Tensor, loop_idx: int, **layer_inputs) -> torch.Tensor:
        """Run adapter and core once: `[batch, positions, n_embd]` to the same.

        Args:
            state: what `start` or the loop before returned.
            embeds: what `prelude` returned.
            loop_idx: number of the loop, from 0; keys and values go to the cache slots of this loop.
            **layer_inputs: `position_embeddings` from `rotary_emb`, `attention_mask` in the form that the attention
                implementation reads, `cache`, and what else the attention function takes.
        """
        state = self.transformer.adapter(torch.cat((state, embeds), dim=-1))
        offset = loop_idx * len(self.transformer.core_block)
        for block in self.transformer.core_block:
            state = block(state, cache_offset=offset, **layer_inputs)
        return state

    def coda(self, state: torch.Tensor, keep: torch.Tensor | None = None, **layer_inputs) -> torch.Tensor:
        """Logits `[batch, kept positions, padded_vocab_size]` of a state after any loop.

        Args:
            state: what `loop` returned.
            keep: int64 positions to give logits for, default all; the coda's layers see every position.
            **layer_inputs: as in `loop`.
        """
        hidden = self._run_coda(self.transformer.ln_f(state), **layer_inputs)
        return self.lm_head(hidden if keep is None else hidden[:, keep])

    def _embed(self, input_ids: torch.Tensor | None, inputs_embeds: torch.Tensor | None) -> torch.Tensor:
        embeds = embed_inputs(self.transformer.wte, input_ids, inputs_embeds)
        return embeds * self.config.init_values["embed_scale"]

    def _run_prelude(self, embeds: torch.Tensor, **layer_inputs) -> torch.Tensor:
        for block in self.transformer.prelude:
            embeds = block(embeds, **layer_inputs)
        return embeds

    def _run_coda(self, latents: torch.Tensor, **layer_inputs) -> torch.Tensor:
        for block in self.transformer.coda:
            latents = block(latents, **layer_inputs)
        return self.transformer.ln_f(latents)

    @accepts_past_key_values
    @merge_with_config_defaults
    @capture_outputs
    def forward(
        self,
        input_ids: torch.LongTensor | None = None,
        attention_mask: Any = None,
        position_ids: torch.LongTensor | None = None,
        cache: Cache | None = None,
        inputs_embeds: torch.Tensor | None = None,
        labels: torch.LongTensor | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int | torch.Tensor = 0,
        num_steps: int | torch.Tensor | tuple[int, int] | None = None,
        init_scale: float | None = None,
        init_seed: int | torch.Tensor | None = None,
        input_states: torch.Tensor | None = None,
        **kwargs,
    ) -> HuginnCausalLMOutput:
        """Next-token logits after `num_steps` loops.

        Args:
            input_ids: integer `[batch, positions]`; or `inputs_embeds`.
            attention_mask: 2-D `[batch, cached + new positions]`, true or 1 where there is a token; or prepared 4-D
                `[batch or 1, heads or 1, queries, keys]`: bool or 0/1 (true: attend), or floating and additive.
            position_ids: `[positions]`, `[1, positions]` or `[batch, positions]`; default the count of tokens in a
                2-D mask, so left padding shifts nothing, else counted on from the cache.
            cache: a `Cache`, updated in place; it gets one slot per loop and core layer. Also under the older name
                `past_key_values`.
            inputs_embeds: `[batch, positions, n_embd]`, as `get_input_embeddings()` returns it.
            labels: int64 `[batch, positions]`, -100 where nothing is to be predicted; shifted here.
            use_cache: make a cache where none is given; default `config.use_cache`.
            logits_to_keep: last positions to give logits for, 0 for all; or a tensor of positions.
            num_steps: loops, an integer or a tensor of one; or a pair (loops without, loops with gradient). Default
                `config.mean_recurrence`; in training mode with `labels` a random pair, see `sample_num_steps`.
            init_scale: scale of a random start state; default `config.init_scale`, 0: start at zero.
            init_seed: seed of that state, an integer or int64 `[batch]`; default `config.init_seed`. The noise of a
                token depends on its seed and its position, padding not counted, and on nothing else.
            input_states: `[batch, positions, n_embd]`, the start state itself.

        Raises:
            ValueError: a number of loops below one, two start states at once, or inputs that do not fit.
            TypeError: an unknown keyword argument.
        """
        check_forward_kwargs(self, kwargs, ("num_steps", "init_scale", "init_seed", "input_states", "cache", "labels"))
        check_labels(labels, input_ids, inputs_embeds, logits_to_keep)
        if num_steps is not None:
            without_gradient, with_gradient = parse_num_steps(num_steps)
        elif self.training and labels is not None:
            without_gradient, with_gradient = self.sample_num_steps()
        else:
            without_gradient, with_gradient = 0, self.config.mean_recurrence
        loops = without_gradient + with_gradient

        embeds = self._embed(input_ids, inputs_embeds)
        if use_cache and cache is None:
            cache = DynamicCache(config=self.config)
        if cache is not None:
            core = self.transformer.core_block
            first = core[0].attn.layer_idx
            prepare_loop_slots(cache, len(embeds), first, len(core), loops, built_with=self.config.n_layers)
        position_ids = resolve_positions(embeds, attention_mask, position_ids, cache)
        layer_inputs = {
            "attention_mask": resolve_mask(self.config, embeds, attention_mask, position_ids, cache),
            "position_embeddings": self.rotary_emb(embeds, position_ids=position_ids),
            "position_ids": position_ids,
            "cache": cache,
            **kwargs,
        }

        embeds = self._run_prelude(embeds, **layer_inputs)
        if input_states is None:
            state = self.start(embeds, position_ids, init_scale, init_seed)
        else:
            state = self._check_input_states(input_states, embeds, init_scale)
        for loop_idx in range(loops):
            with torch.set_grad_enabled(torch.is_grad_enabled() and loop_idx >= without_gradient):
                state = self.loop(state, embeds, loop_idx, **layer_inputs)
        latents = self.transformer.ln_f(state)
        hidden = slice_logits_to_keep(self._run_coda(latents, **layer_inputs), logits_to_keep)
        logits = self.lm_head(hidden)

        loss = None
        if labels is not None:
            loss = self.loss_function(logits, labels, vocab_size=self.config.padded_vocab_size, **kwargs)
        return HuginnCausalLMOutput(loss=loss, logits=logits, cache=cache, latent_states=latents)

    def sample_num_steps(self) -> tuple[int, int]:
        """Random loops (without, with gradient) of a training step, for this model's config."""
        return draw_num_steps(self.config.mean_recurrence, self.config.mean_backprop_depth)

    def _check_input_states(
        self, input_states: torch.Tensor, embeds: torch.Tensor, init_scale: float | None
    ) -> torch.Tensor:
        if init_scale:
            raise ValueError(
                f"input_states and init_scale={init_scale} contradict each other: both set the start state. Pass one."
            )
        if input_states.shape != embeds.shape:
            raise ValueError(
                f"input_states has shape {tuple(input_states.shape)}, but {tuple(embeds.shape)} is needed: a state for "
                "every new position. For `generate`, which feeds one token at a time, use init_scale and init_seed."
            )
        return input_states.to(device=embeds.device, dtype=embeds.dtype)

    def _prepare_generation_config(self, *args, **kwargs):
        if kwargs.get("num_steps") is not None:
            kwargs["num_steps"] = sum(parse_num_steps(kwargs["num_steps"]))
        return super()._prepare_generation_config(*args, **kwargs)

    def state_dict(self, *args, **kwargs) -> dict[str, Any]:
        """As always; the published table is kept as narrow as it was loaded, so that saving keeps its bits."""
        state = super().state_dict(*args, **kwargs)
        for key in [key for key in state if key.endswith("freqs_cis")]:
            narrow = state[key].to(self.dtype)
            if not narrow.is_meta and torch.equal(narrow.to(state[key].dtype), state[key]):
                state[key] = narrow
        return state
