"""`recording_entry`, with one mistake in it that `$ZORSE_TEST_PLANT` names."""

import os
import time
import weakref
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch

from tests.megatron.recording_entry import record
from zorse_megatron.adapter import cpu_mode


def plant_norm() -> None:
    """Count what a TP group holds whole on every rank of it."""
    from megatron.core import tensor_parallel

    tensor_parallel.param_is_not_tensor_parallel_duplicate = lambda *_args, **_kwargs: True


def plant_sum() -> None:
    """Sum over the TP group twice what its ranks have seen parts of."""
    from zorse_megatron.adapter.data_parallel import buckets

    once = buckets.sum_over_tp_group

    def twice(parameters: Any, group: Any) -> None:
        once(parameters, group)
        once(parameters, group)

    buckets.sum_over_tp_group = twice


def plant_large_output(number: int) -> None:
    """Let a layer's output be too large for fp16; layers count from 0."""
    from megatron.core.transformer.transformer_layer import TransformerLayer

    stock = TransformerLayer._forward_post_mlp

    def output(self: Any, *args: Any) -> Any:
        return stock(self, *args) * (1e6 if self.layer_number == number + 1 else 1.0)

    TransformerLayer._forward_post_mlp = output


def plant_routers() -> None:
    """Let routers of all but a TP group's first rank find other scores, as another GPU may."""
    from zorse_megatron.adapter.model.experts import PlanRouter

    stock = PlanRouter.gating

    def gating(self: Any, hidden: Any) -> Any:
        scores = stock(self, hidden)
        return scores + self.tp_group.rank() * scores.detach().flip(-1)

    PlanRouter.gating = gating


def _when_shared(then: Callable[[Any], None]) -> None:
    """Do this with the experts of a layer that ranks share."""
    from zorse_megatron.adapter.model.expert_layers import GroupedExperts

    stock = GroupedExperts.__init__

    def init(self: Any, *args: Any, held: range | None = None, **kwargs: Any) -> None:
        stock(self, *args, held=held, **kwargs)
        if held:
            then(self)

    GroupedExperts.__init__ = init  # type: ignore[method-assign, assignment]


def plant_expert() -> None:
    """Count the gradients of a rank's first expert twice in the norm."""
    from zorse_megatron.adapter.optimizer.gradient_factors import GradientFactors

    first, stock = list[Any](), GradientFactors.read
    _when_shared(lambda experts: first.extend(experts.local_experts[0].parameters()))

    def read(self: Any) -> Any:
        found = stock(self)
        again = [each for each in self.pieces if any(each[0] is one for one in first)]
        return found + self._sum(again) if again else found

    GradientFactors.read = read  # type: ignore[method-assign]


def plant_bias() -> None:
    """Let the experts' bias follow the loads of each micro-batch, too."""
    from zorse_megatron.adapter.model.experts import PlanRouter

    stock = PlanRouter.routing

    def routing(self: Any, *args: Any, **kwargs: Any) -> Any:
        probs, chosen = stock(self, *args, **kwargs)
        loads, rate = chosen.sum(dim=0).float(), self.config.moe_router_bias_update_rate
        self.expert_bias += rate * (loads.mean() - loads).sign()
        return probs, chosen

    PlanRouter.routing = routing  # type: ignore[method-assign]


def plant_share() -> None:
    """Divide gradients of experts by the number of ranks that share them, which is three."""
    from zorse_megatron.adapter.optimizer.gradient_factors import GradientFactors

    experts, stock = list[Any](), GradientFactors.read
    _when_shared(lambda some: experts.extend(some.parameters()))

    def read(self: Any) -> Any:
        for parameter, gradient in self._pieces():
            if any(parameter is each for each in experts):
                gradient.div_(3)
        return stock(self)

    GradientFactors.read = read  # type: ignore[method-assign]


def plant_engine() -> None:
    """No mistake: let norms be computed again, for which stock asks Transformer Engine."""
    from megatron.core.tensor_parallel import random

    random.FP8GlobalStateManager = SimpleNamespace(
        is_fp8_enabled=lambda: False, get_fp8_recipe=lambda: None
    )
    random.activation_recompute_forward = random.fp8_autocast = lambda **_: nullcontext()

    def share_storage(taker: torch.Tensor, giver: torch.Tensor) -> None:
        """By a copy: stock compiles C++ for it, half a minute."""
        storage = giver.untyped_storage()
        taker.untyped_storage().resize_(storage.nbytes())
        taker.untyped_storage().copy_(storage)

    random._get_share_storage = lambda: share_storage


def plant_rows() -> None:
    """No mistake: say how many tensors that were exchanged are there when a layer is over."""
    from zorse_megatron.adapter.model.expert_exchange import _Passage
    from zorse_megatron.adapter.model.overlapped_layer import OverlappedLayer

    begin, forward, sent = _Passage.begin, OverlappedLayer.forward, list[Any]()

    def noted(self: Any, *tensors: Any) -> Any:
        received = begin(self, *tensors)
        sent.append(weakref.ref(received[0]))
        return received

    def counted(self: Any, **kwargs: Any) -> Any:
        found = forward(self, **kwargs)
        print("exchanged:", least(), flush=True)
        return found

    def least() -> int:
        """Within 0.2 s: threads of gloo hold what has arrived a moment longer."""
        counts, until_s = list[int](), time.monotonic() + 0.2
        while time.monotonic() < until_s and 0 not in counts:
            counts.append(sum(each() is not None for each in sent))
            time.sleep(0.005)
        return min(counts)

    _Passage.begin, OverlappedLayer.forward = noted, counted  # type: ignore[assignment]


PLANTS: dict[str, Callable[[], None]] = {
    "norm": plant_norm,
    "sum": plant_sum,
    "routers": plant_routers,
    "expert": plant_expert,
    "bias": plant_bias,
    "share": plant_share,
    "engine": plant_engine,
    "rows": plant_rows,
    "large 0": partial(plant_large_output, 0),
    "large 3": partial(plant_large_output, 3),
}

if __name__ == "__main__":
    if cpu_mode.needed():
        cpu_mode.enable()
    PLANTS[os.environ["ZORSE_TEST_PLANT"]]()
    record()
