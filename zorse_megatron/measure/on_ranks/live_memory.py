"""How much memory a computation holds: the allocator's word on a GPU, live tensors on a CPU."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter


@dataclass(frozen=True, kw_only=True)
class HeldMemory:
    """What one forward and its backward held, beside what was there before."""

    kept_bytes: int
    """Between the two, without the output of the forward."""
    peak_bytes: int
    """At most."""


def held_memory(
    forward: Callable[[], torch.Tensor],
    backward: Callable[[torch.Tensor], None],
    device: torch.device,
) -> HeldMemory:
    """Run a forward and its backward, and return what they held."""
    if device.type != "cuda":
        with _LiveTensors() as live:
            output = forward()
            kept_bytes = live.num_bytes() - output.untyped_storage().nbytes()
            backward(output)
        return HeldMemory(kept_bytes=kept_bytes, peak_bytes=live.peak_bytes)
    torch.cuda.reset_peak_memory_stats(device)
    before_bytes = torch.cuda.memory_allocated(device)
    output = forward()
    kept_bytes = torch.cuda.memory_allocated(device) - before_bytes
    kept_bytes -= output.untyped_storage().nbytes()
    backward(output)
    peak_bytes = torch.cuda.max_memory_allocated(device) - before_bytes
    return HeldMemory(kept_bytes=kept_bytes, peak_bytes=peak_bytes)


class _LiveTensors(TorchDispatchMode):
    """Counts the storages that operations make, for as long as anything holds them.

    What a kernel needs for itself while it runs is not seen.
    """

    def __init__(self) -> None:
        super().__init__()
        self.peak_bytes = 0
        self._live: dict[int, tuple[StorageWeakRef, int]] = {}
        # A weak reference keeps the address from being given to another storage.
        self._given: dict[int, StorageWeakRef] = {}

    def num_bytes(self) -> int:
        """Return what is held now."""
        self._live = {k: v for k, v in self._live.items() if not v[0].expired()}
        return sum(size for _, size in self._live.values())

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Run an operation, and note the storages that it made."""
        for tensor in tree_iter((args, kwargs)):
            if isinstance(tensor, torch.Tensor):
                storage = tensor.untyped_storage()
                if storage._cdata not in self._live:  # it was there before
                    self._given.setdefault(storage._cdata, StorageWeakRef(storage))
        result = func(*args, **(kwargs or {}))
        for tensor in tree_iter(result):
            if isinstance(tensor, torch.Tensor):
                storage = tensor.untyped_storage()
                if storage._cdata not in self._given:
                    self._live[storage._cdata] = (StorageWeakRef(storage), storage.nbytes())
        self.peak_bytes = max(self.peak_bytes, self.num_bytes())
        return result
