"""What records of a run depend on beside its configuration, short enough to compare."""

import hashlib
import json
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ..exit_heads import KINDS, find_exit_head
from .tasks import Task

__all__ = ["inputs_hash", "model_hashes", "weights_hash"]


def inputs_hash(task: Task, tokenizer: PreTrainedTokenizerBase) -> str:
    """SHA-256 of a task's examples, and of the tokens of their prompts."""
    digest = hashlib.sha256()
    for example in task.examples:
        ids = tokenizer(example.prompt, add_special_tokens=task.add_special_tokens)["input_ids"]
        digest.update(json.dumps([asdict(example), ids]).encode())
    return digest.hexdigest()


def weights_hash(model: nn.Module) -> str:
    """SHA-256 of all weights of a model and of its exit heads, as they are on their device."""
    heads: Sequence[Any] = [find_exit_head(model, kind) for kind in KINDS]
    digest = hashlib.sha256()
    for name, tensor in [*model.state_dict().items(), *(pair for h in heads if h for pair in h.state_dict().items())]:
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        digest.update(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy())
    return digest.hexdigest()


def model_hashes(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> dict[str, str]:
    """SHA-256 of what a model's folder holds, by part; where it lies does not count."""
    config = {name: value for name, value in model.config.to_dict().items() if name != "_name_or_path"}
    backend = getattr(tokenizer, "backend_tokenizer", None)
    words = tokenizer.get_vocab() if backend is None else backend.to_str()
    parts = {
        "config": config,
        "generation_config": model.generation_config.to_dict(),
        "tokenizer": [words, tokenizer.chat_template],
    }
    texts = {name: json.dumps(part, sort_keys=True, default=str) for name, part in parts.items()}
    hashes = {f"{name}_sha256": hashlib.sha256(text.encode()).hexdigest() for name, text in texts.items()}
    return {"weights_sha256": weights_hash(model), **hashes}
