"""When a GPU comes to what its host launches; not run on one yet (see docs/limits.md)."""

import time
from typing import Any

import torch


class CudaClock:
    """Marks are events of the current stream; read in the host's wall-clock time, all at the end.

    A counterpart of `trace.HostClock` for devices that the host runs ahead of.
    """

    def __init__(self) -> None:
        self._first: Any = None
        self._first_s = 0.0

    def mark(self) -> Any:
        """Note this point of the current stream."""
        if self._first is None:
            self._first = self._recorded()
            self._first.synchronize()
            self._first_s = time.time()
        return self._recorded()

    def has_come(self, mark: Any) -> bool:
        """Whether the device has come to a mark; it never will after an error of CUDA's."""
        try:
            return bool(mark.query())
        except RuntimeError:
            return False

    def seconds(self, mark: Any) -> float:
        """When the device came to a mark; waits until it has, and for nothing else."""
        mark.synchronize()
        return float(self._first_s + self._first.elapsed_time(mark) * 1e-3)

    @staticmethod
    def _recorded() -> Any:
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event
