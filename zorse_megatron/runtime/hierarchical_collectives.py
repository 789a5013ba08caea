"""Reduce-scatter and all-gather over regions, and with 16-bit messages and fp32 sums.

See `schedule.shards` for who sums and sends what. Sums are made in a fixed order: within a
region as its communicator makes them, over regions in fp32 in the order of the regions. So each
element crosses from a region to another one once, where a ring over all ranks carries almost the
whole buffer into and out of every region.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import lru_cache, partial

import torch
import torch.distributed as dist

from zorse_megatron.kernels.kernels import sum_parts
from zorse_megatron.runtime.collectives import (
    OperationKind,
    Stage,
    StagedWork,
    Works,
    as_one_operation,
    start_all_gather,
    start_reduce_scatter,
    start_stages,
    views,
)
from zorse_megatron.runtime.host_link import HostWorker
from zorse_megatron.runtime.transport import Work, started
from zorse_megatron.schedule.shards import Interval, RegionShards


@dataclass(frozen=True, kw_only=True, eq=False)
class RegionGroups:
    """Communicators of ranks that own one buffer in several regions."""

    inside: dist.ProcessGroup | None
    """This rank's region; None: it is alone there."""
    across: dist.ProcessGroup
    """All of them, for messages between regions. Nothing else may use the two."""
    regions: tuple[Interval, ...]
    """[first, stop) of each region's ranks in `across`."""
    worker: HostWorker = field(default_factory=HostWorker)


def reduce_scatter_hierarchical(
    full: torch.Tensor, bounds: Sequence[Interval], groups: RegionGroups
) -> Works:
    """Start to sum `full` over all ranks into this rank's interval of `full`, in place.

    The other intervals hold leftovers afterwards. Raises ValueError when `bounds` do not fit the
    buffer and the ranks.
    """
    views(full, bounds, groups.across)
    return Works([_Buffer(full, bounds, groups).reduce()])


def all_gather_hierarchical(
    full: torch.Tensor, bounds: Sequence[Interval], groups: RegionGroups
) -> Works:
    """Start to copy every rank's interval of `full` to all ranks, in place.

    Raises ValueError when `bounds` do not fit the buffer and the ranks.
    """
    views(full, bounds, groups.across)
    return Works([_Buffer(full, bounds, groups).gather()])


@lru_cache(maxsize=4096)
def _shards(bounds: tuple[Interval, ...], regions: tuple[Interval, ...]) -> RegionShards:
    """The same for a bucket in every step."""
    return RegionShards(bounds=bounds, regions=regions)


class _Buffer:
    """One buffer as one rank sees it."""

    def __init__(
        self, full: torch.Tensor, bounds: Sequence[Interval], groups: RegionGroups
    ) -> None:
        self.full, self.groups = full, groups
        self.shards = _shards(tuple(bounds), groups.regions)
        self.rank = groups.across.rank()
        self.region = self.shards.region_of(self.rank)
        self.place = self.rank - groups.regions[self.region][0]
        self.own = full[slice(*bounds[self.rank])]
        self.others = [n for n in range(len(groups.regions)) if n != self.region]
        self.sums = [
            full[slice(*self.shards.slices(self.region, block)[self.place])]
            for block in self.others
        ]
        """What this rank sums for the other regions."""

    def reduce(self) -> StagedWork:
        """Sum in the region, what others own first; then send that, while the rest is summed."""
        full, in_place = self.full, len(self.others) == 1
        arrived = full.new_empty(len(self.others) * self.own.numel())
        sent = self.sums[0] if in_place else full.new_empty(sum(map(len, self.sums)))

        def pack() -> None:
            if not in_place:
                torch.cat(self.sums, out=sent)

        stages = list(self._inside("reduce_scatter", self.others))
        last = len(stages) - 1 if stages else None
        stages.append(self._exchange(arrived, sent, pack, reduces=True, after=last))
        stages += self._inside("reduce_scatter", [self.region])
        buffers = [arrived] if in_place else [arrived, sent]
        return start_stages(stages, full, partial(self._add, arrived), buffers, self.groups.worker)

    def gather(self) -> StagedWork:
        """Send the shards, while the region gathers its own; then gather what has arrived."""
        full, in_place, count = self.full, len(self.others) == 1, len(self.others)
        arrived = self.sums[0] if in_place else full.new_empty(sum(map(len, self.sums)))
        sent = self.own if in_place else full.new_empty(count * self.own.numel())

        def pack() -> None:
            if not in_place:
                torch.cat([self.own] * count, out=sent)

        def unpack() -> None:
            parts = [] if in_place else arrived.split(list(map(len, self.sums)))
            for target, part in zip(self.sums, parts, strict=not in_place):
                target.copy_(part)

        exchange = self._exchange(arrived, sent, pack, reduces=False, then=unpack)
        own = self._inside("all_gather", [self.region])
        stages = [exchange, *own, *self._inside("all_gather", self.others, after=0)]
        buffers = [] if in_place else [arrived, sent]
        return start_stages(stages, full, lambda: None, buffers, self.groups.worker)

    def _inside(
        self, kind: OperationKind, blocks: Sequence[int], after: int | None = None
    ) -> Iterator[Stage]:
        """A collective of the region for each block; none where the rank is alone."""
        if (group := self.groups.inside) is None:
            return
        act = start_reduce_scatter if kind == "reduce_scatter" else start_all_gather
        for block in blocks:
            slices = self.shards.slices(self.region, block)
            start, stop = self.shards.block(block)
            if start == stop:
                continue
            sizes = [end - begin for begin, end in slices]
            whole = self.full[start:stop]
            yield Stage(
                group=group,
                kind=kind,
                sizes=sizes,
                start=partial(act, whole, list(whole.split(sizes)), group),
                after=after,
            )

    def _exchange(
        self,
        arrived: torch.Tensor,
        sent: torch.Tensor,
        pack: Callable[[], None],
        *,
        reduces: bool,
        after: int | None = None,
        then: Callable[[], None] | None = None,
    ) -> Stage:
        """Messages between regions, all in one launch: to owners, or to delegates."""
        group = self.groups.across
        to_owners = list(self.shards.sent_as_delegate(self.rank))
        to_delegates = list(self.shards.sent_as_owner(self.rank))
        splits = (to_delegates, to_owners) if reduces else (to_owners, to_delegates)

        def start() -> list[Work]:
            pack()
            work = dist.all_to_all_single(arrived, sent, *splits, group=group, async_op=True)
            return [started(work)]

        sizes = self.shards.messages(to_owners=reduces)
        return Stage(group=group, kind="exchange", sizes=sizes, start=start, after=after, then=then)

    def _add(self, arrived: torch.Tensor) -> None:
        """Add one sum of each region, in their order."""
        if not self.own.numel():
            return
        parts = list(arrived.split(self.own.numel()))
        parts.insert(self.region, self.own)
        if self.own.dtype == torch.float32:
            sum_parts(self.own, parts)
            return
        total = parts[0].float()
        for part in parts[1:]:
            total += part
        self.own.copy_(total)


