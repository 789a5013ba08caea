"""Checks of time and memory, with a GPT large enough to keep the GPU busy."""

import json
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean, median

from zorse_megatron.doctor.doctor_run import DoctorRun, Trained, compared
from zorse_megatron.doctor.plans import (
    ONE_F_ONE_B,
    WITHIN_ROUNDING,
    gpt_flags,
    in_host,
    plan_of,
    replica,
)
from zorse_megatron.doctor.report import Finding, Gpu, Machine, Status, failed, passed
from zorse_megatron.flags.command import read_command
from zorse_megatron.flags.model_in_flags import computing_from_flags, shape_from_flags
from zorse_megatron.flags.table import WITHOUT_EVALUATION
from zorse_megatron.gpus.gpu import BF16_FROM
from zorse_megatron.gpus.known_gpus import CAPABILITIES, GPU_KINDS, kind_of_device
from zorse_megatron.inputs.cluster_yaml import parse_cluster
from zorse_megatron.inputs.profile import load_profile
from zorse_megatron.plan.plan import Group, Plan, Recompute, Schedule
from zorse_megatron.planner.inputs.search_inputs import make_inputs
from zorse_megatron.simulate.iteration import simulate

# How large the GPT is: the host takes about 10 ms to launch a layer's kernels. The faster the GPU,
# the more work it needs of each, or the host is what is timed.


_SEQUENCE, _LAYERS = 1024, 4
_VOCABULARY = ("--vocab-size", "256")
_STATE_BYTES = 18
"""Per parameter, with a 16-bit weight: that, and fp32 weight, gradient and both moments."""
_FLOPS = 8
"""Per parameter and token: forward, the same again, and twice as much backward."""
_LAYER_S = 8e-3
"""What a layer's micro-batch takes at least at the published peak. Layers reach a third of that:
attention is not fused, and small operations wait for memory."""
_STATE_SHARE = 0.5
"""Of the GPU's memory, at most, for the training state of all layers."""


@dataclass(frozen=True, kw_only=True)
class TimedSize:
    """Width of the layers, and samples of a micro-batch."""

    hidden: int
    micro_batch: int

    @property
    def layer_parameters(self) -> int:
        """Of attention and MLP; the rest does not count."""
        return 12 * self.hidden**2

    @property
    def state_bytes(self) -> int:
        """Training state of all layers."""
        return _LAYERS * _STATE_BYTES * self.layer_parameters

    @property
    def layer_flops(self) -> int:
        """Of a layer and a micro-batch."""
        return _FLOPS * self.layer_parameters * self.micro_batch * _SEQUENCE

    @property
    def figures(self) -> Mapping[str, int]:
        """For the report."""
        return {"hidden_size": self.hidden, "micro_batch_size": self.micro_batch}


# By work. Samples grow with the width, no faster: what a layer keeps must fit into what `offload`
# leaves of the training state.
SIZES = tuple(
    TimedSize(hidden=hidden, micro_batch=micro_batch)
    for hidden, micro_batch in ((2048, 2), (2048, 4), (4096, 2), (4096, 4), (4096, 8), (8192, 4))
)


def size_for(machine: Machine) -> TimedSize:
    """The smallest that keeps the first GPU busy; the largest that all have room for."""
    gpu, room_bytes = machine.gpus[0], _STATE_SHARE * min(g.total_bytes for g in machine.gpus)
    fitting = [size for size in SIZES if size.state_bytes <= room_bytes] or SIZES[:1]
    least_flops = _LAYER_S * peak_flops_per_s(gpu)
    return next((size for size in fitting if size.layer_flops >= least_flops), fitting[-1])


def peak_flops_per_s(gpu: Gpu) -> float:
    """Published, in 16 bits. Of another kind: the fastest of its capability, or the last before."""
    kind = kind_of_device(gpu.name, gpu.total_bytes)
    kinds = [kind]
    if kind not in CAPABILITIES:
        capability = max(each for each in CAPABILITIES.values() if each <= gpu.capability)
        kinds = [name for name, each in CAPABILITIES.items() if each == capability]
    return max(GPU_KINDS[name].peak.of("float16") for name in kinds)


