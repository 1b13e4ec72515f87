"""Which process works at which line."""

import fcntl
import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

__all__ = ["Claims"]

_DONE = b"1"


class Claims:
    """Pieces of work, numbered from 0, that processes of one or of several machines share.

    A piece is a byte of one file, which says whether it is done, and whose lock says that somebody is at it. Locks of
    POSIX (`fcntl.lockf`) need no clock: the system takes them back from a process that dies, however it dies, and
    leaves them to one that is merely stopped or slow. A file system that machines share has to support them.

    They belong to processes: there may be one instance at a time for a file in each.

    Args:
        path: of the file, which is made where there is none.
        count: pieces.
    """

    def __init__(self, path: Path, count: int):
        self.count = count
        self._file = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)

    def close(self) -> None:
        """Give back what is held."""
        os.close(self._file)

    @property
    def done(self) -> int:
        """Pieces that are done."""
        return os.pread(self._file, self.count, 1).count(_DONE)

    def is_done(self, piece: int) -> bool:
        return os.pread(self._file, 1, 1 + piece) == _DONE

    def take(self, piece: int) -> bool:
        """Hold a piece until it is finished; False where it is done, or another process's."""
        if self.is_done(piece):
            return False
        try:
            fcntl.lockf(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, 1 + piece)
        except (BlockingIOError, PermissionError):  # which of them depends on the system
            return False
        if self.is_done(piece):  # by who held it when this was asked first
            self._release(piece)
            return False
        return True

    def finish(self, pieces: Iterable[int]) -> None:
        """Say that pieces are done, which this process holds."""
        for piece in pieces:
            os.pwrite(self._file, _DONE, 1 + piece)
            self._release(piece)

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Wait until no other process is here."""
        fcntl.lockf(self._file, fcntl.LOCK_EX, 1, 0)
        try:
            yield
        finally:
            fcntl.lockf(self._file, fcntl.LOCK_UN, 1, 0)

    def _release(self, piece: int) -> None:
        fcntl.lockf(self._file, fcntl.LOCK_UN, 1, 1 + piece)
