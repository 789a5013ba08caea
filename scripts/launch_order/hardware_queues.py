"""Run launches as GPUs do, to find out whether they hang.

The host launches a rank's items in order. Streams share the hardware queues of a GPU
(`CUDA_DEVICE_MAX_CONNECTIONS`), in a way that CUDA does not tell; only the first item of a queue
can start. It starts when the item before it on its stream is done, and what else it waits for. A
kernel of NCCL holds its place on the GPU from its start until all of its ranks have started theirs;
a GPU has room for so many at once. What is computed or copied ends by itself.

Without a limit to what is resident, the order in which items start decides nothing: an item that
can start stays so until it does. So one run is a proof for one way to share the queues. With a
limit it may decide who gets the room, so several orders are tried.
"""

from collections import deque
from collections.abc import Hashable, Sequence
from itertools import chain
from random import Random

from scripts.launch_order.launches import HOST, Launch, Operation

# A rank's items that may start before another rank's: few, so that orders differ.
_MOST_AT_A_TIME = 8


def find_hang(
    launches: Sequence[Sequence[Launch]],
    *,
    num_queues: int | None = None,
    num_resident: int | Sequence[int] | None = None,
    seed: int = 0,
) -> str | None:
    """Where each rank stands, if they all wait; None if everything ends.

    `num_queues`: of each GPU; `num_resident`: kernels of NCCL for which each GPU, or that of each
    rank, has room; None: no limit. `seed`: how streams share the queues, and who starts first.
    """
    limits: Sequence[int | None]
    if num_resident is None or isinstance(num_resident, int):
        limits = [num_resident] * len(launches)
    else:
        limits = num_resident
    random = Random(seed)
    gpus = [
        _Gpu(items, num_queues, limit, random)
        for items, limit in zip(launches, limits, strict=True)
    ]
    return _Run(gpus, launches, random).hang()


def most_seen(launches: Sequence[Sequence[Launch]], *, seed: int = 0) -> list[int]:
    """Rank -> the most kernels of NCCL that were resident at once, in one order of events."""
    random = Random(seed)
    gpus = [_Gpu(items, None, None, random) for items in launches]
    hang = _Run(gpus, launches, random).hang()
    assert hang is None, hang
    return [gpu.most_resident for gpu in gpus]


class _Gpu:
    def __init__(
        self,
        items: Sequence[Launch],
        num_queues: int | None,
        num_resident: int | None,
        random: Random,
    ) -> None:
        self.to_launch = deque(items)
        self.held_by: Launch | None = None
        """What the host waits for."""
        self.num_resident = num_resident
        self.resident: set[Launch] = set()
        self.most_resident = 0
        streams = list(dict.fromkeys(item.stream for item in items if item.stream != HOST))
        random.shuffle(streams)
        count = num_queues or len(streams)
        self.queue_of = {stream: number % count for number, stream in enumerate(streams)}
        self.queues: dict[int, deque[Launch]] = {n: deque() for n in range(count)}
        self.previous: dict[Launch, Launch] = {}
        last: dict[Hashable, Launch] = {}
        for item in items:
            if item.stream in last:
                self.previous[item] = last[item.stream]
            last[item.stream] = item

    def launch(self, done: set[Launch]) -> None:
        """Let the host go on as far as it can."""
        while self.to_launch and (self.held_by is None or self.held_by in done):
            item = self.to_launch[0]
            is_host = item.stream == HOST
            if is_host and not done.issuperset(item.after):
                return
            self.to_launch.popleft()
            if is_host:
                done.add(item)
            else:
                self.queues[self.queue_of[item.stream]].append(item)
            self.held_by = item if item.holds_host else None

    def can_start(self, item: Launch, done: set[Launch]) -> bool:
        if item in self.previous and self.previous[item] not in done:
            return False
        if any(launch not in done for launch in item.after):
            return False
        is_full = self.num_resident is not None and len(self.resident) >= self.num_resident
        return item.operation is None or not is_full


class _Run:
    def __init__(
        self, gpus: Sequence[_Gpu], launches: Sequence[Sequence[Launch]], random: Random
    ) -> None:
        self.gpus = gpus
        self.random = random
        self.done: set[Launch] = set()
        self.started: dict[Operation, list[Launch]] = {}
        self.num_launches = sum(map(len, launches))
        self.members: dict[Operation, list[str]] = {}
        """What each rank launches as its part of an operation."""
        self.waiting: dict[Launch, set[int]] = {}
        """Whose hosts wait for a launch of another rank."""
        for item in chain.from_iterable(launches):
            for each in item.after if item.stream == HOST else ():
                self.waiting.setdefault(each, set()).add(item.rank)
            if item.operation is not None:
                self.members.setdefault(item.operation, []).append(item.kind)

    def hang(self) -> str | None:
        for (communicator, number), kinds in self.members.items():
            if len(kinds) != len(communicator.ranks) or not _fit(kinds):
                return f"operation {number} of {communicator}: found {', '.join(kinds)}"
        awake = list(range(len(self.gpus)))
        while awake:
            rank = awake.pop(self.random.randrange(len(awake)))
            for _ in range(self.random.randint(1, _MOST_AT_A_TIME)):
                woken = self._go_on(rank)
                if woken is None:
                    break
                awake += [other for other in woken if other not in awake]
            else:
                awake.append(rank)
        return None if len(self.done) == self.num_launches else self._where()

    def _go_on(self, rank: int) -> set[int] | None:
        """Start one item; returns other ranks that may go on by that, None if none can start."""
        gpu = self.gpus[rank]
        gpu.launch(self.done)
        ready = [
            queue for queue in gpu.queues.values() if queue and gpu.can_start(queue[0], self.done)
        ]
        return self._start(gpu, self.random.choice(ready).popleft()) if ready else None

    def _start(self, gpu: _Gpu, item: Launch) -> set[int]:
        if item.operation is None:
            self.done.add(item)
            return self.waiting.get(item, set())
        gpu.resident.add(item)
        gpu.most_resident = max(gpu.most_resident, len(gpu.resident))
        together = self.started.setdefault(item.operation, [])
        together.append(item)
        if len(together) < len(item.operation[0].ranks):
            return set()
        for each in together:
            self.done.add(each)
            self.gpus[each.rank].resident.discard(each)
        return {each.rank for each in together} - {item.rank}

    def _where(self) -> str:
        lines = []
        for rank, gpu in enumerate(self.gpus):
            if gpu.to_launch and gpu.to_launch[0].stream == HOST:
                lines.append(f"rank {rank}: {gpu.to_launch[0].word}")
            first = ", ".join(queue[0].word for queue in gpu.queues.values() if queue)
            waiting = ", ".join(sorted(item.word for item in gpu.resident))
            if first or waiting:
                lines.append(
                    f"rank {rank}: next {first or 'nothing'}; resident {waiting or 'none'}"
                )
        return "\n".join(lines)


def _fit(kinds: Sequence[str]) -> bool:
    """Whether these are parts of one operation."""
    return set(kinds) == {"send", "receive"} or len(set(kinds)) == 1