# The plans, and how they are trained and simulated.


_ITERATIONS, _WARM_UP = 5, 2


def timed_plan(size: TimedSize, layers: int, *, recomputes: bool) -> Plan:
    """One rank with four micro-batches; whether it recomputes all layers, or none."""
    recompute = Recompute(mode="full" if recomputes else "none")
    group = Group(replicas=(replica(0, size.micro_batch, 4),), recompute=recompute)
    return plan_of((group,), ((0, layers),), ONE_F_ONE_B)


def timed_flags(
    plan: Plan, size: TimedSize, layers: Sequence[str], iterations: int = _ITERATIONS
) -> tuple[str, ...]:
    """Megatron's flags of such a plan. `layers`: `Machine.layer_flags`."""
    flags = {
        "--num-layers": plan.model.num_layers,
        "--hidden-size": size.hidden,
        "--num-attention-heads": size.hidden // 128,
        "--seq-length": _SEQUENCE,
        "--micro-batch-size": size.micro_batch,
        "--global-batch-size": plan.global_batch_size,
        "--train-iters": iterations,
        # So low that losses stay smooth: differences by rounding do not grow.
        "--lr": 1e-5,
        "--split": "100,0,0",
        "--initial-loss-scale": 16,
        "--distributed-timeout-minutes": 5,
    }
    more = ("--untie-embeddings-and-output-weights", "--calculate-per-token-loss")
    return (*gpt_flags(flags), *WITHOUT_EVALUATION, *more, *layers)


def sized_flags(plan: Plan, size: TimedSize, layers: Sequence[str]) -> tuple[str, ...]:
    """The same with the size of the vocabulary, which a job has from its corpus."""
    return (*timed_flags(plan, size, layers), *_VOCABULARY)


def offload_plans(size: TimedSize) -> tuple[Plan, Plan]:
    """One rank with everything on the GPU, and with everything in host memory; all recomputed."""
    whole = Recompute(mode="full")
    group = Group(replicas=(replica(0, size.micro_batch, _OFFLOAD_MICRO_BATCHES),), recompute=whole)
    by_layer = Schedule(name="breadth_first", parameters={"parameters": "per_pass"})
    return (
        plan_of((group,), [(0, _LAYERS)], ONE_F_ONE_B),
        plan_of((in_host(group),), [(0, 1)] * _LAYERS, by_layer),
    )


def _median_s(trained: Trained) -> float:
    """Of the iterations after the warm-up."""
    return median(s for step, s in trained.elapsed_s.items() if step > _WARM_UP)


def cluster_of(gpu: Gpu) -> str:
    """A cluster file with this GPU alone.

    Of a kind that is not well known, all but the memory is another one's; times are measured.
    """
    kind = kind_of_device(gpu.name, gpu.total_bytes)
    if kind in GPU_KINDS:
        return f"nodes:\n  - gpus: 1 x {kind}\n"
    like = "A100-40" if gpu.capability >= BF16_FROM else "T4"
    memory = f"{gpu.total_bytes / 1e9:.1f}GB"
    return (
        f'gpu_kinds:\n  - {{name: "{kind}", like: {like}, memory: {memory}}}\n'
        f'nodes:\n  - gpus: [{{kind: "{kind}"}}]\n'
    )


def predicted(
    plan: Plan, gpu: Gpu, flags: Sequence[str], profile: Path | None
) -> tuple[float, int]:
    """The simulator's iteration (s) and peak (bytes); by published figures without a profile.

    `flags`: Megatron's, of the command that trains the plan. Raises ZorseError.
    """
    inputs = make_inputs(
        parse_cluster(cluster_of(gpu).encode()),
        shape_from_flags(flags),
        None if profile is None else load_profile(profile),
        global_batch_size=plan.global_batch_size,
        dtype="bfloat16" if "--bf16" in flags else "float16",
        computing=computing_from_flags(read_command(flags).args),
    )
    result = simulate(plan, inputs)
    return result.iteration_s, result.peak_memory_bytes[0]


