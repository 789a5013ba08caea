"""Messages between real ranks are timed: one way, on the slowest rank, and not beyond the limit."""

import time
from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import torch.distributed as dist

from tests.ranks.harness import run_ranks
from zorse_megatron.measure.on_ranks.cluster_discovery import message_sizes, timed_messages
from zorse_megatron.measure.tasks import LinkTask

DELAY_S = 0.08
LARGEST = 10_000


def late(receive: Callable[..., Any]) -> Callable[..., Any]:
    def run(*args: Any, **kwargs: Any) -> Any:
        time.sleep(DELAY_S)
        return receive(*args, **kwargs)

    return run


def run_task(
    operation: str, ranks: tuple[int, ...], late_rank: int, time_limit_s: float
) -> tuple[tuple[int, ...], tuple[float, ...]] | None:
    task = LinkTask(
        operation=operation,  # type: ignore[arg-type]
        nodes=("a",),
        ranks=ranks,
        gpu_kinds=("cpu",) * len(ranks),
    )
    group = dist.new_group(list(ranks))
    if dist.get_rank() not in ranks:
        return None
    name = "recv" if operation == "send" else "all_reduce"
    call = getattr(dist, name)
    with patch.object(dist, name, late(call) if dist.get_rank() == late_rank else call):
        return timed_messages(task, group, largest_bytes=LARGEST, time_limit_s=time_limit_s)


def test_a_send_is_half_of_there_and_back() -> None:
    """A receiver that is late costs its delay on the way there only: half of it is left."""
    first, second = run_ranks(2, run_task, "send", (0, 1), 1, 60.0)
    assert first == second
    sizes, times = first
    assert sizes == message_sizes(LARGEST)
    assert all(DELAY_S / 2 <= time_s < DELAY_S for time_s in times)


def test_a_collective_takes_as_long_as_its_slowest_rank() -> None:
    first, second, outside = run_ranks(3, run_task, "all_reduce", (0, 1), 1, 60.0)
    assert outside is None and first == second
    assert all(time_s >= DELAY_S for time_s in first[1])


def test_no_larger_message_follows_one_that_took_too_long() -> None:
    (sizes, _), _ = run_ranks(2, run_task, "send", (0, 1), 1, DELAY_S / 4)
    assert len(sizes) == 1
