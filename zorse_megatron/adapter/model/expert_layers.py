"""Layers of experts: no loop over experts, and no wait of the host.

Stock's layer without Transformer Engine runs one expert after the other, after the host has waited
for how many tokens each one gets. Here tokens are sorted by expert on the device
(`TokensByExpert`), and a product is one launch for all experts (`kernels.grouped_gemm`). Parameters
stay stock's, with their names and in checkpoints; sums are in an order that does not depend on the
run.

Each rank has all experts, or some of them, any number. Of ranks that share experts alone, each has
tokens of its own, and sends them (`expert_exchange`). In a tensor-parallel group all ranks route
all tokens alike; each computes what its own experts return, and what these returned is added
up as the parts of a dense layer are: one sum, or with sequence parallelism a gather and a
reduce-scatter, of as much as a token has, however many experts it goes to. Of experts that others
have a rank has parameters without elements.

Source: `MoELayer`, `MoETokenDispatcher` and `SequentialMLP` in megatron/core/transformer/moe.
"""

import copy
from collections.abc import Callable, Container, Sequence
from dataclasses import replace
from functools import partial
from itertools import count
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.dist_checkpointing.mapping import ShardedObject
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.tensor_parallel.mappings import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
    reduce_from_tensor_model_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
)
from megatron.core.transformer.mlp import MLP, MLPSubmodules
from megatron.core.transformer.moe.experts import SequentialMLP
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.moe.token_dispatcher import MoETokenDispatcher

from zorse_megatron.adapter.model.expert_exchange import TokensByRank
from zorse_megatron.adapter.model.experts import PlanRouter
from zorse_megatron.adapter.model.uneven_tp_shards import without_columns, without_rows
from zorse_megatron.adapter.parameter_parts import expert_of, unit_of
from zorse_megatron.kernels.grouped_gemm import GroupedProduct, grouped_linear, placed_counts
from zorse_megatron.runtime.mailbox import ExpertRank, TpRank


def with_plan_layers(
    block_samples: int,
    place: TpRank | None,
    expert_place: ExpertRank | None,
    stock: Callable[..., Any],
    *,
    packed_tokens: int | None = None,
) -> Callable[..., Any]:
    """Wrap `get_moe_module_spec_for_backend`: its layers are those below.

    `block_samples`, `packed_tokens`: see `PlanRouter`. `place`: of a rank in a tensor-parallel
    group; `expert_place`: of one that shares experts alone.
    """

    router = partial(PlanRouter, block_samples=block_samples, packed_tokens=packed_tokens)

    def get_moe_module_spec_for_backend(*args: Any, **kwargs: Any) -> Any:
        submodules = stock(*args, **kwargs).keywords["submodules"]
        # Also beside layers of Transformer Engine, whose experts are a loop without a flag that
        # gives parameters other names.
        linears = MLPSubmodules(linear_fc1=ColumnParallelLinear, linear_fc2=RowParallelLinear)
        return partial(
            PlanMoELayer,
            place=place,
            expert_place=expert_place,
            submodules=replace(
                submodules,
                router=router,
                experts=partial(GroupedExperts, submodules=linears),
            ),
        )

    return get_moe_module_spec_for_backend


Compute = Callable[[], tuple[torch.Tensor, Callable[[], torch.Tensor]]]
"""Computes what experts return of tokens that have been sent to them. That leaves, and is returned
beside what waits for it and returns the layer's output."""


