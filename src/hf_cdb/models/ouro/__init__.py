from .configuration_ouro import OuroConfig
from .modeling_ouro import OuroCausalLMOutput, OuroForCausalLM, OuroModel, OuroModelOutput, OuroPreTrainedModel

__all__ = [
    "OuroCausalLMOutput",
    "OuroConfig",
    "OuroForCausalLM",
    "OuroModel",
    "OuroModelOutput",
    "OuroPreTrainedModel",
]
