"""State that moves between ranks over gloo: every value, the bytes that are sent, and the peak."""

from collections.abc import Mapping, Sequence
from math import prod

import torch
import torch.distributed as dist

from tests.equal_parts import equal_part
from tests.ranks.harness import run_ranks
from zorse_megatron.live.move import Owners, moved_bytes, peak_bytes, plan_transfers
from zorse_megatron.runtime.state_transfer import HeldBlock, StateTransfer
from zorse_megatron.schedule.tensor_parallel_parts import TensorBlock, owned_blocks

SHAPES = {"matrix": (24, 10), "other": (6, 8, 4), "vector": (100,)}
DTYPES = (torch.float32, torch.float32, torch.bfloat16)
WORLD = 4
# Sets of ranks, the axis that they cut, and shard weights; the second matrix is cut by columns.
Layout = Mapping[str, tuple[Sequence[Sequence[int]], int | None, Sequence[float]]]
BEFORE: Layout = {
    "matrix": (((0, 1), (2,)), 0, (2.0, 1.0)),
    "other": (((3,), (1,)), None, (1.0, 3.0)),
    "vector": (((0,), (1,), (2,), (3,)), None, (1.0, 0.0, 1.0, 1.0)),
}
AFTER: Layout = {
    "matrix": (((0,), (3,)), None, (1.0, 2.0)),
    "other": (((0, 1, 2, 3),), 1, (1.0,)),
    "vector": (((1,), (0,)), None, (3.0, 1.0)),
}


def owners(layout: Layout) -> Owners:
    found: dict[int, dict[str, list[TensorBlock]]] = {rank: {} for rank in range(WORLD)}
    for name, (tp_groups, axis, weights) in layout.items():
        replicas = [
            {
                rank: equal_part(SHAPES[name], axis, index=index, degree=len(ranks))
                for index, rank in enumerate(ranks)
            }
            for ranks in tp_groups
        ]
        for each in owned_blocks(replicas, weights):
            found[each.owner].setdefault(name, []).append(each.block)
    return found


def values(name: str, state: int) -> torch.Tensor:
    dice = torch.Generator().manual_seed(10 * state + len(name))
    whole = torch.randint(-64, 65, (prod(SHAPES[name]),), generator=dice) / 64
    return whole.view(SHAPES[name]).to(DTYPES[state])


def part(whole: torch.Tensor, block: TensorBlock) -> torch.Tensor:
    return whole[tuple(slice(o, o + n) for o, n in zip(block.offset, block.size, strict=True))]


def move() -> tuple[int, int]:
    """Move, and check every value that this rank is to own; returns its bytes and its peak."""
    rank, before, after = dist.get_rank(), owners(BEFORE), owners(AFTER)
    held = {
        name: [
            HeldBlock(
                block=block,
                values=tuple(part(values(name, s), block).clone() for s in range(len(DTYPES))),
            )
            for block in blocks
        ]
        for name, blocks in before[rank].items()
    }
    transfers = plan_transfers(before, after)
    moving = StateTransfer(transfers, held, rank=rank, dtypes=DTYPES, group=dist.group.WORLD)
    for name in moving.parameters():
        for state in range(len(DTYPES)):
            missing = torch.full(SHAPES[name], float("nan"), dtype=DTYPES[state])
            for block, value in moving.run(name, state):
                part(missing, block).copy_(value)
            for block in after[rank].get(name, ()):
                assert torch.equal(part(missing, block), part(values(name, state), block))
    assert not held
    return moving.sent_bytes, moving.peak_bytes


def test_values_bytes_and_peak() -> None:
    before = owners(BEFORE)
    transfers = plan_transfers(before, owners(AFTER))
    state_bytes = [dtype.itemsize for dtype in DTYPES]
    expected, _ = moved_bytes(transfers, state_bytes)
    assert expected.total()
    for rank, (sent, peak) in enumerate(run_ranks(WORLD, move)):
        assert sent == expected[rank]
        assert peak <= peak_bytes(rank, before[rank], transfers, state_bytes)
