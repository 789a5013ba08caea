"""Checks of time and memory, with a GPT large enough to keep a GPU busy."""

import json
from bisect import bisect_left
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Literal

from zorse_megatron.doctor.doctor_run import DoctorRun, Trained, compared
from zorse_megatron.doctor.plans import (
    ONE_F_ONE_B,
    WITHIN_ROUNDING,
    gpt_flags,
    in_host,
    plan_of,
    replica,
)
from zorse_megatron.doctor.report import Finding, Gpu, Status, failed, not_possible, passed
from zorse_megatron.flags.command import read_command
from zorse_megatron.flags.computing_flags import computing_from_flags
from zorse_megatron.flags.shape import shape_from_flags
from zorse_megatron.flags.turned_off import WITHOUT_EVALUATION
from zorse_megatron.planner.inputs.search_inputs import make_inputs
from zorse_megatron.schedules.actions import Kind
from zorse_megatron.schedules.lower import lower_plan
from zorse_megatron.schema.cluster.cluster_yaml import parse_cluster
from zorse_megatron.schema.gpus.compute_capability import BF16_FROM
from zorse_megatron.schema.gpus.device_names import kind_of_device
from zorse_megatron.schema.gpus.gpu_presets import GPU_KINDS
from zorse_megatron.schema.plan.plan import Group, Plan, Recompute, Schedule
from zorse_megatron.schema.profile.profile_json import load_profile
from zorse_megatron.simulate.iteration import simulate

HIDDEN, SEQUENCE, MICRO_BATCH_SIZE = 2048, 1024, 2
PARAMETERS_PER_LAYER = 12 * HIDDEN**2
_ITERATIONS, _WARM_UP = 5, 2
_VOCABULARY = ("--vocab-size", "256")
_WEIGHT_BYTES = 2
_STATE_BYTES = 18
"""Per parameter, with a 16-bit weight: that, and fp32 weight, gradient and both moments."""
_COPIED_BYTES = 12
"""Per parameter: fp32 weight and both moments, copied to the GPU and back in each step."""
_HELD = 0.6
"""What the offloaded run may hold, of its training state: the gradients alone are 0.22 of that."""
_MAX_SLOWDOWN = 0.05
"""Beyond the copies of optimizer state, which nothing hides (docs/performance.md)."""
_FILLED, _MAX_LAYERS = 0.85, 96
"""Of a GPU's memory, as predicted: the rest is for CUDA's context and fragmentation."""
_MAX_TIME_ERROR, _MAX_PEAK_ERROR = 0.10, 0.08
_MOST_GATHERING = 4


def timed_plan(
    layers: int,
    micro_batches: int,
    *,
    ranks: int = 1,
    parameters: Literal["per_pass", "resident"] | None = None,
    offloaded: bool = False,
) -> Plan:
    """One group of equal replicas with so many micro-batches each; all is recomputed.

    `parameters`: of breadth-first with a chunk per layer, which `offloaded` needs; None:
    1F1B with one chunk.
    """
    replicas = tuple(replica(rank, MICRO_BATCH_SIZE, micro_batches) for rank in range(ranks))
    group = Group(replicas=replicas, recompute=Recompute(mode="full"))
    groups = (in_host(group) if offloaded else group,)
    if parameters is None:
        return plan_of(groups, [(0, layers)], ONE_F_ONE_B)
    schedule = Schedule(name="breadth_first", parameters={"parameters": parameters})
    return plan_of(groups, [(0, 1)] * layers, schedule)


def timed_flags(plan: Plan, layers: Sequence[str]) -> tuple[str, ...]:
    """Megatron's flags of such a plan. `layers`: `Machine.layer_flags`."""
    flags = {
        "--num-layers": plan.model.num_layers,
        "--hidden-size": HIDDEN,
        "--num-attention-heads": HIDDEN // 128,
        "--seq-length": SEQUENCE,
        "--micro-batch-size": MICRO_BATCH_SIZE,
        "--global-batch-size": plan.global_batch_size,
        "--train-iters": _ITERATIONS,
        "--lr": 1e-4,
        "--split": "100,0,0",
        "--initial-loss-scale": 16,
        "--distributed-timeout-minutes": 5,
    }
    untied = "--untie-embeddings-and-output-weights"
    return (*gpt_flags(flags), *WITHOUT_EVALUATION, untied, *layers)


def _trained_s(run: DoctorRun, name: str, plan: Plan, *more: str) -> tuple[Trained, float]:
    """Train; with the median of the iterations after the warm-up."""
    trained = run.trained(name, plan, (*timed_flags(plan, run.machine.layer_flags), *more))
    return trained, median(s for step, s in trained.elapsed_s.items() if step > _WARM_UP)


def offload(run: DoctorRun) -> Finding:
    """The same model with everything on the GPU, and with everything in host memory.

    The second run stops if it needs the memory that the state alone would take on the GPU.
    """
    layers, micro_batches = 4, 64
    num_parameters = layers * PARAMETERS_PER_LAYER
    limit_bytes = round(_HELD * _STATE_BYTES * num_parameters)
    in_memory = timed_plan(layers, micro_batches, parameters="per_pass", offloaded=True)
    copies_s = num_parameters * _COPIED_BYTES / run.answer("copies")
    resident, resident_s = _trained_s(run, "resident", timed_plan(layers, micro_batches))
    limit = ("--zorse-memory-limit", str(limit_bytes / 1e9))
    offloaded, offloaded_s = _trained_s(run, "offloaded", in_memory, *limit)
    same = compared(offloaded, resident, WITHIN_ROUNDING)
    beyond = (offloaded_s - copies_s) / resident_s - 1
    figures = {
        "resident_s": resident_s,
        "offloaded_s": offloaded_s,
        "offloaded_within_bytes": limit_bytes,
        "state_copies_s": copies_s,
        "slowdown": offloaded_s / resident_s - 1,
        "slowdown_beyond_state_copies": beyond,
    }
    if same.status == Status.FAIL:
        return failed(f"offloaded: {same.said}", **figures)
    said = (
        f"resident {resident_s:.3g} s, offloaded {offloaded_s:.3g} s, of which copies of optimizer "
        f"state {copies_s:.3g} s, within {_HELD:.0%} of the training state's memory"
    )
    if beyond > _MAX_SLOWDOWN:
        return failed(f"{said}; expected at most {_MAX_SLOWDOWN:.0%} more beside it", **figures)
    return passed(said, **figures)


