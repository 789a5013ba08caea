"""Point-to-point transfers and process groups: gloo and NCCL behind one interface.

Both only start a transfer; the returned work is waited for by its consumer. Transfers
from one rank to another are started in the same order at both ends (`schedule.validate` checks
it for every plan), which is what NCCL needs, as it matches by order and knows no tags. A receive
has two moments: where its buffer is opened, and its place in the list (see
`schedule.transfer_windows`).
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Protocol

import torch
import torch.distributed as dist

from zorse_megatron.schedule.communicators import WORLD_CTAS, Link, in_rounds


class Work(Protocol):
    """A transfer under way."""

    def wait(self) -> object:
        """Block the host (gloo) or the current stream (NCCL) until the transfer is done."""


def started(work: Work | None) -> Work:
    """What an asynchronous call of `torch.distributed` has returned."""
    assert work is not None, "this rank is not in the group"
    return work


class Receive(Protocol):
    """A receive whose buffer is there."""

    def launch(self) -> None:
        """Start it, if that has not been done: its place in the list has come. Never waits."""

    def wait(self) -> object:
        """As `Work.wait`, once it has been launched."""


class Transport(Protocol):
    """Starts sends and receives of contiguous tensors between global ranks."""

    groups: Sequence[dist.ProcessGroup]
    """Those that were made for it."""

    def send(self, tensor: torch.Tensor, *, peer: int, tag: int) -> Work:
        """Start to send; `tensor` must stay untouched until the work is done."""

    def open(self, buffer: torch.Tensor, *, peer: int, tag: int) -> Receive:
        """Let the message come into `buffer` from this point of the current stream on."""


@dataclass(frozen=True)
class _Posted:
    """A receive that is under way from its opening on."""

    work: Work

    def launch(self) -> None:
        """Nothing is left to do."""

    def wait(self) -> object:
        return self.work.wait()


class GlooTransport:
    """Tagged messages over one gloo group that holds all ranks.

    Posting a receive never waits, so it is posted when its buffer is there.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = group
        self.groups: Sequence[dist.ProcessGroup] = ()

    def send(self, tensor: torch.Tensor, *, peer: int, tag: int) -> Work:
        return started(dist.isend(tensor, dst=peer, group=self.group, tag=tag))

    def open(self, buffer: torch.Tensor, *, peer: int, tag: int) -> Receive:
        return _Posted(started(dist.irecv(buffer, src=peer, group=self.group, tag=tag)))


class Streams(Protocol):
    """What decides when a kernel that is launched now may begin."""

    def mark(self) -> object:
        """Return this point of the current stream."""

    def after(self, mark: object) -> AbstractContextManager[object]:
        """What is launched within the block waits for that point of the stream, for no later one.

        Marks are given in the order in which they were made, as there is one side stream.
        """


class CudaStreams:
    """A side stream that only waits for events of the main stream."""

    def __init__(self, device: torch.device) -> None:
        self._side = torch.cuda.Stream(device)

    def mark(self) -> torch.cuda.Event:
        event = torch.cuda.Event()
        event.record()
        return event

    def after(self, mark: object) -> AbstractContextManager[object]:
        assert isinstance(mark, torch.cuda.Event)
        self._side.wait_event(mark)
        return torch.cuda.stream(self._side)


class NoStreams:
    """For devices without streams: what is launched begins."""

    def mark(self) -> None:
        """There is no other point than this one."""

    def after(self, mark: object) -> AbstractContextManager[object]:
        return nullcontext()


class NcclTransport:
    """One two-rank communicator, hence one stream, for each direction of each pair of ranks.

    With one communicator for both directions, a send that is not matched yet would hold back the
    receive after it on the same stream, and two ranks could wait for each other. With one for
    each direction, a stream carries transfers of one direction only, in one order.

    A receive is launched at its place in the list: earlier, it could hold back what comes after it
    in a hardware queue. But it waits only for the main stream to come to where its buffer was
    opened, so that it runs beside the computations. The buffer is allocated in the main stream's
    order, written after that point, and read and freed after that stream has waited for the work.

    Communicators are made when the transport is, all ranks in one order, because making one blocks
    the host until both ends do. Transfers are batches of one, as torch makes a second communicator
    for a single transfer but uses the group's own for a batch (`ProcessGroupNCCL::pointToPoint`).
    Not run between GPUs yet: see docs/limits.md.
    """

    def __init__(
        self, edges: Mapping[tuple[int, int], dist.ProcessGroup], *, rank: int, streams: Streams
    ) -> None:
        """`edges`: (source rank, target rank) -> the pair's group, for this rank's edges."""
        self.edges = edges
        self.groups: Sequence[dist.ProcessGroup] = tuple(edges.values())
        self.rank = rank
        self.streams = streams

    def send(self, tensor: torch.Tensor, *, peer: int, tag: int) -> Work:
        return _start(dist.isend, tensor, peer, self.edges[self.rank, peer])

    def open(self, buffer: torch.Tensor, *, peer: int, tag: int) -> Receive:
        return _Launched(
            buffer=buffer,
            peer=peer,
            group=self.edges[peer, self.rank],
            streams=self.streams,
            opened=self.streams.mark(),
        )


