"""Which code updates the shards, and what it multiplies gradients by.

Apex and Transformer Engine have fused updates of their own, which stay. Where stock falls back to
torch's AdamW, the kernel does what that does (in plain torch to the bit, in Triton to a few units
in the last place), unscales and clips the gradient, and writes the 16-bit shard that will be
gathered, all in the same pass. One pass before it finds norm and overflow.
The state is torch's, so checkpoints do not change.
"""

import math
from typing import Any, Literal

import torch
import torch.distributed as dist
from megatron.core.optimizer.optimizer import SEPARATE_GRAD_NORM_GROUPS

from zorse_megatron.adapter.checkpoint.saved_optimizer import allocate_state
from zorse_megatron.errors import FlagError, Problem
from zorse_megatron.kernels.dispatch import say_by_kind, why_not_triton
from zorse_megatron.kernels.kernels import AdamW, adamw_shard, norm_and_flag

# What the update multiplies gradients by, found in one pass over them and applied in another.
#
# Stock reads all gradients to unscale them and look for inf and nan, reads them again for the norm,
# and a third time to clip them; twice it writes them. Here they are read once for all of that
# (`norm_and_flag`), and `adamw_shard` multiplies while it updates. The gradients themselves stay as
# they are.
#
# Ranks say the same to one another as under stock (a flag where there is a loss scale, the square
# of the norm), so those that update like this and those that do not can be in one job.
#
# Source: `MixedPrecisionOptimizer._unscale_main_grads_and_check_for_nan` in
# megatron/core/optimizer/optimizer.py, `get_grad_norm_fp32` and `clip_grad_by_total_norm_fp32` in
# megatron/core/optimizer/clip_grads.py.


_EPSILON = 1.0e-6
"""Added to the norm by `clip_grad_by_total_norm_fp32`."""


class GradientFactors:
    """What one step of a rank's optimizer multiplies gradients by."""

    def __init__(self, optimizer: Any, device: torch.device, *, clip_grad: float) -> None:
        """`optimizer`: an `UnevenDistributedOptimizer`; `clip_grad`: 0 for no clipping."""
        self.optimizer = optimizer
        self.device = device
        self.clip_grad = clip_grad
        self.start()

    def start(self) -> None:
        """Forget the last step: gradients are new."""
        self.inv_scale: torch.Tensor | float = 1.0
        """One over the loss scale; a tensor of one fp32 element."""
        self.clip = 1.0
        """The clip coefficient, at most 1."""
        self._squares: torch.Tensor | None = None

    def find_overflow(self, inv_scale: torch.Tensor) -> torch.Tensor:
        """1 where this rank's gradients have inf or nan, else 0; fp32, one element.

        `inv_scale`: one over the loss scale with which they were made; kept for the step.
        """
        self.inv_scale = inv_scale
        return self._read().view(1)

    def find_norm(self, group: Any) -> float:
        """The norm over all ranks of `group`, unscaled; and with it the clip coefficient."""
        if self._squares is None:
            self._read()
        assert self._squares is not None
        scale = torch.as_tensor(self.inv_scale, dtype=torch.float64, device=self.device)
        total = (self._squares * scale.square()).float().view(1)
        dist.all_reduce(total, op=dist.ReduceOp.SUM, group=group)
        norm = math.sqrt(total.item())
        if self.clip_grad > 0:
            refuse_separate_norms(self.optimizer)
            coefficient = self.clip_grad / (norm + _EPSILON)
            # As stock: a norm that is nan clips nothing.
            self.clip = coefficient if coefficient < 1.0 else 1.0
        return norm

    def _read(self) -> torch.Tensor:
        """Note the sum of squares, and return whether anything is inf or nan."""
        counted = self.optimizer.get_grads_for_grad_norm()
        # Copies of what counts elsewhere, such as a tied embedding.
        known = {grad.data_ptr() for grad in counted}
        others = [
            parameter.grad
            for parameter in self.optimizer.get_parameters()
            if parameter.grad is not None and parameter.grad.data_ptr() not in known
        ]
        found = norm_and_flag([grad.view(-1) for grad in counted], self.device)
        self._squares = found.sum_of_squares
        copies = norm_and_flag([grad.view(-1) for grad in others], self.device)
        return torch.maximum(found.found_inf, copies.found_inf)


