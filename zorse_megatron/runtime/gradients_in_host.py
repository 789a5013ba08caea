"""Shards of one chunk's gradients that wait in the host from their reduction to the step.

The step needs them twice: once for their norm, once to be applied. Each time they are copied back
as they left and multiplied on the device by what SCALE has said, so they are the same bits as if
they had stayed; afterwards only the device's memory goes.
"""

from collections.abc import Sequence

import torch

from zorse_megatron.runtime.host_link import HostBacked
from zorse_megatron.runtime.sharded_buffer import ShardedBuffer


class GradientsInHost:
    """Of one chunk: nothing waits until `send`, and nothing after `forget`."""

    def __init__(self, buffers: Sequence[ShardedBuffer]) -> None:
        self.buffers = buffers
        self.are_waiting = False
        """Whether they are what waits in the host, also while a copy is on the device."""
        self._factor: torch.Tensor | float = 1.0
        self._are_scaled = False

    def send(self) -> None:
        """Start to copy the shards to the host, once they have been reduced."""
        self.are_waiting, self._factor = True, 1.0
        for memory in self._memories():
            memory.send()

    def let_go(self) -> None:
        """Free the device's memory of what has been sent, when it has left."""
        for memory in self._memories():
            memory.let_go()

    def scale(self, factor: torch.Tensor | float) -> None:
        """Multiply them whenever they are back."""
        self._factor = factor

    def start_back(self) -> None:
        """Start to bring them back, for `wait_until_back`."""
        for memory in self._memories():
            if memory.is_away:
                self._are_scaled = False
                memory.start_back()

    @torch.no_grad()
    def wait_until_back(self) -> None:
        """Have them back, and scaled."""
        for memory in self._memories():
            memory.wait_until_back()
        if not self._are_scaled:
            self._are_scaled = True
            for buffer in self.buffers if self.are_waiting else ():
                if buffer.shard is not None:
                    buffer.shard.mul_(self._factor)

    def drop(self) -> None:
        """Free the device's memory; the host has them."""
        for memory in self._memories():
            memory.drop()

    def forget(self) -> None:
        """A new step begins."""
        self.are_waiting = False

    def _memories(self) -> Sequence[HostBacked]:
        """None where they stay on the device."""
        if not self.are_waiting:
            return ()
        return [b.memory for b in self.buffers if b.memory is not None and b.num_owned]
