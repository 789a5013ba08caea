"""Times messages between ranks: NCCL on GPUs, gloo on CPUs."""

import time
from statistics import median

import torch
import torch.distributed as dist

from zorse_megatron.measure.tasks.link_tasks import LinkTask
from zorse_megatron.runtime.collectives import all_gather_uneven, reduce_scatter_uneven
from zorse_megatron.schedules.shards import shard_bounds
from zorse_megatron.schema.profile.profile import unequal_parts

_UNEQUAL = ("all_gather_unequal", "reduce_scatter_unequal")
_GATHERS = ("all_gather", "all_gather_unequal")
_WARM_UP = 2
_REPEATS = 7


def message_sizes(largest_bytes: int) -> tuple[int, ...]:
    """Return the sizes that are timed: powers of 8 from 1 KiB on, up to the largest.

    >>> message_sizes(600_000)
    (1024, 8192, 65536, 524288)
    """
    sizes = [1024]
    while 8 * sizes[-1] <= largest_bytes:
        sizes.append(8 * sizes[-1])
    return tuple(sizes)


def timed_messages(
    task: LinkTask, group: dist.ProcessGroup, *, largest_bytes: int, time_limit_s: float
) -> tuple[tuple[int, ...], tuple[float, ...]]:
    """Run a task on this rank, one of `task.ranks`; return sizes and seconds, equal on all of them.

    `group`: of these ranks. The time of a message is that of the slowest rank, the median of
    several messages after warm-up. Stops after a size that took longer than `time_limit_s`.
    Gathers and reductions over shards are those of the runtime.
    """
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    sizes, times = [], []
    for num_bytes in message_sizes(largest_bytes):
        message = _Message(task, group, num_bytes, device)
        seconds = [message.once_s() for _ in range(_WARM_UP + _REPEATS)][_WARM_UP:]
        slowest = torch.tensor([median(seconds)], dtype=torch.float64)
        dist.all_reduce(slowest, op=dist.ReduceOp.MAX, group=group)
        sizes.append(message.num_bytes)
        times.append(float(slowest))
        if times[-1] > time_limit_s:
            break
    return tuple(sizes), tuple(times)


class _Message:
    """One message of a task, again and again."""

    def __init__(
        self, task: LinkTask, group: dist.ProcessGroup, num_bytes: int, device: torch.device
    ) -> None:
        count = len(task.ranks)
        elements = -(-num_bytes // 4 // count) * count  # the same for each rank of a collective
        self.task, self.group = task, group
        self.num_bytes = 4 * elements
        self.tensor = torch.zeros(elements, device=device)
        weights = unequal_parts(count) if task.operation in _UNEQUAL else (1,) * count
        self.bounds = shard_bounds(elements, weights)
        self.index = task.ranks.index(dist.get_rank())

    def once_s(self) -> float:
        """Start together and return this rank's seconds; of a send half of the way there and back.

        There and back, because the clocks of two nodes do not agree.
        """
        dist.barrier(group=self.group)
        self._wait_for_device()
        start_s = time.perf_counter()
        if self.task.operation == "send":
            self._there_and_back()
        elif self.task.operation == "all_reduce":
            dist.all_reduce(self.tensor, group=self.group)
        elif self.task.operation in _GATHERS:
            all_gather_uneven(self.tensor, self.bounds, self.group)
        else:
            reduce_scatter_uneven(self.tensor, self.bounds, self.group)
        self._wait_for_device()
        took_s = time.perf_counter() - start_s
        return took_s / 2 if self.task.operation == "send" else took_s

    def _there_and_back(self) -> None:
        half = len(self.task.ranks) // 2
        is_sender = self.index < half
        partner = self.task.ranks[(self.index + half) % len(self.task.ranks)]
        if is_sender:
            dist.send(self.tensor, partner, group=self.group)
            dist.recv(self.tensor, partner, group=self.group)
        else:
            dist.recv(self.tensor, partner, group=self.group)
            dist.send(self.tensor, partner, group=self.group)

    def _wait_for_device(self) -> None:
        if self.tensor.is_cuda:
            torch.cuda.synchronize()
