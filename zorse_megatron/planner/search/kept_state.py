"""Optimizer state that stays on the GPU, of plans in which it waits in the host.

A step moves all state that waits in the host to the GPU and back. Whatever memory is free while
most is in use has room for a part of it.
"""

from bisect import bisect_left
from collections.abc import Callable
from dataclasses import replace
from itertools import starmap

from zorse_megatron.plan.memory_settings import said_settings, settings_in
from zorse_megatron.plan.plan import Plan, Replica
from zorse_megatron.planner.evaluate import Evaluation, Evaluator
from zorse_megatron.schedule.shards import kept_pieces, state_pieces
from zorse_megatron.simulate.rank_bytes import RankSizes

_STEPS = 1000
"""Fractions are multiples of one in so many."""


def with_state_kept(evaluator: Evaluator, found: Evaluation) -> Evaluation:
    """The evaluation of a plan that fits, or of one that keeps state where there is room for it.

    Both are simulated whole, however long the batch: what stays must fit all the time.
    """
    offloads = (each.settings.offload for each in said_settings(found.plan))
    if not any(o.optimizer_state and o.optimizer_state_fraction is None for o in offloads):
        return found
    whole = evaluator.whole(found.plan) if found.is_extrapolated else found
    if whole is None or not whole.fits:
        return found
    sizes = RankSizes(whole.plan, evaluator.inputs.members.base)
    free = [max(0, -overflow) for overflow in whole.overflow_bytes]
    kept = _with_fractions(whole.plan, lambda number, each: _fraction(sizes, each, free[number]))
    return evaluator.faster(whole, kept)


def without_fractions(plan: Plan) -> Plan:
    """The plan with all of the state in the host that waits there."""
    return _with_fractions(plan, lambda _number, _replica: None)


def _fraction(sizes: RankSizes, replica: Replica, free_bytes: int) -> float:
    """The part that waits where each rank keeps as much of its state as it has room for."""

    def has_room(steps: int) -> bool:
        kept = (_kept_bytes(sizes, rank, steps / _STEPS) for rank in replica.ranks)
        return max(kept) <= free_bytes

    return bisect_left(range(_STEPS), True, key=has_room) / _STEPS


def _kept_bytes(sizes: RankSizes, rank: int, fraction: float) -> int:
    """What stays of the rank's state: whole pieces."""
    total = 0
    for chunk in sizes.chunks(rank):
        pieces = state_pieces(sizes.shards[chunk][rank])
        kept = sum(pieces[: kept_pieces(len(pieces), fraction)])
        total += sizes.memory_of(chunk).state_bytes(kept)
    return total


def _with_fractions(plan: Plan, fraction_of: Callable[[int, Replica], float | None]) -> Plan:
    """Of replicas whose state waits in the host a fraction does; None: all of it.

    `fraction_of`: of the number of a group, and one of its replicas.
    """

    def changed(number: int, _index: int, replica: Replica) -> Replica:
        offload = settings_in(plan.groups[number], replica).offload
        if not offload.optimizer_state:
            return replica
        fraction = fraction_of(number, replica)
        if fraction == offload.optimizer_state_fraction:
            return replica
        waits = fraction is None or fraction > 0
        offload = replace(
            offload, optimizer_state=waits, optimizer_state_fraction=fraction if waits else None
        )
        return replace(replica, offload=offload)

    return plan.with_replicas(starmap(changed, plan.numbered_replicas()))
