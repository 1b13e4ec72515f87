"""Configuration of Huginn (arXiv 2502.05171)."""

import math
from typing import Any

from transformers import PreTrainedConfig

from ..config_checks import check_choice, check_divides, check_heads, check_integers, check_number, take_aliases

__all__ = ["HuginnConfig"]


class HuginnConfig(PreTrainedConfig):
    """Sizes and recurrence settings of a Huginn model. The defaults are those of huginn-0125.

    Takes the keys of the published `config.json` and the usual Transformers names for them (`hidden_size`,
    `num_attention_heads`, `max_position_embeddings`, `rms_norm_eps`, `rope_theta`, `tie_word_embeddings`, ...).
    A saved file uses the published keys only, so that the published class can read it.

    Args:
        n_embd: width of the state.
        n_heads: attention heads; keys and values have as many.
        n_layers_in_prelude: layers that run once, before the loop.
        n_layers_in_recurrent_block: layers that every loop runs, the core.
        n_layers_in_coda: layers that run once, after the loop.
        n_layers: sum of the three; default computed.
        intermediate_size: width inside the gated MLP.
        vocab_size: tokens of the tokenizer.
        padded_vocab_size: rows of the embedding and the head; default `vocab_size` rounded up to a multiple of
            `padding_multiple`.
        block_size: longest trained sequence.
        mean_recurrence: loops of a full-depth pass, and the mean of the random number of loops in training.
        mean_backprop_depth: last loops that carry gradient in training.
        qk_bias: whether queries and keys get a learned bias before rotation.
        rope_base: base of the rotary angles.
        norm_eps: added to the mean of squares in every norm.
        tie_embeddings: whether head and embedding are one matrix.
        init_values: `std`, `out_proj`, `embedding` (standard deviations of fresh weights) and `embed_scale` (factor
            on the embedding); default the published formulas.
        init_scale: default scale of the random start state of the forward; 0 starts at zero. The published code
            draws noise at scale 1 in every call.
        init_seed: default seed of that state.

    The other published keys name variants of the architecture. One value of each is supported, the published one;
    they are kept for the published class to read, and so are `activation_checkpoint_impl` and
    `test_time_noise_type`, which nothing here depends on.

    Raises:
        ValueError: a value that cannot work, with the reason.
    """

    model_type = "huginn_raven"
    keys_to_ignore_at_inference = ["cache", "latent_states"]  # noqa: RUF012 (as in every Transformers config)
    attribute_map = {  # noqa: RUF012
        "hidden_size": "n_embd",
        "num_attention_heads": "n_heads",
        "num_hidden_layers": "n_layers",
        "max_position_embeddings": "block_size",
        "rms_norm_eps": "norm_eps",
        "rope_theta": "rope_base",
        "tie_word_embeddings": "tie_embeddings",
    }

    n_embd: int = 5280
    n_heads: int = 55
    num_key_value_heads: int | None = None
    head_dim: int | None = None
    n_layers_in_prelude: int = 2
    n_layers_in_recurrent_block: int = 4
    n_layers_in_coda: int = 2
    n_layers: int | None = None
    intermediate_size: int = 17920
    vocab_size: int = 65536
    padded_vocab_size: int | None = None
    padding_multiple: int = 4096
    block_size: int = 4096
    mean_recurrence: int = 32
    mean_backprop_depth: int = 8
    effective_expected_depth: int | None = None
    qk_bias: bool = True
    bias: bool = False
    rope_base: float | int = 50_000
    norm_eps: float = 1e-6
    tie_embeddings: bool = True
    use_cache: bool = True
    pad_token_id: int | None = None
    bos_token_id: int | None = None
    eos_token_id: int | list[int] | None = None
    init_values: dict | None = None
    init_scale: float = 0.0
    init_seed: int = 0
    architecture_class_name: str = "RecurrentGPT"
    block_class_name: str = "SandwichBlock"
    norm_class_name: str = "RMSNorm_llama"
    mlp_class_name: str = "GatedMLP"
    nonlin_name: str = "SiLU"
    injection_type: str = "linear"
    state_init: str = "like-init"
    init_strategy: str = "takase"
    init_orthogonal: bool = False
    sampling_scheme: str = "poisson-lognormal-filling"
    activation_checkpoint_impl: str = "per-iteration"
    test_time_noise: float = 0
    test_time_noise_type: str = "fixed"

    def __post_init__(self, **kwargs: Any) -> None:
        take_aliases(self, kwargs)
        sections = ("n_layers_in_prelude", "n_layers_in_recurrent_block", "n_layers_in_coda")
        check_integers(self, "n_embd", "n_heads", "vocab_size", "padding_multiple", "mean_recurrence")
        check_integers(self, *sections, minimum=0)
        layers = sum(getattr(self, name) for name in sections)
        self.n_layers = layers if self.n_layers is None else self.n_layers
        self.num_key_value_heads = self.n_heads if self.num_key_value_heads is None else self.num_key_value_heads
        if self.head_dim is None:
            check_divides(self, "n_embd", "n_heads")
            self.head_dim = self.n_embd // self.n_heads
        if self.padded_vocab_size is None:
            self.padded_vocab_size = self.padding_multiple * math.ceil(self.vocab_size / self.padding_multiple)
        if self.effective_expected_depth is None:
            outside = self.n_layers_in_prelude + self.n_layers_in_coda
            self.effective_expected_depth = outside + self.n_layers_in_recurrent_block * self.mean_recurrence
        check_integers(self, "effective_expected_depth")
        std = math.sqrt(2 / (5 * self.n_embd))
        self.init_values = {
            "std": std,
            "embedding": std,
            "out_proj": std / math.sqrt(2 * self.effective_expected_depth),
            "embed_scale": math.sqrt(self.n_embd),
            **(self.init_values or {}),
        }
        self._take_rope_parameters(kwargs)
        super().__post_init__(**kwargs)
        self.validate_architecture()

    def _take_rope_parameters(self, kwargs: dict[str, Any]) -> None:
        for name in ("rope_parameters", "rope_scaling"):
            given = kwargs.pop(name, None) or {}
            kind = given.get("rope_type", given.get("type", "default"))
            if kind != "default":
                raise ValueError(
                    f"{name}={given!r}: Huginn has the plain rotary embedding only, which its file format has no field "
                    "to change. Set rope_base, or leave this out."
                )
            theta = given.get("rope_theta", self.rope_base)
            if self.rope_base not in (theta, type(self).rope_base):
                raise ValueError(
                    f"rope_base={self.rope_base} and {name}={given!r} contradict each other. Give one of them."
                )
            self.rope_base = theta

    def validate_architecture(self) -> None:
        """Raise a ValueError for values that no Huginn model can be built from."""
        check_integers(
            self,
            "n_embd",
            "n_heads",
            "num_key_value_heads",
            "head_dim",
            "n_layers_in_recurrent_block",
            "n_layers",
            "intermediate_size",
            "vocab_size",
            "padded_vocab_size",
            "block_size",
            "mean_recurrence",
            "mean_backprop_depth",
        )
        check_integers(self, "n_layers_in_prelude", "n_layers_in_coda", minimum=0)
        check_heads(self)
        layers = self.n_layers_in_prelude + self.n_layers_in_recurrent_block + self.n_layers_in_coda
        if self.n_layers != layers:
            raise ValueError(
                f"n_layers={self.n_layers}, but prelude, recurrent block and coda have {self.n_layers_in_prelude} + "
                f"{self.n_layers_in_recurrent_block} + {self.n_layers_in_coda} = {layers} layers. Leave n_layers out."
            )
        if self.num_key_value_heads != self.n_heads or self.head_dim * self.n_heads != self.n_embd:
            raise ValueError(
                f"num_key_value_heads={self.num_key_value_heads}, head_dim={self.head_dim}: the fused projection holds "
                f"n_heads={self.n_heads} heads of n_embd / n_heads for queries, keys and values each. Leave both out."
            )
        if self.padded_vocab_size < self.vocab_size:
            raise ValueError(
                f"padded_vocab_size={self.padded_vocab_size} is less than vocab_size={self.vocab_size}: the last "
                "tokens would have no embedding. Leave padded_vocab_size out."
            )
        check_number(self, "rope_base", 0, above=True)
        check_number(self, "norm_eps", 0)
        check_number(self, "init_scale", 0)
        if isinstance(self.init_seed, bool) or not isinstance(self.init_seed, int):
            raise ValueError(f"init_seed={self.init_seed!r} is no seed: choose an integer.")
        variant = "it names another variant of the architecture, of which no checkpoint is published."
        check_choice(self, "bias", (False,), variant)
        check_choice(self, "block_class_name", ("SandwichBlock",), variant)
        check_choice(self, "norm_class_name", ("RMSNorm_llama",), variant)
        check_choice(self, "mlp_class_name", ("GatedMLP",), variant)
        check_choice(self, "nonlin_name", ("SiLU",), variant)
        check_choice(self, "injection_type", ("linear",), variant)
        check_choice(self, "state_init", ("like-init",), variant)
        check_choice(self, "architecture_class_name", ("RecurrentGPT",), variant)
        check_choice(self, "init_strategy", ("takase",), variant)
        check_choice(self, "init_orthogonal", (False,), variant)
        check_choice(self, "sampling_scheme", ("poisson-lognormal-filling",), variant)
        check_choice(self, "test_time_noise", (0,), "noise in every loop would make a cached pass unrepeatable.")

    @classmethod
    def register_for_auto_class(cls, auto_class="AutoConfig") -> None:
        """Does nothing: saving would copy this file, which is nothing without its package, beside the weights."""

    def to_dict(self) -> dict[str, Any]:
        """As the base class, without `auto_map`."""
        output = super().to_dict()
        output.pop("auto_map", None)
        return output