def seen_peak_bytes(place: Path) -> int:
    """What rank 0 had at most, by what `--zorse-memory` has written there."""
    peaks = json.loads((place / "memory-rank0.json").read_text())["peaks"]
    return int(peaks.get("allocated", peaks["total"])["num_bytes"])


# The checks.


_TURNS = ("stock", "plan", "plan", "stock")
"""GPUs change their clocks, which this evens out."""
_TURN_ITERATIONS = 10
_MAX_SLOWER = 0.01
_FILLED, _MAX_LAYERS = 0.85, 96
"""Of the GPU's memory, as predicted: the rest is for CUDA's context and fragmentation."""
_MAX_TIME_ERROR, _MAX_PEAK_ERROR = 0.10, 0.08
_OFFLOAD_MICRO_BATCHES = 24
"""By the simulator, offloading then costs all known kinds at most 4 % beyond its copies."""
_COPIED_BYTES = 14
"""Per parameter, to the GPU for the step: fp32 weight, both moments, 16-bit weight. Its gradient
comes twice, for the norm and for the step. Less goes back meanwhile. Nothing hides these copies
(docs/performance.md)."""
_HELD = 0.6
"""What the offloaded run may hold, of its training state: the gradients alone are 0.22 of that."""
_MAX_SLOWDOWN = 0.05
"""Beyond those copies."""


def speed_plan(size: TimedSize) -> Plan:
    """What stock does by itself."""
    return timed_plan(size, _LAYERS, recomputes=False)


def speed(run: DoctorRun) -> Finding:
    """Stock and a plan of one rank, in turns, with the same flags."""
    size = size_for(run.machine)
    plan = speed_plan(size)
    flags = timed_flags(plan, size, run.machine.layer_flags, _TURN_ITERATIONS)
    trained: dict[str, list[Trained]] = {"stock": [], "plan": []}
    for who in _TURNS:
        name = f"timed {who} {len(trained[who]) + 1}"
        trained[who].append(run.trained(name, plan if who == "plan" else None, flags))
    medians_s = {who: [_median_s(each) for each in runs] for who, runs in trained.items()}
    stock_s, plan_s = mean(medians_s["stock"]), mean(medians_s["plan"])
    spread = {who: max(runs_s) / min(runs_s) - 1 for who, runs_s in medians_s.items()}
    figures = {
        **size.figures,
        "stock_s": stock_s,
        "plan_s": plan_s,
        "ratio": plan_s / stock_s,
        **{f"{who}_spread": each for who, each in spread.items()},
        **{
            f"{who}_start_and_end_s": min(each.around_s or 0.0 for each in runs)
            for who, runs in trained.items()
        },
    }
    same = compared(trained["plan"][0], trained["stock"][0], WITHIN_ROUNDING)
    if same.status is Status.FAIL:
        return failed(same.said, **figures)
    said = (
        f"stock {stock_s:.4g} s, plan {plan_s:.4g} s ({plan_s / stock_s - 1:+.1%}); two runs of "
        f"each differ by {spread['stock']:.1%} and {spread['plan']:.1%}"
    )
    if plan_s > (1 + _MAX_SLOWER) * stock_s:
        return failed(f"{said}; expected at most {_MAX_SLOWER:+.0%}", **figures)
    return passed(said, **figures)


