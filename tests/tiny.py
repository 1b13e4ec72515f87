"""Small models and inputs that several tests share."""

from pathlib import Path

import torch
from transformers import AutoModelForCausalLM

import hf_cdb

DATA = Path(__file__).parent / "data"

# Families with the keywords that make their passes short, and the float32 tolerance of their logits: Huginn's
# recurrence amplifies rounding.
FAMILIES = {"ouro": ({}, 1e-4), "huginn": ({"num_steps": 4}, 3e-4)}


def load_golden(name: str, **kwargs):
    """One of the golden checkpoints, without an end of sequence, in evaluation mode."""
    model = AutoModelForCausalLM.from_pretrained(DATA / name, **kwargs).eval()
    model.generation_config.update(eos_token_id=None, bos_token_id=None, pad_token_id=0)
    return model


def load_family(family: str, **kwargs):
    return load_golden(f"{family}-tiny", **kwargs)


def random_ouro(seed: int = 0, **kwargs) -> hf_cdb.OuroForCausalLM:
    """F-OURO: 2 layers, width 32, 2 heads, 4 loops, with weights large enough that depths and tokens differ."""
    sizes = {
        "vocab_size": 50,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "max_position_embeddings": 256,
        "initializer_range": 0.3,
    }
    torch.manual_seed(seed)
    return hf_cdb.OuroForCausalLM(hf_cdb.OuroConfig(**{**sizes, **kwargs})).eval()


def random_huginn(seed: int = 0, **kwargs) -> hf_cdb.RavenForCausalLM:
    """F-RAVEN: prelude 1, core 2, coda 1, width 32, 6 loops."""
    sizes = {
        "vocab_size": 50,
        "padding_multiple": 1,
        "n_embd": 32,
        "n_heads": 2,
        "intermediate_size": 64,
        "n_layers_in_prelude": 1,
        "n_layers_in_recurrent_block": 2,
        "n_layers_in_coda": 1,
        "mean_recurrence": 6,
        "block_size": 256,
    }
    torch.manual_seed(seed)
    config = hf_cdb.HuginnConfig(**{**sizes, **kwargs})
    config.init_values = {key: max(value, 0.15) for key, value in config.init_values.items()}
    return hf_cdb.RavenForCausalLM(config).eval()


RANDOM = {"ouro": random_ouro, "huginn": random_huginn}


def prompts(*lengths: int, vocab: int = 50, seed: int = 1) -> list[torch.Tensor]:
    """Prompts of the given lengths, without token 0."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(1, vocab, (length,), generator=generator) for length in lengths]


def left_pad(rows: list[torch.Tensor], pad: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Token ids and mask `[rows, longest]`, padding on the left."""
    longest = max(map(len, rows))
    ids = torch.stack([torch.cat([row.new_full((longest - len(row),), pad), row]) for row in rows])
    mask = torch.stack([torch.arange(longest) >= longest - len(row) for row in rows]).long()
    return ids, mask


def assert_close(actual: torch.Tensor, expected: torch.Tensor, tolerance: float, what: str = "") -> None:
    assert actual.shape == expected.shape, f"{what}: {tuple(actual.shape)} against {tuple(expected.shape)}"
    difference = (actual.double() - expected.double()).abs().max().item() if actual.numel() else 0.0
    assert difference <= tolerance, f"{what}: off by {difference:.3g}, more than {tolerance:g}"
