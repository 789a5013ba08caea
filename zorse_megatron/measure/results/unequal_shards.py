"""From timed collectives to what unequal shards cost beside their bytes."""

from collections.abc import Iterable

from zorse_megatron.costs.rings import Shards
from zorse_megatron.schema.profile.profile import (
    Sharded,
    Transfers,
    UnequalShards,
    unequal_parts,
)

_OPERATIONS: tuple[Sharded, ...] = ("all_gather", "reduce_scatter")


def unequal_factors(transfers: Iterable[Transfers]) -> list[UnequalShards]:
    """Return a factor for each collective, link and kinds of GPU that were timed both ways.

    It is that of the largest message that was timed over equal and over unequal shards. Of several
    kinds of node with the same GPUs the largest factor counts.
    """
    timed = {each.key: each for each in transfers}
    found: dict[tuple[object, ...], UnequalShards] = {}
    for each in timed.values():
        for operation in _OPERATIONS:
            unequal = timed.get((f"{operation}_unequal", each.nodes, each.gpu_kinds))
            factor = _factor(each, unequal)
            if each.operation != operation or unequal is None or factor is None:
                continue
            entry = UnequalShards(
                operation=operation,
                link="intra-node" if len(each.nodes) == 1 else "inter-node",
                gpu_kinds=tuple(sorted(set(each.gpu_kinds))),
                factor=factor,
                source=each.source,
            )
            key = (operation, entry.link, entry.gpu_kinds)
            if key not in found or found[key].factor < factor:
                found[key] = entry
    return list(found.values())


def _factor(equal: Transfers, unequal: Transfers | None) -> float | None:
    """By how much unequal shards take longer than their bytes tell; None: no message in common."""
    if unequal is None:
        return None
    equal_s = dict(zip(equal.num_bytes, equal.time_s, strict=True))
    common = [
        (size, time_s)
        for size, time_s in zip(unequal.num_bytes, unequal.time_s, strict=True)
        if equal_s.get(size)
    ]
    if not common:
        return None
    num_bytes, unequal_s = common[-1]
    count = len(equal.gpu_kinds)
    return unequal_s / equal_s[num_bytes] / (_load(unequal_parts(count)) / _load((1,) * count))


def _load(parts: tuple[int, ...]) -> float:
    """What a link of the ring carries, as `costs.comm` takes it, of a buffer of one byte."""
    return Shards.of(tuple(part / sum(parts) for part in parts)).ring_bytes
