"""A few numbers of each rank, told to all between two iterations; nobody waits for them.

They travel over gloo, on the hosts, beside whatever the GPUs do: what is told after an iteration is
read after the next one. All ranks then have the same numbers.
"""

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist


class Exchange:
    """Tells rows of numbers; a collective call to make, and then one for each iteration."""

    def __init__(self, *, timeout: timedelta | None = None) -> None:
        self.group: Any = dist.new_group(backend="gloo", timeout=timeout)
        self._under_way: tuple[Any, torch.Tensor, torch.Tensor] | None = None

    def swap(self, row: Sequence[float]) -> list[list[float]] | None:
        """Start to tell `row`; return what the ranks told the time before, None the first time."""
        before = self._under_way
        mine = torch.tensor([row], dtype=torch.float64, device="cpu")
        shape = (self.group.size(), len(row))
        rows = torch.empty(shape, dtype=torch.float64, device="cpu")
        work = dist.all_gather_into_tensor(rows, mine, group=self.group, async_op=True)
        self._under_way = work, rows, mine
        if before is None:
            return None
        before[0].wait()
        rows_before: list[list[float]] = before[1].tolist()
        return rows_before

    def finish(self) -> None:
        """Wait for what is under way."""
        if self._under_way is not None:
            self._under_way[0].wait()
            self._under_way = None