def gathers(run: DoctorRun) -> Finding:
    """One group with its parameters gathered per pass, and unsharded; and the gathers alone.

    There is no target: the share depends on the link and on the number of micro-batches.
    """
    ranks = min(_MOST_GATHERING, len(run.machine.gpus))
    if ranks < 2:
        return not_possible("one GPU gathers nothing")
    layer_bytes = _WEIGHT_BYTES * PARAMETERS_PER_LAYER
    each_s = run.answer("gather", str(layer_bytes), world_size=ranks)
    per_pass = timed_plan(4, 16, ranks=ranks, parameters="per_pass")
    unsharded = timed_plan(4, 16, ranks=ranks, parameters="resident")
    _, per_pass_s = _trained_s(run, "gathered per pass", per_pass)
    _, unsharded_s = _trained_s(run, "unsharded", unsharded)
    alone_s = each_s * _num_gathers(per_pass)
    # What the unsharded run gathers after its step is not hidden.
    exposed_s = per_pass_s - (unsharded_s - each_s * _num_gathers(unsharded))
    hidden = 1 - exposed_s / alone_s
    return passed(
        f"{ranks} ranks: gathers alone {alone_s:.3g} s an iteration, of which {hidden:.0%} "
        "does not lengthen it",
        gathered_per_pass_s=per_pass_s,
        unsharded_s=unsharded_s,
        gathers_alone_s=alone_s,
        hidden_share=hidden,
    )


def _num_gathers(plan: Plan) -> int:
    return sum(action.kind is Kind.GATHER for action in lower_plan(plan).ranks[0])


def prediction(run: DoctorRun) -> Finding:
    """Measure this GPU's layers, choose a model that fills it, simulate it, and train it."""
    flags, gpu, place = run.machine.layer_flags, run.machine.gpus[0], run.place("profile")
    profile = place / "profile.json"
    words = ("profile", "measure", "--out", str(profile))
    size = ("--max-micro-batch", str(MICRO_BATCH_SIZE))
    one_layer = timed_flags(timed_plan(1, 1), flags)
    run.run("profile", "zorse_megatron", (*words, *size, "--", *one_layer, *_VOCABULARY))

    def is_too_large(layers: int) -> bool:
        _, peak_bytes = predicted(timed_plan(layers, 8), gpu, flags, profile)
        return peak_bytes > _FILLED * gpu.total_bytes

    # The deepest that fits: the place of the first that does not, after at least one.
    layers = max(1, bisect_left(range(1, _MAX_LAYERS + 1), True, key=is_too_large))
    plan = timed_plan(layers, 8)
    expected_s, expected_bytes = predicted(plan, gpu, flags, profile)
    _, found_s = _trained_s(run, "filled", plan, "--zorse-memory", str(place))
    peaks = json.loads((place / "memory-rank0.json").read_text())["peaks"]
    found_bytes = peaks.get("allocated", peaks["total"])["num_bytes"]
    errors = {
        "time_error": expected_s / found_s - 1,
        "peak_error": expected_bytes / found_bytes - 1,
    }
    figures = {
        "layers": layers,
        "iteration_s": found_s,
        "simulated_iteration_s": expected_s,
        "peak_bytes": found_bytes,
        "simulated_peak_bytes": expected_bytes,
        **errors,
    }
    said = (
        f"{layers} layers: {found_s:.3g} s, simulated {errors['time_error']:+.1%}; "
        f"peak {found_bytes / 2**30:.1f} GiB, simulated {errors['peak_error']:+.1%}"
    )
    is_close = abs(errors["time_error"]) <= _MAX_TIME_ERROR
    if is_close and abs(errors["peak_error"]) <= _MAX_PEAK_ERROR:
        return passed(said, **figures)
    allowed = f"{_MAX_TIME_ERROR:.0%} in time and {_MAX_PEAK_ERROR:.0%} in memory"
    return failed(f"{said}; expected within {allowed}", **figures)


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


def predicted(plan: Plan, gpu: Gpu, layers: Sequence[str], profile: Path) -> tuple[float, int]:
    """The simulator's iteration (s) and peak (bytes). Raises ZorseError."""
    words = [*timed_flags(plan, layers), *_VOCABULARY]
    inputs = make_inputs(
        parse_cluster(cluster_of(gpu).encode()),
        shape_from_flags(words),
        load_profile(profile),
        global_batch_size=plan.global_batch_size,
        dtype="bfloat16" if "--bf16" in layers else "float16",
        computing=computing_from_flags(read_command(words).args),
    )
    costs = inputs.compute, inputs.memory, inputs.comm, inputs.kinds
    result = simulate(plan, *costs, sequence_length=SEQUENCE)
    return result.iteration_s, result.peak_memory_bytes[0]
