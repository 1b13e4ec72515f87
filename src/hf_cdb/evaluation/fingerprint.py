"""What the records of an evaluation depend on beside its configuration, short enough to compare."""

import hashlib
import json
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedTokenizerBase

from ..exit_heads import KINDS, find_exit_head
from .tasks import Task

__all__ = ["inputs_hash", "weights_hash"]


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
