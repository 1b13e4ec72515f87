"""`hf-cdb hub export MODEL FOLDER` and `hf-cdb hub card MODEL`."""

import argparse
from pathlib import Path
from typing import Any

from transformers import AutoModelForCausalLM, PreTrainedModel

from ..checkpoints import EMBEDDED, model_path, saved_tokenizer
from .card import model_card
from .export import export

__all__ = ["add_card_arguments", "add_export_arguments"]


def add_export_arguments(parser: argparse.ArgumentParser) -> None:
    _add_model(parser)
    parser.add_argument("folder", type=Path, metavar="FOLDER", help="to write; new, empty or an earlier export")
    _add_contents(parser)
    parser.add_argument("--plot", type=Path, metavar="FILE", help="a picture to show, as `hf-cdb eval` draws it")
    parser.set_defaults(run=_export)


def add_card_arguments(parser: argparse.ArgumentParser) -> None:
    _add_model(parser)
    _add_contents(parser)
    parser.add_argument("--plot", metavar="NAME", help="a picture to show, which lies beside the card")
    parser.add_argument("--output", type=Path, metavar="FILE", help="to write (default README.md in MODEL)")
    parser.set_defaults(run=_card)


def _add_model(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", metavar="MODEL", help=f"{', '.join(EMBEDDED)}, a folder or a Hub id")


def _add_contents(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--name", help="title of the card (default the folder's name)")
    parser.add_argument("--repo-id", help="Hub id that the usage loads the model by (default the name)")
    parser.add_argument("--text", type=Path, metavar="FILE", help="Markdown with metadata and sections of your own")
    parser.add_argument("--results", type=Path, metavar="FILE", help="results.json of `hf-cdb eval`")
    parser.add_argument("--base-model", help="Hub id of the model that this one was made from")
    parser.add_argument("--language", help="such as en")
    parser.add_argument("--license", help="such as apache-2.0")
    parser.add_argument(
        "--tag", action="append", default=[], dest="tags", metavar="TAG", help="may be given repeatedly"
    )


def _export(arguments: argparse.Namespace) -> None:
    source, model = _load(arguments.model)
    name = arguments.name or arguments.folder.resolve().name
    tokenizer = saved_tokenizer(source)
    print(export(model, arguments.folder, tokenizer=tokenizer, name=name, plot=arguments.plot, **_contents(arguments)))


def _card(arguments: argparse.Namespace) -> None:
    source, model = _load(arguments.model)
    if arguments.output is None and not Path(source).is_dir():
        raise ValueError(f"MODEL={arguments.model!r} is no folder that a card could be written into. Give --output.")
    output = arguments.output or Path(source) / "README.md"
    if arguments.plot is not None and not (output.parent / arguments.plot).is_file():
        raise ValueError(
            f"plot={arguments.plot!r}: {str(output.parent)!r} has no such file. Put the picture there first."
        )
    has_tokenizer = saved_tokenizer(source) is not None
    name = arguments.name or Path(source).resolve().name
    model_card(model, name, tokenizer=has_tokenizer, plot=arguments.plot, **_contents(arguments)).save(output)
    print(output)


def _load(model: str) -> tuple[str, PreTrainedModel]:
    """Folder or Hub id, and the model in the dtype it was saved in."""
    source = model_path(model)
    return source, AutoModelForCausalLM.from_pretrained(source, dtype="auto").eval()


def _contents(arguments: argparse.Namespace) -> dict[str, Any]:
    text = None if arguments.text is None else arguments.text.read_text(encoding="utf-8")
    names = ("repo_id", "results", "base_model", "language", "license", "tags")
    return {"text": text, **{name: getattr(arguments, name) for name in names}}
