"""What the model classes of both families share as Transformers models."""

import functools

from transformers.modeling_utils import PreTrainedModel

from ..generation import CDBGenerationMixin
from ..model_checks import learns_prompts

__all__ = ["LoopedGenerationMixin", "LoopedPreTrainedModel"]


class LoopedGenerationMixin(CDBGenerationMixin):
    """`generate` of the language models."""

    @functools.wraps(CDBGenerationMixin.prepare_inputs_for_generation)  # its signature is read
    def prepare_inputs_for_generation(self, *args, **kwargs):
        inputs = super().prepare_inputs_for_generation(*args, **kwargs)
        if learns_prompts(self):
            # PEFT looks for the cache under its older name, and puts its virtual tokens in front again in every step
            # where it finds none. Positions then count what the mask keeps, those tokens included.
            inputs["past_key_values"] = inputs.pop("cache", None)
            inputs.pop("position_ids", None)
        return inputs


class LoopedPreTrainedModel(PreTrainedModel):
    """The library's flags for a decoder whose layers go through `attend`, and a last check of the config."""

    supports_gradient_checkpointing = True
    _supports_flash_attn = True
    _supports_sdpa = True
    _supports_flex_attn = True
    _can_compile_fullgraph = True
    _supports_attention_backend = True

    def __init__(self, config, *args, **kwargs):
        # Overrides of from_pretrained are set on the config after its own check.
        config.validate_architecture()
        super().__init__(config, *args, **kwargs)

    @classmethod
    def _can_set_attn_implementation(cls) -> bool:
        # The library looks for its registry in the source of the modelling file; here it is used in attention.py.
        return True
