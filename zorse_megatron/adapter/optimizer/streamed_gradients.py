"""Gradients that come from the host for a step: measured, multiplied and clipped as they pass.

Stock has fp32 gradients of all shards on the device in a step. Here chunk after chunk passes twice:
once to be read, and once, when the clip coefficient is known, to be applied. Gradients in 16 bits
are in fp32 for as long as it takes to apply them, whether they were in the host or not.

Source: megatron/core/optimizer/clip_grads.py.
"""

from collections.abc import Callable, Iterable, Iterator
from functools import cached_property
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.optimizer.clip_grads import clip_grad_by_total_norm_fp32

from zorse_megatron.adapter.optimizer.gradient_factors import GradientFactors
from zorse_megatron.runtime.offload import GradientsInHost
from zorse_megatron.schedule.shards import Interval


class StreamedGradients(GradientFactors):
    """One step's gradients of what a rank owns."""

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
        super().__init__(optimizer, device)
        self.clip_grad = clip_grad
        self.on_change = on_change

    @torch.no_grad()
    def read(self) -> torch.Tensor:
        """See `GradientFactors`; chunk by chunk."""
        both = torch.zeros(2, dtype=torch.float64, device=self.device)
        for pieces in self._each_chunk():
            both += self._sum(pieces)
        return both

    @torch.no_grad()
    def count_zeros(self) -> torch.Tensor:
        """Zeros among the gradients; int64, one element. All pass once more for it."""
        total = torch.zeros(1, dtype=torch.int64, device=self.device)
        for pieces in self._each_chunk():
            for parameter, piece in pieces:
                if self.is_counted(parameter):
                    total += piece.numel() - torch.count_nonzero(piece)
        return total

    @torch.no_grad()
    def give(
        self, chunk: Any, each: Iterable[tuple[torch.Tensor, torch.nn.Parameter, int, int]]
    ) -> None:
        """Give tensors that are stepped their gradients, whose memory must be there.

        `each`: such a tensor, and of which elements of which parameter of the chunk it is; no
        element twice in a step.
        """
        tensors = []
        for tensor, parameter, start, stop in each:
            tensor.grad = chunk.gradient_piece(parameter, start, stop).float()
            tensors.append(tensor)
        self.multiply(tensor.grad for tensor in tensors)
        if self.clip_grad > 0:
            clip_grad_by_total_norm_fp32(tensors, self.clip_grad, self.norm)

    def _each_chunk(self) -> Iterator[list[tuple[torch.nn.Parameter, torch.Tensor]]]:
        """Yield model parameters of a chunk, each with what is owned of its gradient, until the
        next ones."""
        chunks = [(chunk, gradients_in_host(chunk)) for chunk in self.optimizer.model_chunks]
        for number, (chunk, waiting) in enumerate(chunks):
            for _, coming in chunks[number : number + 2]:
                coming.start_back()
            self.on_change()
            waiting.wait_until_back()
            yield [
                (parameter, chunk.gradient_piece(parameter, start, stop))
                for parameter, (start, stop) in self._owned[id(chunk)]
            ]
            waiting.drop()

    @cached_property
    def _owned(self) -> dict[int, list[tuple[torch.nn.Parameter, Interval]]]:
        """What is stepped, by the id of its chunk."""
        found: dict[int, list[Any]] = {id(chunk): [] for chunk in self.optimizer.model_chunks}
        for chunk, parameter, interval, _ in self.optimizer.owned_shards:
            found[id(chunk)].append((parameter, interval))
        return found


def gradients_in_host(chunk: Any) -> GradientsInHost:
    """Those of a wrapped chunk; of a resident one all gradients stay on the device."""
    return GradientsInHost(()) if chunk.shards is None else chunk.shards.gradients_in_host


def count_zeros(chained: Any) -> float:
    """In place of `ChainedOptimizer.count_zeros`, on a rank whose gradients are streamed."""
    total = chained.chained_optimizers[0].factors.count_zeros()
    dist.all_reduce(total, group=chained.get_grad_stats_parallel_group())
    return total.item()
