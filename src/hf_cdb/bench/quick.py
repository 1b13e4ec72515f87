"""`hf-cdb bench quick`: `throughput` in a few minutes, at short prompts and outputs."""

import argparse

from . import throughput

__all__ = ["add_arguments"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Those of `throughput`, with other defaults."""
    throughput.add_arguments(parser)
    parser.set_defaults(prompt="8", new="32", turns=3, systems=["stock", "full", "no-refill", "refill"])
