"""Layers of experts that are whole on a rank: no loop over experts, and no wait of the host.

Stock's layer without Transformer Engine runs one expert after the other, after the host has waited
for how many tokens each one gets. Here tokens are sorted by expert on the device
(`TokensByExpert`), and a product is one launch for all experts (`kernels.grouped_gemm`). Parameters
stay stock's, with their names and in checkpoints; sums are in an order that does not depend on the
run.

Source: `MoELayer`, `MoETokenDispatcher` and `SequentialMLP` in megatron/core/transformer/moe.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.mlp import MLP, MLPSubmodules
from megatron.core.transformer.moe.experts import SequentialMLP
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.moe.token_dispatcher import MoETokenDispatcher

from zorse_megatron.adapter.model.experts import PlanRouter
from zorse_megatron.kernels.grouped_gemm import GroupedProduct, grouped_linear, placed_counts


def with_plan_layers(block_samples: int, stock: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap `get_moe_module_spec_for_backend`: its layers are those below.

    `block_samples`: see `PlanRouter`.
    """

    def get_moe_module_spec_for_backend(*args: Any, **kwargs: Any) -> Any:
        submodules = stock(*args, **kwargs).keywords["submodules"]
        # Also beside layers of Transformer Engine, whose experts are a loop without a flag that
        # gives parameters other names.
        linears = MLPSubmodules(linear_fc1=ColumnParallelLinear, linear_fc2=RowParallelLinear)
        return partial(
            WholeExpertsLayer,
            submodules=replace(
                submodules,
                router=partial(PlanRouter, block_samples=block_samples),
                experts=partial(GroupedExperts, submodules=linears),
            ),
        )

    return get_moe_module_spec_for_backend


class WholeExpertsLayer(MoELayer):
    """Stock's, with all experts on the rank."""

    def __init__(self, config: Any, *args: Any, pg_collection: Any = None, **kwargs: Any) -> None:
        super().__init__(config, *args, pg_collection=pg_collection, **kwargs)
        self.token_dispatcher = TokensByExpert(config, pg_collection)