# Reduce-scatter with 16-bit messages and fp32 sums: half the bytes of fp32.
#
# Every rank sends each owner its part of the buffer in 16 bits, all in one all-to-all of unequal
# parts. The owner adds them to its own part, which is never rounded, in fp32 and in the order of
# the group. So each contribution is rounded once (in a 16-bit reduce-scatter every partial sum is),
# and the sum has the same bits whatever arrives first.


@dataclass(frozen=True, kw_only=True)
class CommDtype:
    """How gradients are sent.

    `factor`: what they are multiplied by before they are rounded, and divided by again in fp32; a
    power of two, so that only range changes. Overflow becomes inf, as in a 16-bit backward.
    """

    dtype: torch.dtype
    factor: float = 1.0


def reduce_scatter_low_precision(
    full: torch.Tensor,
    bounds: Sequence[Interval],
    group: dist.ProcessGroup,
    comm_dtype: CommDtype,
) -> Works:
    """Start to sum fp32 `full` over the group into this rank's interval of it, in place.

    The other intervals stay as they are. The sum is made by whoever waits, so all works must be
    waited for. Raises ValueError when `bounds` do not fit the buffer and the group, or the buffer
    is not fp32.
    """
    parts = views(full, bounds, group)
    if full.dtype != torch.float32:
        raise ValueError(f"found gradients in {full.dtype}; expected them in torch.float32")
    if group.size() == 1:
        return Works([])
    me = group.rank()
    own = parts[me]
    sent = full.new_empty(full.numel() - own.numel(), dtype=comm_dtype.dtype)
    received = full.new_empty((group.size() - 1) * own.numel(), dtype=comm_dtype.dtype)
    first = sum(part.numel() for part in parts[:me])
    with torch.no_grad():  # multiplied and rounded in one pass
        torch.mul(full[:first], comm_dtype.factor, out=sent[:first])
        torch.mul(full[first + own.numel() :], comm_dtype.factor, out=sent[first:])
    # The parts of others in their order, and others' of this rank's in theirs; nothing to itself.
    send_sizes = [part.numel() for part in parts]
    receive_sizes = [own.numel() for _ in parts]
    send_sizes[me] = receive_sizes[me] = 0

    def start() -> list[Work]:
        work = dist.all_to_all_single(
            received, sent, receive_sizes, send_sizes, group=group, async_op=True
        )
        return [started(work)]

    works = as_one_operation("exchange", parts, group, start, sent_as=comm_dtype.dtype)
    finish = partial(_add_received, received, own, me, comm_dtype)
    return Works([StagedWork(works, finish, (sent, received))])


@torch.no_grad()
def _add_received(
    received: torch.Tensor, own: torch.Tensor, group_rank: int, comm_dtype: CommDtype
) -> None:
    """Add all contributions to this rank's own."""
    if not own.numel():
        return
    parts = list(received.split(own.numel()))
    weights = [1.0 / comm_dtype.factor] * len(parts)
    parts.insert(group_rank, own)
    weights.insert(group_rank, 1.0)
    sum_parts(own, parts, weights)
