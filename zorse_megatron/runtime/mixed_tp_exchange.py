"""Sums of gradients and gathers of parameters among ranks that hold different parts of a tensor.

Each owner gets, of every other replica, what it owns of the gradients, and adds it up in the order
of the replicas, so a run repeats to the bit; and every holder gets, of each owner, the new
parameters. Nothing is sent twice: an element crosses to its owner once for each other replica, and
from its owner once to each other holder. One message goes from one rank to another for a *unit* of
parameters, such as a layer, so one unit's messages are held at a time.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from zorse_megatron.runtime.collectives import as_one_exchange
from zorse_megatron.runtime.transport import Work, started
from zorse_megatron.schedule.tensor_parallel_parts import (
    Messages,
    OwnedBlock,
    TensorBlock,
    TensorPart,
    gather_messages,
    sum_messages,
)


@dataclass(frozen=True, kw_only=True, eq=False)
class MixedTpTensor:
    """One parameter as a rank sees it."""

    part: TensorPart
    """What the rank holds."""
    blocks: tuple[OwnedBlock, ...]
    """Of the whole tensor, with the owners: the same on all ranks."""

    def owned_by(self, rank: int) -> tuple[TensorBlock, ...]:
        """Blocks of the whole tensor that a rank owns, in the order in which it has them."""
        return tuple(each.block for each in self.blocks if each.owner == rank)

    def view(self, local: torch.Tensor, block: TensorBlock) -> torch.Tensor:
        """A block of the whole tensor, in what this rank holds."""
        place = self.part.local(block)
        spans = zip(place.offset, place.size, strict=True)
        return local[tuple(slice(start, start + size) for start, size in spans)]

    def packed(self, local: torch.Tensor, rank: int) -> torch.Tensor:
        """What this rank owns of a tensor, of one that it holds, one block after the other."""
        views = [self.view(local, block).reshape(-1) for block in self.owned_by(rank)]
        return torch.cat(views) if views else local.new_empty(0)


Unit = Sequence[MixedTpTensor]
"""Parameters that are exchanged together."""


@dataclass(frozen=True, kw_only=True)
class Exchanged:
    """What an exchange moves: sums of gradients to their owners, or parameters from theirs."""

    unit: Unit
    sums: bool

    def messages(self, tensor: MixedTpTensor) -> Messages:
        """(source, target) -> elements of this tensor."""
        return (sum_messages if self.sums else gather_messages)(tensor.blocks)


def sum_into_owners(
    unit: Unit,
    gradients: Sequence[torch.Tensor],
    owned: Sequence[torch.Tensor],
    group: dist.ProcessGroup,
) -> None:
    """Write the sums of what this rank owns to `owned`; a collective call of the group.

    `gradients`: what this rank holds, and `owned` what it owns of each, packed.
    """
    rank, ranks = dist.get_rank(), dist.get_process_group_ranks(group)
    outgoing: dict[int, list[torch.Tensor]] = {peer: [] for peer in ranks}
    counts = dict.fromkeys(ranks, 0)
    for tensor, gradient in zip(unit, gradients, strict=True):
        for each in tensor.blocks:
            if rank == each.owner:
                for peer in each.contributors:
                    counts[peer] += each.block.numel * (peer != rank)
            elif rank in each.contributors:
                outgoing[each.owner].append(tensor.view(gradient, each.block).reshape(-1))
    moved = Exchanged(unit=unit, sums=True)
    arrived = _exchanged(moved, outgoing, counts, gradients[0], group)
    for tensor, gradient, target in zip(unit, gradients, owned, strict=True):
        at = 0
        for each in tensor.blocks:
            if rank != each.owner:
                continue
            place = target[at : at + each.block.numel]
            at += each.block.numel
            first, *others = [
                tensor.view(gradient, each.block).reshape(-1)
                if peer == rank
                else next(arrived[peer])(each.block.numel)
                for peer in each.contributors
            ]
            place.copy_(first)
            for other in others:
                place.add_(other)


def gather_from_owners(
    unit: Unit,
    owned: Sequence[torch.Tensor],
    locals_: Sequence[torch.Tensor],
    group: dist.ProcessGroup,
) -> None:
    """Write to `locals_` what this rank holds of each parameter; a collective call of the group.

    `owned`: what it owns of each, packed.
    """
    rank, ranks = dist.get_rank(), dist.get_process_group_ranks(group)
    outgoing: dict[int, list[torch.Tensor]] = {peer: [] for peer in ranks}
    counts = dict.fromkeys(ranks, 0)
    for tensor, values, local in zip(unit, owned, locals_, strict=True):
        at = 0
        for each in tensor.blocks:
            if rank == each.owner:
                place = values[at : at + each.block.numel]
                at += each.block.numel
                tensor.view(local, each.block).copy_(place.view(each.block.size))
                for peer in each.holders:
                    if peer != rank:
                        outgoing[peer].append(place)
            elif rank in each.holders:
                counts[each.owner] += each.block.numel
    moved = Exchanged(unit=unit, sums=False)
    arrived = _exchanged(moved, outgoing, counts, owned[0], group)
    for tensor, local in zip(unit, locals_, strict=True):
        for each in tensor.blocks:
            if rank != each.owner and rank in each.holders:
                values = next(arrived[each.owner])(each.block.numel)
                tensor.view(local, each.block).copy_(values.view(each.block.size))


def _exchanged(
    moved: Exchanged,
    outgoing: Mapping[int, Sequence[torch.Tensor]],
    counts: Mapping[int, int],
    like: torch.Tensor,
    group: dist.ProcessGroup,
) -> dict[int, Iterator[Callable[[int], torch.Tensor]]]:
    """Send each peer its tensors as one message; returns readers of what came from each.

    `counts`: elements that come from each peer.
    """
    parts = [part for sent in outgoing.values() for part in sent]
    sizes = [sum(part.numel() for part in sent) for sent in outgoing.values()]
    message = torch.cat(parts) if parts else like.new_empty(0)
    incoming = like.new_empty(sum(counts.values()))
    if sum(sizes) or len(incoming) or group.size() > 1:
        splits = list(counts.values()), sizes

        def start() -> Work:
            work = dist.all_to_all_single(incoming, message, *splits, group=group, async_op=True)
            return started(work)

        as_one_exchange(moved, group, start).wait()
    pieces = incoming.split(list(counts.values()))
    return {peer: _reader(piece) for peer, piece in zip(counts, pieces, strict=True)}


def _reader(message: torch.Tensor) -> Iterator[Callable[[int], torch.Tensor]]:
    """Yield functions that take the next elements of a message."""
    at = 0

    def take(count: int) -> torch.Tensor:
        nonlocal at
        at += count
        return message[at - count : at]

    while True:
        yield take
