"""A folder with everything that a looped model needs on the Hub."""

import json
import shutil
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

from torch import nn

from ..exit_heads import FOLDER as HEADS_FOLDER
from ..exit_heads import save_exit_heads
from .card import model_card, origin

__all__ = ["export"]

_GENERATE = Path("custom_generate", "generate.py")
_PICTURE = "quality_speed"
_PICTURES = (".png", ".jpg", ".jpeg", ".svg", ".gif", ".webp")  # that a card on the Hub shows
# What not every export writes: of an earlier one it would speak of another model.
_OPTIONAL = (
    f"{HEADS_FOLDER}/*.safetensors",
    f"{_PICTURE}.*",
    "modeling_hf_cdb.py",
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "chat_template.jinja",
    "additional_chat_templates/*.jinja",
)
_MARK = "Made by hf_cdb.hub.export."
# Loaded with trust_remote_code where nobody has imported the package: importing it registers the classes.
_MODELING = '''"""The classes of this model, which come with the package `hf_cdb`. {mark}"""

from hf_cdb import {config}, {model}

__all__ = ["{config}", "{model}"]
'''


def export(
    model: nn.Module,
    folder: str | Path,
    *,
    tokenizer: Any = None,
    name: str | None = None,
    repo_id: str | None = None,
    text: str | None = None,
    results: Mapping[str, Any] | str | Path | None = None,
    depths: Mapping[int, int] | None = None,
    plot: str | Path | None = None,
    base_model: str | Sequence[str] | None = None,
    language: str | Sequence[str] | None = None,
    license: str | None = None,
    tags: Sequence[str] = (),
) -> Path:
    """Write weights, exit heads, tokenizer, model card and `custom_generate` into a folder for `upload_folder`.

    The classes of hf_cdb are named in the config's `auto_map`, by a module that imports the package, so that
    `from_pretrained(..., trust_remote_code=True)` finds them without an import. Where the package is imported, no code
    of the folder runs.

    Args:
        model: a looped model with an adapter, in the dtype to save it in.
        folder: empty, missing, or the result of an earlier export, whose files are replaced; its tokenizer, heads and
            picture go where this one has none.
        tokenizer: saved too; without one the usage starts from token ids.
        name: title of the card; default the folder's name.
        plot: a picture, as an evaluation draws it; copied and shown in the card.
        repo_id, text, results, depths, base_model, language, license, tags: see `model_card`.

    Returns:
        The folder.

    Raises:
        FileExistsError: the folder holds something that no export wrote.
        FileNotFoundError: there is no such plot.
        ValueError: a model with layers of PEFT, a plot that is no picture, and what `model_card` raises. Nothing has
            been written then.
    """
    folder = Path(folder)
    _check_folder(folder)
    if layer := next((layer for layer in model.modules() if origin(layer) == "peft"), None):
        raise ValueError(
            f"model={type(model).__name__} holds an adapter of PEFT ({type(layer).__name__}), whose weights would get "
            "lost. Export model.merge_and_unload() of the PEFT model."
        )
    picture = None if plot is None else _picture(Path(plot))
    card = model_card(
        model,
        name or folder.resolve().name,
        repo_id=repo_id,
        text=text,
        results=results,
        depths=depths,
        plot=picture,
        tokenizer=tokenizer is not None,
        base_model=base_model,
        language=language,
        license=license,
        tags=tags,
    )
    _write_code(folder)  # first: by it the folder is known as an export, should what follows fail
    model.save_pretrained(folder)
    written = set(save_exit_heads(model, folder))  # those of models whose own `save_pretrained` knows none, too
    if origin(model) == "hf_cdb":
        written.add(_write_auto_map(folder, type(model.config).__name__, type(model).__name__))
    if tokenizer is not None:
        written |= set(map(Path, tokenizer.save_pretrained(folder)))
    if picture is not None:
        written.add(folder / picture)
        if Path(plot).resolve() != (folder / picture).resolve():
            shutil.copyfile(plot, folder / picture)
    for stale in {file for pattern in _OPTIONAL for file in folder.glob(pattern)} - written:
        stale.unlink()
    card.save(folder / "README.md")
    return folder


def _check_folder(folder: Path) -> None:
    """Raise where the folder holds what is not an export."""
    if folder.exists() and not folder.is_dir():
        raise FileExistsError(f"folder={str(folder)!r} is a file. Name a folder.")
    if not folder.exists() or not any(folder.iterdir()):
        return
    code = folder / _GENERATE
    if not code.is_file() or _MARK not in code.read_text(encoding="utf-8"):
        raise FileExistsError(
            f"folder={str(folder)!r} is not empty, and no export made it. Name a new folder, or remove its files."
        )


def _picture(plot: Path) -> str:
    """Name of a plot's copy in the folder."""
    if not plot.is_file():
        raise FileNotFoundError(f"plot={str(plot)!r} is no file. Name a picture, or leave it out.")
    if plot.suffix.lower() not in _PICTURES:
        raise ValueError(f"plot={str(plot)!r} is no picture that a card shows. Give one of {', '.join(_PICTURES)}.")
    return f"{_PICTURE}{plot.suffix}"


def _write_code(folder: Path) -> None:
    code = folder / _GENERATE
    code.parent.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(Path(__file__).parent / "templates" / "generate.py", code)
    code.with_name("requirements.txt").write_text(f"hf-cdb>={version('hf-cdb')}\n", encoding="utf-8")


def _write_auto_map(folder: Path, config: str, model: str) -> Path:
    """Let the config name classes, and return the file that imports them."""
    code = folder / "modeling_hf_cdb.py"
    code.write_text(_MODELING.format(mark=_MARK, config=config, model=model), encoding="utf-8")
    file = folder / "config.json"
    content = json.loads(file.read_text(encoding="utf-8"))
    content["auto_map"] = {
        "AutoConfig": f"modeling_hf_cdb.{config}",
        "AutoModelForCausalLM": f"modeling_hf_cdb.{model}",
    }
    file.write_text(json.dumps(content, indent=2, sort_keys=True) + "\n", encoding="utf-8")
    return code
