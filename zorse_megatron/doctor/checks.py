"""All checks of a machine; docs/gpus.md says what each proves.

A check gets the run and returns its finding. Whatever one of them raises, the others are made.
"""

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from zorse_megatron.doctor.doctor_run import (
    CANNOT_SHARE,
    NO_CUDA,
    CannotShare,
    DoctorRun,
    Trained,
    compared,
)
from zorse_megatron.doctor.plans import (
    CASES,
    EXACT,
    FP32_FLAGS,
    INTERLEAVED,
    ITERATIONS,
    SAVE_EVERY,
    SMALL_GPT,
    TWO_LEVELS,
    UNEQUAL_PARTS,
    UNEVEN_PLAN,
    WITHIN_ROUNDING,
    PlanCase,
    with_split_backward,
)
from zorse_megatron.doctor.report import Finding, Status, failed, no_time, not_possible, passed
from zorse_megatron.doctor.timed import offload, prediction, speed
from zorse_megatron.errors import OutOfTime, RankFailure, ZorseError
from zorse_megatron.gpus.gpu import BF16_FROM, TRITON_FROM
from zorse_megatron.inputs.status import load_status
from zorse_megatron.launch.rank_environment import MOST_QUEUES, VARIABLE
from zorse_megatron.live.move import make_request
from zorse_megatron.plan.plan import Plan

_SAVED = CASES[0]
(_LEFT,) = (case for case in CASES if case.plan is TWO_LEVELS)
_LOOK_S = 0.01
_MIN_SHARE_OF_COPY = 0.85
"""The target of docs/performance.md."""


def communicators(run: DoctorRun) -> Finding:
    """Make the communicators of a plan as its training does, and note what memory each takes."""
    shares_gpus = run.machine.shares_gpus(UNEVEN_PLAN.world_size)
    try:
        taken = run.connected()
    except RankFailure as failure:
        if not shares_gpus or run.is_time_up:
            raise
        return not_possible(
            f"{CANNOT_SHARE} ({_reason(failure)}), and so no plans with more ranks than GPUs"
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
    name = f"{_reference(case)} {' '.join(case.flags)}"
    reference = run.trained(name, case.reference, (*SMALL_GPT, *case.flags))
    return compared(_of_plan(run, case), reference, case.limits)


def _reference(case: PlanCase) -> str:
    return "stock" if case.reference is None else "one rank"


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


def moves(run: DoctorRun) -> Finding:
    """A run that is asked for another plan goes on under it, to the losses of one that stays."""
    stays = _of_plan(run, _LEFT)
    status = run.place("moved") / "status"
    status.mkdir()
    flags = (*SMALL_GPT, *_LEFT.flags, "--zorse-status", str(status))
    with asked_again(status, UNEQUAL_PARTS):
        moved = run.trained("moved", _LEFT.plan, flags)
    answers = load_status(status).moves
    if [each.refused for each in answers] != [None]:
        said = "; ".join(each.refused or "granted" for each in answers) or "none"
        return failed(f"the run's answers to the request for another plan: {said}")
    found = compared(moved, stays, EXACT)
    return replace(found, said=f"moved after iteration {answers[0].iteration}; {found.said}")


@contextmanager
def asked_again(status: Path, plan: Plan) -> Iterator[None]:
    """Ask a run for another plan as soon as it looks for requests, and so before it trains.

    It takes away what lies there when it starts, as asked of a run before it. A moment later the
    request is there again.
    """
    request, has_ended = make_request(status, plan), threading.Event()

    def ask() -> None:
        while request.exists():
            if has_ended.wait(_LOOK_S):
                return
        make_request(status, plan)

    thread = threading.Thread(target=ask)
    thread.start()
    try:
        yield
    finally:
        has_ended.set()
        thread.join()


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
    is_quick: bool = False
    limit_s: float = 120.0
    """Several times what it takes with all ranks on one GPU; one that hangs leaves time for the
    others."""


_REPORT_IT = "Do not train on this machine yet, and report it with doctor.json"
_QUICK_PLANS = 2
_PLANS = tuple(
    Check(
        name="plans",
        title=f"Plan {case.name} against {_reference(case)}",
        run=partial(follows_stock, case=case),
        remedy=_REPORT_IT,
        needs_gpu=False,
        is_quick=number < _QUICK_PLANS,
    )
    for number, case in enumerate(CASES)
)
CHECKS: tuple[Check, ...] = (
    Check(
        name="communicators",
        title="NCCL connects the ranks of a plan; memory of each communicator",
        run=communicators,
        remedy="Repeat with NCCL_DEBUG=INFO in the environment; stock Megatron's data parallelism "
        "needs the same of NCCL",
    ),
    *_PLANS[:_QUICK_PLANS],
    Check(
        name="prediction",
        title="Simulated against measured, with a model that fills the GPU",
        run=prediction,
        remedy="Plan with a larger --margin, and report it with doctor.json",
        limit_s=180.0,
    ),
    *_PLANS[_QUICK_PLANS:],
    Check(
        name="resume",
        title="Another plan resumes from a checkpoint",
        run=resumes,
        remedy=_REPORT_IT,
        needs_gpu=False,
    ),
    Check(
        name="move",
        title="A running job moves to another plan",
        run=moves,
        remedy="Change plans from a checkpoint instead (docs/elastic.md), and report it with "
        "doctor.json",
        needs_gpu=False,
    ),
    Check(
        name="kernels",
        title="Shard kernels: right, and as fast as a copy",
        run=kernels,
        remedy="Report it with doctor.json; where results differ, do not train on this GPU yet",
        is_quick=True,
    ),
    Check(
        name="speed",
        title="A plan of one rank as fast as stock",
        run=speed,
        remedy="Close what else uses the GPU and repeat it; if it stays so, report it with "
        "doctor.json",
        is_quick=True,
        limit_s=180.0,
    ),
    Check(
        name="offload",
        title="What offload costs on one GPU",
        run=offload,
        remedy="Plan without offload (docs/performance.md), and report it with doctor.json",
        limit_s=180.0,
    ),
    Check(
        name="engine",
        title="Transformer Engine's layers under a plan against stock",
        run=with_transformer_engine,
        remedy="Until then, train with --transformer-impl local; please report it",
    ),
)


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
            remedy=check.remedy if found.status is Status.FAIL else found.remedy,
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
    except CannotShare as error:
        return not_possible(f"{CANNOT_SHARE} ({_reason(error)})")
    except ZorseError as error:
        is_cut_off = isinstance(error, OutOfTime) and run.is_time_up
        return no_time() if is_cut_off else failed(str(error))
    except Exception as error:  # a file that a job should have left, a key that it should have
        return failed(f"{type(error).__name__}: {error}")
