"""Seconds that a launch spends inside the attention function."""

import time

from transformers import AttentionInterface

from ..attention import DEPTH_ATTENTION, depth_attention

__all__ = ["AttentionClock"]


class AttentionClock:
    """Context manager that times the attention function of the engine.

    Attributes:
        seconds: inside it since this was set to 0.
    """

    def __init__(self) -> None:
        self.seconds = 0.0

    def __enter__(self) -> "AttentionClock":
        AttentionInterface.register(DEPTH_ATTENTION, self._timed)
        return self

    def __exit__(self, *error) -> None:
        AttentionInterface.register(DEPTH_ATTENTION, depth_attention)

    def _timed(self, *args, **kwargs):
        begin = time.perf_counter()
        try:
            return depth_attention(*args, **kwargs)
        finally:
            self.seconds += time.perf_counter() - begin
