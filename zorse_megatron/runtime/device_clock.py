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
        self._is_done = False

    def mark(self) -> Any:
        """Note this point of the current stream."""
        if self._first is None:
            self._first = self._recorded()
            self._first.synchronize()
            self._first_s = time.time()
        self._is_done = False
        return self._recorded()

    def seconds(self, mark: Any) -> float:
        """When the device came to a mark; waits until it has."""
        if not self._is_done:
            torch.cuda.synchronize()
            self._is_done = True
        return float(self._first_s + self._first.elapsed_time(mark) * 1e-3)

    @staticmethod
    def _recorded() -> Any:
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event
