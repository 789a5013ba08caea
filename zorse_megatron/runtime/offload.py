"""What waits in the host: activations for their backward, gradients for the step.

Source of the idea: Zorse (MLSys 2026) and Cephalo (ICS 2025) offload boundary activations. Here
what autograd saves is offloaded, by storage, so that tensors that share one are copied once: with
full recomputation the inputs of the layers, without it all that layers keep. The saved tensors stay
the same objects; only their memory leaves and comes back. So nothing else may use it meanwhile:

- What carries gradients belongs to this forward, but what is handed on to the next chunk may be on
  its way there: that stays.
- What carries none (dropout masks, what a fused kernel keeps for itself) leaves if nothing but
  saved tensors of this forward holds it. Masks and rotary tables that others hold stay.
- Parameters stay.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from weakref import ref

import torch
from torch.autograd.graph import saved_tensors_hooks

from zorse_megatron.runtime.host_link import HostBacked, HostLink
from zorse_megatron.runtime.sharded_buffer import ShardedBuffer

# Masks of a few bytes and the like are not worth a copy.
_SMALLEST_BYTES = 4096
# Of attention's scores: samples, heads, queries, keys.
_SCORE_DIMENSIONS = 4


@dataclass(kw_only=True)
class _Saved:
    """One storage that a forward has saved."""

    kept: list[ref[torch.Tensor]] = field(default_factory=list)
    """Saved tensors that share it."""
    has_gradient: bool = False
    """Whether one of them carries a gradient."""

    def tensor(self) -> torch.Tensor | None:
        """One of those that autograd still has."""
        return next((tensor for each in self.kept if (tensor := each()) is not None), None)

    def is_own(self) -> bool:
        """Whether nothing but these tensors holds the storage."""
        alive = [tensor for each in self.kept if (tensor := each()) is not None]
        storage = alive[0].untyped_storage()
        holders: int = torch._C._storage_Use_Count(storage._cdata)
        return holders <= len(alive) + 1  # `storage` itself is one


@dataclass(kw_only=True)
class ActivationOffload:
    """Keeps what forwards save, per key, in host memory between forward and backward.

    `stays(storage address)`: storages that must stay, such as parameters.
    """

    link: HostLink
    stays: Callable[[int], bool]
    away: dict[tuple[int, int], list[HostBacked]] = field(default_factory=dict)
    _leaving: list[HostBacked] = field(default_factory=list)
    _handed_on: int | None = None
    """The storage of the running forward's output."""

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
        found: dict[int, _Saved] = {}
        self._handed_on = None

        def pack(tensor: torch.Tensor) -> torch.Tensor:
            # Not the tensor itself: it may be an output of the node that saves it.
            kept = keep(tensor)
            storage = tensor.untyped_storage()
            if self._may_leave(tensor, storage):
                saved = found.setdefault(storage._cdata, _Saved())
                saved.kept.append(ref(kept))
                saved.has_gradient |= tensor.requires_grad
            return kept

        with saved_tensors_hooks(pack, lambda tensor: tensor):
            yield
        self._send(key, [HostBacked(t, self.link, "activations") for t in self._leaving_of(found)])

    def hand_on(self, output: torch.Tensor) -> None:
        """Told within the block what the forward gives to others: that stays."""
        self._handed_on = output.untyped_storage()._cdata

    def _may_leave(self, tensor: torch.Tensor, storage: torch.UntypedStorage) -> bool:
        """Whether it is large enough, and neither a parameter nor of the batch."""
        return (
            storage.nbytes() >= _SMALLEST_BYTES
            and storage.resizable()
            and tensor.device.type == self.link.device.type
            and (tensor.is_floating_point() or _is_of_forward(tensor))
            and not self.stays(storage.data_ptr())
        )

    def _leaving_of(self, found: dict[int, _Saved]) -> Iterable[torch.Tensor]:
        """A tensor of each storage that leaves."""
        for identity, saved in found.items():
            tensor = saved.tensor()
            # What is recomputed may have been emptied since it was saved.
            if tensor is None or not tensor.untyped_storage().nbytes():
                continue
            if identity != self._handed_on and (saved.has_gradient or saved.is_own()):
                yield tensor

    def _send(self, key: tuple[int, int], memories: list[HostBacked]) -> None:
        self.link.expect_activations(memories)
        self.let_go()
        for memory in memories:
            memory.send()
        self._leaving += memories
        self.away[key] = memories

    def let_go(self) -> None:
        """Behind each forward: free the device's memory of what the one before it kept.

        Only here, so that what is held does not hang on how far the host is ahead.
        """
        for memory in self._leaving:
            memory.let_go()
        self._leaving = []

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


def _is_of_forward(mask: torch.Tensor) -> bool:
    """Whether it is one of dropout's, and not one of positions, the same for all heads."""
    is_of_scores = mask.dim() == _SCORE_DIMENSIONS and mask.shape[1] > 1
    return mask.element_size() == 1 and (is_of_scores or mask.dim() == _SCORE_DIMENSIONS - 1)


# Shards of one chunk's gradients that wait in the host from their reduction to the step.
#
# The step needs them twice: once for their norm, once to be applied. Each time they are copied back
# as they left; afterwards only the device's memory goes.


class GradientsInHost:
    """Of one chunk: nothing waits until `send`, and nothing after `forget`."""

    def __init__(self, buffers: Sequence[ShardedBuffer]) -> None:
        self.buffers = buffers
        self.are_waiting = False
        """Whether they are what waits in the host, also while a copy is on the device."""

    def send(self) -> None:
        """Start to copy the shards to the host, once they have been reduced."""
        self.are_waiting = True
        for memory in self._memories():
            memory.send()

    def let_go(self) -> None:
        """Free the device's memory of what has been sent, when it has left."""
        for memory in self._memories():
            memory.let_go()

    def start_back(self) -> None:
        """Start to bring them back, for `wait_until_back`."""
        for memory in self._memories():
            if memory.is_away:
                memory.start_back()

    def wait_until_back(self) -> None:
        """Have them back."""
        for memory in self._memories():
            memory.wait_until_back()

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
