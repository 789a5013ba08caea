"""A step's gradients of one rank: their norm, inf and nan, and what they are multiplied by.

Stock divides all gradients by the tokens, reads them to unscale them and look for inf and nan,
reads them again for the norm, and once more to clip them; three times it writes them. Here what a
rank owns is read once, before anything is multiplied (`GradientFactors.read`); all ranks sum what
they found along with the tokens (`step_sums`), so norm, inf and nan are known to all. One factor is
left, of tokens and loss scale, and the clip coefficient: `adamw_shard` applies both while it
updates, other updates find gradients multiplied.

Source: `MixedPrecisionOptimizer._unscale_main_grads_and_check_for_nan` in
megatron/core/optimizer/optimizer.py, `get_grad_norm_fp32` and `clip_grad_by_total_norm_fp32` in
megatron/core/optimizer/clip_grads.py.
"""

import math
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from megatron.core import tensor_parallel
from megatron.core.optimizer.optimizer import SEPARATE_GRAD_NORM_GROUPS
from megatron.core.transformer.module import param_is_not_shared

from zorse_megatron.adapter.step_sums import Part
from zorse_megatron.kernels.kernels import norm_and_flag

_EPSILON = 1.0e-6
"""Added to the norm by `clip_grad_by_total_norm_fp32`."""


class GradientFactors:
    """Of one step of an `UnevenDistributedOptimizer`."""

    def __init__(self, optimizer: Any, device: torch.device) -> None:
        self.optimizer = optimizer
        self.device = device
        self.multiplier = torch.ones((), device=device)
        """What gradients are multiplied by; fp32, 0-d."""
        self.pieces: list[tuple[torch.nn.Parameter, torch.Tensor]] = []
        """What `read` has read, until it is given to what is stepped."""
        self._found: Part | None = None
        self._multiplied_by: Part | None = None

    @torch.no_grad()
    def read(self) -> torch.Tensor:
        """[2] in fp64: the sum of squares, and 0, or something else if any is inf or nan.

        Before `know`.
        """
        self.pieces = list(self._pieces())
        return self._sum(self.pieces)

    def know(self, found: Part, factor: torch.Tensor) -> None:
        """`found`: what `read` returned, summed over all ranks; `factor`: what makes the gradients
        those of a mean, on the device."""
        scaler = self.optimizer.grad_scaler
        self.multiplier = factor.float()
        if scaler:
            self.multiplier = self.multiplier * scaler.inv_scale.view(())
        self._found, self._multiplied_by = found, found.sums.add(self.multiplier)

    @property
    def has_overflow(self) -> bool:
        """Whether any rank's gradients have inf or nan; the host waits for it, or for `norm`."""
        assert self._found is not None
        return self._found.in_host[1] != 0

    @property
    def norm(self) -> float:
        """Of the gradients of all ranks, multiplied, not clipped."""
        assert self._found is not None and self._multiplied_by is not None
        return math.sqrt(self._found.in_host[0]) * self._multiplied_by.in_host[0]

    def multiply(self, gradients: Iterable[torch.Tensor | None]) -> None:
        """Multiply fp32 gradients in place, those that are there."""
        if found := [each for each in gradients if each is not None and each.numel()]:
            torch._foreach_mul_(found, self.multiplier)

    def clip(self, clip_grad: float) -> float:
        """The clip coefficient, at most 1; `clip_grad`: 0 for no clipping."""
        if clip_grad <= 0:
            return 1.0
        coefficient = clip_grad / (self.norm + _EPSILON)
        # As stock: a norm that is nan clips nothing.
        return coefficient if coefficient < 1.0 else 1.0

    def is_counted(self, parameter: torch.nn.Parameter) -> bool:
        """Whether its elements are no copies of what counts elsewhere, as of a tied embedding."""
        group = getattr(self.optimizer, "tp_group", None)
        is_duplicate = not tensor_parallel.param_is_not_tensor_parallel_duplicate(
            parameter, tp_group=group
        )
        return param_is_not_shared(parameter) and not is_duplicate

    def _pieces(self) -> Iterator[tuple[torch.nn.Parameter, torch.Tensor]]:
        """Each model parameter with what is owned of its gradient, in the type that it is kept."""
        for chunk, parameter, (start, stop), _ in self.optimizer.owned_shards:
            yield parameter, chunk.gradient_piece(parameter, start, stop)

    def _sum(self, pieces: Iterable[tuple[torch.nn.Parameter, torch.Tensor]]) -> torch.Tensor:
        counted: list[torch.Tensor] = []
        copies: list[torch.Tensor] = []
        for parameter, piece in pieces:
            (counted if self.is_counted(parameter) else copies).append(piece)
        both = norm_and_flag(_joined(counted), self.device)
        if copies:
            both[1] += norm_and_flag(_joined(copies), self.device)[1]
        return both


def _joined(pieces: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    """The same elements in fewer tensors: neighbours of one buffer are read at once."""
    runs: list[tuple[torch.Tensor, int, int]] = []
    """First piece, elements, where they end."""
    for piece in pieces:
        start, count = piece.data_ptr(), piece.numel()
        if runs and _are_of_one_buffer(runs[-1][0], piece):
            first, before, end = runs[-1]
            if end == start:
                runs[-1] = first, before + count, start + piece.nbytes
                continue
            if start + piece.nbytes == first.data_ptr():
                runs[-1] = piece, before + count, end
                continue
        runs.append((piece, count, start + piece.nbytes))
    return [
        first if first.numel() == count else first.as_strided((count,), (1,))
        for first, count, _ in runs
    ]


def _are_of_one_buffer(one: torch.Tensor, other: torch.Tensor) -> bool:
    storages = (each.untyped_storage().data_ptr() for each in (one, other))
    return one.dtype == other.dtype and len({*storages}) == 1


def refuse_separate_norms(optimizer: Any) -> None:
    """Ask what stock asks after the norm (`_compute_grad_norms_by_group`), for it is a sum
    over all ranks the first time. `--mtp-num-layers`, which has them, is refused with a plan.
    """
    for name in SEPARATE_GRAD_NORM_GROUPS:
        assert not optimizer.has_grad_norm_group(name), name
