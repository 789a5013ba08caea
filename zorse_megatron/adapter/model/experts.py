"""Mixture of experts under a plan: losses of the load, and what experts have been given.

Experts are whole on every rank of a group, and their weights are parameters like all others. But a
router has losses and counts of a micro-batch as a whole. Stock's `aux_loss` is one of each
micro-batch, so it is taken here over blocks of as many samples as the command's micro-batches have,
whatever the plan's sizes are. All other losses are means over tokens or samples, and are weighted
by their number. What experts have been given, for their bias, and the losses that are logged are
summed over all ranks along with the step's tokens (`ExpertLoads`): stock would sum them over a
pipeline's group, which does not exist under a plan.

Source: megatron/core/transformer/moe/router.py, moe_utils.py and moe_logging.py.
"""

from collections.abc import Iterable, Mapping
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core.transformer.moe.moe_logging import MoEMetricsTracker, get_moe_metrics_tracker
from megatron.core.transformer.moe.moe_utils import MoEAuxLossAutoScaler, z_loss_func
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.utils import unwrap_model

_AUX_LOSS, _Z_LOSS = "load_balancing_loss", "z_loss"
# Type in --moe-router-load-balancing-type -> its name in the log (`training_log`).
_LOGGED_AS = {"aux_loss": _AUX_LOSS, "seq_aux_loss": "seq_load_balancing_loss"}

_ROUTER_DTYPES = {"fp32": torch.float32, "fp64": torch.float64}


class PlanRouter(TopKRouter):
    """Stock's router, whose losses are the same however samples are cut into micro-batches."""

    local_tokens_per_expert: torch.Tensor
    expert_bias: torch.Tensor

    def __init__(self, *args: Any, block_samples: int, **kwargs: Any) -> None:
        """`block_samples`: of a micro-batch of the command; those of the plan are multiples of it,
        if there is a loss of each block."""
        super().__init__(*args, **kwargs)
        self.block_samples = block_samples
        self.num_samples = 0
        """Of the micro-batch that is routed."""

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
        """As stock's; logits [tokens of a sample, samples, experts].

        In a tensor-parallel group those of the first rank decide: rounding may be another one on
        another kind of GPU, and a token would go to experts of the one rank's choice or of none.
        """
        self.num_samples = logits.shape[1]
        if self.tp_group.size() > 1:
            logits = _OfFirstRank.apply(logits, self.tp_group)
        return super().routing(logits, padding_mask)

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
        num_experts, samples = routing_map.shape[-1], self.block_samples
        assert self.num_samples % samples == 0, "a micro-batch that is no multiple of a block"
        by_block = (-1, self.num_samples // samples, samples, num_experts)
        loads = routing_map.view(by_block).sum(dim=(0, 2))
        scores = scores_for_aux_loss.view(by_block).sum(dim=(0, 2))
        tokens = len(routing_map) // self.num_samples * samples
        loss = (scores * loads).sum() * (num_experts * coefficient / (self.topk * tokens * tokens))
        # As a mean over the blocks.
        loss = loss * (samples / self.num_samples)
        return self._attached(probs, loss, coefficient, _AUX_LOSS)

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
        self.routers = _routers(models)
        for router in self.routers:
            router._maintain_float32_expert_bias()  # a rank may run no forward before a step
        self.config = config
        self._names = _logged_names(config)
        self._logged = torch.zeros(len(self._names), config.num_layers, device="cuda")
        """Losses of all ranks that wait to be logged."""

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
