"""Point-to-point transfers between ranks of different groups: gloo and NCCL behind one interface.

Both only start a transfer; the returned work is waited for by its consumer. Transfers
from one rank to another are started in the same order at both ends (`schedules.validate` checks
it for every plan), which is what NCCL needs, as it matches by order and knows no tags.
"""

from collections.abc import Callable
from typing import Protocol

import torch
import torch.distributed as dist


class Work(Protocol):
    """A transfer under way."""

    def wait(self) -> object:
        """Block the host (gloo) or the current stream (NCCL) until the transfer is done."""

    def is_completed(self) -> bool:
        """Whether the transfer is done, without waiting."""


class Transport(Protocol):
    """Starts sends and receives of contiguous tensors between global ranks."""

    def send(self, tensor: torch.Tensor, *, peer: int, tag: int) -> Work:
        """Start to send; `tensor` must stay untouched until the work is done."""

    def receive(self, buffer: torch.Tensor, *, peer: int, tag: int) -> Work:
        """Start to receive into `buffer`."""


class GlooTransport:
    """Tagged messages over one gloo group that holds all ranks."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = group

    def send(self, tensor: torch.Tensor, *, peer: int, tag: int) -> Work:
        work = dist.isend(tensor, dst=peer, group=self.group, tag=tag)
        assert work is not None
        return work

    def receive(self, buffer: torch.Tensor, *, peer: int, tag: int) -> Work:
        work = dist.irecv(buffer, src=peer, group=self.group, tag=tag)
        assert work is not None
        return work


class NcclTransport:
    """One two-rank communicator, hence one stream, for each direction of each pair of ranks.

    With one communicator for both directions, a send that is not matched yet would hold back the
    receive after it on the same stream, and two ranks could wait for each other. With one for
    each direction, a stream carries transfers of one direction only, in one order.

    Communicators are made when the transport is, all ranks in one order, because making one blocks
    the host until both ends do. Transfers are batches of one, as torch makes a second communicator
    for a single transfer but uses the group's own for a batch (`ProcessGroupNCCL::pointToPoint`).
    Not run on GPUs yet: see docs/limits.md.
    """

    def __init__(self, edges: dict[tuple[int, int], dist.ProcessGroup], *, rank: int) -> None:
        """`edges`: (source rank, target rank) -> the pair's group, for this rank's edges."""
        self.edges = edges
        self.rank = rank

    def send(self, tensor: torch.Tensor, *, peer: int, tag: int) -> Work:
        return self._start(dist.isend, tensor, peer, self.edges[self.rank, peer])

    def receive(self, buffer: torch.Tensor, *, peer: int, tag: int) -> Work:
        return self._start(dist.irecv, buffer, peer, self.edges[peer, self.rank])

    @staticmethod
    def _start(
        operation: Callable[..., object],
        tensor: torch.Tensor,
        peer: int,
        group: dist.ProcessGroup,
    ) -> Work:
        (work,) = dist.batch_isend_irecv([dist.P2POp(operation, tensor, peer, group)])
        return work


def make_transport(*, rank: int, edges: list[tuple[int, int]], device: torch.device) -> Transport:
    """Create the transport of the job's backend; a collective call for NCCL (all ranks).

    `edges`: every (source, target) pair of the job, in one global order. Raises ValueError for
    another backend than gloo and NCCL. A group that wraps another one counts as that.
    """
    assert dist.group.WORLD is not None
    backend = dist.group.WORLD._get_backend(device).name()
    if backend == "gloo":
        return GlooTransport(dist.group.WORLD)
    if backend != "nccl":
        raise ValueError(f"found backend {backend!r}; expected 'gloo' or 'nccl'")
    groups = {edge: dist.new_group(list(edge)) for edge in edges}
    mine = {edge: group for edge, group in groups.items() if rank in edge}
    for group in mine.values():
        dist.all_reduce(torch.zeros(1, device=device), group=group)
    return NcclTransport(mine, rank=rank)
