"""Makes the Auto classes of Transformers find the models of this package."""

from transformers import AutoConfig, AutoModel, AutoModelForCausalLM

from .huginn import HuginnConfig, RavenForCausalLM
from .ouro import OuroConfig, OuroForCausalLM, OuroModel

__all__ = ["register_models"]


def register_models() -> None:
    """Register every class that the published configs name in `auto_map`.

    A registered class outside Transformers wins over `auto_map`, so no remote code runs, whatever
    `trust_remote_code` says. Registering twice is harmless.
    """
    AutoConfig.register(OuroConfig.model_type, OuroConfig, exist_ok=True)
    AutoModel.register(OuroConfig, OuroModel, exist_ok=True)
    AutoModelForCausalLM.register(OuroConfig, OuroForCausalLM, exist_ok=True)
    AutoConfig.register(HuginnConfig.model_type, HuginnConfig, exist_ok=True)
    AutoModel.register(HuginnConfig, RavenForCausalLM, exist_ok=True)
    AutoModelForCausalLM.register(HuginnConfig, RavenForCausalLM, exist_ok=True)
