"""Prepacked weights: the same results, fresh after every change of the weights, and out of everybody's way."""

import gc
import threading

import pytest
import torch
from torch import nn

from hf_cdb import CDBConfig, prepack
from hf_cdb.prepack import PrepackedWeights, release

from .tiny import assert_close, left_pad, prompts, random_ouro

pytestmark = pytest.mark.skipif(
    not list(prepack._packable(nn.Sequential(nn.Linear(512, 512)))), reason="this build of PyTorch has no oneDNN"
)


def layer(rows=512, columns=512, **options):
    torch.manual_seed(0)
    return nn.Linear(columns, rows, **options)


def count_packed(monkeypatch):
    """How often weights are brought into the blocked order."""
    packed = []
    forward_of = prepack._reorder

    def reorder(weight):
        packed.append(weight.shape)
        return forward_of(weight)

    monkeypatch.setattr(prepack, "_reorder", reorder)
    return packed


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("rows", [1, 3, 8, 16, 70])
def test_products_are_those_of_the_plain_layer(rows, bias):
    plain = layer(384, 512, bias=bias)
    x = torch.randn(1, rows, 512)
    expected = x.double() @ plain.weight.double().T + (plain.bias.double() if bias else 0)
    with torch.no_grad(), PrepackedWeights(plain):
        assert "forward" in vars(plain)
        assert PrepackedWeights(plain, True).layers == 1  # another call may begin meanwhile
        assert_close(plain(x).double(), expected, 1e-5)
    assert "forward" not in vars(plain)


@pytest.mark.parametrize(
    "change",
    [
        lambda weight: weight.data.mul_(2),
        lambda weight: weight.data.copy_(weight.data.flip(0)),
        lambda weight: weight.data.copy_(weight.data.flip(1)),
        lambda weight: weight.data[17].neg_(),
        lambda weight: weight.data[300].__setitem__(5, 1.0),
        lambda weight: setattr(weight, "data", torch.ones_like(weight)),
    ],
)
def test_changed_weights_are_packed_anew(change, monkeypatch):
    plain, x = layer(), torch.randn(4, 512)
    packed = count_packed(monkeypatch)
    PrepackedWeights(plain)
    PrepackedWeights(plain)
    assert len(packed) == 1
    with torch.no_grad():
        change(plain.weight)
        with PrepackedWeights(plain):
            assert_close(plain(x), x @ plain.weight.T + plain.bias, 1e-4)
    assert len(packed) == 2


def test_what_packing_leaves_alone():
    """Small layers, wide dtypes, layers that others have changed, and weights that are no plain tensors."""
    hooked, patched, small = layer(), layer(), layer(64, 64)
    hooked.register_forward_hook(lambda *_: None)
    patched.forward = lambda x: x
    model = nn.ModuleList([hooked, patched, small, layer().double(), nn.Embedding(512, 512)])
    assert PrepackedWeights(model).layers == 0
    with pytest.raises(ValueError, match="prepack_weights=True: ModuleList has no plain linear layer"):
        PrepackedWeights(model, True)
    assert PrepackedWeights(layer(), False).layers == 0


def test_copies_that_memory_does_not_hold_are_not_made(monkeypatch):
    free = type("Memory", (), {"available": 4 * 512 * 512 * 4 - 1})
    monkeypatch.setattr(prepack.psutil, "virtual_memory", lambda: free)
    assert PrepackedWeights(layer()).layers == 0
    assert PrepackedWeights(layer(), True).layers == 1


def test_training_and_autocast_meanwhile_get_the_plain_layer():
    plain, x = layer(), torch.randn(2, 512)
    with PrepackedWeights(plain):
        plain(x).sum().backward()
        with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
            assert plain(x).dtype == torch.bfloat16
        with pytest.raises(RuntimeError, match="dtype"), torch.no_grad():
            plain(x.double())
    assert_close(plain.weight.grad, x.sum(0).expand(512, 512), 1e-5)


def test_copies_end_with_the_model_or_by_release():
    first, second = layer(), layer()
    held = len(prepack._PACKED)
    for one in (first, second):
        PrepackedWeights(one)
    assert len(prepack._PACKED) == held + 2
    release(first)
    assert len(prepack._PACKED) == held + 1
    del one, second
    gc.collect()
    assert len(prepack._PACKED) == held


@pytest.mark.parametrize("threads", [1, 2])
def test_generation_is_the_same(threads):
    """Tokens and depths are those without packing, logits but for rounding, and threads do not mix."""
    model = random_ouro(hidden_size=256, intermediate_size=640, vocab_size=600, initializer_range=0.05)
    ids, mask = left_pad(prompts(5, 9, 7))
    settings = {"exit_rule": "confidence", "exit_threshold": 0.01, "max_num_seqs": 2}
    options = {"max_new_tokens": 6, "do_sample": False, "return_dict_in_generate": True, "output_logits": True}
    expected = model.generate(ids, attention_mask=mask, cdb=settings | {"prepack_weights": False}, **options)
    outputs = []

    def generate():
        outputs.append(model.generate(ids, attention_mask=mask, cdb=settings | {"prepack_weights": True}, **options))

    workers = [threading.Thread(target=generate) for _ in range(threads)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert len(outputs) == threads
    for output in outputs:
        assert torch.equal(output.sequences, expected.sequences)
        assert torch.equal(output.exit_depths, expected.exit_depths)
        for left, right in zip(output.logits, expected.logits, strict=True):
            assert_close(left, right, 1e-5)
    assert not any("forward" in vars(module) for module in model.modules())


def test_the_setting_is_checked():
    with pytest.raises(ValueError, match="prepack_weights='yes': choose True, False or 'auto'"):
        CDBConfig(prepack_weights="yes")
