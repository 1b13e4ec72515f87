"""Configuration of Ouro (arXiv 2510.25741)."""

from typing import Any

from transformers import PreTrainedConfig

from ..config_checks import check_choice, check_divides, check_heads, check_integers, check_number, check_rotary

__all__ = ["OuroConfig"]


class OuroConfig(PreTrainedConfig):
    """Sizes and exit settings of an Ouro model. The defaults are those of Ouro-1.4B.

    Takes the keys of the published `config.json`, `rope_theta` and `rope_scaling` included, beside Transformers' newer
    `rope_parameters`.

    Args:
        vocab_size: rows of the embedding and the head.
        hidden_size: width of the state.
        intermediate_size: width inside the gated MLP.
        num_hidden_layers: layers of the stack that every loop runs.
        num_attention_heads: query heads.
        num_key_value_heads: key and value heads; default as many as query heads.
        head_dim: size of a head; default `hidden_size / num_attention_heads`.
        hidden_act: activation of the MLP gate.
        total_ut_steps: loops of a full-depth pass, R.
        early_exit_threshold: default `exit_threshold` of the forward, in (0, 1]; 1.0 never exits early.
        early_exit_step: default `exit_at_step` of the forward, from 0; None leaves it to the threshold.
        exit_entropy_weight: weight of the entropy of the exit distribution in the training loss.
        max_position_embeddings: longest trained sequence.
        initializer_range: standard deviation of fresh weights.
        rms_norm_eps: added to the mean of squares in every norm.
        tie_word_embeddings: whether head and embedding are one matrix.
        rope_parameters: rotary settings in the Transformers form, `{"rope_type": ..., "rope_theta": ...}`.
        attention_dropout: dropout of attention weights in training.

    Raises:
        ValueError: a value that cannot work, with the reason.
    """

    model_type = "ouro"
    keys_to_ignore_at_inference = ["cache", "gate_logits", "exit_pdf", "exit_steps", "loop_states"]  # noqa: RUF012
    default_theta = 1_000_000.0
    base_model_tp_plan = {  # noqa: RUF012 (a class attribute by the library's convention)
        "layers.*.self_attn.q_proj": "colwise",
        "layers.*.self_attn.k_proj": "colwise",
        "layers.*.self_attn.v_proj": "colwise",
        "layers.*.self_attn.o_proj": "rowwise",
        "layers.*.mlp.gate_proj": "colwise",
        "layers.*.mlp.up_proj": "colwise",
        "layers.*.mlp.down_proj": "rowwise",
    }

    vocab_size: int = 49152
    hidden_size: int = 2048
    intermediate_size: int = 5632
    num_hidden_layers: int = 24
    num_attention_heads: int = 16
    num_key_value_heads: int | None = None
    head_dim: int | None = None
    hidden_act: str = "silu"
    total_ut_steps: int = 4
    early_exit_threshold: float = 1.0
    early_exit_step: int | None = None
    exit_entropy_weight: float = 0.05
    max_position_embeddings: int = 65536
    initializer_range: float = 0.02
    rms_norm_eps: float = 1e-6
    use_cache: bool = True
    pad_token_id: int | None = None
    bos_token_id: int | None = None
    eos_token_id: int | list[int] | None = None
    tie_word_embeddings: bool = False
    rope_parameters: dict | None = None
    attention_dropout: float = 0.0
    layer_types: list[str] | None = None
    use_sliding_window: bool = False
    sliding_window: int | None = None
    max_window_layers: int | None = None

    def __post_init__(self, **kwargs: Any) -> None:
        check_integers(self, "hidden_size", "num_attention_heads", "num_hidden_layers")
        if self.num_key_value_heads is None:
            self.num_key_value_heads = self.num_attention_heads
        if self.head_dim is None:
            check_divides(self, "hidden_size", "num_attention_heads")
            self.head_dim = self.hidden_size // self.num_attention_heads
        if self.layer_types is None:
            self.layer_types = ["full_attention"] * self.num_hidden_layers
        theta = (self.rope_parameters or {}).get("rope_theta")
        if None not in (theta, kwargs.get("rope_theta")) and theta != kwargs["rope_theta"]:
            raise ValueError(
                f"rope_theta={kwargs['rope_theta']} and rope_parameters={self.rope_parameters!r} contradict each "
                "other. Change both, or leave one out."
            )
        super().__post_init__(**kwargs)
        self.validate_architecture()

    def validate_architecture(self) -> None:
        """Raise a ValueError for values that no Ouro model can be built from."""
        check_integers(
            self,
            "vocab_size",
            "hidden_size",
            "intermediate_size",
            "num_hidden_layers",
            "num_attention_heads",
            "num_key_value_heads",
            "head_dim",
            "total_ut_steps",
            "max_position_embeddings",
        )
        check_heads(self)
        check_rotary(self)
        check_number(self, "rms_norm_eps", 0)
        check_number(self, "initializer_range", 0)
        check_number(self, "exit_entropy_weight", 0)
        check_number(self, "attention_dropout", 0, high=1)
        check_number(self, "early_exit_threshold", 0, high=1, above=True)
        if self.pad_token_id is not None and not 0 <= self.pad_token_id < self.vocab_size:
            raise ValueError(
                f"pad_token_id={self.pad_token_id} has no row in an embedding of vocab_size={self.vocab_size}. Choose "
                "an existing token, or None."
            )
        if self.early_exit_step is not None:
            check_integers(self, "early_exit_step", minimum=0)
            if self.early_exit_step >= self.total_ut_steps:
                raise ValueError(
                    f"early_exit_step={self.early_exit_step} does not exist: steps count from 0 and "
                    f"total_ut_steps={self.total_ut_steps}. Choose at most {self.total_ut_steps - 1}."
                )
            if self.early_exit_threshold < 1:
                raise ValueError(
                    f"early_exit_step={self.early_exit_step} and early_exit_threshold={self.early_exit_threshold} "
                    "contradict each other: a fixed step leaves nothing to decide. Set one of them."
                )
        if self.use_sliding_window or set(self.layer_types) != {"full_attention"}:
            raise ValueError(
                f"use_sliding_window={self.use_sliding_window}, layer_types={self.layer_types!r}: only full attention "
                "is supported, which all published Ouro models use. Set use_sliding_window=False and leave "
                "layer_types out."
            )
        if len(self.layer_types) != self.num_hidden_layers:
            raise ValueError(
                f"layer_types names {len(self.layer_types)} layers, but num_hidden_layers={self.num_hidden_layers}. "
                "Leave layer_types out, or name every layer."
            )
        check_choice(self, "hidden_act", _activations(), "the name is looked up in Transformers' activations.")

    @classmethod
    def register_for_auto_class(cls, auto_class="AutoConfig") -> None:
        """Does nothing: saving would copy this file, which is nothing without its package, beside the weights."""

    def to_dict(self) -> dict[str, Any]:
        """As the base class, without `auto_map`, and with `rope_theta` for readers older than `rope_parameters`."""
        output = super().to_dict()
        output.pop("auto_map", None)
        if (self.rope_parameters or {}).get("rope_type") == "default":
            output["rope_theta"] = self.rope_parameters.get("rope_theta")
        return output


def _activations() -> tuple[str, ...]:
    from transformers.activations import ACT2FN  # imports torch, which reading a config does not need

    return tuple(ACT2FN)
