"""Small tensors on their way from the host to the device."""

import torch

__all__ = ["to_device"]


def to_device(values: torch.Tensor, device: torch.device) -> torch.Tensor:
    """`values` of the host on the device; on the CPU themselves.

    On CUDA without waiting: a plain copy of pageable memory would wait until the device has done all before it, and
    with it what lookahead gains. The allocator of pinned memory keeps the piece until it has been copied.
    """
    if device.type == "cuda":
        return values.pin_memory().to(device, non_blocking=True)
    return values.to(device)
