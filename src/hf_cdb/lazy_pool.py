"""A pool whose rows take memory only once they are written."""

import mmap
import sys

import numpy
import torch

from .pool import Pool

__all__ = ["LazyPool"]

# Room is asked for that will never be written; the system shall not count it as memory. Python 3.13 has no name for it.
_FLAGS = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | 0x4000 if sys.platform == "linux" else 0


class LazyPool(Pool):
    """A `Pool` in memory that the system maps page by page: a row that was never written takes none, and what is
    released goes back at once. So a segment may be as long as it could ever become, and nothing is ever moved.

    On Linux and the CPU; see `serves`. It does not grow by itself: `take`, and `renew` where that finds nothing.

    Args:
        layers, width, dtype, device: see `Pool`.
    """

    @staticmethod
    def serves(device: torch.device) -> bool:
        """Whether the memory of this device is mapped so."""
        return device.type == "cpu" and sys.platform == "linux"

    def renew(self, rows: int) -> None:
        layers, _, width = self.tensor.shape
        dtype = self.tensor.dtype
        rows = int(self.whole_pages(rows, width))
        size = layers * rows * width * dtype.itemsize
        self._memory = mmap.mmap(-1, size, flags=_FLAGS)
        # A huge page would take two megabytes for its first entry.
        if hasattr(mmap, "MADV_NOHUGEPAGE"):
            self._memory.madvise(mmap.MADV_NOHUGEPAGE)
        self.tensor = torch.frombuffer(self._memory, dtype=dtype).view(layers, rows, width)
        self._free = [(0, rows)]

    def _extend(self, rows: int) -> None:
        raise RuntimeError(f"a pool of mapped memory does not grow by {rows} rows by itself. Use `take` and `renew`.")

    def release(self, first: int, rows: int) -> None:
        super().release(first, rows)
        layers, held, width = self.tensor.shape
        row = width * self.tensor.dtype.itemsize
        for layer in range(layers):
            self._memory.madvise(mmap.MADV_DONTNEED, (layer * held + first) * row, rows * row)

    def whole_pages(self, count: int | numpy.ndarray, elements: int | numpy.ndarray) -> int | numpy.ndarray:
        """`count` stretches of so many elements, or as few more as fill whole pages."""
        step = mmap.PAGESIZE // numpy.gcd(mmap.PAGESIZE, elements * self.tensor.dtype.itemsize)
        return -(-count // step) * step
