"""An operation in several stages, each a collective of its own communicator, as one work.

A later stage starts when an earlier one is done, and nobody waits in between: on a GPU side streams
do, one for each communicator, so the next operation's first stage runs beside this one's last. Over
gloo a thread does, one operation after the other.

All ranks start the same operations in the same order, and a stage only ever waits for earlier
stages of its own operation. So each communicator has one order on all ranks, and the first stage
that is not done can always run: no order of waiting can deadlock.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Protocol, runtime_checkable

import torch
import torch.distributed as dist

from zorse_megatron.runtime.collectives import OperationKind
from zorse_megatron.runtime.host_worker import HostTask, HostWorker
from zorse_megatron.runtime.transport import Work

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
        done: "HostTask | _DeviceEvent",
        buffers: Sequence[torch.Tensor],
    ) -> None:
        """`counted`: works that say when it is done, `done`: that it is; `buffers`: its own."""
        self._counted, self._done, self._buffers = tuple(counted), done, tuple(buffers)

    @property
    def buffer_bytes(self) -> int:
        """What it holds beside the caller's buffer, until it has been waited for."""
        return sum(buffer.nbytes for buffer in self._buffers)

    def wait(self) -> None:
        """Block the host (gloo) or the current stream (NCCL) until all stages are done."""
        for work in self._counted:
            work.wait()
        self._counted = ()
        self._done.wait()
        self._buffers = ()

    def is_completed(self) -> bool:
        """Whether all stages are done, without waiting."""
        return all(each.is_completed() for each in self._counted) and self._done.is_completed()


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
    return StagedWork(counted, worker.submit(lambda: _one_by_one(stages, finish)), buffers)


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


class _DeviceEvent:
    def __init__(self, event: torch.cuda.Event) -> None:
        self._event = event

    def wait(self) -> None:
        torch.cuda.current_stream().wait_event(self._event)

    def is_completed(self) -> bool:
        return self._event.query()


@torch.no_grad()
def _on_streams(
    stages: Sequence[Stage], finish: Callable[[], None], device: torch.device
) -> _DeviceEvent:
    """Start the stages on a side stream for each communicator."""
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
    return _DeviceEvent(stream.record_event())


@cache
def _side_stream(device: torch.device, exchanges: bool) -> torch.cuda.Stream:
    """Of a rank's one group: that of its messages, or that of its region's collectives."""
    return torch.cuda.Stream(device)
