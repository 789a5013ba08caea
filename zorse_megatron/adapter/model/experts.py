"""Mixture of experts under a plan: losses of the load, and what experts have been given.

Experts are whole on every rank of a group, and their weights are parameters like all others. But a
router has losses and counts of a micro-batch as a whole. Stock's `aux_loss` is one of each
micro-batch, so it is taken here over blocks of as many samples as the command's micro-batches have,
whatever the plan's sizes are. All other losses are means over tokens or samples, and are weighted
by their number. Stock's `global_aux_loss` takes the mean load of all micro-batches of the step so
far, and so does `LoadsInOrder`, in the order of samples. What experts have been given, for their
bias, and the losses that are logged are summed over all ranks along with the step's tokens
(`ExpertLoads`): stock would sum them over a pipeline's group, which does not exist under a plan.

Source: megatron/core/transformer/moe/router.py, moe_utils.py and moe_logging.py.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager
from copy import copy
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any
from uuid import uuid4

import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core.transformer.moe.moe_logging import MoEMetricsTracker, get_moe_metrics_tracker
from megatron.core.transformer.moe.moe_utils import (
    MoEAuxLossAutoScaler,
    compute_routing_scores_for_aux_loss,
    z_loss_func,
)
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.utils import unwrap_model

from zorse_megatron.adapter.groups.global_groups import presented
from zorse_megatron.runtime.collectives import on_rank_0
from zorse_megatron.schedule.samples import MicroBatch

_AUX_LOSS, _Z_LOSS = "load_balancing_loss", "z_loss"
_GLOBAL_LOSS = "global_load_balancing_loss"
# Type in --moe-router-load-balancing-type -> its name in the log (`training_log`).
_LOGGED_AS = {
    "aux_loss": _AUX_LOSS,
    "seq_aux_loss": "seq_load_balancing_loss",
    "global_aux_loss": _GLOBAL_LOSS,
}

_ROUTER_DTYPES = {"fp32": torch.float32, "fp64": torch.float64}


class PlanRouter(TopKRouter):
    """Stock's router, whose losses are the same however samples are cut into micro-batches."""

    local_tokens_per_expert: torch.Tensor
    expert_bias: torch.Tensor

    def __init__(
        self, *args: Any, block_samples: int, packed_tokens: int | None = None, **kwargs: Any
    ) -> None:
        """`block_samples`: of a micro-batch of the command; those of the plan are multiples of it,
        if there is a loss of each block. `packed_tokens`: of a sample, where layers have samples
        as one sequence."""
        super().__init__(*args, **kwargs)
        self.block_samples, self.packed_tokens = block_samples, packed_tokens
        self.num_samples = 0
        """Of the micro-batch that is routed."""
        self.in_order: LoadsInOrder | None = None
        """Where a loss needs them."""

    def _maintain_float32_expert_bias(self) -> None:
        """Also the loads: in 16 bits, which stock leaves them in, a load above 256 is rounded."""
        super()._maintain_float32_expert_bias()
        if self.enable_expert_bias:
            self.local_tokens_per_expert = self.local_tokens_per_expert.float()

    def gating(self, input: torch.Tensor) -> torch.Tensor:
        """As stock's, which cannot reshape logits of no tokens."""
        if input.numel():
            return super().gating(input)
        dtype = _ROUTER_DTYPES.get(self.config.moe_router_dtype, input.dtype)
        logits: torch.Tensor = F.linear(input.to(dtype), self.weight.to(dtype))
        return logits

    def routing(self, logits: torch.Tensor, padding_mask: torch.Tensor | None = None) -> Any:
        """As stock's; logits [tokens of a sample, samples, experts], packed [tokens, 1, experts].

        In a tensor-parallel group those of the first rank decide: rounding may be another one on
        another kind of GPU, and a token would go to experts of the one rank's choice or of none.
        """
        length, self.num_samples, experts = logits.shape
        if self.packed_tokens is not None and length > self.packed_tokens:
            by_sample = logits.view(-1, self.packed_tokens, experts).transpose(0, 1)
            found = self.routing(by_sample.contiguous(), padding_mask)
            sizes = (self.packed_tokens, -1, experts)
            return tuple(each.view(sizes).transpose(0, 1).reshape(-1, experts) for each in found)
        if self.tp_group.size() > 1:
            logits = _OfFirstRank.apply(logits, self.tp_group)
        if self.in_order is not None and self.training and self.num_samples:
            # Also where the layer is to be computed again, so that stock would count then.
            flat = logits.detach().reshape(-1, logits.shape[-1])
            chosen, _ = compute_routing_scores_for_aux_loss(flat, self.topk, self.score_function)
            self.in_order.note(self.layer_number, self._of_blocks(chosen))
        if not self.num_samples and self.config.moe_router_group_topk:
            return self._routing_of_none(logits)
        return super().routing(logits, padding_mask)

    def _routing_of_none(self, logits: torch.Tensor) -> Any:
        """Without groups of experts, into which stock cannot reshape scores of no tokens."""
        ungrouped: Any = copy(self.config)
        ungrouped.moe_router_num_groups = ungrouped.moe_router_group_topk = None
        with presented(self, config=ungrouped):
            return super().routing(logits)

    def _of_blocks(self, by_token: torch.Tensor) -> torch.Tensor:
        """The sums [blocks, experts] of what the tokens of a micro-batch have."""
        samples = self.block_samples
        assert self.num_samples % samples == 0, "a micro-batch that is no multiple of a block"
        by_block = (-1, self.num_samples // samples, samples, by_token.shape[-1])
        return by_token.view(by_block).sum(dim=(0, 2))

    def _factor(self, coefficient: float, num_tokens: int) -> float:
        """Of a product of scores and loads, as `switch_load_balancing_loss_func` has it."""
        return self.config.num_moe_experts * coefficient / (self.topk * num_tokens * num_tokens)

    def apply_z_loss(self, logits: torch.Tensor, padding_mask: Any = None) -> torch.Tensor:
        """As stock's: a mean over tokens, weighted by their number."""
        coefficient = self.config.moe_z_loss_coeff
        if coefficient is None or not (self.training and torch.is_grad_enabled()):
            return logits
        if not self.num_samples:  # on a rank that has experts alone
            return logits
        return self._attached(logits, z_loss_func(logits, coefficient), coefficient, _Z_LOSS)

    def _apply_aux_loss(
        self,
        probs: torch.Tensor,
        scores_for_aux_loss: torch.Tensor,
        routing_map: torch.Tensor,
        with_padding_mask: bool = False,
    ) -> torch.Tensor:
        """Of each block, as `switch_load_balancing_loss_func` has it of a micro-batch."""
        coefficient = self.get_aux_loss_coeff("aux_loss")
        if coefficient == 0 or not self.num_samples:
            return probs
        samples = self.block_samples
        loads, scores = self._of_blocks(routing_map), self._of_blocks(scores_for_aux_loss)
        tokens = len(routing_map) // self.num_samples * samples
        loss = (scores * loads).sum() * self._factor(coefficient, tokens)
        # As a mean over the blocks.
        loss = loss * (samples / self.num_samples)
        return self._attached(probs, loss, coefficient, _AUX_LOSS)

    def _apply_global_aux_loss(
        self,
        probs: torch.Tensor,
        scores_for_aux_loss: torch.Tensor,
        routing_map: torch.Tensor,
        with_padding_mask: bool = False,
    ) -> torch.Tensor:
        """As stock's of each block; its backward, which finds the loads, says the loss."""
        coefficient = self.get_aux_loss_coeff("global_aux_loss")
        if coefficient == 0 or not self.num_samples:
            return probs
        assert self.in_order is not None
        tokens = len(probs) // self.num_samples * self.block_samples
        scores = self._of_blocks(scores_for_aux_loss) * (self._factor(coefficient, tokens) * tokens)
        attached: torch.Tensor = _LossOfLoads.apply(
            probs, scores, self, self.in_order.here, 1 / (coefficient * tokens)
        )
        return attached

    def attach_and_log_load_balancing_loss(
        self,
        activation: Any,
        aux_loss_coeff: float,
        aux_loss: Any,
        aux_loss_name: str,
        *_: Any,
        **__: Any,
    ) -> torch.Tensor:
        """As stock's, for a mean over the samples."""
        if not self.num_samples:
            return activation
        return self._attached(activation, aux_loss, aux_loss_coeff, aux_loss_name)

    def _attached(
        self, activation: torch.Tensor, loss: torch.Tensor, coefficient: float, name: str
    ) -> torch.Tensor:
        """Let the loss, a mean over the micro-batch, have its backward with that of `activation`.

        In the log it counts as many times as the micro-batch has blocks, as stock logs the mean of
        the command's micro-batches.
        """
        get_moe_metrics_tracker().record(
            name,
            loss / coefficient * (self.num_samples / self.block_samples),
            self.layer_number,
            self.config.num_layers,
        )
        attached: torch.Tensor = MoEAuxLossAutoScaler.apply(activation, loss * len(activation))
        return attached


class _OfFirstRank(torch.autograd.Function):
    """The first rank's values; gradients are each rank's own, which are the same."""

    @staticmethod
    def forward(ctx: Any, own: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        values = own.detach().clone(memory_format=torch.contiguous_format)
        dist.broadcast(values, group=group, group_src=0)
        return values

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[Any, ...]:
        return gradient, None


@dataclass(kw_only=True, eq=False)
class _Forwarded:
    """A micro-batch in a chunk, from its forward to its backward."""

    start: int
    """Its first sample."""
    loads: dict[int, torch.Tensor] = field(default_factory=dict)
    """Number of a layer -> what experts get of each block [blocks, experts]."""
    means: dict[int, torch.Tensor] = field(default_factory=dict)
    """The same, as a mean over all blocks up to each."""


class _LossOfLoads(torch.autograd.Function):
    """A sum of `scores` times mean loads, which are known when it has its backward."""

    @staticmethod
    def forward(  # noqa: PLR0917  (torch's way)
        ctx: Any,
        activation: torch.Tensor,
        scores: torch.Tensor,
        router: PlanRouter,
        micro_batch: _Forwarded,
        logged_factor: float,
    ) -> torch.Tensor:
        ctx.save_for_backward(scores)
        ctx.router, ctx.micro_batch, ctx.logged_factor = router, micro_batch, logged_factor
        return activation

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[Any, ...]:
        (scores,) = ctx.saved_tensors
        number, layers = ctx.router.layer_number, ctx.router.config.num_layers
        means = ctx.micro_batch.means[number].to(scores)
        loss = (scores * means).sum() * ctx.logged_factor
        get_moe_metrics_tracker().record(_GLOBAL_LOSS, loss, number, layers)
        scale = MoEAuxLossAutoScaler.main_loss_backward_scale
        return gradient, means if scale is None else means * scale, None, None, None


class LoadsInOrder:
    """What experts get of all samples of a step up to each block, whichever ranks run them.

    Ranks tell each other through the store in which they have met, after each forward, and wait for
    earlier samples before each backward: no launch on a GPU waits for another rank. Who calls has
    made sure that they come (`schedule.validate.executes_in_order`).
    """

    def __init__(
        self,
        *,
        block_samples: int,
        timeout: timedelta,
        waiting: Callable[[], AbstractContextManager[None]],
    ) -> None:
        """A collective call. `timeout`: of waits for other ranks, which are within `waiting`."""
        token = on_rank_0(lambda: uuid4().hex)
        world = dist.distributed_c10d._get_default_store()
        self.store = dist.PrefixStore(f"zorse/loads/{token}", world)
        self.block_samples, self.timeout, self.waiting = block_samples, timeout, waiting
        self.step = 0
        self.told: list[str] = []
        self.here = _Forwarded(start=0)
        """What is computed."""
        self.forwarded: dict[tuple[int, int], _Forwarded] = {}
        self.before: dict[int, dict[int, torch.Tensor]] = defaultdict(dict)
        """Chunk -> sample -> loads [layers, experts] of all earlier ones."""

    def begin_step(self) -> None:
        """All ranks have read what was told in the step before."""
        for key in self.told:
            self.store.delete_key(key)
        self.told.clear()
        self.before.clear()
        self.step += 1

    def enter(self, chunk: int, micro_batch: MicroBatch) -> None:
        """What follows is its forward."""
        self.here = _Forwarded(start=micro_batch.start)
        self.forwarded[chunk, micro_batch.index] = self.here

    def note(self, layer: int, loads: torch.Tensor) -> None:
        """Those [blocks, experts] of the micro-batch that is computed, in one layer."""
        self.here.loads.setdefault(layer, loads)

    def tell(self, chunk: int, micro_batch: MicroBatch) -> None:
        """Its forward is over; waits for the device."""
        loads = self.here.loads
        if not loads:
            return
        own = torch.stack([loads[layer] for layer in sorted(loads)]).to("cpu", torch.int64)
        self.here.loads = dict(zip(sorted(loads), own, strict=True))
        # The ranks of a tensor-parallel group say the same.
        key = self._key(chunk, micro_batch.start)
        values = [micro_batch.stop, *own.sum(dim=1).flatten().tolist()]
        self.store.set(key, " ".join(map(str, values)))
        self.told.append(key)

    def wait_for_earlier(self, chunk: int, micro_batch: MicroBatch) -> None:
        """Before a backward: set what its losses need."""
        self.here = here = self.forwarded.pop((chunk, micro_batch.index))
        if not here.loads:
            return
        layers, first = sorted(here.loads), here.start // self.block_samples
        own = torch.stack([here.loads[layer] for layer in layers])
        earlier = self._before(chunk, here.start, torch.zeros_like(own[:, 0]))
        sums = (earlier.unsqueeze(1) + own.cumsum(dim=1)).float()
        counts = torch.arange(first + 1, first + 1 + own.shape[1]).float()
        here.means = dict(zip(layers, sums / counts.view(1, -1, 1), strict=True))

    def _before(self, chunk: int, sample: int, zeros: torch.Tensor) -> torch.Tensor:
        known = self.before[chunk]
        known.setdefault(0, zeros)
        at = max(each for each in known if each <= sample)
        while at < sample:
            key = self._key(chunk, at)
            with self.waiting():
                self.store.wait([key], self.timeout)
            stop, *values = map(int, self.store.get(key).split())
            known[stop] = known[at] + torch.tensor(values).view_as(zeros)
            at = stop
        assert at == sample, f"sample {sample} is inside another rank's samples"
        return known[sample]

    def _key(self, chunk: int, sample: int) -> str:
        return f"{self.step}/{chunk}/{sample}"


def scale_router_losses(loss_divisor: float) -> None:
    """Divide the losses of routers as the loss is (`adapter.loss`), after each forward.

    Stock has just set by what they are multiplied before their backward.
    """
    scale = MoEAuxLossAutoScaler.main_loss_backward_scale
    if scale is not None and loss_divisor != 1.0:
        scale.div_(loss_divisor)


class ExpertLoads:
    """What experts of all layers have been given in a step, and the losses of routers.

    One vector, in fp64: sums of whole numbers are exact.
    """

    def __init__(self, models: Iterable[Any], config: Any, *, is_counted: bool) -> None:
        """`models`: the rank's wrapped chunks; `config`: of the transformer. `is_counted`: of a
        tensor-parallel group, whose ranks route the same tokens, the first rank alone."""
        self.is_counted = is_counted
        self.in_order: LoadsInOrder | None = None
        self.routers = _routers(models)
        for router in self.routers:
            router._maintain_float32_expert_bias()  # a rank may run no forward before a step
        self.config = config
        self._names = _logged_names(config)
        self._logged = torch.zeros(len(self._names), config.num_layers, device="cuda")
        """Losses of all ranks that wait to be logged."""

    def put_in_order(self, loads: LoadsInOrder) -> None:
        """Let routers have what a loss needs."""
        self.in_order = loads
        for router in self.routers:
            router.in_order = loads

    def take(self) -> torch.Tensor:
        """Return this rank's part of what is to be summed, and begin at zero again."""
        tracker = get_moe_metrics_tracker()
        losses = torch.zeros_like(self._logged)
        for number, name in enumerate(self._names):
            tracker.ensure_initialized(name, self.config.num_layers)
            values = tracker.metrics[name].values
            losses[number].copy_(values)
            values.zero_()
        own = torch.cat([losses.double().view(-1), self._loads().double().view(-1)])
        return own if self.is_counted else torch.zeros_like(own)

    def _loads(self) -> torch.Tensor:
        """[layers, experts]; nothing where no bias follows them."""
        if not self.config.moe_router_enable_expert_bias:
            return self._logged.new_zeros(0)
        size = self.config.num_layers, self.config.num_moe_experts
        loads = torch.zeros(size, device="cuda")
        for router in self.routers:
            loads[router.layer_number - 1].copy_(router.local_tokens_per_expert)
            router.local_tokens_per_expert.zero_()
        return loads

    @torch.no_grad()
    def give(self, summed: torch.Tensor) -> None:
        """Take what `take` returned, summed over all ranks: biases follow, losses wait."""
        losses, loads = summed.split([self._logged.numel(), len(summed) - self._logged.numel()])
        self._logged += losses.view_as(self._logged)
        if not len(loads):
            return
        loads = loads.view(self.config.num_layers, -1)
        steps = self.config.moe_router_bias_update_rate * torch.sign(
            loads.mean(dim=1, keepdim=True) - loads
        )
        for router in self.routers:
            if not router.frozen_expert_bias:
                router.expert_bias += steps[router.layer_number - 1].to(router.expert_bias)

    def tell(self, tracker: MoEMetricsTracker) -> None:
        """Let the log have the losses of all ranks, since it last asked."""
        for name, losses in zip(self._names, self._logged, strict=True):
            tracker.metrics[name].values.copy_(losses)
        self._logged.zero_()


def _routers(models: Iterable[Any]) -> list[PlanRouter]:
    modules = (module for model in models for module in unwrap_model(model).modules())
    return [module for module in modules if isinstance(module, PlanRouter)]


def expert_biases(models: Iterable[Any]) -> dict[int, torch.Tensor]:
    """Number of a layer, from 1 -> the bias of its experts, in the host; of a rank's chunks."""
    return {
        router.layer_number: router.expert_bias.float().cpu()
        for router in _routers(models)
        if router.enable_expert_bias
    }


@torch.no_grad()
def set_expert_biases(models: Iterable[Any], biases: Mapping[int, torch.Tensor]) -> None:
    """The inverse; `biases`: of all layers."""
    for router in _routers(models):
        if router.enable_expert_bias:
            router._maintain_float32_expert_bias()
            router.expert_bias.copy_(biases[router.layer_number])


def _logged_names(config: Any) -> list[str]:
    """Losses that `training_log` asks for, in one order on all ranks."""
    types = config.moe_router_load_balancing_type
    given = [types] if isinstance(types, str) else types
    names = [logged for kind, logged in _LOGGED_AS.items() if kind in given]
    return names + [_Z_LOSS] * (config.moe_z_loss_coeff is not None)
