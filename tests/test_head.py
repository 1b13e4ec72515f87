import torch
from torch import nn

from hf_cdb.adapters.head import apply_head


def test_the_head_gives_the_same_logits_for_few_rows_and_many():
    torch.manual_seed(0)
    head = nn.Linear(48, 200, bias=False).requires_grad_(False)
    states = torch.randn(12, 48)
    for rows in range(1, 13):
        expected = (states[:rows].double() @ head.weight.double().T).float()
        assert torch.allclose(apply_head(head, states[:rows]), expected, atol=1e-5)


class Packed(torch.Tensor):
    """Weights, as a quantisation library has them, that know how to be those of a linear layer and no more."""

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        if func in (torch.matmul, torch.Tensor.matmul, torch.Tensor.__matmul__):
            raise NotImplementedError("packed weights cannot be multiplied")  # as such libraries raise it
        return super().__torch_function__(func, types, args, kwargs or {})


def test_weights_of_another_type_are_left_to_the_layer():
    head = nn.Linear(48, 20, bias=False)
    states = torch.randn(4, 48)
    expected = head(states)
    head.weight = nn.Parameter(head.weight.detach().as_subclass(Packed))
    assert torch.equal(apply_head(head, states).as_subclass(torch.Tensor), expected)


def test_whoever_changes_the_head_is_heard():
    """A bias, a hook, a replaced forward (accelerate) and a subclass (quantisation, LoRA) all take the layer's call."""

    class Doubled(nn.Linear):
        def forward(self, x):
            return 2 * super().forward(x)

    states = torch.randn(4, 48)
    hooked, before, replaced = (nn.Linear(48, 20, bias=False) for _ in range(3))
    hooked.register_forward_hook(lambda module, inputs, output: output + 1)
    before.register_forward_pre_hook(lambda module, inputs: (2 * inputs[0],))
    replaced.forward = lambda x: x @ replaced.weight.T - 1
    for head in (nn.Linear(48, 20), hooked, before, replaced, Doubled(48, 20, bias=False)):
        assert torch.equal(apply_head(head, states), head(states))
