"""All checks of a machine; docs/gpus.md says what each proves.

A check gets the run and returns its finding. Whatever one of them raises, the others are made.
"""

import json
import time
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any, Literal

from zorse_megatron.doctor.doctor_run import (
    NO_CUDA,
    DoctorRun,
    Finding,
    Gpu,
    Status,
    Trained,
    compared,
    failed,
    not_possible,
    passed,
)
from zorse_megatron.doctor.plans import (
    CASES,
    EXACT,
    FP32_FLAGS,
    INTERLEAVED,
    ITERATIONS,
    ONE_F_ONE_B,
    SAVE_EVERY,
    SMALL_GPT,
    UNEVEN_PLAN,
    WITHIN_ROUNDING,
    PlanCase,
    gpt_flags,
    in_host,
    plan_of,
    replica,
    with_split_backward,
)
from zorse_megatron.errors import RankFailure, ZorseError
from zorse_megatron.flags.command import read_command
from zorse_megatron.flags.model_in_flags import computing_from_flags, shape_from_flags
from zorse_megatron.flags.table import WITHOUT_EVALUATION
from zorse_megatron.gpus.gpu import BF16_FROM, TRITON_FROM
from zorse_megatron.gpus.known_gpus import GPU_KINDS, kind_of_device
from zorse_megatron.inputs.cluster_yaml import parse_cluster
from zorse_megatron.inputs.profile import load_profile
from zorse_megatron.launch.rank_environment import MOST_QUEUES, VARIABLE
from zorse_megatron.plan.plan import Group, Plan, Recompute, Schedule
from zorse_megatron.planner.inputs.search_inputs import make_inputs
from zorse_megatron.schedule.actions import Kind
from zorse_megatron.schedule.lower import lower_plan
from zorse_megatron.simulate.iteration import simulate

# Checks of time and memory, with a GPT large enough to keep a GPU busy.


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
    return sum(action.kind is Kind.UNSHARD for action in lower_plan(plan).ranks[0])


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
    result = simulate(plan, inputs.costs)
    return result.iteration_s, result.peak_memory_bytes[0]


_SAVED = CASES[0]
_MIN_SHARE_OF_COPY = 0.85
"""The target of docs/performance.md."""


def communicators(run: DoctorRun) -> Finding:
    """Make the communicators of a plan as its training does, and note what memory each takes."""
    shares_gpus = run.machine.shares_gpus(UNEVEN_PLAN.world_size)
    try:
        taken = run.connected()
    except RankFailure as failure:
        if not shares_gpus:
            raise
        return not_possible(
            f"NCCL runs no two ranks on one GPU here ({_reason(failure)}); plans with more ranks "
            "than GPUs are trained over host memory and gloo instead"
        )
    figures, listed = {}, []
    for use in dict.fromkeys(row["use"] for row in taken):
        rows = [row for row in taken if row["use"] == use]
        ranks = [row["rank"] for row in rows]
        figures[f"{use}_per_rank"] = max(map(ranks.count, ranks))
        most, priced = (max(row[key] for row in rows) for key in ("num_bytes", "priced_bytes"))
        figures |= {f"{use}_bytes": most, f"{use}_priced_bytes": priced}
        listed.append(f"{use} {most / 1e6:.0f} MB (priced {priced / 1e6:.0f})")
    shared = " that share GPUs, which show the sum of theirs" if shares_gpus else ""
    said = f"{UNEVEN_PLAN.world_size} ranks{shared}; at most {', '.join(listed)}"
    return passed(said, **figures)


def _reason(failure: RankFailure) -> str:
    """NCCL's own words if it has said any, else the last line."""
    lines = [line.strip() for line in failure.problems[0].remedy.splitlines() if line.strip()]
    of_nccl = [line for line in lines if "NCCL" in line or "Duplicate GPU" in line]
    return (of_nccl or lines)[-1]


def kernels(run: DoctorRun) -> Finding:
    """Run each kernel in Triton, compare it with plain torch, and time it against a copy."""
    answer: dict[str, Any] = run.answer("kernels")
    rows, reason = answer["kernels"], answer["in_plain_torch_because"]
    figures = {f"{name}_share_of_copy": row["share_of_copy"] for name, row in rows.items()}
    figures |= {key: answer[key] for key in ("num_bytes", "copy_bytes_per_s")}
    wrong = [f"{name}: {row['disagrees']}" for name, row in rows.items() if row["disagrees"]]
    if wrong:
        return failed(f"results differ from plain torch's: {'; '.join(wrong)}", **figures)
    if reason is not None and run.machine.gpus[0].capability < TRITON_FROM:
        return not_possible(reason)
    if reason is not None:
        return failed(f"kernels run in plain torch: {reason}", **figures)
    shares = {name: row["share_of_copy"] for name, row in rows.items()}
    slow = [f"{name} {share:.0%}" for name, share in shares.items() if share < _MIN_SHARE_OF_COPY]
    if slow:
        expected = f"expected at least {_MIN_SHARE_OF_COPY:.0%} of a copy's bandwidth"
        return failed(f"right, but slow: {', '.join(slow)}; {expected}", **figures)
    least = min(shares.values())
    return passed(f"compiled by Triton, right, at least {least:.0%} of a copy's speed", **figures)


