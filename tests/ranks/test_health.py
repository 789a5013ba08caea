"""Heartbeats of real ranks, with a short timeout: who is named, and why."""

import time
from collections.abc import Callable

import pytest
import torch.distributed as dist

from tests.ranks.harness import run_ranks
from zorse_megatron.runtime.health import Heartbeat

TIMEOUT_S = 6.0
GUILTY = 1


def watch(end: Callable[[Heartbeat], None] | None) -> str | None:
    """Rank 1 ends by `end` (None: it falls silent); the line that this rank stops with, if any."""
    lines: list[str] = []
    heartbeat = Heartbeat(
        store=dist.distributed_c10d._get_default_store().clone(),  # type: ignore[attr-defined]
        rank=dist.get_rank(),
        world_size=dist.get_world_size(),
        timeout_s=TIMEOUT_S,
        describe=lambda rank: f"rank {rank}",
        stop_process=lines.append,
    )
    heartbeat.start()
    if dist.get_rank() == GUILTY:
        time.sleep(1)
        if end is None:
            heartbeat.stopping.set()
        else:
            end(heartbeat)
        time.sleep(TIMEOUT_S)
        return None
    heartbeat.thread.join(timeout=TIMEOUT_S + 1)
    heartbeat.stopping.set()
    return lines[0] if lines else None


def fail_without_message(heartbeat: Heartbeat) -> None:
    heartbeat.fail(AssertionError())


def fail(heartbeat: Heartbeat) -> None:
    heartbeat.fail(ValueError("a fault\nwith details"))


def leave(heartbeat: Heartbeat) -> None:
    heartbeat.exit(7)


def finish(heartbeat: Heartbeat) -> None:
    heartbeat.finish()


@pytest.mark.parametrize(
    ("end", "reason"),
    [
        (None, "rank 1 has been silent for"),
        (fail, "rank 1 failed (ValueError: a fault)"),
        (fail_without_message, "rank 1 failed (AssertionError: )"),
        (leave, "rank 1 has exited with status 7"),
        (finish, None),
    ],
)
def test_names_the_rank_and_the_reason(
    end: Callable[[Heartbeat], None] | None, reason: str | None
) -> None:
    lines = run_ranks(3, watch, end, timeout_s=60)
    for rank in (0, 2):
        assert (reason is None) == (lines[rank] is None)
        assert reason is None or reason in lines[rank]
