"""Small trained checkpoints that come with the package: nothing has to be downloaded to try, test or measure."""

from pathlib import Path

__all__ = ["tiny_checkpoint"]

NAMES = ("ouro", "huginn")


def tiny_checkpoint(name: str) -> str:
    """Folder of an embedded checkpoint, for `from_pretrained`.

    Args:
        name: "ouro" or "huginn"; "tiny-ouro" and "tiny-huginn", as the folders are called, are the same.

    Raises:
        ValueError: another name.
    """
    short = str(name).removeprefix("tiny-")
    if short not in NAMES:
        raise ValueError(f"name={name!r}: no such checkpoint comes with the package. Choose one of {', '.join(NAMES)}.")
    return str(Path(__file__).parent / f"tiny-{short}")
