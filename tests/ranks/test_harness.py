"""The harness itself: results by rank, every traceback, and the stack of a rank that hangs."""

import pytest
import torch
import torch.distributed as dist

from tests.ranks.harness import RanksFailed, run_ranks


def _sum_of_ranks(offset: int) -> float:
    tensor = torch.tensor([float(dist.get_rank() + offset)])
    dist.all_reduce(tensor)
    return tensor.item()


def _one_raises_and_others_wait() -> None:
    if dist.get_rank() == 1:
        raise KeyError("the culprit")
    dist.barrier()


def test_results_come_back_by_rank() -> None:
    assert run_ranks(3, _sum_of_ranks, 10) == [33.0] * 3
    assert run_ranks(2, dist.get_rank) == [0, 1]


def test_the_culprit_and_the_waiting_ranks_are_both_reported() -> None:
    with pytest.raises(RanksFailed) as failure:
        run_ranks(3, _one_raises_and_others_wait, timeout_s=30)
    message = str(failure.value)
    assert "KeyError: 'the culprit'" in message
    # gloo tells the waiting ranks that a connection closed, or the harness shows where they hang.
    assert "rank 0" in message
    assert "in _one_raises_and_others_wait" in message