class TokensByExpert(MoETokenDispatcher):
    """Sorts tokens by expert, each as often as it has experts, and adds up what experts return.

    Nothing of a micro-batch stays here once its forward is over.
    """

    def dispatch_preprocess(
        self, tokens: torch.Tensor, routing_map: torch.Tensor, probs: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """`tokens` [length, samples, width]; `routing_map` and `probs` [tokens, experts].

        Returns tokens [tokens, width], and the weights of each one's experts [tokens, k].
        """
        self.shape, self.copies = tokens.shape, int(self.config.moe_router_topk)
        self.counts = routing_map.sum(dim=0)
        # Each row has k of them.
        chosen = routing_map.byte().topk(self.copies, dim=1).indices.sort(dim=1).values
        self.order = torch.argsort(chosen.view(-1), stable=True)
        self.places = torch.argsort(self.order)
        return tokens.view(-1, self.shape[-1]), probs.gather(1, chosen)

    def token_dispatch(
        self, hidden_states: torch.Tensor, probs: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Nothing is sent."""
        return hidden_states, probs

    def dispatch_postprocess(
        self, hidden_states: torch.Tensor, probs: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Tokens by expert [tokens x k, width], how many each expert has, and their weights."""
        tokens = _copied(hidden_states, self.order, self.places, self.copies)
        weights = _copied(probs.reshape(-1, 1), self.order, self.places, 1)
        return tokens, self.counts, weights.view(-1)

    def combine_preprocess(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """The sum of what a token's experts have returned [tokens, width]."""
        total: torch.Tensor = _Summed.apply(hidden_states, self.order, self.places, self.copies)
        return total

    def token_combine(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """Nothing is sent."""
        return hidden_states

    def combine_postprocess(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """As the layer was given them."""
        del self.counts, self.order, self.places  # the graph has what a backward needs
        return hidden_states.view(self.shape)


# Row i of copies goes to row `places[i]`, and comes from there by `order`. Each of the two
# functions is the other one's backward. Both read rows, and add none to another's: no sum depends
# on which thread comes first.


def _copied(
    rows: torch.Tensor, order: torch.Tensor, places: torch.Tensor, copies: int
) -> torch.Tensor:
    found: torch.Tensor = _Copied.apply(rows, order, places, copies)
    return found


def _copy(rows: torch.Tensor, order: torch.Tensor, copies: int) -> torch.Tensor:
    return rows.index_select(0, order if copies == 1 else order // copies)


def _sum(rows: torch.Tensor, places: torch.Tensor, copies: int) -> torch.Tensor:
    back = rows.index_select(0, places)
    return back if copies == 1 else back.view(-1, copies, rows.shape[1]).sum(dim=1)


class _Copied(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, rows: torch.Tensor, order: torch.Tensor, places: torch.Tensor, copies: int
    ) -> torch.Tensor:
        ctx.copies = copies
        ctx.save_for_backward(places)
        return _copy(rows, order, copies)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[Any, ...]:
        (places,) = ctx.saved_tensors
        return _sum(gradient, places, ctx.copies), None, None, None


class _Summed(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, rows: torch.Tensor, order: torch.Tensor, places: torch.Tensor, copies: int
    ) -> torch.Tensor:
        ctx.copies = copies
        ctx.save_for_backward(order)
        return _sum(rows, places, copies)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[Any, ...]:
        (order,) = ctx.saved_tensors
        return _copy(gradient, order, ctx.copies), None, None, None


class GroupedExperts(SequentialMLP):
    """Stock's experts, computed together."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        experts = list(self.local_experts)
        both = [_AllExperts([getattr(each, name) for each in experts]) for name in _LINEARS]
        # Not a submodule: parameters are those of the experts alone.
        self.__dict__["together"] = SimpleNamespace(
            config=self.config,
            activation_func=experts[0].activation_func,
            **dict(zip(_LINEARS, both, strict=True)),
        )

    def forward(
        self,
        permuted_local_hidden_states: torch.Tensor,
        tokens_per_expert: torch.Tensor,
        permuted_probs: torch.Tensor,
    ) -> tuple[torch.Tensor, None]:
        """See `SequentialMLP`; `tokens_per_expert` on the device of the tokens."""
        tokens = permuted_local_hidden_states
        if self.config.moe_apply_probs_on_input:
            tokens = (permuted_probs.unsqueeze(-1) * tokens).to(tokens.dtype)
            permuted_probs = torch.ones_like(permuted_probs)
        counts = placed_counts(tokens_per_expert, tokens.device)
        for name in _LINEARS:
            getattr(self.together, name).counts = counts
        output, _ = MLP.forward(self.together, tokens, permuted_probs)
        for name in _LINEARS:
            del getattr(self.together, name).counts
        return output, None

    def delay_weights(self, leave: Callable[[GroupedProduct], None]) -> None:
        """Let `leave` have what weight gradients are made of, in place of their computation."""
        for name in _LINEARS:
            getattr(self.together, name).leave = leave


_LINEARS = ("linear_fc1", "linear_fc2")


class _AllExperts(torch.nn.Module):
    """The same linear layer of all experts."""

    counts: torch.Tensor
    """Tokens of each, of the micro-batch that is computed."""

    def __init__(self, linears: Sequence[torch.nn.Module]) -> None:
        super().__init__()
        self.linears = tuple(linears)  # not as submodules
        self.leave: Callable[[GroupedProduct], None] | None = None

    def forward(self, tokens: torch.Tensor) -> tuple[torch.Tensor, None]:
        """[tokens x k, inputs] to [tokens x k, outputs], and no bias."""
        for linear in self.linears:
            # It is not called itself: its hooks wait for parameters that are being gathered.
            for hook in linear._forward_pre_hooks.values():
                hook(linear, (tokens,))
        weights: list[Any] = [linear.weight for linear in self.linears]
        main_grads = [weight.main_grad for weight in weights if hasattr(weight, "main_grad")]
        output = grouped_linear(
            tokens, self.counts, weights, main_grads=main_grads or None, later=self.leave
        )
        return output, None
