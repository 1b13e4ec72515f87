"""A small dory, the looped model that ships with Transformers."""

import torch
from transformers import DoryConfig, DoryForCausalLM


def random_dory(seed: int = 0, **overrides) -> DoryForCausalLM:
    """One input, two recurrent, one output layer, 4 loops, grouped-query attention, a window of 8 in every other layer.

    States move halfway towards their update in every layer, and matrices are large, so that depths and tokens differ.
    """
    sizes = {
        "vocab_size": 50,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 4,
        "n_input_layers": 1,
        "n_recurrent_layers": 2,
        "n_output_layers": 1,
        "n_recurrent_loops": 4,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 16,
        "layer_types": ["full_attention", "sliding_attention", "full_attention", "sliding_attention"],
        "sliding_window": 8,
        "max_position_embeddings": 256,
        "initializer_range": 1.0,
        "ngpt_alpha_init": 0.5,
    }
    torch.manual_seed(seed)
    return DoryForCausalLM(DoryConfig(**{**sizes, **overrides})).eval()
