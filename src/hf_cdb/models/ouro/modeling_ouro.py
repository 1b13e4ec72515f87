"""Ouro (arXiv 2510.25741) as a native Transformers model: one stack of layers, run several times per token."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers.activations import ACT2FN
from transformers.cache_utils import Cache, DynamicCache
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_outputs import BaseModelOutputWithPast, CausalLMOutputWithPast
from transformers.modeling_utils import slice_logits_to_keep
from transformers.utils import can_return_tuple
from transformers.utils.generic import merge_with_config_defaults
from transformers.utils.output_capturing import capture_outputs

from ..arguments import as_integer, as_number, check_forward_kwargs, check_labels
from ..attention import attend
from ..inputs import accepts_past_key_values, embed_inputs, resolve_mask, resolve_positions
from ..loop_slots import prepare_loop_slots
from ..norm import LoopRMSNorm
from ..pretrained import LoopedGenerationMixin, LoopedPreTrainedModel
from ..rope import LoopRotaryEmbedding, rotate_halves
from .configuration_ouro import OuroConfig
from .exit_distribution import ExitGate, exit_probabilities, first_step_reaching
from .objective import expected_exit_loss

__all__ = ["OuroCausalLMOutput", "OuroForCausalLM", "OuroModel", "OuroModelOutput", "OuroPreTrainedModel"]


@dataclass
class OuroModelOutput(BaseModelOutputWithPast):
    """Output of `OuroModel`.

    Attributes:
        last_hidden_state: `[batch, positions, width]`, normed, after the last loop run.
        cache: keys and values, slot `loop * num_hidden_layers + layer` with loops from 0.
        hidden_states: with `output_hidden_states`, the embedding and the output of every layer of every loop, the
            last one replaced by `last_hidden_state`: `1 + loops * num_hidden_layers` tensors.
        attentions: with `output_attentions`, the weights of every layer of every loop.
        gate_logits: `[batch, positions, loops]`, at least float32.
        loop_states: with `output_loop_states`, the normed state after every loop.
    """

    gate_logits: torch.Tensor | None = None
    loop_states: tuple[torch.Tensor, ...] | None = None


@dataclass
class OuroCausalLMOutput(CausalLMOutputWithPast):
    """Output of `OuroForCausalLM`; `cache`, `hidden_states`, `attentions` as in `OuroModelOutput`.

    Attributes:
        loss: with `labels`, see `OuroForCausalLM.forward`.
        logits: `[batch, kept positions, vocab]`.
        gate_logits: `[batch, positions, loops]`, at least float32: `sigmoid` of it is the hazard of leaving there.
        exit_pdf: `[batch, positions, loops]`, probability of leaving after each loop.
        exit_steps: int64 `[batch, positions]`, the step, from 0, whose state gave the logits of the position; None
            for `use_weighted_exit`, where every step did.
    """

    gate_logits: torch.Tensor | None = None
    exit_pdf: torch.Tensor | None = None
    exit_steps: torch.Tensor | None = None


class OuroAttention(nn.Module):
    """Causal self-attention; `layer_idx` is the cache slot in the first loop."""

    def __init__(self, config: OuroConfig, layer_idx: int):
        super().__init__()
        self.config = config
        self.layer_idx = layer_idx
        self.head_dim = config.head_dim
        self.num_key_value_groups = config.num_attention_heads // config.num_key_value_heads
        self.scaling = config.head_dim**-0.5
        self.is_causal = True
        query_width = config.num_attention_heads * config.head_dim
        key_width = config.num_key_value_heads * config.head_dim
        self.q_proj = nn.Linear(config.hidden_size, query_width, bias=False)
        self.k_proj = nn.Linear(config.hidden_size, key_width, bias=False)
        self.v_proj = nn.Linear(config.hidden_size, key_width, bias=False)
        self.o_proj = nn.Linear(query_width, config.hidden_size, bias=False)

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
        heads = (batch, length, -1, self.head_dim)
        query = self.q_proj(hidden_states).view(heads).transpose(1, 2)
        key = self.k_proj(hidden_states).view(heads).transpose(1, 2)
        value = self.v_proj(hidden_states).view(heads).transpose(1, 2)
        query, key = rotate_halves(query, *position_embeddings), rotate_halves(key, *position_embeddings)
        if cache is not None:
            key, value = cache.update(key, value, self.layer_idx + cache_offset, kwargs=kwargs)
        dropout = self.config.attention_dropout
        output, weights = attend(self, query, key, value, attention_mask, dropout=dropout, **kwargs)
        return self.o_proj(output.reshape(batch, length, -1)), weights


class OuroMLP(nn.Module):
    """`down(act(gate(x)) * up(x))`, without biases."""

    def __init__(self, config: OuroConfig):
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)
        self.act_fn = ACT2FN[config.hidden_act]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))


class OuroDecoderLayer(GradientCheckpointingLayer):
    """Attention and MLP, each between two norms ("sandwich"), added to the state."""

    def __init__(self, config: OuroConfig, layer_idx: int):
        super().__init__()
        self.self_attn = OuroAttention(config, layer_idx)
        self.mlp = OuroMLP(config)
        self.input_layernorm = LoopRMSNorm(config.hidden_size, config.rms_norm_eps)
        self.input_layernorm_2 = LoopRMSNorm(config.hidden_size, config.rms_norm_eps)
        self.post_attention_layernorm = LoopRMSNorm(config.hidden_size, config.rms_norm_eps)
        self.post_attention_layernorm_2 = LoopRMSNorm(config.hidden_size, config.rms_norm_eps)

    def forward(self, hidden_states: torch.Tensor, **kwargs) -> torch.Tensor:
        attended, _ = self.self_attn(self.input_layernorm(hidden_states), **kwargs)
        hidden_states = hidden_states + self.input_layernorm_2(attended)
        transformed = self.mlp(self.post_attention_layernorm(hidden_states))
        return hidden_states + self.post_attention_layernorm_2(transformed)


class OuroPreTrainedModel(LoopedPreTrainedModel):
    """Loading, saving and the library's flags, common to both Ouro classes."""

    config: OuroConfig
    base_model_prefix = "model"
    _no_split_modules = ["OuroDecoderLayer"]  # noqa: RUF012 (flags by the library's convention)
    _can_record_outputs = {"hidden_states": OuroDecoderLayer, "attentions": OuroAttention}  # noqa: RUF012


