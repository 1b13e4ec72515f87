from .configuration_huginn import HuginnConfig
from .modeling_huginn import HuginnCausalLMOutput, HuginnPreTrainedModel, RavenForCausalLM

__all__ = ["HuginnCausalLMOutput", "HuginnConfig", "HuginnPreTrainedModel", "RavenForCausalLM"]