@dataclass(kw_only=True)
class _Launched:
    """A receive of NCCL, from its opening on."""

    buffer: torch.Tensor
    peer: int
    group: dist.ProcessGroup
    streams: Streams
    opened: object
    work: Work | None = None

    def launch(self) -> None:
        with self.streams.after(self.opened):
            self.work = _start(dist.irecv, self.buffer, self.peer, self.group)

    def wait(self) -> object:
        assert self.work is not None, "a receive is launched before it is waited for"
        return self.work.wait()


def _start(
    operation: Callable[..., object], tensor: torch.Tensor, peer: int, group: dist.ProcessGroup
) -> Work:
    (work,) = dist.batch_isend_irecv([dist.P2POp(operation, tensor, peer, group)])
    return work


def make_transport(
    *,
    rank: int,
    edges: list[tuple[int, int]],
    device: torch.device,
    timeout: timedelta | None = None,
    channels: Mapping[tuple[int, int], int] | None = None,
) -> Transport:
    """Create the transport of the job's backend; a collective call for NCCL (all ranks).

    `edges`: every (source, target) pair of the job, in one global order. `timeout`: of a transfer;
    None: torch's own. `channels`: what NCCL may use for each. Raises ValueError for another backend
    than gloo and NCCL. A group that wraps another one counts as that.
    """
    assert dist.group.WORLD is not None
    backend = dist.group.WORLD._get_backend(device).name()
    if backend == "gloo":
        return GlooTransport(dist.group.WORLD)
    if backend != "nccl":
        raise ValueError(f"found backend {backend!r}; expected 'gloo' or 'nccl'")
    mine = link_groups(edges, rank=rank, timeout=timeout, channels=channels or {})
    connect(mine, all_links=edges, rank=rank, device=device)
    streams = CudaStreams(device) if device.type == "cuda" else NoStreams()
    return NcclTransport(mine, rank=rank, streams=streams)


# Process groups of NCCL's communicators: with few channels each, and connected without a sum.
#
# All ranks call `new_group` for every group in one order, also for those that they are not in:
# torch names a group by the number of the call, talks to nobody for a group that the rank is not in
# (1,890 of them take 0.06 s), and waits for nobody (`TORCH_DIST_INIT_BARRIER` is off). With
# `use_local_synchronization` the name would be a hash of the ranks and of the number of groups that
# *this* process has (`_hash_ranks_to_str`), which differs between the ranks of a plan, so that they
# would wait for each other under two names.


def nccl_options(channels: int | None, timeout: timedelta | None) -> Any:
    """Return what limits a communicator to so many channels; None: NCCL decides.

    A channel is a CTA of each kernel and its own buffers (maxCTAs of NCCL's configuration).
    `timeout`: as `new_group` gets it, which warns of any other one in the options.
    """
    if channels is None:
        return None
    options = dist.ProcessGroupNCCL.Options()
    if timeout is not None:
        options._timeout = timeout
    options.config.max_ctas = channels
    return options


def world_options(backend: str, timeout: timedelta | None) -> Any:
    """Return the options of the group of all ranks, which stock would leave to NCCL."""
    return nccl_options(WORLD_CTAS, timeout) if backend == "nccl" else None


def link_groups(
    links: Sequence[Link], *, rank: int, timeout: timedelta | None, channels: Mapping[Link, int]
) -> dict[Link, dist.ProcessGroup]:
    """Make the two-rank groups of all links; a collective call. Returns those of this rank.

    `links`: the same on all ranks, in the same order; `channels`: of those that are limited.
    """
    groups = {
        link: dist.new_group(
            list(link), timeout=timeout, pg_options=nccl_options(channels.get(link), timeout)
        )
        for link in links
    }
    return {link: group for link, group in groups.items() if rank in link}


def connect(
    groups: Mapping[Link, dist.ProcessGroup],
    *,
    all_links: Sequence[Link],
    rank: int,
    device: torch.device,
) -> None:
    """Let the ends of this rank's links meet, by one message along each, as they will carry.

    A sum would make rings and trees in both directions, with their buffers. Meeting blocks the
    host, so all ranks go through the links of the job in one order (`in_rounds`), in which pairs
    that have nothing to do with each other meet at the same time.
    """
    for source, target in in_rounds(all_links):
        if (source, target) not in groups:
            continue
        operation, peer = (dist.isend, target) if rank == source else (dist.irecv, source)
        message = torch.zeros(1, device=device)
        group = groups[source, target]
        for work in dist.batch_isend_irecv([dist.P2POp(operation, message, peer, group)]):
            work.wait()
