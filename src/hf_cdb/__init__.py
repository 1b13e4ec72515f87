"""Adaptive-depth inference of looped language models inside Hugging Face Transformers.

Importing the package registers Ouro and Huginn with the Auto classes:

    import hf_cdb
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained("path/to/checkpoint")
"""

from importlib.metadata import version

from .adapters import LoopAdapter, register_adapter
from .cache import DepthCache
from .checkpoints import tiny_checkpoint
from .config import CDBConfig
from .diagnosis import diagnose
from .exit_heads import attach_exit_head, load_exit_head
from .exits import ExitRule
from .generation import CDBGenerationMixin, GenerateCDBOutput, RowsFailedError, enable_cdb
from .jobs import CDBGenerationOutput
from .manager import CDBManager
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
from .streaming import StreamPiece

__all__ = [
    "CDBConfig",
    "CDBGenerationMixin",
    "CDBGenerationOutput",
    "CDBManager",
    "DepthCache",
    "ExitRule",
    "GenerateCDBOutput",
    "HuginnCausalLMOutput",
    "HuginnConfig",
    "LoopAdapter",
    "OuroCausalLMOutput",
    "OuroConfig",
    "OuroForCausalLM",
    "OuroModel",
    "OuroModelOutput",
    "RavenForCausalLM",
    "RowsFailedError",
    "StreamPiece",
    "attach_exit_head",
    "diagnose",
    "enable_cdb",
    "load_exit_head",
    "register_adapter",
    "tiny_checkpoint",
]
__version__ = version("hf-cdb")

register_models()
