"""Which layers of Transformer Engine leave their weight gradients, and which are refused."""

from types import SimpleNamespace

import pytest
import torch

from zorse_megatron.adapter.model.engine_weight_gradients import delay_in_engine
from zorse_megatron.errors import FlagError


class Layer(torch.nn.Module):
    """What is asked of a layer; `engine_like` of tests/megatron computes as one."""

    def __init__(self, *, is_fused: bool = False, **weights: torch.nn.Parameter) -> None:
        super().__init__()
        self.fuse_wgrad_accumulation = is_fused
        self.wgrad_store: object = SimpleNamespace()
        for name, weight in weights.items():
            setattr(self, name, weight)


def parameter() -> torch.nn.Parameter:
    return torch.nn.Parameter(torch.zeros(3))


def test_layers_that_cannot_leave_their_gradients_are_named_together() -> None:
    before = Layer(weight=parameter())
    before.wgrad_store = None
    several = Layer(weight0=parameter(), weight1=parameter())
    layers = torch.nn.ModuleList([Layer(weight=parameter()), before, several])
    with pytest.raises(FlagError) as refused:
        delay_in_engine(layers, lambda _: None)
    said = str(refused.value)
    assert "1 (Layer): found no store" in said and "before Transformer Engine 2.3" in said
    assert "2 (Layer): found several weights" in said and "0 (Layer)" not in said


def test_each_product_is_accumulated_once_in_the_order_that_is_asked_for() -> None:
    layer, left = Layer(weight=parameter(), bias=parameter()), []
    layers = torch.nn.ModuleList([layer, torch.nn.LayerNorm(3)])
    assert delay_in_engine(layers, left.append) == {id(layer.weight)}
    assert layer.wgrad_store.delay_wgrad_compute()
    for number in (1.0, 2.0):
        operand = torch.full((3,), number, requires_grad=True)
        layer.wgrad_store.put([operand], lambda x: (10 * x, x))
    seen = []
    layer.weight.register_hook(lambda gradient: seen.append(gradient[0].item()))
    for product in reversed(left):
        product.accumulate(None)
    assert seen == [20.0, 10.0]
    assert layer.weight.grad.tolist() == [30.0] * 3 and layer.bias.grad.tolist() == [3.0] * 3


def test_gradients_that_have_moved_are_not_added_to_what_is_there_now() -> None:
    layer, left = Layer(is_fused=True, weight=parameter()), []
    delay_in_engine(layer, left.append)
    layer.weight.main_grad = torch.zeros(3)
    layer.wgrad_store.put([torch.ones(3)], lambda x: (layer.weight.main_grad.add_(x), None))
    left[0].accumulate(None)
    assert layer.weight.grad is None and layer.weight.main_grad.tolist() == [1.0] * 3
    layer.weight.main_grad = torch.zeros(3)
    with pytest.raises(AssertionError, match="have moved"):
        left[0].accumulate(None)
