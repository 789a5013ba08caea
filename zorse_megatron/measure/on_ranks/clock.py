"""Timing of computations: CUDA events on a GPU, the processor's clock on a CPU."""

import time
from collections.abc import Callable
from statistics import median

import torch

WARM_UP = 2
REPEATS = 5


def median_s(run: Callable[[], object], device: torch.device) -> float:
    """Return the median of the seconds that `run` takes, after a warm-up."""
    for _ in range(WARM_UP):
        run()
    return median(timed_s(run, device) for _ in range(REPEATS))


def timed_s(run: Callable[[], object], device: torch.device) -> float:
    """Return the seconds that `run` takes once, until all of its work is done."""
    if device.type != "cuda":
        start_s = time.perf_counter()
        run()
        return time.perf_counter() - start_s
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    run()
    end.record()
    end.synchronize()
    return 1e-3 * float(start.elapsed_time(end))
