"""Models to measure: the embedded checkpoints, random ones of stated size, a folder or a Hub id."""

import argparse
import difflib
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from ..adapters import adapter_for
from ..checkpoints import EMBEDDED, model_path, tiny_checkpoint
from ..generation import enable_cdb
from ..models import HuginnConfig, OuroConfig

__all__ = ["RANDOM", "add_model_arguments", "check_device", "load_model", "load_tokenizer", "plain_generation"]

DTYPES = ("float32", "bfloat16", "float16", "float64")

# Sizes of the random models. The parameters of their cores give them their names.
RANDOM: dict[str, dict[str, Any]] = {
    # Small enough to run hundreds of long requests together.
    "random-ouro-400k": {
        "vocab_size": 8192,
        "hidden_size": 128,
        "intermediate_size": 352,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "max_position_embeddings": 16384,
    },
    "random-ouro-20m": {
        "vocab_size": 8192,
        "hidden_size": 512,
        "intermediate_size": 1408,
        "num_hidden_layers": 6,
        "num_attention_heads": 8,
        "max_position_embeddings": 16384,
    },
    # What runs once per token is the same share of a loop as in the published 1.4B: 0.082.
    "random-ouro-100m": {
        "vocab_size": 8192,
        "hidden_size": 1024,
        "intermediate_size": 2816,
        "num_hidden_layers": 8,
        "num_attention_heads": 8,
        "max_position_embeddings": 16384,
    },
    # The shape of ByteDance/Ouro-1.4B, which is the configuration's default.
    "random-ouro-1.4b": {},
    # 2-4-2 layers, and width to intermediate size, as in tomg-group-umd/huginn-0125.
    "random-huginn-20m": {
        "vocab_size": 8192,
        "n_embd": 576,
        "n_heads": 9,
        "intermediate_size": 1952,
        "mean_recurrence": 16,
        "block_size": 16384,
    },
}


def add_model_arguments(parser: argparse.ArgumentParser, default: str = "random-ouro-20m") -> None:
    """`--model`, `--dtype` and `--device`."""
    parser.add_argument(
        "--model",
        default=default,
        help=f"{', '.join((*EMBEDDED, *RANDOM))}, a folder or a Hub id (default %(default)s)",
    )
    parser.add_argument("--dtype", choices=DTYPES, default="float32", help="of the weights (default %(default)s)")
    parser.add_argument("--device", default="cpu", help="where it runs, such as cuda (default %(default)s)")


def check_device(device: str) -> None:
    """Refuse a device that is not here.

    Raises:
        ValueError: no device of PyTorch, or one that it cannot use on this machine.
    """
    try:
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError, ImportError) as error:  # each backend has its own way to say no
        reason = str(error).partition("\n")[0].rstrip(".")
        raise ValueError(f"device={device!r} cannot be used here: {reason}. Choose another, such as cpu.") from error
    if torch.device(device).type == "meta":
        raise ValueError(f"device={device!r} computes nothing. Choose another, such as cpu.")


def load_model(name: str, dtype: str = "float32", device: str = "cpu") -> PreTrainedModel:
    """A looped model in evaluation mode, with cdb, without ends of sequence: every request runs to its length.

    Args:
        name: a name of `RANDOM` (weights from seed 0), "tiny-ouro", "tiny-huginn", a folder or a Hub id.
        dtype: of weights and computation.
        device: of torch.

    Raises:
        ValueError: a random model of another name, or a model that is not looped.
        OSError: no such folder, and no such model on the Hub.
    """
    kind = getattr(torch, dtype)
    if name in RANDOM:
        model = _random_model(RANDOM[name], kind, device)
    elif name.startswith("random-"):
        near = difflib.get_close_matches(name, RANDOM, n=1)
        hint = f" Did you mean {near[0]}?" if near else ""
        raise ValueError(f"model={name!r}: no random model has this name.{hint} There are {', '.join(RANDOM)}.")
    else:
        folder = model_path(name)
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=kind).to(device)
    model = enable_cdb(model.eval())
    model.generation_config.update(eos_token_id=None, pad_token_id=0)
    return model


def _random_model(sizes: dict[str, Any], dtype: torch.dtype, device: str) -> PreTrainedModel:
    config = (HuginnConfig if "n_embd" in sizes else OuroConfig)(**sizes)
    before = torch.get_rng_state()
    torch.manual_seed(0)
    try:
        # Made where it runs and as it runs: the large ones would not fit twice.
        with torch.device(device):
            return AutoModelForCausalLM.from_config(config, dtype=dtype)
    finally:
        torch.set_rng_state(before)


def load_tokenizer(name: str) -> PreTrainedTokenizerBase:
    """The model's tokenizer; for a random model that of the embedded Ouro, whose ids any of them has."""
    folder = tiny_checkpoint("ouro") if name in RANDOM else model_path(name)
    return AutoTokenizer.from_pretrained(folder)


def plain_generation(model: PreTrainedModel) -> dict[str, Any]:
    """Arguments with which the model's stock `generate` runs full depth, greedily."""
    adapter = adapter_for(model)
    return {**adapter.plain_arguments(adapter.full_depth), "do_sample": False, "cdb": False}
