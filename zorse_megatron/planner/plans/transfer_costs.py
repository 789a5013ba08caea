"""Cost of inter-stage transfers between two groups, for the plan file.

Where it counts is decided with the groups' positions (`in_flight`): estimates depend on it too.
"""

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

from zorse_megatron.planner.closed_form.communication import CommunicationCosts
from zorse_megatron.planner.closed_form.stage import Stage
from zorse_megatron.schema.plan.plan import Chunk, Hop


def with_hops(
    chunks: Sequence[Chunk],
    stages: Sequence[Stage],
    communication: CommunicationCosts,
    busy_s: float,
) -> tuple[Chunk, ...]:
    """The chunks with the hops after them that count.

    `stages`: of each group. `busy_s`: how long the slowest group computes.
    """
    pairs = [(chunk.group, after.group) for chunk, after in pairwise(chunks)]
    found: dict[tuple[int, int], Hop | None] = {}
    for pair in set(pairs):
        source, target = (stages[group] for group in pair)
        slow = source.position.slow_after or target.position.slow_before
        # A group with fewer layers than chunks is left out of a turn: two of another one meet.
        if slow and pair[0] != pair[1]:
            found[pair] = _hop(source, target, communication, busy_s)
    hops = [found.get(pair) for pair in pairs]
    return tuple(replace(chunk, hop=hop) for chunk, hop in zip(chunks, [*hops, None], strict=True))


def _hop(
    source: Stage, target: Stage, communication: CommunicationCosts, busy_s: float
) -> Hop | None:
    """What shared links take for each sample, and what one message takes beyond that.

    None where a message is on its way for as long as the whole batch: nothing could hide that.
    """
    path = communication.path(source.device_group, target.device_group)
    size = min(max(source.sizes), max(target.sizes))
    per_sample_s = communication.boundary * path.contended_s_per_byte
    alone_s = communication.transfer_s(path, size=size, round_samples=0)
    latency = max(0.0, alone_s - size * per_sample_s) / busy_s
    load = communication.inputs.global_batch_size * per_sample_s / busy_s
    return Hop(latency=_short(latency), load=_short(load)) if latency < 0.999 else None


def _short(value: float) -> float:
    """Few digits, for people who read the file: it is an estimate."""
    return float(f"{value:.4g}")
