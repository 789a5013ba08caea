"""Parts and owners of a tensor, against numbers that are moved element by element."""

from collections import Counter
from itertools import pairwise
from math import prod

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.strategies import DrawFn

from zorse_megatron.schedule.tensor_parallel_parts import (
    OwnedBlock,
    TensorBlock,
    TensorPart,
    equal_part,
    owned_blocks,
    runs_of,
    runs_of_rows,
)


@st.composite
def replicas_of_a_tensor(
    draw: DrawFn,
) -> tuple[tuple[int, ...], list[dict[int, TensorPart]], list[float]]:
    """A shape, what each rank of each replica holds, and weights."""
    axis = draw(st.sampled_from([None, 0, 1]))
    counts = draw(st.lists(st.sampled_from([1, 2, 3, 4]), min_size=1, max_size=3))
    blocks = draw(st.sampled_from([1, 2]))
    shape = [draw(st.integers(1, 9)), draw(st.integers(1, 9))]
    if axis is not None:
        shape[axis] = 12 * blocks
    replicas, rank = [], 0
    for degree in counts:
        replicas.append(
            {
                rank + index: equal_part(shape, axis, index=index, degree=degree, blocks=blocks)
                for index in range(degree)
            }
        )
        rank += degree
    weights = draw(
        st.lists(
            st.sampled_from([0.0, 1.0, 2.5]), min_size=len(counts), max_size=len(counts)
        ).filter(any)
    )
    return tuple(shape), replicas, weights


def held(part: TensorPart) -> np.ndarray:
    """The numbers of the whole tensor's elements that a rank holds, in its own shape."""
    whole = np.arange(prod(part.shape)).reshape(part.shape)
    if part.axis is None:
        return whole
    pieces = [np.take(whole, range(a, b), axis=part.axis) for a, b in part.pieces]
    return np.concatenate(pieces, axis=part.axis)


def elements(shape: tuple[int, ...], block: TensorBlock) -> list[int]:
    whole = np.arange(prod(shape)).reshape(shape)
    spans = zip(block.offset, block.size, strict=True)
    return list(whole[tuple(slice(a, a + n) for a, n in spans)].flat)


@given(case=replicas_of_a_tensor())
def test_each_element_has_one_owner_that_holds_it(
    case: tuple[tuple[int, ...], list[dict[int, TensorPart]], list[float]],
) -> None:
    shape, replicas, weights = case
    owners: Counter[int] = Counter()
    for each in owned_blocks(replicas, weights):
        inside = elements(shape, each.block)
        owners.update(inside)
        (mine,) = [n for n, replica in enumerate(replicas) if each.owner in replica]
        assert weights[mine] > 0
        # One of each replica adds to the sum, and all that have it are told the result.
        having = [
            {r for r, part in replica.items() if set(inside) <= set(held(part).flat)}
            for replica in replicas
        ]
        assert [rank in ranks for rank, ranks in zip(each.contributors, having, strict=True)]
        assert all(r in h for r, h in zip(each.contributors, having, strict=True))
        assert sorted(each.holders) == sorted(rank for ranks in having for rank in ranks)
        assert each.owner in each.contributors
    assert owners == Counter(range(prod(shape)))


@given(case=replicas_of_a_tensor())
def test_a_block_is_where_the_rank_has_it(
    case: tuple[tuple[int, ...], list[dict[int, TensorPart]], list[float]],
) -> None:
    shape, replicas, weights = case
    parts = {rank: part for replica in replicas for rank, part in replica.items()}
    for each in owned_blocks(replicas, weights):
        for rank in each.holders:
            local = parts[rank].local(each.block)
            mine = held(parts[rank])
            assert mine.shape == parts[rank].local_shape
            spans = zip(local.offset, local.size, strict=True)
            found = mine[tuple(slice(a, a + n) for a, n in spans)]
            assert list(found.flat) == elements(shape, each.block)


@given(case=replicas_of_a_tensor())
def test_shares_follow_the_weights(
    case: tuple[tuple[int, ...], list[dict[int, TensorPart]], list[float]],
) -> None:
    shape, replicas, weights = case
    blocks = owned_blocks(replicas, weights)
    owned = [
        sum(each.block.numel for each in blocks if each.owner in replica) for replica in replicas
    ]
    cells = len({each.contributors for each in blocks}) + 2 * len(blocks)
    for count, weight in zip(owned, weights, strict=True):
        # Each cell is cut in units of 64 elements.
        assert abs(count - prod(shape) * weight / sum(weights)) <= 128 * cells


def test_a_block_as_runs() -> None:
    shape = (3, 4, 5)
    for block in (
        TensorBlock(offset=(0, 1, 2), size=(3, 2, 2)),
        TensorBlock(offset=(1, 0, 0), size=(2, 4, 5)),
        TensorBlock(offset=(0, 2, 0), size=(2, 2, 5)),
    ):
        runs = list(runs_of(block, shape, 7))
        assert [e for run in runs for e in range(run.start, run.stop)] == elements(shape, block)
        assert runs[0].at == 7
        assert all(a.at + a.stop - a.start == b.at for a, b in pairwise(runs))


def test_rows_of_two_pieces_as_runs() -> None:
    part = TensorPart(shape=(8, 3), axis=0, pieces=((1, 3), (5, 7)))
    mine = held(part).reshape(-1)
    for start in range(12):
        for stop in range(start, 13):
            found = [
                (e, run.at + e - run.start)
                for run in runs_of_rows(part, (start, stop))
                for e in range(run.start, run.stop)
            ]
            assert found == [(int(mine[at]), at) for at in range(start, stop)]


def test_what_a_set_holds_whole_is_owned_by_its_first_rank() -> None:
    replicas = [{rank: equal_part((100,), None, index=i, degree=2)} for i, rank in enumerate((4,))]
    replicas.append(
        {rank: equal_part((100,), None, index=i, degree=2) for i, rank in ((0, 7), (1, 8))}
    )
    owners = {each.owner for each in owned_blocks(replicas, (1.0, 1.0))}
    assert owners == {4, 7}


def test_columns_of_one_rank_are_strided() -> None:
    """A replica of one rank owns, of each half of the columns, what it owns of it."""
    halves = {r: equal_part((4, 64), 1, index=r, degree=2) for r in (0, 1)}
    whole = {2: equal_part((4, 64), 1, index=0, degree=1)}
    blocks: tuple[OwnedBlock, ...] = owned_blocks([halves, whole], (0.0, 1.0))
    assert [(b.block.offset, b.block.size, b.owner) for b in blocks] == [
        ((0, 0), (4, 32), 2),
        ((0, 32), (4, 32), 2),
    ]
    assert [b.contributors for b in blocks] == [(0, 2), (1, 2)]
