"""`recording_entry` on GPUs that are sleeping threads: a layer takes so long for each sample.

A micro-batch is said to take what they slept for it: what the machine's processors take depends on
what else they run. `$ZORSE_TEST_STATUS`: the status directory. Rank 2 sleeps ten times as long as
the others. Rank 0 waits once, after iteration `WAITS_AFTER`, for a request to move, and keeps the
status that is there then in `before-move.json`. Rank 1's clock is ahead, and what it receives
arrives late.
"""

import os
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from tests.megatron.recording_entry import record
from zorse_megatron.adapter import cpu_mode
from zorse_megatron.inputs.status import STATUS_NAME
from zorse_megatron.live.move import REQUEST_NAME

LAYER_S, SLOW, FACTOR = 0.004, 2, 10
WAITS_AFTER, AT_MOST_S = 9, 200.0
LATE, LATE_S, AHEAD_S = 1, 0.01, 1000.0


def sleeping(
    forward: Callable[..., Any], seconds: float, slept_s: list[float]
) -> Callable[..., Any]:
    def sleep_and_forward(layer: Any, hidden_states: Any, *args: Any, **kwargs: Any) -> Any:
        if layer.training:
            slept_s.append(seconds * hidden_states.shape[1])
            time.sleep(slept_s[-1])
        return forward(layer, hidden_states, *args, **kwargs)

    return sleep_and_forward


def as_slept(read: Callable[..., Any], slept_s: list[float]) -> Callable[..., Any]:
    def read_as_slept(times: Any, iteration: Any) -> Any:
        found = read(times, iteration)
        number = len({action.micro_batch for action, *_ in iteration.actions} - {None})
        total_s = sum(slept_s)
        slept_s.clear()
        return replace(found, micro_batch_s=total_s / max(1, number))  # a rank may have none

    return read_as_slept


def waiting(code: Callable[..., float], request: Path) -> Callable[..., float]:
    calls: list[float] = []

    def wait_for_request(requests: Any) -> float:
        calls.append(time.monotonic())
        if len(calls) == WAITS_AFTER:
            while not request.exists() and time.monotonic() - calls[-1] < AT_MOST_S:
                time.sleep(0.05)
            status = request.with_name(STATUS_NAME)
            request.with_name("before-move.json").write_text(status.read_text())
        return code(requests)

    return wait_for_request


def late(wait: Callable[..., Any]) -> Callable[..., Any]:
    def wait_longer(receive: Any) -> Any:
        result = wait(receive)
        time.sleep(LATE_S)
        return result

    return wait_longer


if __name__ == "__main__":
    if cpu_mode.needed():
        cpu_mode.enable()
    from megatron.core.transformer.transformer_layer import TransformerLayer

    from zorse_megatron.adapter import watching
    from zorse_megatron.adapter.watching import PlanRequests
    from zorse_megatron.runtime.step_times import StepTimes

    own_layer_s = LAYER_S * (FACTOR if os.environ["RANK"] == str(SLOW) else 1)
    slept: list[float] = []
    TransformerLayer.forward = sleeping(TransformerLayer.forward, own_layer_s, slept)
    StepTimes._read = as_slept(StepTimes._read, slept)  # type: ignore[method-assign]
    if os.environ["RANK"] == "0":
        directory = Path(os.environ["ZORSE_TEST_STATUS"])
        PlanRequests.code = waiting(PlanRequests.code, directory / REQUEST_NAME)  # type: ignore[method-assign]
        watching._EVERY_S = 0.0
    if os.environ["RANK"] == str(LATE):
        from zorse_megatron.runtime.transport import _Posted
        from zorse_megatron.trace import HostClock

        _Posted.wait = late(_Posted.wait)  # type: ignore[method-assign]
        HostClock.mark = lambda clock: time.time() + AHEAD_S  # type: ignore[method-assign]
    record()
