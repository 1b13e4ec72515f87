"""Adaptive-depth inference of looped language models inside Hugging Face Transformers.

Importing the package registers Ouro and Huginn with the Auto classes:

    import hf_cdb
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained("path/to/checkpoint")
"""

from importlib.metadata import version

from .models import (
    HuginnCausalLMOutput,
    HuginnConfig,
    OuroCausalLMOutput,
    OuroConfig,
    OuroForCausalLM,
    OuroModel,
    OuroModelOutput,
    RavenForCausalLM,
    register_models,
)

__all__ = [
    "HuginnCausalLMOutput",
    "HuginnConfig",
    "OuroCausalLMOutput",
    "OuroConfig",
    "OuroForCausalLM",
    "OuroModel",
    "OuroModelOutput",
    "RavenForCausalLM",
]
__version__ = version("hf-cdb")

register_models()
