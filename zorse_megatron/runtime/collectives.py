"""Reduce-scatter and all-gather whose shards differ in size, in one stage or several.

A buffer `full` (1-D, the same length on all ranks of a group) is cut by `bounds`, one interval per
group rank (see `schedule.shards`). Nothing is padded: a rank with an empty interval owns nothing
but takes part in every call. All ranks call in the same order with the same bounds; both backends
then give the same result on every run.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import TYPE_CHECKING, Any, Literal, Protocol, runtime_checkable

import torch
import torch.distributed as dist

from zorse_megatron.errors import ZorseError
from zorse_megatron.runtime.host_link import HostWorker
from zorse_megatron.runtime.transport import Work, started
from zorse_megatron.schedule.shards import Interval

if TYPE_CHECKING:
    from zorse_megatron.runtime.mixed_tp_exchange import Exchanged


class Works:
    """Several transfers under way, as one (it may be none at all)."""

    def __init__(self, works: Sequence[Work]) -> None:
        self._works = tuple(works)

    def wait(self) -> None:
        """Block the host (gloo) or the current stream (NCCL) until all are done."""
        for work in self._works:
            work.wait()

    @property
    def buffer_bytes(self) -> int:
        """What they hold beside the buffers that they were given."""
        return sum(getattr(work, "buffer_bytes", 0) for work in self._works)


def reduce_scatter_uneven(
    full: torch.Tensor, bounds: Sequence[Interval], group: dist.ProcessGroup
) -> Works:
    """Start to sum `full` over the group into this rank's interval of `full`, in place.

    The other intervals hold leftovers afterwards. Raises ValueError when `bounds` do not fit the
    buffer and the group.
    """
    parts = views(full, bounds, group)
    start = partial(start_reduce_scatter, full, parts, group)
    return Works(as_one_operation("reduce_scatter", parts, group, start))


def all_gather_uneven(
    full: torch.Tensor, bounds: Sequence[Interval], group: dist.ProcessGroup
) -> Works:
    """Start to copy every rank's interval of `full` to all ranks of the group, in place.

    Raises ValueError when `bounds` do not fit the buffer and the group.
    """
    parts = views(full, bounds, group)
    start = partial(start_all_gather, full, parts, group)
    return Works(as_one_operation("all_gather", parts, group, start))


OperationKind = Literal["reduce_scatter", "all_gather", "exchange"]


def gathered(mine: Any, group: dist.ProcessGroup | None = None) -> list[Any]:
    """What every rank of a group has, in its order; None: of the world. Pickled, so for few."""
    everyone: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(everyone, mine, group=group)
    return everyone


def from_rank(value: Any, source: int) -> Any:
    """Give the value of rank `source` to all ranks; a collective call. Pickled, as above."""
    box = [value]
    dist.broadcast_object_list(box, src=source)
    return box[0]


def on_rank_0(decide: Callable[[], Any]) -> Any:
    """Let rank 0 decide for all; a collective call.

    A ZorseError or an OSError there is raised on every rank, so that all of them say what is wrong.
    """
    decision, failure = None, None
    if dist.get_rank() == 0:
        try:
            decision = decide()
        except (ZorseError, OSError) as error:
            failure = error
    decision, failure = from_rank((decision, failure), 0)
    if failure is not None:
        raise failure
    return decision


@runtime_checkable
class CountsOperations(Protocol):
    """A process group that is told which calls are one operation.

    Over gloo an operation may be one call for each owner, where NCCL has one launch.
    """

    def one_operation(
        self,
        kind: OperationKind,
        parts: Sequence[torch.Tensor],
        start: Callable[[], Sequence[Work]],
        *,
        sent_as: torch.dtype | None,
    ) -> Sequence[Work]:
        """Return what `start`, which makes the calls, returns, or one work for all of it.

        `parts`: what each rank owns; `sent_as`: in which type it is sent; None: in its own.
        """

    def one_exchange(self, exchanged: "Exchanged", start: Callable[[], Work]) -> Work:
        """The same for messages between ranks that hold different parts of tensors."""


def as_one_operation(
    kind: OperationKind,
    parts: Sequence[torch.Tensor],
    group: dist.ProcessGroup,
    start: Callable[[], Sequence[Work]],
    *,
    sent_as: torch.dtype | None = None,
) -> Sequence[Work]:
    """Start the calls of one operation; a group that counts operations counts one."""
    if isinstance(group, CountsOperations):
        return group.one_operation(kind, parts, start, sent_as=sent_as)
    return start()


def as_one_exchange(
    exchanged: "Exchanged", group: dist.ProcessGroup, start: Callable[[], Work]
) -> Work:
    """Start an exchange of parts; a group that counts operations counts it."""
    if isinstance(group, CountsOperations):
        return group.one_exchange(exchanged, start)
    return start()


def views(
    full: torch.Tensor, bounds: Sequence[Interval], group: dist.ProcessGroup
) -> list[torch.Tensor]:
    """Each rank's interval of `full`. Raises ValueError when `bounds` do not fit."""
    sizes = [stop - start for start, stop in bounds]
    if full.ndim != 1 or len(sizes) != group.size() or sum(sizes) != full.numel():
        raise ValueError(
            f"found bounds {tuple(bounds)} for a buffer of shape {tuple(full.shape)} and "
            f"{group.size()} ranks; expected one interval per rank that together cover the buffer"
        )
    return list(full.split(sizes))


