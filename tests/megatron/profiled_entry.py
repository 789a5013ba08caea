"""`zorse_megatron.pretrain`, counting what each step does: operations, messages, Python calls.

Writes `$ZORSE_COUNTS/rank<R>.json`: name -> how often in a step, in the mean, or seconds. None of
the counts depends on what else the machine does. `$ZORSE_COUNTED_STEPS`: see `iterations`.
"""

import functools
import json
import os
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

from zorse_megatron.adapter import cpu_mode
from zorse_megatron.pretrain import main

WARM_UP = 2
STEPS = int(os.environ.get("ZORSE_COUNTED_STEPS", "1"))
"""Of each profiler."""
_ALLOCATIONS = ("aten::empty", "aten::empty_strided")


def iterations(counted_steps: int) -> int:
    """How many a job has to run, for so many steps of each profiler."""
    return WARM_UP + 3 * counted_steps


def profiled(train_step: Callable[..., Any], found: dict[str, float]) -> Callable[..., Any]:
    """Wrap a step: after the warm-up some run under torch's profiler, then some with the main
    thread's calls counted, then some with timers alone."""
    import torch

    calls = Counter[str]()
    operations = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU])
    done = Counter[str]()

    @functools.wraps(train_step)
    def step(*args: Any, **kwargs: Any) -> Any:
        number, done["steps"] = done["steps"] - WARM_UP, done["steps"] + 1
        if number == 0:
            operations.__enter__()
        elif number == STEPS:
            operations.__exit__(None, None, None)
            # torch's own list of events takes as long to make as a step.
            recorded = operations.profiler.kineto_results.events()
            found.update(_operations(event.name() for event in recorded))
            # cProfile watches all threads, and loses calls where they take turns.
            sys.setprofile(lambda _frame, event, _argument: calls.update((event,)))
        elif number == 2 * STEPS:
            sys.setprofile(None)
            found["Python calls"] = (calls["call"] + calls["c_call"]) / STEPS
            found["threads"] = len(os.listdir("/proc/self/task"))
            found["Python threads"] = threading.active_count()
            found["started_s"] = time.thread_time()
        result = train_step(*args, **kwargs)
        if number == 3 * STEPS - 1:
            found["step, main thread"] = (time.thread_time() - found.pop("started_s")) / STEPS
        return result

    return step


def _operations(names: Any) -> dict[str, float]:
    counts = Counter(names)
    aten = {name: count for name, count in counts.items() if name.startswith("aten::")}
    messages = {name: count for name, count in counts.items() if name.startswith("gloo:")}
    return {
        "operations of torch": sum(aten.values()) / STEPS,
        "copies": aten.get("aten::copy_", 0) / STEPS,
        "allocations": sum(aten.get(name, 0) for name in _ALLOCATIONS) / STEPS,
        **{name.partition(":")[2]: count / STEPS for name, count in messages.items()},
    }


def timed(owner: Any, name: str, label: str, found: dict[str, float]) -> None:
    """Let CPU time of the main thread in `owner.name` be summed while only timers run."""
    function = getattr(owner, name)

    @functools.wraps(function)
    def with_time(*args: Any, **kwargs: Any) -> Any:
        before_s = time.thread_time()
        result = function(*args, **kwargs)
        if "started_s" in found:
            key = f"{label}, main thread"
            found[key] = found.get(key, 0.0) + (time.thread_time() - before_s) / STEPS
        return result

    setattr(owner, name, with_time)


def run() -> None:
    """Train, with stock's functions wrapped."""
    if cpu_mode.needed():
        cpu_mode.enable()
    from megatron.core.optimizer.optimizer import ChainedOptimizer
    from megatron.core.pipeline_parallel import schedules
    from megatron.training import training

    from zorse_megatron.adapter.model import chunk_runner

    found: dict[str, float] = {}
    for module in (schedules, chunk_runner):
        timed(module, "forward_step", "forward", found)
        timed(module, "backward_step", "backward", found)
    timed(ChainedOptimizer, "prepare_grads", "gradients to the optimizer", found)
    timed(ChainedOptimizer, "get_grad_norm", "norm", found)
    timed(ChainedOptimizer, "step_with_ready_grads", "update", found)
    training.train_step = profiled(training.train_step, found)
    timed(training, "training_log", "log", found)
    main()
    path = Path(os.environ["ZORSE_COUNTS"], f"rank{os.environ['RANK']}.json")
    path.write_text(json.dumps(found))


if __name__ == "__main__":
    run()
