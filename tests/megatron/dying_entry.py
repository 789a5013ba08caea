"""The recording entry, but one rank dies: `ZORSE_TEST_DEATH=<how>:<rank>:<when>`.

`kill:1:5` - rank 1 is killed in the middle of its fifth step; `raise:1:5` - it fails there by an
error of its own; `oom:1:5` - its device has no memory left there (`oom-step`: in STEP, not in a
backward); `host:1:5` - it may not take any more host memory from a forward on; `save:1:2` - it is
killed in the middle of its second checkpoint.
"""

import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from tests.megatron.recording_entry import record
from zorse_megatron.adapter import cpu_mode
from zorse_megatron.pretrain import main
from zorse_megatron.schedule.actions import Kind

HOW, RANK, WHEN = os.environ["ZORSE_TEST_DEATH"].split(":")


def die(runner: Any = None) -> None:
    if HOW.startswith("oom"):
        raise torch.OutOfMemoryError("no memory left, as far as this test goes")
    if HOW == "host":
        link = runner.activations.link
        link.limit_bytes = link.host_bytes
        return
    if "ZORSE_TEST_DIED" in os.environ:
        Path(os.environ["ZORSE_TEST_DIED"]).touch()
    if HOW == "exit":
        sys.exit(7)
    if HOW == "raise":
        raise ValueError("this rank has a fault of its own")
    os.kill(os.getpid(), signal.SIGKILL)


def dying(computation: Callable[..., Any]) -> Callable[..., Any]:
    def run(self: Any, action: Any, runner: Any) -> Any:
        if self.step + 1 == int(WHEN) and (HOW != "oom-step" or action.kind is Kind.STEP):
            die(runner)
        return computation(self, action, runner)

    return run


def dying_call(write: Callable[..., Any]) -> Callable[..., Any]:
    calls = []

    def run(*args: Any, **kwargs: Any) -> Any:
        calls.append(1)
        if len(calls) == int(WHEN):
            die()
        return write(*args, **kwargs)

    return run


if __name__ == "__main__":
    if cpu_mode.needed():
        cpu_mode.enable()
    if os.environ["RANK"] == RANK:
        if HOW == "save":
            from megatron.core.dist_checkpointing.strategies.torch import (
                TorchDistSaveShardedStrategy as Strategy,
            )

            Strategy.async_save = dying_call(Strategy.async_save)
        elif HOW in ("start", "meet", "kill-data"):
            from zorse_megatron.adapter import start, training
            from zorse_megatron.live import hub_address as exchange

            module, name = {
                "start": (exchange, "exchange"),
                "meet": (start, "_initialize_distributed"),
                "kill-data": (training, "plan_loader_builder"),
            }[HOW]
            setattr(module, name, dying_call(getattr(module, name)))
        else:
            from zorse_megatron.runtime.executor import Executor

            where = {"host": "_forward", "oom-step": "_on_state"}
            name = where.get(HOW, "_backward")
            setattr(Executor, name, dying(getattr(Executor, name)))
    if "ZORSE_TEST_RECORD" in os.environ:
        record()
    else:
        main()