def start_reduce_scatter(
    full: torch.Tensor, parts: list[torch.Tensor], group: dist.ProcessGroup
) -> list[Work]:
    """Start to sum `full` into each rank's part of it; a collective call of the group."""
    mine = parts[group.rank()]
    if group.size() == 1:
        return []
    if _is_gloo(group, full):
        # One reduce per owner. 1.4 to 2 times as fast as gloo's own reduce_scatter, even or
        # uneven (three ranks, 3 million fp32: 6.7 ms against 14.4 and 18.6).
        return [
            started(dist.reduce(part, group=group, group_dst=owner, async_op=True))
            for owner, part in enumerate(parts)
            if part.numel()
        ]
    if _is_even(parts):
        return [started(dist.reduce_scatter_tensor(mine, full, group=group, async_op=True))]
    # NCCL turns a list of unequal parts into one grouped launch of ncclReduce, in place.
    return [started(dist.reduce_scatter(mine, parts, group=group, async_op=True))]


def start_all_gather(
    full: torch.Tensor, parts: list[torch.Tensor], group: dist.ProcessGroup
) -> list[Work]:
    """Start to copy each rank's part of `full` to all; a collective call of the group."""
    mine = parts[group.rank()]
    if group.size() == 1:
        return []
    if _is_gloo(group, full):
        # gloo's all_gather refuses unequal parts. One broadcast per owner is faster than
        # all_to_all_single with splits (8.5 ms against 17.5, parts 3:1:0 of 4 million fp32) and
        # than all_gather_into_tensor for equal parts (6.5 ms against 11.7).
        return [
            started(dist.broadcast(part, group=group, group_src=owner, async_op=True))
            for owner, part in enumerate(parts)
            if part.numel()
        ]
    if _is_even(parts):
        return [started(dist.all_gather_into_tensor(full, mine, group=group, async_op=True))]
    # NCCL turns a list of unequal parts into one grouped launch of ncclBroadcast, in place.
    return [started(dist.all_gather(parts, mine, group=group, async_op=True))]


def _is_gloo(group: dist.ProcessGroup, tensor: torch.Tensor) -> bool:
    return group._get_backend(tensor.device).name() == "gloo"


def _is_even(parts: Sequence[torch.Tensor]) -> bool:
    return len({part.numel() for part in parts}) == 1


@dataclass(frozen=True, kw_only=True)
class IntervalExchange:
    """One interval that this rank swaps with a rank of another group.

    `send` and `receive` are contiguous, of one dtype and equal size; `peer` is a global rank.
    """

    peer: int
    send: torch.Tensor
    receive: torch.Tensor


def exchange_intervals(exchanges: Sequence[IntervalExchange], group: dist.ProcessGroup) -> None:
    """Swap intervals with ranks of another group and wait until all have arrived.

    Every rank lists its exchanges in one global order, such as that of elements, so that several
    between the same two ranks meet. All are started as one batch, which NCCL needs:
    a send and a receive started apart can each wait for the other. `group` holds all ranks that
    take part, and with NCCL has been used before, because ranks without exchanges do not call.
    """
    if not exchanges:
        return
    operations = []
    for exchange in exchanges:
        operations.append(dist.P2POp(dist.isend, exchange.send, exchange.peer, group))
        operations.append(dist.P2POp(dist.irecv, exchange.receive, exchange.peer, group))
    Works(dist.batch_isend_irecv(operations)).wait()