class OuroModel(OuroPreTrainedModel):
    """The looped stack without a head.

    `prelude` and `loop` are the stages that `forward` is made of; an engine that advances rows one loop at a time
    calls the same two.
    """

    def __init__(self, config: OuroConfig):
        super().__init__(config)
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size, config.pad_token_id)
        self.layers = nn.ModuleList([OuroDecoderLayer(config, idx) for idx in range(config.num_hidden_layers)])
        self.norm = LoopRMSNorm(config.hidden_size, config.rms_norm_eps)
        self.rotary_emb = LoopRotaryEmbedding(config)
        self.early_exit_gate = ExitGate(config.hidden_size)
        self.gradient_checkpointing = False
        self.post_init()

    def prelude(self, input_ids: torch.Tensor | None = None, inputs_embeds: torch.Tensor | None = None) -> torch.Tensor:
        """The state before loop 1: the embeddings `[batch, positions, width]`.

        Args:
            input_ids: integer `[batch, positions]`, or
            inputs_embeds: `[batch, positions, width]`.
        """
        return embed_inputs(self.embed_tokens, input_ids, inputs_embeds)

    def loop(
        self,
        state: torch.Tensor,
        loop_idx: int,
        *,
        position_embeddings: tuple[torch.Tensor, torch.Tensor],
        attention_mask: Any = None,
        cache: Cache | None = None,
        **kwargs,
    ) -> torch.Tensor:
        """Run the stack and the final norm once: `[batch, positions, width]` to the same.

        The result is the next loop's input and what the gate and the head read.

        Args:
            state: what `prelude` or the loop before returned.
            loop_idx: number of the loop, from 0; keys and values go to the cache slots of this loop.
            position_embeddings: cosines and sines from `rotary_emb`, the same in every loop.
            attention_mask: in the form that the attention implementation reads.
            cache: updated in place.
            **kwargs: handed to the attention function and to `cache.update`.
        """
        for layer in self.layers:
            state = layer(
                state,
                position_embeddings=position_embeddings,
                attention_mask=attention_mask,
                cache=cache,
                cache_offset=loop_idx * len(self.layers),
                **kwargs,
            )
        return self.norm(state)

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
        use_cache: bool | None = None,
        loops: int | None = None,
        output_loop_states: bool = False,
        **kwargs,
    ) -> OuroModelOutput:
        """Run `loops` loops over all positions.

        Args:
            input_ids, attention_mask, position_ids, cache, inputs_embeds, use_cache: as in `OuroForCausalLM.forward`.
            loops: loops to run, from 1; default `config.total_ut_steps`.
            output_loop_states: return the state after every loop.
        """
        check_forward_kwargs(self, kwargs, ("loops", "output_loop_states", "cache", "use_cache"))
        most = self.config.total_ut_steps
        loops = most if loops is None else as_integer("loops", loops)
        if not 1 <= loops <= most:
            raise ValueError(f"loops={loops}, but this model runs 1 to total_ut_steps={most} loops.")
        state = self.prelude(input_ids, inputs_embeds)
        if use_cache and cache is None:
            cache = DynamicCache(config=self.config)
        if cache is not None:
            prepare_loop_slots(cache, len(state), 0, len(self.layers), loops, built_with=len(self.layers))
        position_ids = resolve_positions(state, attention_mask, position_ids, cache)
        mask = resolve_mask(self.config, state, attention_mask, position_ids, cache)
        position_embeddings = self.rotary_emb(state, position_ids=position_ids)

        gate_logits, loop_states = [], []
        for loop_idx in range(loops):
            state = self.loop(
                state,
                loop_idx,
                position_embeddings=position_embeddings,
                attention_mask=mask,
                cache=cache,
                position_ids=position_ids,
                **kwargs,
            )
            gate_logits.append(self.early_exit_gate(state))
            if output_loop_states:
                loop_states.append(state)
        return OuroModelOutput(
            last_hidden_state=state,
            cache=cache,
            gate_logits=torch.cat(gate_logits, dim=-1),
            loop_states=tuple(loop_states) or None,
        )


