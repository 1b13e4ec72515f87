"""Text files of users."""

import contextlib
from collections.abc import Iterator
from pathlib import Path

__all__ = ["naming"]


@contextlib.contextmanager
def naming(path: Path, argument: str) -> Iterator[None]:
    """Let errors of the encoding name the file.

    Args:
        path: the file that is read inside.
        argument: which brought it.

    Raises:
        ValueError: what is read is no UTF-8.
    """
    try:
        yield
    except UnicodeDecodeError as error:
        raise ValueError(
            f"{argument}={str(path)!r} is no UTF-8 text ({error.reason}: {error.object[error.start]:#x}). Convert it."
        ) from error
