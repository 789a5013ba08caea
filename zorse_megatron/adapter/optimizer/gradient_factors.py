"""What the update multiplies gradients by, found in one pass over them and applied in another.

Stock reads all gradients to unscale them and look for inf and nan, reads them again for the norm,
and a third time to clip them; twice it writes them. Here they are read once for all of that
(`kernels.norm_and_flag`), and `kernels.adamw_shard` multiplies while it updates. The gradients
themselves stay as they are.

Ranks say the same to one another as under stock (a flag where there is a loss scale, the square of
the norm), so those that update like this and those that do not can be in one job.

Source: `MixedPrecisionOptimizer._unscale_main_grads_and_check_for_nan` in
megatron/core/optimizer/optimizer.py, `get_grad_norm_fp32` and `clip_grad_by_total_norm_fp32` in
megatron/core/optimizer/clip_grads.py.
"""

import math
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.optimizer.optimizer import SEPARATE_GRAD_NORM_GROUPS

from zorse_megatron.kernels import norm_and_flag

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