# An operation in several stages, each a collective of its own communicator, as one work.
#
# A later stage starts when an earlier one is done, and nobody waits in between: on a GPU side
# streams do, one for each communicator, so the next operation's first stage runs beside this one's
# last. Over gloo a thread does, one operation after the other.
#
# All ranks start the same operations in the same order, and a stage only ever waits for earlier
# stages of its own operation. So each communicator has one order on all ranks, and the first stage
# that is not done can always run: no order of waiting can deadlock.


StageSizes = Sequence[int] | Mapping[tuple[int, int], int]
"""Elements of each rank's part; or (source, target) -> elements of a message."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Stage:
    """One collective."""

    group: dist.ProcessGroup
    kind: OperationKind
    sizes: StageSizes
    """What it moves, in elements; the same on all ranks of `group`, whose numbers it has."""
    start: Callable[[], Sequence[Work]]
    after: int | None = None
    """Number of the stage that must be done before."""
    then: Callable[[], None] | None = None
    """What follows on the device before it counts as done."""


@runtime_checkable
class CountsStages(Protocol):
    """A process group that is told what a stage moves, apart from moving it."""

    def announce(
        self,
        kind: OperationKind,
        sizes: StageSizes,
        whole: torch.Tensor,
        after: Work | None,
    ) -> Work | None:
        """Count a stage that begins after another one; None: nothing is counted now.

        `whole`: the buffer of which `sizes` counts elements.
        """

    def carry(self, start: Callable[[], Sequence[Work]]) -> Sequence[Work]:
        """Do what `start` does without counting it."""


class StagedWork:
    """An operation under way."""

    def __init__(
        self,
        counted: Sequence[Work],
        wait: Callable[[], object],
        buffers: Sequence[torch.Tensor],
    ) -> None:
        """`counted`: works that say when it is done; `wait`: until it is, and what follows it, made
        once; `buffers`: its own."""
        self._counted, self._wait, self._buffers = tuple(counted), wait, tuple(buffers)

    @property
    def buffer_bytes(self) -> int:
        """What it holds beside the caller's buffer, until it has been waited for."""
        return sum(buffer.nbytes for buffer in self._buffers)

    def wait(self) -> None:
        """Block the host (gloo) or the current stream (NCCL) until all stages are done."""
        for work in self._counted:
            work.wait()
        self._counted = ()
        self._wait()
        self._wait, self._buffers = lambda: None, ()


def start_stages(
    stages: Sequence[Stage],
    whole: torch.Tensor,
    finish: Callable[[], None],
    buffers: Sequence[torch.Tensor],
    worker: HostWorker,
) -> StagedWork:
    """Start all stages of an operation on the buffer `whole`; `finish` comes behind the last."""
    if whole.is_cuda:
        return StagedWork((), _on_streams(stages, finish, whole.device), buffers)
    counted = _announced(stages, whole)
    done = worker.submit(lambda: _one_by_one(stages, finish))
    return StagedWork(counted, done.result, buffers)


def _announced(stages: Sequence[Stage], whole: torch.Tensor) -> list[Work]:
    works: list[Work | None] = []
    for stage in stages:
        if isinstance(stage.group, CountsStages):
            after = None if stage.after is None else works[stage.after]
            works.append(stage.group.announce(stage.kind, stage.sizes, whole, after))
    return [work for work in works if work is not None]


@torch.no_grad()
def _one_by_one(stages: Sequence[Stage], finish: Callable[[], None]) -> None:
    for stage in stages:
        group = stage.group
        works = group.carry(stage.start) if isinstance(group, CountsStages) else stage.start()
        for work in works:
            work.wait()
        if stage.then is not None:
            stage.then()
    finish()


@torch.no_grad()
def _on_streams(
    stages: Sequence[Stage], finish: Callable[[], None], device: torch.device
) -> Callable[[], None]:
    """Start the stages on a side stream for each communicator; returns what waits for the last."""
    stream = torch.cuda.current_stream(device)
    ready = stream.record_event()
    done: list[torch.cuda.Event] = []
    for stage in stages:
        stream = _side_stream(device, stage.kind == "exchange")
        stream.wait_event(ready if stage.after is None else done[stage.after])
        with torch.cuda.stream(stream):
            for work in stage.start():
                work.wait()  # the stream does
            if stage.then is not None:
                stage.then()
        done.append(stream.record_event())
    for event in done:
        stream.wait_event(event)
    with torch.cuda.stream(stream):
        finish()
    last = stream.record_event()
    return lambda: torch.cuda.current_stream().wait_event(last)


@cache
def _side_stream(device: torch.device, exchanges: bool) -> torch.cuda.Stream:
    """Of a rank's one group: that of its messages, or that of its region's collectives."""
    return torch.cuda.Stream(device)
