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
        lambda weight: weight[7, 255].add_(1e-6),
        lambda weight: weight[:, 256].copy_(torch.randn(512)),
    ],
)
@pytest.mark.parametrize("columns", [512, 513])
def test_changed_weights_are_packed_anew(change, columns, monkeypatch):
    plain, x = layer(columns=columns), torch.randn(4, columns)
    packed = count_packed(monkeypatch)
    PrepackedWeights(plain)
    PrepackedWeights(plain)
    assert len(packed) == 1
    with torch.no_grad():
        change(plain.weight)
        with PrepackedWeights(plain):
            assert_close(plain(x), x @ plain.weight.T + plain.bias, 1e-4)
    assert len(packed) == 2


def test_changed_weights_in_half_precision():
    """Eight bits swallow small changes of a sum: those that PyTorch counts are noticed all the same."""
    if torch.bfloat16 not in {one.weight.dtype for one in prepack._packable(layer().bfloat16())}:
        pytest.skip("this processor does not multiply bfloat16")
    plain, x = layer(bias=False).bfloat16(), torch.eye(512, dtype=torch.bfloat16)
    with torch.no_grad():
        for column in (0, 255, 256, 511):
            PrepackedWeights(plain)
            plain.weight[3, column] += 0.001
            with PrepackedWeights(plain):
                assert torch.equal(plain(x), plain.weight.T)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_no_sum_swallows_the_change_of_one_weight(dtype):
    """Changed through `.data`, which PyTorch does not count; each of these by no more than itself."""
    weight = layer().weight.data.to(dtype)
    probed = prepack._probe(weight)
    for column in range(512):
        changed = weight.clone()
        changed[column, column] *= 0.5
        assert not torch.equal(prepack._probe(changed), probed)


def test_copies_go_with_their_dtype():
    model = nn.Sequential(layer())
    PrepackedWeights(model)
    assert model[0] in prepack._PACKED
    model.to(torch.float64)
    PrepackedWeights(model)
    assert model[0] not in prepack._PACKED


def test_another_dtype_is_packed_anew():
    """Weights of zeros are equal in every dtype."""
    plain = layer()
    with torch.no_grad():
        plain.weight.zero_()
        PrepackedWeights(plain)
        plain.bfloat16()
        with PrepackedWeights(plain):
            assert plain(torch.ones(1, 512, dtype=torch.bfloat16)).dtype == torch.bfloat16


def test_what_packing_leaves_alone():
    """Small layers, wide dtypes, layers that others have changed, and weights that are no plain tensors."""
    hooked, before, patched, small = layer(), layer(), layer(), layer(64, 64)
    hooked.register_forward_hook(lambda *_: None)
    before.register_forward_pre_hook(lambda *_: None)
    patched.forward = lambda x: x
    model = nn.ModuleList([hooked, before, patched, small, layer().double(), nn.Embedding(512, 512)])
    assert PrepackedWeights(model).layers == 0
    with pytest.raises(ValueError, match="prepack_weights=True: ModuleList has no plain linear layer"):
        PrepackedWeights(model, True)
    assert PrepackedWeights(layer(), False).layers == 0


def test_copies_that_memory_does_not_hold_are_not_made(monkeypatch):
    free = type("Memory", (), {"available": 4 * 512 * 512 * 4 - 1})
    monkeypatch.setattr(prepack.psutil, "virtual_memory", lambda: free)
    one = layer()
    assert PrepackedWeights(one).layers == 0
    assert PrepackedWeights(one, True).layers == 1
    assert PrepackedWeights(one).layers == 1, "its copy is there already"


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
    gc.collect()  # models of other tests
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