def offload(run: DoctorRun) -> Finding:
    """The same model under both plans.

    The second run stops if it needs the memory that the state alone would take on the GPU.
    """
    size = size_for(run.machine)
    limit_bytes = round(_HELD * size.state_bytes)
    copies_s = step_copies_s(run.machine, run.answer("copies"))
    on_gpu, in_memory = offload_plans(size)
    flags = timed_flags(on_gpu, size, run.machine.layer_flags)
    resident = run.trained("resident", on_gpu, flags)
    limit = ("--zorse-memory-limit", str(limit_bytes / 1e9))
    offloaded = run.trained("offloaded", in_memory, (*flags, *limit))
    resident_s, offloaded_s = _median_s(resident), _median_s(offloaded)
    beyond = (offloaded_s - copies_s) / resident_s - 1
    figures = {
        **size.figures,
        "resident_s": resident_s,
        "offloaded_s": offloaded_s,
        "offloaded_within_bytes": limit_bytes,
        "step_copies_s": copies_s,
        "slowdown_beyond_copies": beyond,
    }
    same = compared(offloaded, resident, WITHIN_ROUNDING)
    if same.status is Status.FAIL:
        return failed(f"offloaded: {same.said}", **figures)
    said = (
        f"resident {resident_s:.3g} s, offloaded {offloaded_s:.3g} s, of which copies around the "
        f"step {copies_s:.3g} s, within {_HELD:.0%} of the training state's memory"
    )
    if beyond > _MAX_SLOWDOWN:
        return failed(f"{said}; expected at most {_MAX_SLOWDOWN:.0%} more beside it", **figures)
    return passed(said, **figures)


def step_copies_s(machine: Machine, bytes_per_s: float) -> float:
    """What copies around the optimizer step take, at the speed of the link to the host.

    Megatron accumulates gradients in fp32 with --bf16, and in 16 bits with --fp16.
    """
    gradient_bytes = 4 if machine.dtype_flag == "--bf16" else 2
    num_parameters = _LAYERS * size_for(machine).layer_parameters
    return num_parameters * (_COPIED_BYTES + 2 * gradient_bytes) / bytes_per_s


def prediction(run: DoctorRun) -> Finding:
    """Measure this GPU's layers, choose a model that fills it, simulate it, and train it."""
    size, place = size_for(run.machine), run.place("profile")
    plan, (expected_s, expected_bytes) = _filling(run, size, place / "profile.json")
    flags = timed_flags(plan, size, run.machine.layer_flags)
    found_s = _median_s(run.trained("filled", plan, (*flags, "--zorse-memory", str(place))))
    found_bytes = seen_peak_bytes(place)
    time_error, peak_error = expected_s / found_s - 1, expected_bytes / found_bytes - 1
    layers = plan.model.num_layers
    figures = {
        **size.figures,
        "layers": layers,
        "iteration_s": found_s,
        "simulated_iteration_s": expected_s,
        "peak_bytes": found_bytes,
        "simulated_peak_bytes": expected_bytes,
        "time_error": time_error,
        "peak_error": peak_error,
    }
    said = (
        f"{layers} layers: {found_s:.3g} s, simulated {time_error:+.1%}; "
        f"peak {found_bytes / 2**30:.1f} GiB, simulated {peak_error:+.1%}"
    )
    if abs(time_error) <= _MAX_TIME_ERROR and abs(peak_error) <= _MAX_PEAK_ERROR:
        return passed(said, **figures)
    allowed = f"{_MAX_TIME_ERROR:.0%} in time and {_MAX_PEAK_ERROR:.0%} in memory"
    return failed(f"{said}; expected within {allowed}", **figures)


def _filling(run: DoctorRun, size: TimedSize, profile: Path) -> tuple[Plan, tuple[float, int]]:
    """The deepest plan that fits into the GPU by a profile that is measured, and its simulation."""
    flags, gpu = run.machine.layer_flags, run.machine.gpus[0]
    words = ("profile", "measure", "--out", str(profile))
    most = ("--max-micro-batch", str(size.micro_batch))
    one_layer = sized_flags(timed_plan(size, 1, recomputes=True), size, flags)
    run.run("profile", "zorse_megatron", (*words, *most, "--", *one_layer))

    def simulated(layers: int) -> tuple[Plan, tuple[float, int]]:
        plan = timed_plan(size, layers, recomputes=True)
        return plan, predicted(plan, gpu, sized_flags(plan, size, flags), profile)

    def is_too_large(layers: int) -> bool:
        _, (_, peak_bytes) = simulated(layers)
        return peak_bytes > _FILLED * gpu.total_bytes

    # The place of the first that does not fit, after at least one.
    return simulated(max(1, bisect_left(range(1, _MAX_LAYERS + 1), True, key=is_too_large)))