def refuse_separate_norms(optimizer: Any) -> None:
    """Ask what stock asks after the norm (`_compute_grad_norms_by_group`), for it is a sum
    over all ranks the first time. `--mtp-num-layers`, which has them, is refused with a plan.
    """
    for name in SEPARATE_GRAD_NORM_GROUPS:
        assert not optimizer.has_grad_norm_group(name), name


Update = Literal["auto", "stock", "fused"]


class ShardUpdate:
    """Takes the place of the inner optimizer's `step`."""

    def __init__(self, optimizer: Any, factors: GradientFactors) -> None:
        """`optimizer`: an `UnevenDistributedOptimizer` over torch's Adam or AdamW."""
        self.optimizer = optimizer
        self.factors = factors
        self.inner = optimizer.optimizer
        self.decoupled = isinstance(self.inner, torch.optim.AdamW)

    @torch.no_grad()
    def step(self) -> None:
        """Update every shard that has a gradient, and the parameters that are kept in 16 bits."""
        allocate_state(self.optimizer)
        copies = self._copies()
        for group in self.inner.param_groups:
            for shard in group["params"]:
                if shard.grad is not None:
                    self._update(group, shard, copies.get(id(shard)))

    def _update(
        self, group: dict[str, Any], shard: torch.Tensor, copy: torch.Tensor | None
    ) -> None:
        assert shard.grad is not None
        state = self.inner.state[shard]
        state["step"] += 1
        beta1, beta2 = group["betas"]
        numbers = AdamW(
            lr=float(group["lr"]),
            beta1=beta1,
            beta2=beta2,
            eps=group["eps"],
            weight_decay=group["weight_decay"],
            step=int(state["step"]),
            decoupled=self.decoupled,
        )
        adamw_shard(
            shard.view(-1),
            state["exp_avg"].view(-1),
            state["exp_avg_sq"].view(-1),
            shard.grad.view(-1),
            numbers,
            inv_scale=self.factors.inv_scale,
            clip=self.factors.clip,
            copy=copy,
        )

    def _copies(self) -> dict[int, torch.Tensor]:
        """Stepped tensor -> where its rounded copy belongs; none while `host_state` copies."""
        if self.optimizer.host_state is not None:
            return {}
        return {
            id(shard): chunk.parameter_piece(parameter, start, stop)
            for chunk, parameter, (start, stop), shard in self.optimizer.owned_shards
            if parameter.dtype != torch.float32
        }


def choose_update(
    optimizer: Any, wanted: Update, device: torch.device, *, streams: bool = False
) -> str:
    """Set how an `UnevenDistributedOptimizer` updates, and return which and why, for people.

    `auto`: fused where stock would use torch's Adam and the kernels run in Triton. Raises FlagError
    for `fused` where Apex or Transformer Engine offer their own. `streams`: gradients come from
    the host for the step, unscaled and clipped (see `streamed_gradients`), which the one pass would
    do itself.
    """
    inner = optimizer.optimizer
    can = isinstance(inner, torch.optim.Adam | torch.optim.AdamW) and optimizer.muon is None
    if wanted == "fused" and (streams or not can):
        raise _not_fused(type(inner), streams=streams)
    name = f"{type(inner).__module__.partition('.')[0]}'s {type(inner).__name__}"
    if streams or not can or wanted == "stock":
        return f"shards are updated by {name}, as without a plan"
    reason = why_not_triton(device)
    if wanted == "auto" and reason is not None:
        return f"shards are updated by {name}: one pass over each gains nothing in plain torch"
    factors = GradientFactors(optimizer, device, clip_grad=optimizer.config.clip_grad)
    optimizer.update_in_one_pass(ShardUpdate(optimizer, factors).step, factors)
    return f"shards are updated in one pass each, in place of {name}"


def say_update(lines: list[str], device: torch.device) -> None:
    """Say it once, whatever the number of optimizers."""
    for line in dict.fromkeys(lines):
        say_by_kind(line, device)


def _not_fused(inner: type, *, streams: bool) -> FlagError:
    problem = Problem(
        where="--zorse-update",
        found=f"fused, while the optimizer is {inner.__module__}.{inner.__name__}",
        expected="fused only where Megatron would use torch's Adam",
        remedy="Leave the flag out: that optimizer has a fused update of its own.",
    )
    if streams:
        problem = Problem(
            where="--zorse-update",
            found="fused, while the plan offloads gradients",
            expected="stock or auto with offload.gradients",
            remedy="Leave the flag out: gradients are unscaled and clipped as they come back.",
        )
    return FlagError("The shards cannot be updated as the command says", [problem])
