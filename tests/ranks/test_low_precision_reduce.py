"""Gradients sent in 16 bits: fp32 sums of what was rounded once, in the order of the group."""

import itertools
import time

import pytest
import torch
import torch.distributed as dist

from tests.ranks.harness import run_ranks
from tests.ranks.test_collectives import WEIGHTS_3
from zorse_megatron.runtime.collectives import reduce_scatter_uneven
from zorse_megatron.runtime.hierarchical_collectives import CommDtype, reduce_scatter_low_precision
from zorse_megatron.schedule.shards import shard_bounds

BF16, FP16 = CommDtype(dtype=torch.bfloat16), CommDtype(dtype=torch.float16, factor=2.0**-6)


def _world() -> dist.ProcessGroup:
    assert dist.group.WORLD is not None
    return dist.group.WORLD


def _normal(total: int, rank: int) -> torch.Tensor:
    return torch.randn(total, generator=torch.Generator().manual_seed(rank))


def _expected(total: int, me: int, size: int, comm_dtype: CommDtype) -> torch.Tensor:
    """The definition: own part as it is, others rounded once, added in fp32 from rank 0 on."""
    result = torch.zeros(total)
    for rank in range(size):
        part = _normal(total, rank)
        if rank != me:
            part = (part * comm_dtype.factor).to(comm_dtype.dtype).float() / comm_dtype.factor
        result = result + part
    return result


def _each_case(weights_list: list[tuple[float, ...]]) -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    for weights, total, comm_dtype in itertools.product(weights_list, [1000, 5, 0], [BF16, FP16]):
        bounds = shard_bounds(total, weights, align=16)
        full = _normal(total, rank)
        before = full.clone()
        time.sleep(0.005 * ((rank * 7 + total) % 3))  # others arrive in another order
        work = reduce_scatter_low_precision(full, bounds, _world(), comm_dtype)
        sent = full.numel() - (bounds[rank][1] - bounds[rank][0])
        arriving = (size - 1) * (bounds[rank][1] - bounds[rank][0])
        assert work.buffer_bytes == (2 * (sent + arriving) if size > 1 else 0)
        work.wait()
        assert work.buffer_bytes == 0
        work.wait()  # adds nothing twice
        start, stop = bounds[rank]
        expected = _expected(total, rank, size, comm_dtype)
        assert torch.equal(full[start:stop], expected[start:stop])
        assert torch.equal(full[:start], before[:start])
        assert torch.equal(full[stop:], before[stop:])


def test_sum_is_the_definition_to_the_bit() -> None:
    run_ranks(3, _each_case, WEIGHTS_3)


def test_one_rank_has_nothing_to_send() -> None:
    run_ranks(1, _each_case, [(1,)])


def _special_values() -> list[list[float]]:
    """Each column: what rank 0 and rank 1 add up in rank 0."""
    found = []
    for comm_dtype in (BF16, CommDtype(dtype=torch.float16), FP16):
        mine = [1.0, 1.0, float("inf"), 2.0, 3.0e38]
        theirs = [float("nan"), float("-inf"), float("-inf"), 1e6, 1.0]
        full = torch.tensor(mine if dist.get_rank() == 0 else theirs)
        reduce_scatter_low_precision(full, ((0, 5), (5, 5)), _world(), comm_dtype).wait()
        found.append(full.tolist())
    return found


def test_overflow_and_nan_arrive_as_inf_and_nan() -> None:
    bf16, fp16, scaled = run_ranks(2, _special_values)[0]
    for found in (bf16, fp16, scaled):
        assert found[0] != found[0], "nan"
        assert found[1] == float("-inf")
        assert found[2] != found[2], "inf - inf"
    assert bf16[3] == pytest.approx(1e6, rel=2**-8)
    assert fp16[3] == float("inf"), "1e6 is more than fp16 has"
    assert scaled[3] == pytest.approx(1e6, rel=2**-11), "the factor brings it into range"
    assert bf16[4] == scaled[4] == pytest.approx(3.0e38)  # this rank's own part is never rounded


def _errors() -> tuple[float, float]:
    """RMS errors against fp64: of the 16-bit comm_dtype, and of a reduce-scatter in bf16."""
    total, size, me = 40_000, dist.get_world_size(), dist.get_rank()
    bounds = shard_bounds(total, [1.0] * size)
    truth = torch.stack([_normal(total, rank).double() for rank in range(size)]).sum(0)
    narrow, plain = _normal(total, me), _normal(total, me).bfloat16()
    reduce_scatter_low_precision(narrow, bounds, _world(), BF16).wait()
    reduce_scatter_uneven(plain, bounds, _world()).wait()
    start, stop = bounds[me]
    errors = [
        (found[start:stop] - truth[start:stop]).square().mean().sqrt()
        for found in (narrow.double(), plain.double())
    ]
    return errors[0].item(), errors[1].item()


def test_error_is_below_that_of_a_bf16_reduce_scatter() -> None:
    """One rounding of each of n - 1 parts, against one of every part and every partial sum.

    With parts of variance 1 and a rounding error of variance e^2 v for a value of variance v, that
    is (n - 1) e^2 against at least n e^2 + (2 + ... + n) e^2 in a chain. For n = 5 the root of
    the quotient is sqrt(19 / 4) = 2.2; a tree rounds less often: 1.5 is asked for.
    """
    for narrow, plain in run_ranks(5, _errors):
        assert plain > 1.5 * narrow


def _refused() -> None:
    with pytest.raises(ValueError, match=r"torch\.float32"):
        reduce_scatter_low_precision(torch.zeros(4).half(), ((0, 4),), _world(), BF16)
    with pytest.raises(ValueError, match="one interval per rank"):
        reduce_scatter_low_precision(torch.zeros(4), ((0, 3),), _world(), BF16)


def test_other_buffers_are_refused() -> None:
    run_ranks(1, _refused)
