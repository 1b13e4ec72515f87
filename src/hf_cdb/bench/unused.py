"""Arguments that are given where they do nothing."""

import argparse
from collections.abc import Sequence

__all__ = ["refuse_unused"]


def refuse_unused(arguments: argparse.Namespace, names: Sequence[str], reason: str) -> None:
    """Refuse arguments that would be ignored, by their values: one that is given as its default changes nothing.

    Args:
        arguments: with the parser's `get_default` as `default_of`.
        names: of arguments that have no effect beside the others.
        reason: why, and the way out.

    Raises:
        ValueError: one of them is not its default.
    """
    for name in names:
        value = getattr(arguments, name)
        if value != arguments.default_of(name):
            raise ValueError(f"{name}={str(value)!r} has no effect {reason}.")