class OuroForCausalLM(LoopedGenerationMixin, OuroPreTrainedModel):
    """Ouro with its language modelling head.

    The stages `prelude`, `loop` and `coda` together are the forward at full depth.
    """

    _tied_weights_keys = {"lm_head.weight": "model.embed_tokens.weight"}  # noqa: RUF012
    _tp_plan = {"lm_head": "colwise_gather_output"}  # noqa: RUF012

    def __init__(self, config: OuroConfig):
        super().__init__(config)
        self.model = OuroModel(config)
        self.vocab_size = config.vocab_size
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    def prelude(self, *args, **kwargs) -> torch.Tensor:
        """See `OuroModel.prelude`."""
        return self.model.prelude(*args, **kwargs)

    def loop(self, *args, **kwargs) -> torch.Tensor:
        """See `OuroModel.loop`."""
        return self.model.loop(*args, **kwargs)

    def coda(self, state: torch.Tensor) -> torch.Tensor:
        """Logits `[..., vocab]` of a state `[..., width]` after any loop; the state is normed already."""
        return self.lm_head(state)

    @accepts_past_key_values
    @can_return_tuple
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
        exit_at_step: int | None = None,
        exit_threshold: float | None = None,
        use_weighted_exit: bool = False,
        **kwargs,
    ) -> OuroCausalLMOutput:
        """Next-token logits, from the last loop or from the exit that was asked for.

        `exit_at_step` runs no loop beyond the step. `exit_threshold` below 1 and `use_weighted_exit` run all loops,
        so keys and values stay those of full depth whatever the exit, as in the published model.

        Args:
            input_ids: integer `[batch, positions]`; or `inputs_embeds`.
            attention_mask: 2-D `[batch, cached + new positions]`, true or 1 where there is a token; or prepared 4-D
                `[batch or 1, heads or 1, queries, keys]`: bool or 0/1 (true: attend), or floating and additive.
            position_ids: `[positions]`, `[1, positions]` or `[batch, positions]`; default the count of tokens in a
                2-D mask, so left padding shifts nothing, else counted on from the cache.
            cache: a `Cache`, updated in place; it gets one slot per loop and layer. Also under the older name
                `past_key_values`.
            inputs_embeds: `[batch, positions, width]`.
            labels: int64 `[batch, positions]`, -100 where nothing is to be predicted; shifted here. The loss is the
                cross-entropy of the returned logits, except in training mode without an exit argument, where it is
                the objective of arXiv 2510.25741: the expectation of the loops' losses over the exit distribution
                less `config.exit_entropy_weight` times the entropy of that distribution.
            use_cache: make a cache where none is given; default `config.use_cache`.
            logits_to_keep: last positions to give logits for, 0 for all; or a tensor of positions.
            exit_at_step: step, from 0, whose state gives the logits.
            exit_threshold: in (0, 1]; the logits of a position come from the first step whose cumulative exit
                probability reaches it. 1.0 never exits early, in any dtype. Default
                `config.early_exit_threshold`, unless `config.early_exit_step` is set.
            use_weighted_exit: mean of the logits of all steps, weighted with the exit distribution; the config's
                defaults do not count against it.

        Raises:
            ValueError: an exit argument out of range, two of them at once, or inputs that do not fit each other.
            TypeError: an unknown keyword argument.
        """
        check_forward_kwargs(self, kwargs, ("exit_at_step", "exit_threshold", "use_weighted_exit", "cache", "labels"))
        check_labels(labels, input_ids, inputs_embeds, logits_to_keep)
        asked_for_exit = exit_at_step is not None or exit_threshold is not None or use_weighted_exit
        step, threshold = self._resolve_exit(exit_at_step, exit_threshold, use_weighted_exit)
        train_exits = labels is not None and self.training and not asked_for_exit
        outputs = self.model(
            input_ids=input_ids,
            attention_mask=attention_mask,
            position_ids=position_ids,
            cache=cache,
            inputs_embeds=inputs_embeds,
            use_cache=use_cache,
            loops=None if step is None or train_exits else step + 1,
            output_loop_states=use_weighted_exit or threshold < 1 or train_exits,
            return_dict=True,
            **kwargs,
        )
        pdf = exit_probabilities(outputs.gate_logits)
        if use_weighted_exit:
            steps = None
            states = self._kept_states(outputs, logits_to_keep)
            weights = slice_logits_to_keep(pdf, logits_to_keep).to(states.dtype)
            # The head is linear, so it may follow the mean in place of preceding it.
            hidden = torch.einsum("...t,...td->...d", weights, states)
        elif threshold < 1:
            steps = first_step_reaching(pdf, threshold)
            states = self._kept_states(outputs, logits_to_keep)
            kept_steps = slice_logits_to_keep(steps[..., None], logits_to_keep)[..., None]
            hidden = states.gather(-2, kept_steps.expand(*kept_steps.shape[:-1], states.shape[-1])).squeeze(-2)
        else:
            steps = first_step_reaching(pdf, 1.0)
            state = outputs.last_hidden_state
            if train_exits and step is not None:
                steps, state = torch.full_like(steps, step), outputs.loop_states[step]
            hidden = slice_logits_to_keep(state, logits_to_keep)
        logits = self.coda(hidden)

        loss = None
        if train_exits:
            loss = expected_exit_loss(
                (self.coda(slice_logits_to_keep(state, logits_to_keep)) for state in outputs.loop_states),
                slice_logits_to_keep(pdf, logits_to_keep),
                labels,
                entropy_weight=self.config.exit_entropy_weight,
                **kwargs,
            )
        elif labels is not None:
            loss = self.loss_function(logits=logits, labels=labels, vocab_size=self.config.vocab_size, **kwargs)
        return OuroCausalLMOutput(
            loss=loss,
            logits=logits,
            cache=outputs.cache,
            hidden_states=outputs.hidden_states,
            attentions=outputs.attentions,
            gate_logits=outputs.gate_logits,
            exit_pdf=pdf,
            exit_steps=steps,
        )

    def _kept_states(self, outputs: OuroModelOutput, logits_to_keep: int | torch.Tensor) -> torch.Tensor:
        """States after every loop at the kept positions, `[batch, kept, loops, width]`."""
        return torch.stack([slice_logits_to_keep(state, logits_to_keep) for state in outputs.loop_states], dim=-2)

    def _resolve_exit(
        self, exit_at_step: int | None, exit_threshold: float | None, use_weighted_exit: bool
    ) -> tuple[int | None, float]:
        """Step to stop at, or None, and threshold, from the call's arguments and the config's defaults."""
        given = {
            "exit_at_step": exit_at_step,
            "exit_threshold": exit_threshold,
            "use_weighted_exit": use_weighted_exit or None,
        }
        given = [f"{name}={value}" for name, value in given.items() if value is not None]
        if len(given) > 1:
            raise ValueError(f"{' and '.join(given)} contradict each other: each names the exit. Pass one of them.")
        if use_weighted_exit:
            return None, 1.0
        if exit_threshold is not None:
            exit_threshold = as_number("exit_threshold", exit_threshold)
            if not 0 < exit_threshold <= 1:
                raise ValueError(
                    f"exit_threshold={exit_threshold!r} is outside (0, 1]: it is compared with a cumulative "
                    "probability. Choose 1.0 to never exit early, less to exit earlier."
                )
            return None, exit_threshold
        last = self.config.total_ut_steps - 1
        if exit_at_step is not None:
            exit_at_step = as_integer("exit_at_step", exit_at_step)
            if not 0 <= exit_at_step <= last:
                raise ValueError(
                    f"exit_at_step={exit_at_step!r} does not exist: steps count from 0 and this model has "
                    f"total_ut_steps={last + 1}. Choose an integer from 0 to {last}."
                )
            return exit_at_step, 1.0
        return self.config.early_exit_step, self.config.early_exit_threshold
