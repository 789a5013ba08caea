"""Whether any rank asks for its step again, summed along with the step's tokens.

Stock sums that over the world as soon as the passes are over, then the tokens, one collective after
the other: between distant sites each takes a round trip of all ranks. Here both are one sum.

Source: `RerunStateMachine.should_run_forward_backward` and `_reduce_any` in
megatron.core.rerun_state_machine.
"""

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.rerun_state_machine import RerunMode, RerunState, get_rerun_state_machine


class RerunVotes:
    """Of one rank: its votes go out with the tokens, the answer waits until stock asks."""

    def __init__(self) -> None:
        self._counted: torch.Tensor | None = None
        """Of all ranks, for the run of the step that is over."""

    def sum_with(self, num_tokens: torch.Tensor, group: dist.ProcessGroup) -> None:
        """Sum the number of tokens over all ranks in place; a collective call.

        `num_tokens`: int32, no dimensions.
        """
        both = torch.stack([num_tokens, torch.full_like(num_tokens, _asks())])
        dist.all_reduce(both, group=group)
        num_tokens.copy_(both[0])
        self._counted = both[1]

    def answering(self, stock: Callable[..., Any]) -> Callable[..., Any]:
        """Take the place of stock's sum (`_reduce_any`): the first one after `sum_with`."""

        @functools.wraps(stock)
        def reduce_any(self_: Any, value: bool | list[bool]) -> bool | tuple[bool, ...]:
            counted, self._counted = self._counted, None
            # Later runs of a step vote on two questions at once.
            if counted is None or self_.state != RerunState.INITIAL_RUN:
                return stock(self_, value)
            return bool(counted.item() > 0)

        return reduce_any


def _asks() -> bool:
    """Whether this rank has found something in a first run that should be run again."""
    machine = get_rerun_state_machine()
    return (
        machine.mode != RerunMode.DISABLED
        and machine.state == RerunState.INITIAL_RUN
        and machine.rerun_requested
    )
