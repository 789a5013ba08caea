"""Optimizer state that stays on the GPU, of plans in which it waits in the host.

A step moves all state that waits in the host to the GPU and back. Whatever memory is free while
most is in use has room for a part of it.
"""

from bisect import bisect_left
from collections.abc import Callable
from dataclasses import replace

from zorse_megatron.plan.memory_settings import settings_in
from zorse_megatron.plan.plan import Group, Plan, Replica
from zorse_megatron.planner.evaluate import Evaluation, Evaluator
from zorse_megatron.schedule.shards import kept_pieces, state_pieces
from zorse_megatron.simulate.rank_bytes import RankSizes

_STEPS = 1000
"""Fractions are multiples of one in so many."""


def with_state_kept(evaluator: Evaluator, found: Evaluation) -> Evaluation:
    """The evaluation of a plan that fits, or of one that keeps state where there is room for it.

    Both are simulated whole, however long the batch: what stays must fit all the time.
    """
    if not any(map(_has_state_in_host, found.plan.groups)):
        return found
    whole = evaluator.whole(found.plan) if found.is_extrapolated else found
    if whole is None or not whole.fits:
        return found
    found = whole
    sizes = RankSizes(found.plan, evaluator.inputs.members.base)
    groups = [
        _kept(sizes, group, max(0, -overflow))
        for group, overflow in zip(found.plan.groups, found.overflow_bytes, strict=True)
    ]
    other = evaluator.evaluate_plan(replace(found.plan, groups=tuple(groups)))
    is_faster = other is not None and other.fits and other.iteration_s < found.iteration_s
    return other if other is not None and is_faster else found


def without_fractions(plan: Plan) -> Plan:
    """The plan with all of the state in the host that waits there."""
    groups = (_with_fractions(group, lambda _: None) for group in plan.groups)
    return replace(plan, groups=tuple(groups))


def _has_state_in_host(group: Group) -> bool:
    settings = (settings_in(group, replica) for replica in group.replicas)
    return any(
        each.offload.optimizer_state and each.offload.optimizer_state_fraction is None
        for each in settings
    )


def _kept(sizes: RankSizes, group: Group, free_bytes: int) -> Group:
    """The group whose ranks keep as much of the state as each has room for."""

    def fraction(replica: Replica) -> float:
        def has_room(steps: int) -> bool:
            kept = (_kept_bytes(sizes, rank, steps / _STEPS) for rank in replica.ranks)
            return max(kept) <= free_bytes

        return bisect_left(range(_STEPS), True, key=has_room) / _STEPS

    return _with_fractions(group, fraction)


def _kept_bytes(sizes: RankSizes, rank: int, fraction: float) -> int:
    """What stays of the rank's state: whole pieces."""
    total = 0
    for chunk in sizes.chunks(rank):
        pieces = state_pieces(sizes.shards[chunk][rank])
        kept = sum(pieces[: kept_pieces(len(pieces), fraction)])
        total += sizes.memory_of(chunk).state_bytes(kept)
    return total


def _with_fractions(group: Group, fraction_of: Callable[[Replica], float | None]) -> Group:
    """Of replicas whose state waits in the host a fraction does; None: all of it."""

    def changed(replica: Replica) -> Replica:
        offload = settings_in(group, replica).offload
        if not offload.optimizer_state:
            return replica
        fraction = fraction_of(replica)
        if fraction == offload.optimizer_state_fraction:
            return replica
        waits = fraction is None or fraction > 0
        offload = replace(
            offload, optimizer_state=waits, optimizer_state_fraction=fraction if waits else None
        )
        return replace(replica, offload=offload)

    return replace(group, replicas=tuple(map(changed, group.replicas)))
