"""A user's processor or criterion for every row: copies, so that a state which it keeps is the row's own."""

import copy
import enum
import functools
import io
import pickle
import re
import types
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy
import torch
from torch import nn
from transformers import PreTrainedTokenizerBase
from transformers.utils import logging

__all__ = ["Copier", "PerRow"]

logger = logging.get_logger(__name__)

_MODELS = (nn.Module, PreTrainedTokenizerBase, types.ModuleType)
# What `copy.deepcopy` does not copy either, and pickle cannot always.
_SHARED = (
    *_MODELS,
    type,
    types.FunctionType,
    types.BuiltinFunctionType,
    types.CodeType,
    property,
    re.Pattern,
    weakref.ref,
)
_ATOMS = (int, float, complex, bool, str, bytes, type(None))
# Their own `__deepcopy__` does what pickle does.
_PICKLED = (numpy.ndarray, numpy.generic, enum.Enum)
_LARGE = 2**18  # bytes of a pickle that a warning tells of; in memory containers take about ten times as much


class Copier:
    """Makes copies of an object as it is now, each equal to what `copy.deepcopy` makes, where it can at less cost.

    Models, tokenizers and functions are shared by all copies. A tensor is shared until one of them writes into it
    (torch's copy-on-write). The rest is pickled once and unpickled for each copy, which is several times faster than a
    deep copy; `copy.deepcopy` itself is used where pickle would not do the same.

    Args:
        thing: a logits processor or a stopping criterion.

    Attributes:
        thing: the object itself.
        nbytes: of the pickle, without tensors and texts; None where deep copies are made.

    Raises:
        Exception: whatever the object raises where it cannot be copied.
    """

    def __init__(self, thing: Callable):
        self.thing = thing
        self._parts: list[Any] = []  # what the pickle refers to
        self.nbytes: int | None = None
        try:
            file = io.BytesIO()
            _Pickler(file, self._parts).dump(thing)
            self._pickle = file.getvalue()
            self.nbytes = len(self._pickle)
            self()
        except Exception:  # whatever stands in pickle's way; a deep copy raises what is the object's own fault
            self.nbytes = None
            self._models = {id(value): value for value in _models(thing, set())}
            self._snapshot = thing
            self._snapshot = self()

    def __call__(self) -> Callable:
        """A copy."""
        if self.nbytes is None:
            return copy.deepcopy(self._snapshot, dict(self._models))
        return _Unpickler(io.BytesIO(self._pickle), self._parts).load()

    def warn_if_large(self, what: str) -> None:
        """Say once that copies take long and much memory, and how they need not."""
        if self.nbytes is not None and self.nbytes >= _LARGE:
            logger.warning_once(
                f"{what} is copied for every row that runs, and its pickle has {self.nbytes / 2**20:.1f} MB: that "
                "takes time and memory. Keep tables that do not change in torch tensors, which rows share until one "
                "writes into them, in tuples of plain values, or in a class with a __deepcopy__ that returns self."
            )


class _Pickler(pickle.Pickler):
    """Refers to what all copies share, and to tensors, by their place in `parts`.

    Raises:
        pickle.PicklingError: something that a deep copy would treat in another way than pickle.
    """

    def __init__(self, file: io.BytesIO, parts: list[Any]):
        super().__init__(file, protocol=4)  # that of the copy module
        self._parts = parts
        self._places: dict[int, int] = {}
        self._storages: set[int] = set()
        self._referred: list[Any] = []  # kept alive, so that an id stands for one object

    def persistent_id(self, value: Any) -> int | None:
        if isinstance(value, torch.Tensor):
            if id(value) not in self._places:
                self._refer(value, self._own(value))
        elif isinstance(value, _SHARED) or _never_changes(value):
            if id(value) not in self._places:
                self._refer(value, value)
        else:
            return None
        return self._places[id(value)]

    def _refer(self, value: Any, part: Any) -> None:
        self._places[id(value)] = len(self._parts)
        self._parts.append(part)
        self._referred.append(value)

    def _own(self, value: torch.Tensor) -> torch.Tensor:
        """A tensor to clone from, whatever becomes of this one."""
        storage = value.untyped_storage().data_ptr() if value.layout is torch.strided else 0
        clone = value.detach().clone()
        plain = type(value) is torch.Tensor and not value.requires_grad and not vars(value)
        if not plain or storage in self._storages or clone.layout is not torch.strided:
            raise pickle.PicklingError("a tensor that clones would not stand for")
        if clone.stride() != value.stride():
            raise pickle.PicklingError("a tensor whose elements share memory")
        if value.numel():
            self._storages.add(storage)
        return clone

    def reducer_override(self, value: Any) -> Any:
        if isinstance(value, types.MethodType):  # pickle would look the function up by its name
            return types.MethodType, (value.__func__, value.__self__)
        if hasattr(value, "__deepcopy__") and not isinstance(value, _PICKLED):
            raise pickle.PicklingError(f"{type(value).__name__} has a __deepcopy__ of its own")
        return NotImplemented


class _Unpickler(pickle.Unpickler):
    def __init__(self, file: io.BytesIO, parts: list[Any]):
        super().__init__(file)
        self._parts = parts
        self._tensors: dict[int, torch.Tensor] = {}

    def persistent_load(self, place: int) -> Any:
        part = self._parts[place]
        if not isinstance(part, torch.Tensor):
            return part
        if place not in self._tensors:
            self._tensors[place] = torch._lazy_clone(part)  # without a public name so far; numpy views write apart too
        return self._tensors[place]


def _never_changes(value: Any) -> bool:
    """Whether it is a long text, or a tuple or frozenset of plain values: not worth a copy."""
    if type(value) in (str, bytes):
        return len(value) > 64
    return type(value) in (tuple, frozenset) and len(value) > 0 and all(type(item) in _ATOMS for item in value)


def _models(thing: Any, seen: set[int]) -> Iterator[Any]:
    """Models, tokenizers, Python modules that `thing` leads to: in attributes, in lists and dicts, as the object of a
    bound method or an argument of a partial."""
    if id(thing) in seen or isinstance(thing, (type, torch.Tensor)):
        return
    seen.add(id(thing))
    if isinstance(thing, _MODELS):
        yield thing
        return
    inner = [getattr(thing, "__self__", None), *(vars(thing).values() if hasattr(thing, "__dict__") else ())]
    if isinstance(thing, functools.partial):
        inner += [thing.func, *thing.args, *thing.keywords.values()]
    if isinstance(thing, (list, tuple, set)):
        inner += thing
    if isinstance(thing, dict):
        inner += thing.values()
    for value in inner:
        yield from _models(value, seen)


class PerRow:
    """For every row a list of things of its own, made when it is first asked for and dropped when the row has ended.

    Args:
        makers: functions from a row to the thing that is made for it.
    """

    def __init__(self, makers: Iterable[Callable[[int], Callable]] = ()):
        self._makers = list(makers)
        self._made: dict[int, list[Callable]] = {}

    def add(self, maker: Callable[[int], Callable]) -> None:
        """One thing more for every row."""
        self._makers.append(maker)

    def __len__(self) -> int:
        """Things per row."""
        return len(self._makers)

    def __getitem__(self, row: int) -> list[Callable]:
        if row not in self._made:
            self._made[row] = [make(row) for make in self._makers]
        return self._made[row]

    def release(self, row: int) -> None:
        """Drop what the row has; it has ended."""
        self._made.pop(row, None)
