"""Which code updates the shards, and what it multiplies gradients by.

Apex and Transformer Engine have fused updates of their own, which stay. Where stock falls back to
torch's AdamW, the kernel does what that does (in plain torch to the bit, in Triton to a few units
in the last place), unscales and clips the gradient, and writes the 16-bit shard that will be
gathered, all in the same pass. The state is torch's, so checkpoints do not change.
"""

from typing import Any, Literal

import torch

from zorse_megatron.adapter.checkpoint.saved_optimizer import allocate_state
from zorse_megatron.errors import FlagError, Problem
from zorse_megatron.kernels.dispatch import why_not_triton
from zorse_megatron.kernels.kernels import AdamW, adamw_shard

Update = Literal["auto", "stock", "fused"]


class ShardUpdate:
    """Takes the place of the inner optimizer's `step`."""

    def __init__(self, optimizer: Any, *, clip_grad: float) -> None:
        """`optimizer`: an `UnevenDistributedOptimizer` over torch's Adam or AdamW; `clip_grad`: 0
        for no clipping."""
        self.optimizer = optimizer
        self.clip_grad = clip_grad
        self.inner = optimizer.optimizer
        self.decoupled = isinstance(self.inner, torch.optim.AdamW)

    @torch.no_grad()
    def step(self) -> None:
        """Update every shard that has a gradient, and the parameters that are kept in 16 bits."""
        allocate_state(self.optimizer)
        copies, clip = self._copies(), self.optimizer.factors.clip(self.clip_grad)
        for group in self.inner.param_groups:
            for shard in group["params"]:
                if shard.grad is not None:
                    self._update(group, shard, clip, copies.get(id(shard)))

    def _update(
        self, group: dict[str, Any], shard: torch.Tensor, clip: float, copy: torch.Tensor | None
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
            inv_scale=self.optimizer.factors.multiplier,
            clip=clip,
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
    the host for the step, multiplied and clipped (see `streamed_gradients`), which the one pass
    would do itself.
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
    optimizer.update_in_one_pass(ShardUpdate(optimizer, clip_grad=optimizer.config.clip_grad).step)
    return f"shards are updated in one pass each, in place of {name}"


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
