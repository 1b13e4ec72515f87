"""The memory of a device."""

import psutil
import torch

__all__ = ["kv_budget", "whole_memory"]


def kv_budget(max_kv_memory: int | float | None, device: torch.device) -> int | None:
    """Bytes that keys and values may take, given as `CDBConfig.max_kv_memory`; None where nothing bounds them. A share
    is one of what is free now, and may come to 0 bytes."""
    if not isinstance(max_kv_memory, float):
        return max_kv_memory
    free = torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else psutil.virtual_memory().available
    return int(max_kv_memory * free)


def whole_memory(device: torch.device) -> int:
    """Bytes of the whole memory."""
    return torch.cuda.mem_get_info(device)[1] if device.type == "cuda" else psutil.virtual_memory().total
