from .huginn import HuginnCausalLMOutput, HuginnConfig, RavenForCausalLM
from .ouro import OuroCausalLMOutput, OuroConfig, OuroForCausalLM, OuroModel, OuroModelOutput
from .registration import register_models

__all__ = [
    "HuginnCausalLMOutput",
    "HuginnConfig",
    "OuroCausalLMOutput",
    "OuroConfig",
    "OuroForCausalLM",
    "OuroModel",
    "OuroModelOutput",
    "RavenForCausalLM",
    "register_models",
]
