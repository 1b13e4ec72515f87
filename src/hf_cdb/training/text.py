"""The text that small models are trained on: the King James Bible, by chapters (see `kjv.md` for its source)."""

import lzma
from functools import cache
from importlib import resources

__all__ = ["HELD_OUT_EVERY", "chapters"]

HELD_OUT_EVERY = 20


def chapters(split: str) -> list[str]:
    """Chapters of one split, in the order of the book.

    A chapter is its name, then one verse a line, each with its number, all lines ended: "Jude 1\\n1 Jude, the servant
    ...\\n2 Mercy unto you ...\\n". Plain ASCII, so characters are bytes.

    Args:
        split: "held-out": every 20th of the 1,189 chapters, 59 in all, the 20th of the book first; "train": the others.

    Raises:
        ValueError: another name.
    """
    if split not in ("train", "held-out"):
        raise ValueError(f"split={split!r} is no split of the text: choose 'train' or 'held-out'.")
    held_out = split == "held-out"
    return [text for number, text in enumerate(_book(), 1) if (number % HELD_OUT_EVERY == 0) == held_out]


@cache
def _book() -> tuple[str, ...]:
    packed = resources.files(__package__).joinpath("kjv.txt.xz").read_bytes()
    text = lzma.decompress(packed).decode("ascii")
    return tuple(chapter.rstrip("\n") + "\n" for chapter in text.split("\n\n"))
