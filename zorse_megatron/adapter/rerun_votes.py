"""Whether any rank asks for its step again, summed along with the step's tokens.

Stock sums that over the world as soon as the passes are over, then the tokens, one collective after
the other: between distant sites each takes a round trip of all ranks. Here both are one sum. A rank
asks for it, too, where its gradients have inf or nan, which the host need not know by then.

Source: `RerunStateMachine.should_run_forward_backward` and `_reduce_any` in
megatron.core.rerun_state_machine.
"""

import functools
import math
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.rerun_state_machine import RerunMode, RerunState, get_rerun_state_machine

from zorse_megatron.adapter.data_parallel.ddp import NotedNorms


class RerunVotes:
    """Of one rank: its votes go out with the tokens, the answer waits until stock asks."""

    def __init__(self) -> None:
        self._counted: torch.Tensor | None = None
        """Of all ranks, for the run of the step that is over."""
        self._noted: NotedNorms | None = None
        """Of this rank's gradients, until somebody has looked or need not look."""

    def sum_with(
        self,
        num_tokens: torch.Tensor,
        group: dist.ProcessGroup,
        noted: NotedNorms,
        more: torch.Tensor | None = None,
    ) -> None:
        """Sum the number of tokens over all ranks in place; a collective call.

        `num_tokens`: int32, no dimensions; `more`: a vector in fp64 that is summed along, None on
        all ranks or on none. Raises RuntimeError for gradients with inf or nan in a run that is a
        repetition, where stock compares them with the first one's.
        """
        machine = get_rerun_state_machine()
        self._noted, asks = noted, torch.zeros_like(num_tokens)
        if machine.mode != RerunMode.DISABLED:
            if machine.state != RerunState.INITIAL_RUN:
                self._look()
            elif machine.rerun_requested:
                asks += 1
            elif noted.are_any:
                asks = noted.bad()
        both = torch.stack([num_tokens, asks])
        summed = both if more is None else torch.cat([both.double(), more])
        dist.all_reduce(summed, group=group)
        num_tokens.copy_(summed[0])
        self._counted = summed[1]
        if more is not None:
            more.copy_(summed[2:])

    def answering(self, stock: Callable[..., Any]) -> Callable[..., Any]:
        """Take the place of stock's sum (`_reduce_any`): the first one after `sum_with`."""

        @functools.wraps(stock)
        def reduce_any(self_: Any, value: bool | list[bool]) -> bool | tuple[bool, ...]:
            counted, self._counted = self._counted, None
            # Later runs of a step vote on two questions at once.
            if counted is None or self_.state != RerunState.INITIAL_RUN:
                return stock(self_, value)
            asked = bool(counted.item() > 0)
            if asked:
                self._look()
            self._noted = None
            return asked

        return reduce_any

    def look_after(self, grad_norm: float | None) -> None:
        """Where stock does not ask: inf and nan are in the gradients' norm as well.

        `grad_norm`: of all ranks; None: it has not been computed. Raises RuntimeError where this
        rank's gradients have them.
        """
        if grad_norm is None or not math.isfinite(grad_norm):
            self._look()
        self._noted = None

    def _look(self) -> None:
        if self._noted is not None:
            self._noted.look()
        self._noted = None
