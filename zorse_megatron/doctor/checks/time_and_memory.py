"""On one GPU: what offload costs, and how close the simulator comes for a model that fills it."""

import json
from collections.abc import Callable
from dataclasses import replace

from zorse_megatron.doctor.checks.against_stock import compared
from zorse_megatron.doctor.finding import Finding, failed, not_possible, passed
from zorse_megatron.doctor.machine import NO_CUDA
from zorse_megatron.doctor.plans import WITHIN_ROUNDING
from zorse_megatron.doctor.rank_jobs import RankJob
from zorse_megatron.doctor.timed_cases import (
    MICRO_BATCH_SIZE,
    PARAMETERS_PER_LAYER,
    STATE_BYTES,
    TimedCase,
    cluster_of,
    iteration_s,
    model_flags,
    predicted,
)
from zorse_megatron.doctor.workshop import Workshop

MAX_SLOWDOWN = 0.05
"""Beyond the copies of optimizer state, which nothing hides (docs/performance.md)."""
MAX_TIME_ERROR, MAX_PEAK_ERROR = 0.10, 0.08
_FILLED = 0.85
"""Of a GPU's memory, as predicted: the rest is for CUDA's context and fragmentation."""
_COPIED_BYTES = 12
"""Per parameter: fp32 weight and both moments, copied to the GPU and back in each step."""
_LIMIT = 0.6
"""What the offloaded run may hold, of its training state: the gradients alone are 0.22 of that."""
_MAX_LAYERS = 96


def offload(workshop: Workshop) -> Finding:
    """The same small model with everything on the GPU, and with everything in host memory.

    The second run stops if it needs the memory that the state alone would take on the GPU.
    """
    if not workshop.machine.has_gpu:
        return not_possible(NO_CUDA)
    flags, gpu = workshop.machine.layer_flags, workshop.machine.gpus[0]
    resident = TimedCase(layers=4, micro_batches=64)
    in_host = replace(resident, parameters="per_pass", in_host=True)
    num_parameters = resident.layers * PARAMETERS_PER_LAYER
    limit_bytes = round(_LIMIT * STATE_BYTES * num_parameters)
    limit = ("--zorse-memory-limit", str(limit_bytes / 1e9))
    runs = [
        workshop.trained(name, case.plan, more, base=case.flags(flags))
        for name, case, more in (("resident", resident, ()), ("offloaded", in_host, limit))
    ]
    times_s = [iteration_s(run) for run in runs]
    same = compared(runs[1], runs[0], WITHIN_ROUNDING)
    slowest = min(gpu.host_to_gpu_bytes_per_s, gpu.gpu_to_host_bytes_per_s)
    copies_s = num_parameters * _COPIED_BYTES / slowest
    beyond = (times_s[1] - copies_s) / times_s[0] - 1
    figures = {
        "resident_s": times_s[0],
        "offloaded_s": times_s[1],
        "offloaded_within_bytes": limit_bytes,
        "state_copies_s": copies_s,
        "slowdown": times_s[1] / times_s[0] - 1,
        "slowdown_beyond_state_copies": beyond,
    }
    if same.status != "pass":
        return failed(f"offloaded: {same.said}", **figures)
    said = (
        f"resident {times_s[0]:.3g} s, offloaded {times_s[1]:.3g} s, of which copies of optimizer "
        f"state {copies_s:.3g} s, within {_LIMIT:.0%} of the training state's memory"
    )
    if beyond > MAX_SLOWDOWN:
        return failed(f"{said}; expected at most {MAX_SLOWDOWN:.0%} more beside it", **figures)
    return passed(said, **figures)


def prediction(workshop: Workshop) -> Finding:
    """Measure this GPU's layers, choose a model that fills it, simulate it, and train it."""
    if not workshop.machine.has_gpu:
        return not_possible(NO_CUDA)
    flags, gpu = workshop.machine.layer_flags, workshop.machine.gpus[0]
    directory = workshop.directory / "prediction"
    directory.mkdir(parents=True, exist_ok=True)
    cluster, profile = directory / "cluster.yaml", directory / "profile.json"
    cluster.write_text(cluster_of(gpu))
    _measure_layers(workshop, cluster_name=str(cluster), profile_name=str(profile))

    def peak_bytes(layers: int) -> int:
        case = TimedCase(layers=layers, micro_batches=8)
        return predicted(case, flags, cluster, profile)[1]

    layers = largest(_MAX_LAYERS, lambda each: peak_bytes(each) <= _FILLED * gpu.total_bytes)
    case = TimedCase(layers=layers, micro_batches=8)
    expected_s, expected_bytes = predicted(case, flags, cluster, profile)
    run = workshop.trained(
        "filled",
        case.plan,
        ("--zorse-memory", str(directory)),
        base=case.flags(flags),
    )
    peaks = json.loads((directory / "memory-rank0.json").read_text())["peaks"]
    found_bytes = peaks.get("allocated", peaks["total"])["num_bytes"]
    found_s = iteration_s(run)
    figures = {
        "layers": layers,
        "iteration_s": found_s,
        "simulated_iteration_s": expected_s,
        "time_error": expected_s / found_s - 1,
        "peak_bytes": found_bytes,
        "simulated_peak_bytes": expected_bytes,
        "peak_error": expected_bytes / found_bytes - 1,
    }
    said = (
        f"{layers} layers: {figures['iteration_s']:.3g} s, simulated {figures['time_error']:+.1%}; "
        f"peak {found_bytes / 2**30:.1f} GiB, simulated {figures['peak_error']:+.1%}"
    )
    close = abs(expected_s / found_s - 1) <= MAX_TIME_ERROR
    if close and abs(expected_bytes / found_bytes - 1) <= MAX_PEAK_ERROR:
        return passed(said, **figures)
    allowed = f"{MAX_TIME_ERROR:.0%} in time and {MAX_PEAK_ERROR:.0%} in memory"
    return failed(f"{said}; expected within {allowed}", **figures)


def largest(limit: int, fits: Callable[[int], bool]) -> int:
    """The largest number from 1 to `limit` that fits, if one does; fewer always fit if more do.

    >>> largest(96, lambda layers: layers <= 37), largest(96, lambda layers: False)
    (37, 1)
    """
    low, high = 1, limit
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if fits(middle) else (low, middle - 1)
    return low


def _measure_layers(workshop: Workshop, *, cluster_name: str, profile_name: str) -> None:
    flags = model_flags(TimedCase(layers=1, micro_batches=1), workshop.machine.layer_flags)
    words = ["--cluster", cluster_name, "--out", profile_name]
    words += ["--max-micro-batch", str(MICRO_BATCH_SIZE), "--", *flags, "--vocab-size", "256"]
    workshop.run(
        RankJob(
            name="profile",
            entry="zorse_megatron",
            arguments=("profile", "measure", *words),
            world_size=1,
            directory=workshop.directory / "profile",
            limit_s=workshop.limit_s(),
        )
    )
