"""What an exit rule says of the rows of a launch, on its way from the device to the host."""

import itertools
from collections.abc import Sequence
from typing import Any

import torch

from .scheduler import Launch

__all__ = ["Signal", "Signals"]


class Signal:
    """What a rule said after a launch of the core; it may still be under way.

    Args:
        launch: the launch.
        deciding: the rows of it, by index, that the rule was asked about. The others stay.
        said: bool `[deciding]`, on the host.
        event: has happened when `said` has arrived; None where it has.

    Attributes:
        leaving: rows of the launch, by index, that leave without being asked.
    """

    leaving: Sequence[int] = ()

    def __init__(self, launch: Launch, deciding: Sequence[int], said: Sequence[bool] | torch.Tensor, event: Any = None):
        self.launch = launch
        self._deciding, self._said, self._event = deciding, said, event

    def read(self) -> list[bool]:
        """By row of the launch, whether it may leave. Waits until the device has come so far."""
        if self._event is not None:
            self._event.synchronize()
        said = self._said.tolist() if isinstance(self._said, torch.Tensor) else self._said
        flags = [False] * len(self.launch)
        for index, flag in zip(self._deciding, said, strict=True):
            flags[index] = flag
        for index in self.leaving:
            flags[index] = True
        return flags


class Signals:
    """Sends what a rule says to the host without waiting for it.

    On CUDA by a copy into pinned memory, of which there are two pieces in turn: a signal must be read before the next
    but one is sent. Elsewhere a signal has arrived when it is sent.

    Args:
        rows: of a launch at most.
        device: where the rule computes.
    """

    def __init__(self, rows: int, device: torch.device):
        self._buffers = None
        if device.type == "cuda":
            self._buffers = itertools.cycle([torch.empty(rows, dtype=torch.bool, pin_memory=True) for _ in range(2)])

    def send(self, launch: Launch, deciding: Sequence[int], said: Any) -> Signal:
        """On its way from now on: what the rule said, a bool tensor `[deciding]` or a sequence of bools."""
        if not isinstance(said, torch.Tensor):
            return Signal(launch, deciding, [bool(flag) for flag in said])
        if self._buffers is None or said.device.type != "cuda":
            return Signal(launch, deciding, said.tolist())
        buffer = next(self._buffers)[: len(deciding)]
        buffer.copy_(said, non_blocking=True)
        event = torch.cuda.Event()
        event.record(torch.cuda.current_stream(said.device))
        return Signal(launch, deciding, buffer, event)
