"""Weights of linear layers in the blocked order that oneDNN multiplies fastest, for models on the CPU.

A launch has few rows, so most of a plain multiplication is spent on bringing the weights into that order, again in
every launch. Done once, 16 rows take about .55 of the time with AVX-512 and .8 with AVX2. The price is a second copy
of the weights, which lasts as long as the model or until `release`.
"""

import itertools
import weakref
from collections.abc import Iterator

import psutil
import torch
from torch import nn

__all__ = ["PrepackedWeights", "is_plain", "release"]

# Measured: the call costs 12 us more than a plain one, which smaller layers do not win back.
LEAST_ELEMENTS = 1 << 17


_PACKED: "weakref.WeakKeyDictionary[nn.Module, _Multiply]" = weakref.WeakKeyDictionary()
# A compiled graph cannot hold packed weights, so in it a multiplication is an operator that is told which ones.
_BY_NUMBER: "weakref.WeakValueDictionary[int, _Multiply]" = weakref.WeakValueDictionary()
_NUMBERS = itertools.count()
_OPERATORS = torch.library.Library("hf_cdb_prepack", "DEF")
_OPERATORS.define("multiply(Tensor x, int number, int width) -> Tensor")
_OPERATORS.impl("multiply", lambda x, number, width: _BY_NUMBER[number].multiply(x), "CPU")
torch.library.register_fake("hf_cdb_prepack::multiply", lambda x, number, width: x.new_empty(*x.shape[:-1], width))


def is_plain(layer: nn.Module) -> bool:
    """Whether nobody (adapters, quantisation, offloading) changes what calling a linear layer means."""
    forward = vars(layer).get("forward")  # in the middle of a launch it may be that of prepacked weights
    replaced = not isinstance(forward, _Multiply | None) or layer._forward_hooks or layer._forward_pre_hooks
    # Quantised and sharded weights are tensors of other types, which know how to be a layer's and may know no more.
    return type(layer) is nn.Linear and type(layer.weight) in (nn.Parameter, torch.Tensor) and not replaced


class PrepackedWeights:
    """Context manager: while it is open, the linear layers of `model` multiply with prepacked weights.

    Packs what has not been packed before or has changed since: a layer's weights are read once to tell. What changes
    while it is in use is not seen. Results differ from those of the plain layers by rounding alone. Layers of fewer
    than 131,072 weights stay as they are.

    Args:
        model: the model.
        wanted: True, False, or "auto": where the machine can, and a quarter of the free memory holds the copies.

    Attributes:
        layers: how many layers it packs.

    Raises:
        ValueError: `wanted` is True and nothing can be packed.
    """

    def __init__(self, model: nn.Module, wanted: bool | str = "auto"):
        layers = [] if wanted is False else list(_packable(model))
        if wanted is True and not layers:
            raise ValueError(
                f"prepack_weights=True: {type(model).__name__} has no plain linear layer of {LEAST_ELEMENTS} weights "
                "or more on the CPU in a dtype that oneDNN can pack: float32, and bfloat16 and float16 where the "
                "processor knows them. Leave prepack_weights at 'auto'."
            )
        for module in model.modules():  # copies in a dtype that the model has no more
            packed = _PACKED.get(module)
            if packed is not None and packed.seen and packed.seen[0] != module.weight.dtype:
                _PACKED.pop(module, None)
        missing = sum(layer.weight.nbytes for layer in layers if layer not in _PACKED)
        if wanted == "auto" and missing > psutil.virtual_memory().available // 4:
            layers = []
        self.layers = len(layers)
        self._forwards = [(vars(layer), _packed(layer)) for layer in layers]

    def __enter__(self) -> None:
        for attributes, forward in self._forwards:
            attributes["forward"] = forward

    def __exit__(self, *error) -> None:
        for attributes, _ in self._forwards:
            attributes.pop("forward", None)


def release(model: nn.Module) -> None:
    """Give the memory of a model's prepacked weights back."""
    for module in model.modules():
        _PACKED.pop(module, None)


def _packable(model: nn.Module) -> Iterator[nn.Linear]:
    if not (torch.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, "_linear_pointwise")):
        return
    dtypes = {torch.float32}
    if torch.ops.mkldnn._is_mkldnn_bf16_supported():
        dtypes.add(torch.bfloat16)
    if torch.ops.mkldnn._is_mkldnn_fp16_supported():
        dtypes.add(torch.float16)
    for module in model.modules():
        if isinstance(module, nn.Linear) and is_plain(module):
            weight = module.weight
            if weight.device.type == "cpu" and weight.dtype in dtypes and weight.numel() >= LEAST_ELEMENTS:
                yield module


@torch.no_grad()
def _packed(layer: nn.Linear) -> "_Multiply":
    """What the layer does, with its weights packed."""
    weight = layer.weight.detach()
    version = None if layer.weight.is_inference() else layer.weight._version
    seen = (weight.dtype, weight.data_ptr(), version)
    probed = _probe(weight)
    packed = _PACKED.get(layer)
    if packed is None:
        packed = _PACKED[layer] = _Multiply(layer)
    if packed.seen != seen or not torch.equal(packed.probed, probed):
        packed.pack(weight, seen, probed)
    return packed


def _probe(weight: torch.Tensor) -> torch.Tensor:
    """A sum of every row with random signs, which tells weights that were changed. Half precision is added up in
    float32: rounded to its own 8 bits the sum would hide the change of one weight in many."""
    signs = torch.randint(2, (weight.shape[1],), generator=torch.Generator().manual_seed(0)) * 2 - 1
    if weight.dtype == torch.float32:
        return weight @ signs.to(weight.dtype)
    return (weight * signs.to(weight.dtype)).sum(dim=1, dtype=torch.float32)


class _Multiply:
    """Stands in for the `forward` of a layer, always the same one: a compiled graph would not know another.

    Attributes:
        seen: what tells its weights from others: dtype, address, and the count of changes that PyTorch keeps.
        probed: the weights times a vector of signs: changes through `.data` are not counted.
    """

    def __init__(self, layer: nn.Linear):
        self.layer = weakref.proxy(layer)  # which is the key that this is found under
        self.width, self.number, self.seen = layer.out_features, next(_NUMBERS), ()
        _BY_NUMBER[self.number] = self

    def pack(self, weight: torch.Tensor, seen: tuple, probed: torch.Tensor) -> None:
        """Take these weights from now on."""
        self.packed, self.dtype, self.seen, self.probed = _reorder(weight), weight.dtype, seen, probed

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        # Another thread may train the model meanwhile, autocast it, or give it anything else that a layer takes.
        if torch.is_grad_enabled() or x.dtype != self.dtype or torch.is_autocast_enabled("cpu"):
            return nn.functional.linear(x, self.layer.weight, self.layer.bias)
        if torch.compiler.is_compiling():
            return torch.ops.hf_cdb_prepack.multiply(x, self.number, self.width)
        return self.multiply(x)

    def multiply(self, x: torch.Tensor) -> torch.Tensor:
        """The product with the packed weights, and the bias."""
        return torch.ops.mkldnn._linear_pointwise(x, self.packed, self.layer.bias, "none", [], "")


def _reorder(weight: torch.Tensor) -> torch.Tensor:
    # The pair of operators that `torch.compile` emits for constant weights; one order serves all numbers of rows.
    return torch.ops.mkldnn._reorder_linear_weight(weight)