def follows_stock(run: DoctorRun, case: PlanCase) -> Finding:
    """Train a plan and its reference, and compare every iteration."""
    gpus = run.machine.gpus
    if not gpus and case.queues != MOST_QUEUES:
        return not_possible(f"{NO_CUDA}: the variable means nothing on a CPU")
    without = [gpu.name for gpu in gpus if gpu.capability < BF16_FROM]
    if without and "--bf16" in case.flags:
        return not_possible(f"no units for bf16 on {' and '.join(dict.fromkeys(without))}")
    stock = run.trained(f"stock {' '.join(case.flags)}", None, (*SMALL_GPT, *case.flags))
    return compared(_of_plan(run, case), stock, case.limits)


def _of_plan(run: DoctorRun, case: PlanCase) -> Trained:
    save = ("--save", _checkpoints(run), "--save-interval", str(SAVE_EVERY))
    flags = (*SMALL_GPT, *case.flags, *(save if case is _SAVED else ()))
    queues = {VARIABLE: str(case.queues)}
    return run.trained(case.name, case.plan, flags, environment=queues)


def _checkpoints(run: DoctorRun) -> str:
    return str(run.directory / "checkpoints")


def resumes(run: DoctorRun) -> Finding:
    """What the first plan saved, another plan goes on from, to the losses of the first."""
    saved = _of_plan(run, _SAVED)
    load = ("--load", _checkpoints(run), "--ckpt-step", str(SAVE_EVERY))
    resumed = run.trained("resumed", INTERLEAVED, (*SMALL_GPT, *FP32_FLAGS, *load))
    trained, expected = [*resumed.losses], [*range(SAVE_EVERY + 1, ITERATIONS + 1)]
    if trained != expected:
        return failed(f"the resumed job trained iterations {trained}; expected {expected}")
    return compared(resumed, saved, EXACT)


def with_transformer_engine(run: DoctorRun) -> Finding:
    """As the plans before, with Transformer Engine's layers in 16 bits.

    Weight gradients apart from backwards must leave everything as it is.
    """
    if run.machine.transformer_engine is None:
        return not_possible("Transformer Engine is not installed")
    flags = (*SMALL_GPT, run.machine.dtype_flag, "--initial-loss-scale", "16")
    stock = run.trained("stock with Transformer Engine", None, flags)
    plan = run.trained("2|1|2 with Transformer Engine", UNEVEN_PLAN, flags)
    apart = with_split_backward(UNEVEN_PLAN)
    split = run.trained("the same with split_backward", apart, flags)
    found = compared(split, plan, EXACT)
    return found if found.status is Status.FAIL else compared(plan, stock, WITHIN_ROUNDING)


@dataclass(frozen=True, kw_only=True)
class Check:
    """A line of the report to be."""

    name: str
    """For `--check`."""
    title: str
    run: Callable[[DoctorRun], Finding]
    remedy: str
    """What to do about a failure."""
    needs_gpu: bool = True
    limit_s: float = 120.0


_REPORT_IT = "Do not train on this machine yet, and report it with doctor.json"
CHECKS: tuple[Check, ...] = (
    Check(
        name="communicators",
        title="NCCL connects the ranks of a plan; memory of each communicator",
        run=communicators,
        remedy="Repeat with NCCL_DEBUG=INFO in the environment; stock Megatron's data parallelism "
        "needs the same of NCCL",
    ),
    Check(
        name="kernels",
        title="Shard kernels: right, and as fast as a copy",
        run=kernels,
        remedy="Report it with doctor.json; where results differ, do not train on this GPU yet",
    ),
    *(
        Check(
            name="plans",
            title=f"Plan {case.name} against stock",
            run=partial(follows_stock, case=case),
            remedy=_REPORT_IT,
            needs_gpu=False,
        )
        for case in CASES
    ),
    Check(
        name="resume",
        title="Another plan resumes from a checkpoint",
        run=resumes,
        remedy=_REPORT_IT,
        needs_gpu=False,
    ),
    Check(
        name="engine",
        title="Transformer Engine's layers under a plan against stock",
        run=with_transformer_engine,
        remedy="Until then, train with --transformer-impl local; please report it",
    ),
    Check(
        name="offload",
        title="What offload costs on one GPU",
        run=offload,
        limit_s=180.0,
        remedy="Plan without offload (docs/performance.md), and report it with doctor.json",
    ),
    Check(
        name="gathers",
        title="Which share of all-gathers computation hides",
        run=gathers,
        remedy=_REPORT_IT,
    ),
    Check(
        name="prediction",
        title="Simulated against measured, with a model that fills the GPU",
        run=prediction,
        limit_s=240.0,
        remedy="Plan with a larger --margin, and report it with doctor.json",
    ),
)
NAMES = tuple(dict.fromkeys(check.name for check in CHECKS))


def examine(
    run: DoctorRun, checks: Sequence[Check], tell: Callable[[Finding], None]
) -> list[Finding]:
    """Make the checks one after another, each within its time; `tell` gets each finding."""
    findings = []
    for check in checks:
        started_s = time.monotonic()
        run.allow(check.limit_s)
        found = _made(check, run)
        finding = replace(
            found,
            check=check.name,
            title=check.title,
            remedy=check.remedy if found.status is Status.FAIL else "",
            duration_s=round(time.monotonic() - started_s, 3),
        )
        tell(finding)
        findings.append(finding)
    return findings


def _made(check: Check, run: DoctorRun) -> Finding:
    if check.needs_gpu and not run.machine.gpus:
        return not_possible(NO_CUDA)
    try:
        return check.run(run)
    except ZorseError as error:
        return failed(str(error))
    except Exception as error:  # a file that a job should have left, a key that it should have
        return failed(f"{type(error).__name__}: {error}")