class PlanMoELayer(MoELayer):
    """Stock's, with all experts on the rank, or those of its place among ranks that share them."""

    def __init__(
        self,
        config: Any,
        *args: Any,
        submodules: Any,
        place: TpRank | None,
        expert_place: ExpertRank | None,
        pg_collection: Any = None,
        **kwargs: Any,
    ) -> None:
        if pg_collection.tp.size() == 1:  # also where the whole model is built
            place = None
        shared = expert_place if pg_collection.ep.size() > 1 else None
        alone = copy.copy(pg_collection)
        alone.ep = alone.tp = alone.tp_cp = alone.tp_ep = alone.expt_tp = pg_collection.cp
        experts = range(config.num_moe_experts)
        parts, index = None, 0
        if place is not None:
            parts, index = place.tp_shards, place.index
        elif shared is not None:
            parts, index = shared.parts, shared.index
        if parts is not None:
            experts = parts.experts_of(index)
            held = partial(submodules.experts, held=experts, index=index)
            submodules = replace(submodules, experts=held)
        super().__init__(config, *args, submodules=submodules, pg_collection=alone, **kwargs)
        self.gathers = place is not None and config.sequence_parallel
        tp_group = None if place is None else place.group
        self.overlaps = shared is not None and shared.overlap
        if shared is None:
            dispatcher: Any = TokensByExpert(config, alone, experts=experts, tp_group=tp_group)
            self.dispatchers = [dispatcher]
        else:
            left: list[GroupedProduct] = []
            self.experts.delay_weights(left.append)
            # Each has what belongs to its half of a micro-batch.
            self.dispatchers = [
                TokensByRank(config, alone, shared, left) for _ in range(1 + shared.overlap)
            ]
        self.token_dispatcher = self.dispatchers[0]
        # Whose copies are one to checkpoints, and whose gradients are complete.
        self.router.tp_group = pg_collection.tp
        for parameter in self.router.parameters():
            parameter.sequence_parallel = False

    def forward(self, hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        """See `MoELayer`; routers see whole sequences. Where halves overlap: a `Compute`."""
        if self.overlaps:
            return self._sent(hidden_states, **kwargs)
        dispatcher = self.token_dispatcher
        if not self.gathers:
            return super().forward(hidden_states, *args, **kwargs)
        dispatcher.own = hidden_states
        # Of the router each rank has the whole gradient, so each takes its own part of it.
        whole = gather_from_sequence_parallel_region(
            hidden_states, tensor_parallel_output_grad=False, group=dispatcher.tp_group
        )
        return super().forward(whole, *args, **kwargs)

    def _sent(
        self, hidden_states: torch.Tensor, padding_mask: torch.Tensor | None = None
    ) -> Compute:
        """Let tokens leave for their experts."""
        self.dispatchers.reverse()
        self.token_dispatcher = dispatcher = self.dispatchers[0]
        if padding_mask is not None:
            padding_mask = padding_mask.transpose(0, 1).bool()
        beside = self.shared_experts_compute(hidden_states)
        routed = self.preprocess(hidden_states, *self.route(hidden_states, padding_mask))
        rows = [*self.dispatch(*routed)]  # not there yet; until experts are computed

        def compute() -> tuple[torch.Tensor, Callable[[], torch.Tensor]]:
            self.token_dispatcher = dispatcher
            output, _ = self.routed_experts_compute(*rows)
            rows.clear()
            returning = self.combine(output)

            def arrived() -> torch.Tensor:
                self.token_dispatcher = dispatcher
                found: torch.Tensor = self.postprocess(returning, beside)
                return found

            return returning, arrived

        return compute

    def shared_experts_compute(self, hidden_states: torch.Tensor) -> torch.Tensor | None:
        """As stock's, which cannot shape what is computed of no samples."""
        if self.use_shared_expert and not hidden_states.numel():
            return hidden_states
        found: torch.Tensor | None = super().shared_experts_compute(hidden_states)
        return found


class TokensByExpert(MoETokenDispatcher):
    """Sorts tokens by expert, each as often as it has experts, and adds up what experts return.

    Nothing of a micro-batch stays here once its forward is over.
    """

    own: torch.Tensor | None = None
    """This rank's part of what is dispatched, with sequence parallelism."""

    def __init__(
        self,
        config: Any,
        pg_collection: Any,
        *,
        experts: range,
        tp_group: dist.ProcessGroup | None = None,
    ) -> None:
        """`experts`: this rank's. `tp_group`: whose ranks have the others."""
        super().__init__(config, pg_collection)
        self.experts, self.tp_group = experts, tp_group

    def dispatch_preprocess(
        self, tokens: torch.Tensor, routing_map: torch.Tensor, probs: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """`tokens` [length, samples, width]; `routing_map` and `probs` [tokens, experts].

        Returns tokens [tokens, width], and the weights of each one's experts [tokens, k].
        """
        self.shape, self.copies = tokens.shape, int(self.config.moe_router_topk)
        self.counts = routing_map.sum(dim=0)[self.experts.start : self.experts.stop]
        # Each row has k of them.
        chosen = routing_map.byte().topk(self.copies, dim=1).indices.sort(dim=1).values
        # This rank's experts come first.
        sorted_by = (chosen - self.experts.start) % routing_map.shape[1]
        self.order = torch.argsort(sorted_by.view(-1), stable=True)
        self.places = torch.argsort(self.order)
        weights = probs.gather(1, chosen)
        if self.tp_group is None:
            return tokens.view(-1, self.shape[-1]), weights
        # Each rank's experts give a part of the gradients.
        weights = copy_to_tensor_model_parallel_region(weights, group=self.tp_group)
        if self.own is None:
            tokens = copy_to_tensor_model_parallel_region(tokens, group=self.tp_group)
        else:
            tokens = _Gathered.apply(self.own, tokens.detach(), self.tp_group)
        return tokens.view(-1, self.shape[-1]), weights

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
        is_cut, self.own = self.own is not None, None
        total = hidden_states.view(self.shape)
        if is_cut:
            return reduce_scatter_to_sequence_parallel_region(total, group=self.tp_group)
        if self.tp_group is not None:
            return reduce_from_tensor_model_parallel_region(total, group=self.tp_group)
        return total


class _Gathered(torch.autograd.Function):
    """`whole`, which has been gathered of what each rank of the group has as `own`."""

    @staticmethod
    def forward(
        ctx: Any, own: torch.Tensor, whole: torch.Tensor, group: dist.ProcessGroup
    ) -> torch.Tensor:
        ctx.group, ctx.shape = group, own.shape
        return whole.view_as(whole)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[Any, ...]:
        own = gradient.new_empty(ctx.shape)
        dist.reduce_scatter_tensor(own, gradient.contiguous(), group=ctx.group)
        return own, None, None


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

    def __init__(
        self, *args: Any, submodules: Any, held: range | None = None, index: int = 0, **kwargs: Any
    ) -> None:
        """`held`: those that this rank has, if others have the rest; `index`: of the rank among
        them."""
        if held is not None:
            submodules = replace(
                submodules,
                linear_fc1=_EachExpert(submodules.linear_fc1, without_rows, held),
                linear_fc2=_EachExpert(submodules.linear_fc2, without_columns, held),
            )
        super().__init__(*args, submodules=submodules, **kwargs)
        experts = list(self.local_experts)
        self.held = held = range(len(experts)) if held is None else held
        self.index = index
        both = [_AllExperts([getattr(each, name) for each in experts], held) for name in _LINEARS]
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

    def sharded_state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """See `SequentialMLP`: of experts that others have, nothing here is saved."""
        found = super().sharded_state_dict(*args, **kwargs)
        for name, entry in found.items():
            pipeline, _, data = entry.replica_id
            if isinstance(entry, ShardedObject):
                # They are empty, so it matters not whose are saved. Where replicas cut layers
                # differently, who holds an expert need not be the first with its part.
                entry.replica_id = (pipeline, self.index, data)
            elif expert_of(name) not in self.held:
                entry.replica_id = (pipeline, 1, data)
        return found

    def delay_weights(self, leave: Callable[[GroupedProduct], None]) -> None:
        """Let `leave` have what weight gradients are made of, in place of their computation."""
        for name in _LINEARS:
            getattr(self.together, name).leave = leave


_LINEARS = ("linear_fc1", "linear_fc2")


class _EachExpert:
    """Builds a linear layer of one expert after the other."""

    def __init__(
        self, build: Callable[..., Any], build_empty: Callable[..., Any], held: Container[int]
    ) -> None:
        self.build, self.build_empty, self.held = build, build_empty, held
        self.numbers = count()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if next(self.numbers) in self.held:
            return self.build(*args, **kwargs)
        return self.build_empty(self.build, *args, **kwargs)


class _AllExperts(torch.nn.Module):
    """The same linear layer of all experts, of which the rank has some."""

    counts: torch.Tensor
    """Tokens of each that the rank has, of the micro-batch that is computed."""

    def __init__(self, linears: Sequence[Any], held: range) -> None:
        super().__init__()
        self.linears = tuple(linears)  # not as submodules
        self.held = held
        self.has_all = len(held) == len(linears)
        self.outputs = linears[0].weight.shape[0] or unit_of(linears[0].weight)
        self.leave: Callable[[GroupedProduct], None] | None = None

    def forward(self, tokens: torch.Tensor) -> tuple[torch.Tensor, None]:
        """[tokens x k, inputs] to [tokens x k, outputs], and no bias.

        Zeros for tokens of experts that the rank lacks, which come last.
        """
        for linear in self.linears:
            # It is not called itself: its hooks wait for parameters that are being gathered.
            for hook in linear._forward_pre_hooks.values():
                hook(linear, (tokens,))
        if not self.held:
            # Depends on tokens, so that backwards take part in what the group sums.
            return tokens[:, :0] @ tokens.new_empty(0, self.outputs), None
        weights: list[Any] = [self.linears[number].weight for number in self.held]
        main_grads = [weight.main_grad for weight in weights if hasattr(weight, "main_grad")]
        output = grouped_linear(
            tokens,
            self.counts,
            weights,
            main_grads=main_grads or None,
            later=self.leave,
            has_rest=not self.has_all,
        )
        return output, None
