"""Sums and gathers between TP groups of different degrees, on gloo ranks, against whole tensors."""

import torch
import torch.distributed as dist

from tests.equal_parts import equal_part
from tests.ranks.harness import run_ranks
from zorse_megatron.runtime import mixed_tp_exchange
from zorse_megatron.runtime.mixed_tp_exchange import (
    MixedTpTensor,
    gather_from_owners,
    sum_into_owners,
)
from zorse_megatron.schedule.tensor_parallel_parts import (
    Messages,
    gather_messages,
    owned_blocks,
    sum_messages,
)

TP_GROUPS, WEIGHTS = ((0, 1), (2,), (3,)), (2.0, 1.0, 0.0)
TENSORS = (((24, 40), 0, 2), ((16, 48), 1, 1), ((100,), None, 1))


def tensors(rank: int) -> list[MixedTpTensor]:
    found = []
    for shape, axis, blocks in TENSORS:
        replicas = [
            {
                r: equal_part(shape, axis, index=i, degree=len(ranks), blocks=blocks)
                for i, r in enumerate(ranks)
            }
            for ranks in TP_GROUPS
        ]
        (part,) = [replica[rank] for replica in replicas if rank in replica]
        found.append(MixedTpTensor(part=part, blocks=owned_blocks(replicas, WEIGHTS)))
    return found


def whole_values(seed: int) -> list[torch.Tensor]:
    dice = torch.Generator().manual_seed(seed)
    return [torch.randint(-64, 65, shape, generator=dice) / 64 for shape, *_ in TENSORS]


def cut(whole: torch.Tensor, tensor: MixedTpTensor) -> torch.Tensor:
    part = tensor.part
    if part.axis is None:
        return whole.clone()
    return torch.cat([whole.narrow(part.axis, a, b - a) for a, b in part.pieces], dim=part.axis)


def moved(messages: Messages, end: int, rank: int) -> int:
    """Elements that a rank sends (`end` 0) or receives (1)."""
    return sum(count for pair, count in messages.items() if pair[end] == rank)


class Counting:
    """torch.distributed, with what this rank exchanges counted."""

    def __init__(self) -> None:
        self.sent = self.received = 0

    def __getattr__(self, name: str) -> object:
        return getattr(dist, name)

    def all_to_all_single(self, received: torch.Tensor, sent: torch.Tensor, *args, **kw) -> object:
        self.sent += sent.nbytes
        self.received += received.nbytes
        return dist.all_to_all_single(received, sent, *args, **kw)


def exchange() -> tuple[bool, bool, list[tuple[int, int]]]:
    rank, unit = dist.get_rank(), tensors(dist.get_rank())
    assert dist.group.WORLD is not None
    replica = next(n for n, ranks in enumerate(TP_GROUPS) if rank in ranks)
    counting = Counting()
    mixed_tp_exchange.dist = counting  # type: ignore[assignment]
    mine = [cut(v, t) for v, t in zip(whole_values(replica), unit, strict=True)]
    owned = [torch.empty(sum(block.numel for block in t.owned_by(rank))) for t in unit]
    sum_into_owners(unit, mine, owned, dist.group.WORLD)
    total = [sum(values) for values in zip(*map(whole_values, range(len(TP_GROUPS))), strict=True)]
    expected = [t.packed(cut(v, t), rank) for v, t in zip(total, unit, strict=True)]
    sums_are_right = all(torch.equal(a, b) for a, b in zip(owned, expected, strict=True))
    volumes = [(counting.sent, counting.received)]
    locals_ = [torch.full(t.part.local_shape, float("nan")) for t in unit]
    counting.sent = counting.received = 0
    gather_from_owners(unit, owned, locals_, dist.group.WORLD)
    volumes.append((counting.sent, counting.received))
    expected = [cut(v, t) for v, t in zip(total, unit, strict=True)]
    gathered = all(torch.equal(a, b) for a, b in zip(locals_, expected, strict=True))
    return sums_are_right, gathered, volumes


def test_sums_and_gathers_are_those_of_whole_tensors() -> None:
    """Gradients are multiples of 1/64, so their sums are exact in any order."""
    for rank, (sums, gathered, (summed, told)) in enumerate(run_ranks(4, exchange)):
        assert sums and gathered
        for messages, counted in ((sum_messages, summed), (gather_messages, told)):
            each = [messages(t.blocks) for t in tensors(rank)]
            assert counted == tuple(4 * sum(moved(m, end, rank) for m in each) for end in (0, 1))


def test_an_element_crosses_once_for_each_other_replica_or_holder() -> None:
    """Over all ranks: twice to sum and gather of what is cut; once for each rank of what is not."""
    for number, (shape, axis, _) in enumerate(TENSORS):
        elements = torch.Size(shape).numel()
        summed = told = 0
        for rank in range(4):
            blocks = tensors(rank)[number].blocks
            summed += moved(sum_messages(blocks), 0, rank)
            told += moved(gather_messages(blocks), 0, rank)
        assert summed == 2 * elements
        assert told == (2 if axis is not None else 3) * elements
