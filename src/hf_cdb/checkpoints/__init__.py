"""Small trained checkpoints that come with the package: nothing has to be downloaded to try, test or measure."""

from pathlib import Path

from transformers import AutoTokenizer, PreTrainedTokenizerBase

__all__ = ["EMBEDDED", "model_path", "saved_tokenizer", "tiny_checkpoint"]

NAMES = ("ouro", "huginn")
EMBEDDED = tuple(f"tiny-{name}" for name in NAMES)


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


def model_path(name: str) -> str:
    """What `from_pretrained` loads for a MODEL of the command line.

    Args:
        name: an embedded checkpoint by either name of `tiny_checkpoint`, a folder or a Hub id. A model in a folder of
            such a name comes first, as it does before a Hub id in `from_pretrained`.
    """
    embedded = name.removeprefix("tiny-") in NAMES and not (Path(name) / "config.json").is_file()
    return tiny_checkpoint(name) if embedded else name


def saved_tokenizer(path: str) -> PreTrainedTokenizerBase | None:
    """The tokenizer of a folder or Hub id, or None of a folder that has none."""
    files = ("tokenizer.json", "tokenizer_config.json")
    if Path(path).is_dir() and not any((Path(path) / name).is_file() for name in files):
        return None
    return AutoTokenizer.from_pretrained(path)
