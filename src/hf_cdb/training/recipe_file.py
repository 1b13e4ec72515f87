"""Recipes as YAML files and as plain values."""

import contextlib
import dataclasses
import types
import typing
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from .recipe import Recipe, nearest
from .text_file import naming

__all__ = ["build", "load_recipe", "read_yaml", "recipe_from_dict", "write_recipe"]


def load_recipe(path: str | Path, overrides: Sequence[str] = ()) -> Recipe:
    """Read a recipe from a YAML file.

    Args:
        path: the file.
        overrides: `key=value` with dots into sections, as `optimizer.muon_lr=0.01`; values in YAML.

    Raises:
        FileNotFoundError: no such file.
        ValueError: no YAML, unknown keys, or values that cannot work.
    """
    return recipe_from_dict(read_yaml(path, overrides))


def read_yaml(path: str | Path, overrides: Sequence[str] = ()) -> dict[str, Any]:
    """The mapping that a YAML file holds; arguments and errors as of `load_recipe`, but for what the keys mean."""
    path = Path(path)
    if not path.is_file():
        raise FileNotFoundError(f"config={str(path)!r}: there is no such file. It has to be a YAML file.")
    with naming(path, "config"):
        text = path.read_text(encoding="utf-8")
    values = _parse_yaml(text, str(path))
    if not isinstance(values, dict):
        raise ValueError(f"{path} holds {type(values).__name__}, but a mapping from keys to values is needed.")
    for override in overrides:
        key, equals, text = override.partition("=")
        if not key or not equals:
            raise ValueError(f"set {override!r}: write key=value, as in optimizer.muon_lr=0.01.")
        *sections, last = key.split(".")
        place = values
        for section in sections:
            place = place.setdefault(section, {})
            if not isinstance(place, dict):
                raise ValueError(f"set {override!r}: {section} is a value, not a section.")
        place[last] = _parse_yaml(text, override)
    return values


def recipe_from_dict(values: Mapping[str, Any]) -> Recipe:
    """A recipe from plain values; errors as in `load_recipe`."""
    return build(Recipe, values, "recipe")


def write_recipe(recipe: Recipe, folder: Path) -> None:
    """Write `recipe.yaml`, as `load_recipe` reads it, into a folder."""
    text = yaml.safe_dump(recipe.to_dict(), sort_keys=False)
    (folder / "recipe.yaml").write_text(text, encoding="utf-8")


class _UniqueKeys(yaml.SafeLoader):
    """Refuses a key that stands twice in a mapping, where PyYAML would take the last one silently."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        keys = [self.construct_object(key, deep=True) for key, _ in node.value]
        if twice := next((key for place, key in enumerate(keys) if key in keys[:place]), None):
            raise yaml.constructor.ConstructorError(None, None, f"the key {twice!r} stands twice", node.start_mark)
        return super().construct_mapping(node, deep)


def _parse_yaml(text: str, where: str) -> Any:
    try:
        return yaml.load(text, _UniqueKeys)  # a safe loader
    except yaml.YAMLError as error:
        raise ValueError(f"{where} is no YAML: {error}") from error


def build(cls: type, values: Any, where: str) -> Any:
    """An instance of a dataclass from plain values; sections are dataclasses themselves.

    Args:
        where: what the values are, for messages.

    Raises:
        ValueError: an unknown or missing key, a value of another type, or what the class refuses.
    """
    if not isinstance(values, Mapping):
        raise ValueError(f"{where}={values!r}: a section is a mapping from keys to values.")
    hints = typing.get_type_hints(cls)
    fields = {item.name: item for item in dataclasses.fields(cls)}
    for key in values:
        if key not in fields:
            raise ValueError(f"{where}: the key {key!r} is unknown.{nearest(str(key), fields)}")
    for name, item in fields.items():
        if name not in values and item.default is item.default_factory is dataclasses.MISSING:
            raise ValueError(f"{where}: the key {name!r} is missing. Give it.")
    read = {name: _read(hints[name], value, f"{where}: {name}") for name, value in values.items()}
    try:
        return cls(**read)
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from error


def _read(hint: Any, value: Any, where: str) -> Any:
    if dataclasses.is_dataclass(hint):
        return build(hint, value, where)
    allowed = hint.__args__ if isinstance(hint, types.UnionType) else (hint,)
    kinds = [typing.get_origin(kind) or kind for kind in allowed]
    if float in kinds and isinstance(value, (int, str)) and not isinstance(value, bool):
        # YAML 1.1 reads 6e-3, without a dot, as text. What is no number fails the check below.
        with contextlib.suppress(ValueError):
            value = float(value)
    if not isinstance(value, tuple(kinds)) or (isinstance(value, bool) and bool not in kinds):
        names = " or ".join("null" if kind is types.NoneType else kind.__name__ for kind in kinds)
        raise ValueError(f"{where}={value!r} is {type(value).__name__}, but {names} is needed.")
    return value
