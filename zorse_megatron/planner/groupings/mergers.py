"""Which pools of GPUs share groups: ways to put pools together."""

from collections.abc import Sequence
from itertools import combinations

from zorse_megatron.planner.groupings.pools import Pool
from zorse_megatron.planner.groupings.set_partitions import set_partitions

Merger = tuple[tuple[Pool, ...], ...]
"""Pools that share groups; each pool is in one part."""

# Up to this many pools every way is tried (Bell's number: 203 for 6).
_ALL_WAYS_UP_TO = 6


def mergers_of(pools: Sequence[Pool]) -> tuple[Merger, ...]:
    """Ways to merge pools, those with few mergers first.

    All of them for up to 6 pools. Beyond: none, all, by kind, by region, and every two.
    """
    if len(pools) <= _ALL_WAYS_UP_TO:
        found = list(set_partitions(tuple(pools)))
    else:
        found = [tuple((pool,) for pool in pools), (tuple(pools),)]
        found += [_by(pools, "kind"), _by(pools, "region")]
        found += [
            (*((pool,) for pool in pools if pool not in pair), pair)
            for pair in combinations(pools, 2)
        ]
    return tuple(sorted(dict.fromkeys(found), key=lambda merger: -len(merger)))


def _by(pools: Sequence[Pool], field: str) -> Merger:
    together: dict[str, list[Pool]] = {}
    for pool in pools:
        together.setdefault(getattr(pool, field), []).append(pool)
    return tuple(map(tuple, together.values()))
