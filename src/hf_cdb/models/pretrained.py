"""What the model classes of both families share as Transformers models."""

from transformers.modeling_utils import PreTrainedModel

__all__ = ["LoopedPreTrainedModel"]


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
