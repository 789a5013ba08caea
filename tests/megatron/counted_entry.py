"""The usual entry; counts what floating-point tensors take of the device, after every operation.

On CPU, host and device are one memory. What would be the host's on a GPU is told by the code that
asks for it: our functions for memory of the host, and torch's and Megatron's readers and writers of
checkpoint files. Everything else that any operation makes counts, whether we know of it or not.

Writes `counted-rank<R>.json` to `$ZORSE_TEST_COUNTED`: phase (start, load, save) -> the most bytes
at one time.
"""

import functools
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from zorse_megatron import pretrain
from zorse_megatron.adapter import cpu_mode

NAME = "ZORSE_TEST_COUNTED"
FILE_ACCESS = ("torch/distributed/checkpoint/", "dist_checkpointing/strategies/filesystem_async")


def make_counter(host_code: set[Any], device_code: set[Any]) -> Any:
    """A counter to be entered as a context; torch must not be imported before CPU mode.

    `host_code`, `device_code`: code objects, of which the innermost at work decides.
    """
    import torch
    from torch.multiprocessing.reductions import StorageWeakRef
    from torch.utils._python_dispatch import TorchDispatchMode
    from torch.utils._pytree import tree_leaves

    @functools.cache
    def asks_for_host(code: Any) -> bool | None:
        """Whether what this code makes is in the host; None where its callers decide."""
        if code in device_code:
            return False
        in_host = code in host_code or any(part in code.co_filename for part in FILE_ACCESS)
        return True if in_host else None

    def is_in_host() -> bool:
        frame = sys._getframe()
        while frame is not None:
            in_host = asks_for_host(frame.f_code)
            if in_host is not None:
                return in_host
            frame = frame.f_back  # type: ignore[assignment]
        return False

    class Counter(TorchDispatchMode):
        """Watches all storages that are made within the block."""

        def __init__(self) -> None:
            super().__init__()
            self.known: dict[int, tuple[Any, bool]] = {}
            """Storage (by identity) -> a weak reference and whether it is on the device."""
            self.phase = "start"
            self.peaks: dict[str, int] = {}
            self.bound = 0
            """No less than what is held: what was at the last look, and all that came since."""

        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            result = func(*args, **(kwargs or {}))
            for tensor in tree_leaves(result):
                if isinstance(tensor, torch.Tensor) and tensor.is_floating_point():
                    storage = tensor.untyped_storage()
                    if storage._cdata not in self.known:
                        here = tensor.device.type != "meta" and not is_in_host()
                        self.known[storage._cdata] = StorageWeakRef(storage), here
                        self.bound += storage.nbytes()
            self.look()
            return result

        def look(self) -> None:
            """Sum what is held, where that can be more than the most so far: it takes long."""
            most = self.peaks.setdefault(self.phase, 0)
            # What a step takes is tested elsewhere.
            if self.phase != "train" and self.bound > most:
                self.bound = self.held_bytes()
                self.peaks[self.phase] = max(most, self.bound)

        def may_grow(self, resize: Callable[..., Any]) -> Callable[..., Any]:
            """`UntypedStorage.resize_`, which is no operation, counted."""

            def resized(storage: Any, num_bytes: int) -> Any:
                self.bound += max(0, num_bytes - storage.nbytes())
                return resize(storage, num_bytes)

            return resized

        def held_bytes(self) -> int:
            held = 0
            for identity, (weak, here) in list(self.known.items()):
                storage = torch.UntypedStorage._new_with_weak_ptr(weak.cdata)
                if storage is None:
                    del self.known[identity]
                elif here:
                    held += storage.nbytes()
            return held

    return Counter()


def in_phase(counter: Any, phase: str, call: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(call)
    def with_phase(*args: Any, **kwargs: Any) -> Any:
        before, counter.phase = counter.phase, phase
        try:
            return call(*args, **kwargs)
        finally:
            counter.phase = "train" if "train" in counter.peaks else before

    return with_phase


def count() -> None:
    if cpu_mode.needed():
        cpu_mode.enable()
    import torch
    from megatron.training import training

    from zorse_megatron.adapter.optimizer.host_state import ChunkState, _Flat
    from zorse_megatron.adapter.session import PlanSession
    from zorse_megatron.runtime import host_link

    host = (
        host_link.copied_to_host,
        host_link.joined_in_host,
        host_link.HostLink.new_host_bytes,
        host_link.HostBacked.in_host,
        ChunkState._make,  # where shards are while they get their state
    )
    counter = make_counter({f.__code__ for f in host}, {_Flat.__init__.__code__})
    training.load_checkpoint = in_phase(counter, "load", training.load_checkpoint)
    training.save_checkpoint = in_phase(counter, "save", training.save_checkpoint)
    PlanSession.forward_backward = in_phase(  # type: ignore[method-assign]
        counter, "train", PlanSession.forward_backward
    )
    torch.UntypedStorage.resize_ = counter.may_grow(  # type: ignore[method-assign]
        torch.UntypedStorage.resize_
    )
    with counter:
        pretrain.main()
    rank = os.environ["RANK"]
    Path(os.environ[NAME], f"counted-rank{rank}.json").write_text(json.dumps(counter.peaks))


if __name__ == "__main__":
    count()
