"""Offload of activations between a forward and its backward.

Source of the idea: Zorse (MLSys 2026) and Cephalo (ICS 2025) offload boundary activations. Here
what autograd saves and what carries gradients is offloaded, by storage: with full recomputation
these are the inputs of the layers. The saved tensors stay the same objects; only their memory
leaves and comes back. What carries no gradient (masks, rotary tables) stays: other micro-batches
may share it.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch.autograd.graph import saved_tensors_hooks

from zorse_megatron.runtime.host_link import HostBacked, HostLink

# Masks of a few bytes and the like are not worth a copy.
_SMALLEST_BYTES = 4096


@dataclass(kw_only=True)
class ActivationOffload:
    """Keeps what forwards save, per key, in host memory between forward and backward.

    `stays(storage address)`: storages that must stay, such as parameters.
    """

    link: HostLink
    stays: Callable[[int], bool]
    away: dict[tuple[int, int], list[HostBacked]] = field(default_factory=dict)
    _leaving: list[HostBacked] = field(default_factory=list)

    @contextmanager
    def keeping(
        self,
        key: tuple[int, int],
        keep: Callable[[torch.Tensor], torch.Tensor] = torch.Tensor.detach,
    ) -> Iterator[None]:
        """Run a forward within; when the block ends, what it saved starts to leave.

        `keep` makes of every saved tensor what is kept: of nested hooks only the innermost are
        called.
        """
        found: dict[int, torch.Tensor] = {}

        def pack(tensor: torch.Tensor) -> torch.Tensor:
            # Not the tensor itself: it may be an output of the node that saves it.
            kept = keep(tensor)
            storage = tensor.untyped_storage()
            address = storage.data_ptr()
            is_activation = tensor.requires_grad and not self.stays(address)
            if is_activation and storage.nbytes() >= _SMALLEST_BYTES:
                found[address] = kept
            return kept

        with saved_tensors_hooks(pack, lambda tensor: tensor):
            yield
        self._send(key, [HostBacked(t, self.link, "activations") for t in found.values()])

    def _send(self, key: tuple[int, int], memories: list[HostBacked]) -> None:
        self.link.expect_activations(memories)
        # What the forward before this one kept has had this one's time to leave.
        self.let_go(wait=True)
        for memory in memories:
            memory.send()
        self._leaving += memories
        self.away[key] = memories

    def let_go(self, *, wait: bool = False) -> None:
        """Free the device's memory of what has left."""
        self._leaving = [m for m in self._leaving if not m.let_go(wait=wait)]

    def start_back(self, key: tuple[int, int]) -> None:
        """Start to bring back what the forward of `key` kept."""
        for memory in self.away.get(key, ()):
            memory.start_back()

    def wait_until_back(self, key: tuple[int, int]) -> None:
        """Have it back before its backward; the host's memory is freed."""
        for memory in self.away.pop(key, ()):
            memory.wait_until_back()
            memory.forget_host()
            if memory in self._leaving:
                self._leaving.remove(memory)
