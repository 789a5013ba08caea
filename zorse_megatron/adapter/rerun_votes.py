"""Whether any rank asks for its step again, summed along with the step's tokens (`step_sums`).

Source: `RerunStateMachine.should_run_forward_backward` and `_reduce_any` in
megatron.core.rerun_state_machine.
"""

import functools
import math
from collections.abc import Callable
from typing import Any

import torch
from megatron.core.rerun_state_machine import RerunMode, RerunState, get_rerun_state_machine

from zorse_megatron.adapter.data_parallel.ddp import NotedNorms
from zorse_megatron.adapter.step_sums import Part, StepSums


class RerunVotes:
    """Whether this rank asks for the step again; the answer waits until stock asks for it.

    A rank asks for it, too, where its gradients have inf or nan, which the host need not know.
    """

    def __init__(self) -> None:
        self._counted: Part | None = None
        """Of all ranks, for the run of the step that is over."""
        self._noted: NotedNorms | None = None
        """Of this rank's gradients, until somebody has looked or need not look."""

    def cast(self, sums: StepSums, noted: NotedNorms, device: torch.device) -> None:
        """Let `sums` have this rank's vote.

        Raises RuntimeError for gradients with inf or nan in a run that is a repetition, where stock
        compares them with the first one's.
        """
        machine = get_rerun_state_machine()
        self._noted, asks = noted, 0
        if machine.mode != RerunMode.DISABLED:
            if machine.state != RerunState.INITIAL_RUN:
                self._look()
            elif machine.rerun_requested:
                asks = 1
            elif noted.are_any:
                self._counted = sums.add(noted.bad())
                return
        self._counted = sums.add(torch.full((), asks, dtype=torch.float64, device=device))

    def answering(self, stock: Callable[..., Any]) -> Callable[..., Any]:
        """Take the place of stock's sum (`_reduce_any`): the first one after `cast`."""

        @functools.wraps(stock)
        def reduce_any(self_: Any, value: bool | list[bool]) -> bool | tuple[bool, ...]:
            counted, self._counted = self._counted, None
            # Later runs of a step vote on two questions at once.
            if counted is None or self_.state != RerunState.INITIAL_RUN:
                return stock(self_, value)
            asked = counted.in_host[0] > 0
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
