"""What a card's author writes: metadata, a description and sections, in one Markdown text."""

import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jinja2
import yaml
from huggingface_hub import ModelCard

__all__ = ["CardText", "read_text"]


@dataclass(frozen=True)
class CardText:
    """The parts of a text.

    Attributes:
        metadata: of the YAML block at its head.
        title: of its heading `# ...`; None without.
        description: what stands before the first section.
        sections: heading -> text of every `## ...`, in order.
    """

    metadata: dict[str, Any] = field(default_factory=dict)
    title: str | None = None
    description: str = ""
    sections: dict[str, str] = field(default_factory=dict)


def read_text(text: str, folder: str | Path | None = None) -> CardText:
    """The parts of a Markdown text with or without a YAML block.

    It is a Jinja template in which `{{ tables("depth.md") }}` stands for the tables of a Markdown file, so that
    measured figures are never copied by hand.

    Args:
        text: the text.
        folder: of the files that `tables` reads.

    Raises:
        ValueError: the template or the YAML is wrong, a file that is named is not there or has no table, or a heading
            comes twice.
    """
    environment = jinja2.Environment(undefined=jinja2.StrictUndefined)
    environment.globals["tables"] = lambda name: _tables(None if folder is None else Path(folder) / name, name)
    try:
        text = environment.from_string(text).render()
    except jinja2.TemplateError as error:
        raise ValueError(
            f"text: {error}. Braces are instructions for Jinja here: put text that shows some between {{% raw %}} and "
            "{% endraw %}."
        ) from error
    metadata = {}
    if text.startswith("---\n"):
        try:
            card = ModelCard(text)
        except (yaml.YAMLError, ValueError) as error:
            raise ValueError(f"text: its YAML block cannot be read, {error}. Give `key: value` lines.") from error
        metadata, text = card.data.to_dict(), card.text
    head, sections = _split(text)
    heading = re.match(r"\s*# +(.+)\n", head + "\n")
    return CardText(metadata, heading and heading[1].strip(), head[heading.end() if heading else 0 :].strip(), sections)


def _split(text: str) -> tuple[str, dict[str, str]]:
    """What comes before the first `## `, and every section by its heading; those in fenced code are none."""
    parts: dict[str | None, list[str]] = {None: []}
    heading, fenced = None, False
    for line in text.splitlines():
        fenced ^= line.lstrip().startswith(("```", "~~~"))
        if line.startswith("## ") and not fenced:
            heading = line.removeprefix("## ").strip()
            if heading in parts:
                raise ValueError(f"text: the section {heading!r} comes twice. Give one of them another heading.")
            parts[heading] = []
        else:
            parts[heading].append(line)
    head, *sections = ("\n".join(lines).strip("\n") for lines in parts.values())
    return head, dict(zip(list(parts)[1:], sections, strict=True))


def _tables(path: Path | None, name: str) -> str:
    """The tables of a Markdown file, a blank line between them."""
    if path is None or not path.is_file():
        where = "this text has no folder to read from" if path is None else f"there is no file {str(path)!r}"
        raise ValueError(f"text: tables({name!r}): {where}. Write the tables into the text, or name a file beside it.")
    blocks = path.read_text(encoding="utf-8").split("\n\n")
    found = [block.strip("\n") for block in blocks if block.lstrip("\n").startswith("|")]
    if not found:
        raise ValueError(f"text: tables({name!r}): {str(path)!r} has no Markdown table.")
    return "\n\n".join(found)
