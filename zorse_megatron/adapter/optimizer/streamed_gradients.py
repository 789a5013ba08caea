"""Gradients that come from the host for a step: unscaled, measured and clipped as they pass.

Stock unscales, checks, measures and clips the gradients of all shards one operation after the
other, which takes all of them on the device. Here chunk after chunk passes twice: once to be
checked and for the norm, and once, when the clip coefficient is known, to be applied. Both times
the same operations are made of the same bits in stock's order, so what is applied is what stock
would apply. Gradients in 16 bits are in fp32 for as long, whether they were in the host or not:
stock has such copies of all of them in a step. The norm is taken shard by shard and then of these
norms, as stock's own code does where it runs without fused kernels; those differ from that by
rounding.

Source: `MixedPrecisionOptimizer._unscale_main_grads_and_check_for_nan` in
megatron/core/optimizer/optimizer.py; megatron/core/optimizer/clip_grads.py.
"""

from collections.abc import Callable, Iterable, Iterator
from functools import cached_property
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.optimizer.clip_grads import clip_grad_by_total_norm_fp32, get_grad_norm_fp32

from zorse_megatron.adapter.optimizer.shard_update import refuse_separate_norms
from zorse_megatron.runtime.offload import GradientsInHost
from zorse_megatron.schedule.shards import Interval


class StreamedGradients:
    """One step's gradients of what a rank owns; takes the place of `GradientFactors`."""

    def __init__(
        self,
        optimizer: Any,
        device: torch.device,
        *,
        clip_grad: float,
        on_change: Callable[[], None],
    ) -> None:
        """`optimizer`: an `UnevenDistributedOptimizer`; `clip_grad`: 0 for no clipping.

        `on_change`: called whenever as much is on the device as there will be until the next call.
        """
        self.optimizer = optimizer
        self.device = device
        self.clip_grad = clip_grad
        self.on_change = on_change
        self.start()

    def start(self) -> None:
        """Forget the last step: gradients are new."""
        self._inv_scale: torch.Tensor | None = None
        self._norms: dict[int, torch.Tensor] | None = None
        self._norm: Any = 0.0
        self._found_inf = torch.zeros(1, device=self.device)
        self._unscaled: set[int] = set()
        """Chunks whose gradients have been unscaled where they are."""

    def find_overflow(self, inv_scale: torch.Tensor) -> torch.Tensor:
        """1 where this rank's gradients have inf or nan, else 0; fp32, one element.

        `inv_scale`: one over the loss scale with which they were made; kept for the step.
        """
        self._inv_scale = inv_scale
        self._measure()
        return self._found_inf

    def find_norm(self, group: Any) -> Any:
        """The norm over all ranks of `group`, unscaled, as stock returns it."""
        norms = self._measure()
        shards = self.optimizer.get_parameters()
        found = [norms[id(shard)] for shard in shards if id(shard) in norms]
        self._norm = get_grad_norm_fp32(found, grad_stats_parallel_group=group)
        if self.clip_grad > 0:
            refuse_separate_norms(self.optimizer)
        return self._norm

    def count_zeros(self) -> torch.Tensor:
        """Zeros among what will be applied; int64, one element. All passes once more for it."""
        total = torch.zeros(1, dtype=torch.int64, device=self.device)
        for shard in self._each():
            for gradient in self._counted(shard):
                kept, shard.grad = shard.grad, gradient.clone()  # which is not clipped yet
                self._clip([shard])
                total += gradient.numel() - torch.count_nonzero(shard.grad)
                shard.grad = kept
        return total

    def give(
        self, chunk: Any, each: Iterable[tuple[torch.Tensor, torch.nn.Parameter, int, int]]
    ) -> None:
        """Give tensors that are stepped their gradients, whose memory must be there.

        `each`: such a tensor, and of which elements of which parameter of the chunk it is.
        """
        tensors = []
        for tensor, parameter, start, stop in each:
            tensor.grad = self._prepared(chunk, chunk.gradient_piece(parameter, start, stop))
            tensors.append(tensor)
        self._clip(tensors)

    def _measure(self) -> dict[int, torch.Tensor]:
        """The norm of each shard that counts, by its id; notes inf and nan."""
        if self._norms is None:
            self._norms = {}
            for shard in self._each():
                for gradient in self._counted(shard):
                    self._norms[id(shard)] = torch.norm(gradient).view(1)
        return self._norms

    def _counted(self, shard: torch.Tensor) -> list[torch.Tensor]:
        """The shard's gradient, unless it is a copy of what counts elsewhere."""
        found: list[torch.Tensor] = self.optimizer._filter_grads_for_norm([shard])
        return found

    def _each(self) -> Iterator[torch.Tensor]:
        """Yield what is stepped, each with its unscaled gradient until the next one."""
        chunks = [(chunk, gradients_in_host(chunk)) for chunk in self.optimizer.model_chunks]
        for number, (chunk, waiting) in enumerate(chunks):
            for _, coming in chunks[number : number + 2]:
                coming.start_back()
            self.on_change()
            waiting.wait_until_back()
            for parameter, (start, stop), shard in self._owned[id(chunk)]:
                shard.grad = self._prepared(chunk, chunk.gradient_piece(parameter, start, stop))
                yield shard
                shard.grad = None
            if self._inv_scale is not None and not waiting.are_waiting:
                self._unscaled.add(id(chunk))
            waiting.drop()

    @cached_property
    def _owned(self) -> dict[int, list[tuple[torch.nn.Parameter, Interval, torch.Tensor]]]:
        """What is stepped, by the id of its chunk."""
        found: dict[int, list[Any]] = {id(chunk): [] for chunk in self.optimizer.model_chunks}
        for chunk, parameter, interval, shard in self.optimizer.owned_shards:
            found[id(chunk)].append((parameter, interval, shard))
        return found

    def _prepared(self, chunk: Any, piece: torch.Tensor) -> torch.Tensor:
        """In fp32 and unscaled: a copy, or in place where they are in fp32."""
        gradient = piece.float()
        is_done = id(chunk) in self._unscaled and gradient.data_ptr() == piece.data_ptr()
        if self._inv_scale is not None and not is_done and gradient.numel():
            torch._amp_foreach_non_finite_check_and_unscale_(
                [gradient], self._found_inf, self._inv_scale
            )
        return gradient

    def _clip(self, tensors: list[torch.Tensor]) -> None:
        if self.clip_grad > 0 and tensors:
            clip_grad_by_total_norm_fp32(tensors, self.clip_grad, self._norm)


def gradients_in_host(chunk: Any) -> GradientsInHost:
    """Those of a wrapped chunk; of a resident one all gradients stay on the device."""
    return GradientsInHost(()) if chunk.shards is None else chunk.shards.gradients_in_host


def count_zeros(chained: Any) -> float:
    """In place of `ChainedOptimizer.count_zeros`, on a rank whose gradients are streamed."""
    total = sum(each.factors.count_zeros() for each in chained.chained_optimizers)
    dist.all_reduce(total, group=chained.get_grad_stats_parallel_group())
    return total.item()
