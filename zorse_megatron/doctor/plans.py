"""The plans that are compared with stock Megatron on one rank, and how close they must come."""

import dataclasses
from dataclasses import dataclass

from zorse_megatron.doctor.small_gpt import GLOBAL_BATCH_SIZE, NUM_LAYERS, uneven_plan
from zorse_megatron.schema.plan.plan import (
    Chunk,
    Group,
    ModelFingerprint,
    Offload,
    Plan,
    Recompute,
    Replica,
    Schedule,
)

FP32_FLAGS = ("--transformer-impl", "local")
# So low that no step is skipped.
SIXTEEN_BIT_FLAGS = ("--bf16", "--initial-loss-scale", "16", "--transformer-impl", "local")
BF16_ROUNDING = 2**-8
MAX_ABS_LOSS_DIFFERENCE = 2e-5
"""fp32 sums in another order move a loss of about 5 by up to 1e-6 an iteration (measured between
stock's own layouts: 9.5e-7 over 20 iterations); a wrong scale or a lost sample moves it by 1e-3 or
more."""
MAX_RELATIVE_GRAD_NORM_DIFFERENCE = 1e-4


@dataclass(frozen=True, kw_only=True)
class Tolerance:
    """How far a plan may be from stock; sums in another order move both a little."""

    abs_loss: float | None = MAX_ABS_LOSS_DIFFERENCE
    relative_loss: float | None = None
    relative_grad_norm: float | None = MAX_RELATIVE_GRAD_NORM_DIFFERENCE


EXACT = Tolerance()
WITHIN_ROUNDING = Tolerance(abs_loss=None, relative_loss=BF16_ROUNDING, relative_grad_norm=None)
"""Losses within one rounding to bf16, as tests/megatron/test_mixed_precision.py has it."""


@dataclass(frozen=True, kw_only=True)
class PlanCase:
    """A plan, and the flags that it and its reference are trained with."""

    name: str
    plan: Plan
    flags: tuple[str, ...] = FP32_FLAGS
    tolerance: Tolerance = EXACT


def _replica(rank: int, size: int, count: int, weight: float) -> Replica:
    return Replica(
        ranks=(rank,), micro_batch_size=size, num_microbatches=count, shard_weight=weight
    )


_PAIR = (_replica(0, 2, 8, 3.0), _replica(1, 2, 4, 1.0))
_ALONE = (_replica(2, 3, 8, 1.0),)


def _plan(
    groups: tuple[Group, ...], spans: tuple[tuple[int, int], ...], schedule: Schedule
) -> Plan:
    """`spans`: (group, layers) of each chunk in the order of the model."""
    chunks, first = [], 0
    for group, layers in spans:
        chunks.append(Chunk(group=group, layers=(first, first + layers)))
        first += layers
    assert first == NUM_LAYERS
    return Plan(
        schema_version=1,
        global_batch_size=GLOBAL_BATCH_SIZE,
        model=ModelFingerprint(num_layers=NUM_LAYERS),
        groups=groups,
        chunks=tuple(chunks),
        schedule=schedule,
    )


_SPANS = ((0, 1), (1, 2), (0, 2), (1, 1))
INTERLEAVED = _plan(
    (Group(replicas=_PAIR), Group(replicas=_ALONE)), _SPANS, Schedule(name="interleaved")
)


def _in_host(group: Group) -> Group:
    """With all that can wait in host memory there."""
    everything = Offload(parameters=True, gradients=True, optimizer_state=True, activations=True)
    return dataclasses.replace(group, recompute=Recompute(mode="full"), offload=everything)


def with_split(plan: Plan) -> Plan:
    """With weight gradients apart from backwards in all groups."""
    groups = tuple(dataclasses.replace(group, split_backward=True) for group in plan.groups)
    return dataclasses.replace(plan, groups=groups)


BREADTH_FIRST = dataclasses.replace(
    INTERLEAVED,
    groups=tuple(map(_in_host, INTERLEAVED.groups)),
    schedule=Schedule(name="breadth_first", parameters={"parameters": "per_pass"}),
)
MIXED = _plan(
    (
        Group(replicas=(_replica(1, 3, 8, 1.0),), compute_dtype="bf16"),
        Group(replicas=(_replica(0, 2, 12, 1.0),), compute_dtype="fp16"),
    ),
    ((0, 4), (1, 2)),
    Schedule(name="1f1b"),
)

CASES = (
    PlanCase(name="2|1|2", plan=uneven_plan()),
    PlanCase(name="interleaved", plan=INTERLEAVED),
    PlanCase(name="breadth-first, all offloaded", plan=BREADTH_FIRST),
    PlanCase(
        name="bf16 and fp16 groups", plan=MIXED, flags=SIXTEEN_BIT_FLAGS, tolerance=WITHIN_ROUNDING
    ),
)
