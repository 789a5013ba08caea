"""What all ranks sum once in a step, and whether any of them asks for the step again.

Stock sums several numbers over the world, one collective after the other: whether a rank asks for
the step again, the tokens, whether gradients have inf or nan (where there is a loss scale), and
their squares. Between distant sites each takes a round trip of all ranks. Here all of it is one
sum, made when the passes are over: the norm is that of gradients before they are divided by the
tokens, and known with them.

Source: `RerunStateMachine.should_run_forward_backward` and `_reduce_any` in
megatron.core.rerun_state_machine; `finalize_model_grads`; `get_grad_norm_fp32`.
"""

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.rerun_state_machine import RerunMode, RerunState, get_rerun_state_machine

from zorse_megatron.adapter.data_parallel.ddp import NotedNorms


class StepSums:
    """Numbers that go out in one vector; the host waits once for all that it asks of it."""

    def __init__(self) -> None:
        self._parts: list[torch.Tensor] = []
        self._num_values = 0
        self._in_host: list[float] | None = None

    def add(self, values: torch.Tensor) -> "Part":
        """Let `values` (on the device, of any shape) be summed, too; or, after `reduce`, be read
        along with the sums."""
        self._parts.append(values.detach().double().reshape(-1))
        first, self._num_values = self._num_values, self._num_values + values.numel()
        return Part(sums=self, first=first, stop=self._num_values)

    def reduce(self, group: dist.ProcessGroup) -> None:
        """Sum over all ranks, in fp64; a collective call, with as many values on each."""
        self._parts = [torch.cat(self._parts)]
        dist.all_reduce(self._parts[0], group=group)

    def on_device(self, first: int, stop: int) -> torch.Tensor:
        """Summed values, after `reduce`."""
        return self._parts[0][first:stop]

    def in_host(self, first: int, stop: int) -> list[float]:
        """The same for the host, which waits for the device the first time."""
        if self._in_host is None:
            self._in_host = torch.cat(self._parts).tolist()
        return self._in_host[first:stop]


@dataclass(frozen=True, kw_only=True)
class Part:
    """Some of the values."""

    sums: StepSums
    first: int
    stop: int

    @property
    def on_device(self) -> torch.Tensor:
        """[stop - first], fp64; of what was summed."""
        return self.sums.on_device(self.first, self.stop)

    @property
    def in_host(self) -> list[float]:
        """The values; see `StepSums.in_host`."""
        return self.sums.in_host(self.first, self.stop)


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
        self._noted, asks = noted, torch.zeros((), device=device)
        if machine.mode != RerunMode.DISABLED:
            if machine.state != RerunState.INITIAL_RUN:
                self._look()
            elif machine.rerun_requested:
                asks += 1
            elif noted.are_any:
                asks = noted.bad()
        self._counted = sums.add(asks)

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
