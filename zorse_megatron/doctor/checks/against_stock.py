"""Plans train as stock Megatron does on one rank of the same machine."""

import math
from collections.abc import Iterable

from zorse_megatron.doctor.finding import Finding, Status, failed, not_possible, passed
from zorse_megatron.doctor.machine import NO_CUDA
from zorse_megatron.doctor.plans import (
    CASES,
    EXACT,
    FP32_FLAGS,
    INTERLEAVED,
    WITHIN_ROUNDING,
    PlanCase,
    Tolerance,
    with_split,
)
from zorse_megatron.doctor.workshop import ITERATIONS, SAVE_EVERY, Trained, Workshop
from zorse_megatron.schema.gpus.compute_capability import BF16_FROM

CONNECTIONS = (1, 8)
"""Values of CUDA_DEVICE_MAX_CONNECTIONS: in how many queues a GPU takes its work."""
_SAVED = CASES[0]


def follows_stock(workshop: Workshop, case: PlanCase, connections: int) -> Finding:
    """Train a plan and its reference, and compare every iteration."""
    if not workshop.machine.has_gpu and connections != CONNECTIONS[0]:
        return not_possible(f"{NO_CUDA}: the variable means nothing on a CPU")
    without = [gpu.name for gpu in workshop.machine.gpus if gpu.capability < BF16_FROM]
    if without and "--bf16" in case.flags:
        return not_possible(f"no units for bf16 on {' and '.join(dict.fromkeys(without))}")
    stock = workshop.trained(f"stock {' '.join(case.flags)}", None, case.flags)
    plan = _of_plan(workshop, case, connections)
    return compared(plan, stock, case.tolerance)


def resumes(workshop: Workshop) -> Finding:
    """What the first plan saved, another plan goes on from, to the losses of the first."""
    saved = _of_plan(workshop, _SAVED, CONNECTIONS[0])
    load = ("--load", str(_checkpoints(workshop)), "--ckpt-step", str(SAVE_EVERY))
    resumed = workshop.trained("resumed", INTERLEAVED, (*FP32_FLAGS, *load))
    expected = tuple(range(SAVE_EVERY + 1, ITERATIONS + 1))
    if tuple(resumed.losses) != expected:
        return failed(f"the resumed job trained iterations {list(resumed.losses)}; expected "
                      f"{list(expected)}")  # fmt: skip
    return compared(resumed, saved, EXACT)


def with_transformer_engine(workshop: Workshop) -> Finding:
    """As the plans before, with Transformer Engine's layers in 16 bits.

    Weight gradients apart from backwards must leave everything as it is.
    """
    machine = workshop.machine
    if not machine.has_gpu:
        return not_possible(NO_CUDA)
    if machine.transformer_engine is None:
        return not_possible("Transformer Engine is not installed")
    flags = (machine.dtype_flag, "--initial-loss-scale", "16")
    stock = workshop.trained("stock with Transformer Engine", None, flags)
    plan = workshop.trained("2|1|2 with Transformer Engine", _SAVED.plan, flags)
    split = workshop.trained("the same with split_backward", with_split(_SAVED.plan), flags)
    found = compared(split, plan, EXACT)
    return found if found.status is Status.FAIL else compared(plan, stock, WITHIN_ROUNDING)


def compared(plan: Trained, stock: Trained, tolerance: Tolerance) -> Finding:
    """Compare all iterations of `plan`, up to the last of `stock`, with the same ones of that."""
    steps = tuple(plan.losses)
    if not steps or not set(steps) <= set(stock.losses) or max(steps) != max(stock.losses):
        return failed(f"iterations {list(steps)} and {list(stock.losses)} cannot be compared")
    losses = [(plan.losses[step], stock.losses[step]) for step in steps]
    norms = [(plan.grad_norms[step], stock.grad_norms[step]) for step in steps]
    found = {
        "abs_loss": _largest(abs(mine - theirs) for mine, theirs in losses),
        "relative_loss": _largest(_apart(mine, theirs) for mine, theirs in losses),
        "relative_grad_norm": _largest(_apart(mine, theirs) for mine, theirs in norms),
    }
    limits = {name: getattr(tolerance, name) for name in found}
    missed = [
        f"{name} differs by {found[name]:.3e}, expected at most {limit:.0e}"
        for name, limit in limits.items()
        if limit is not None and not found[name] <= limit
    ]
    if missed:
        return failed(f"{'; '.join(missed)}: the plan does not train as stock does", **found)
    what = f"{len(steps)} iterations: losses differ by at most {found['abs_loss']:.1e}"
    return passed(f"{what}, gradient norms by {found['relative_grad_norm']:.1e}", **found)


def _of_plan(workshop: Workshop, case: PlanCase, connections: int) -> Trained:
    flags = case.flags
    if case is _SAVED and connections == CONNECTIONS[0]:
        flags = (*flags, "--save", str(_checkpoints(workshop)), "--save-interval", str(SAVE_EVERY))
    return workshop.trained(
        f"{case.name}, {connections} queues",
        case.plan,
        flags,
        environment={"CUDA_DEVICE_MAX_CONNECTIONS": str(connections)},
    )


def _checkpoints(workshop: Workshop) -> str:
    return str(workshop.directory / "checkpoints")


def _largest(values: Iterable[float]) -> float:
    """The largest; NaN if one is, which `max` may pass over."""
    listed = list(values)
    return math.nan if any(map(math.isnan, listed)) else max(listed)


def _apart(mine: float, theirs: float) -> float:
    return abs(mine - theirs) / abs(theirs) if theirs else abs(mine)
