"""Why a plan has tensor-parallel sets of a kind of GPU, or none."""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

from zorse_megatron.planner.groupings.grouping import hardware_key
from zorse_megatron.planner.inputs.joined_inputs import joined
from zorse_megatron.planner.inputs.possible_sets import may_join
from zorse_megatron.planner.inputs.search_inputs import Inputs, SearchSpace
from zorse_megatron.planner.inputs.unit_costs import UnitCompute
from zorse_megatron.planner.inputs.units import JoinedSet
from zorse_megatron.planner.search.set_parts import choices_of_parts
from zorse_megatron.schema.plan.plan import Plan
from zorse_megatron.schema.text.figures import duration, percent

_SIZES = (1, 2, 4, 8)
_LINKS = {"pcie": "PCIe", "nvlink": "NVLink", "nvswitch": "NVSwitch"}


@dataclass(frozen=True, kw_only=True)
class PairCosts:
    """A layer of a sample on one GPU, and on a set of two like it."""

    kind: str
    link: str
    """What joins them."""
    alone_s: float
    computing_s: float
    collectives_s: float

    @property
    def rate(self) -> float:
        """Throughput of the set over that of its GPUs, each by itself."""
        return self.alone_s / (2 * (self.computing_s + self.collectives_s))


def pair_costs(inputs: Inputs) -> list[PairCosts]:
    """Of each kind with two GPUs on a node, each kind of node once, at its best micro-batch."""
    found: dict[object, PairCosts] = {}
    if inputs.sets is None or not may_join(inputs, 2):
        return []
    for index, node in enumerate(inputs.spec.nodes):
        for kind, count in Counter(node.gpu_kinds).items():
            key = kind, hardware_key(node)
            if count > 1 and key not in found:
                ranks = [r for r in inputs.spec.ranks_of(index) if inputs.kinds[r] == kind][:2]
                costs = _pair(inputs, (ranks[0], ranks[1]), node.link.type)
                if costs is not None:
                    found[key] = costs
    return list(found.values())


def _pair(inputs: Inputs, ranks: tuple[int, int], link: str) -> PairCosts | None:
    choices = choices_of_parts(inputs, ranks)
    if not choices:
        return None
    units = joined(inputs, (JoinedSet(ranks=ranks, parts=choices[0]),))
    compute = units.compute
    kind = next(each for each in units.kinds if each not in inputs.kinds)
    assert isinstance(compute, UnitCompute)
    sizes = [size for size in _SIZES if size <= inputs.global_batch_size]
    rows = []
    for size in sizes:
        alone = inputs.compute.layer(inputs.kinds[ranks[0]], size)
        inside = compute.collectives(kind, "layer", size)
        computing = compute.without_collectives(kind, size)
        rows.append(
            PairCosts(
                kind=inputs.kinds[ranks[0]],
                link=link,
                alone_s=(alone.forward_s + alone.backward_s) / size,
                computing_s=(computing.forward_s + computing.backward_s) / size,
                collectives_s=(inside.forward_s + inside.backward_s) / size,
            )
        )
    return min(rows, key=lambda row: row.computing_s + row.collectives_s)


def set_sentences(inputs: Inputs, plan: Plan) -> Iterator[str]:
    """Yield for each kind of GPU why TP is used or not; nothing where it cannot be."""
    used = _kinds_in_sets(inputs, plan)
    if inputs.space.max_tensor_parallel == 1 and not used:
        yield f"TP not used: {_ruled_out(inputs.space)}."
        return
    for costs in pair_costs(inputs):
        over = f"over {_LINKS.get(costs.link, costs.link)}"
        collectives = f"{duration(costs.collectives_s)} of collectives"
        if costs.kind in used:
            degrees = " and ".join(str(degree) for degree in sorted(used[costs.kind]))
            yield (
                f"TP={degrees} used on {costs.kind}: with TP=2 a layer takes "
                f"{duration(costs.computing_s + costs.collectives_s)} per sample instead of "
                f"{duration(costs.alone_s)}, including {collectives} {over}."
            )
            continue
        yield (
            f"TP=2 not used on {costs.kind}: {_slower(costs.rate)} {over} than two GPUs apart "
            f"({collectives} per layer and sample)."
        )


def _ruled_out(space: SearchSpace) -> str:
    if space.barring_sets:
        several = len(space.barring_sets) > 1
        return f"{' and '.join(space.barring_sets)} rule{'' if several else 's'} it out"
    return "--max-tp 1"


def _slower(rate: float) -> str:
    """Compare a set with its GPUs apart, by their throughput.

    >>> _slower(0.75), _slower(0.999), _slower(1.02)
    ('25 % slower', 'no faster', '2.0 % faster per layer, not per iteration,')
    """
    if rate > 1.001:
        return f"{percent(rate - 1)} faster per layer, not per iteration,"
    return f"{percent(1 - rate)} slower" if rate < 0.999 else "no faster"


def _kinds_in_sets(inputs: Inputs, plan: Plan) -> dict[str, set[int]]:
    """Kind -> numbers of ranks of the sets that it is in."""
    found: dict[str, set[int]] = {}
    for group in plan.groups:
        for replica in group.replicas:
            for rank in replica.ranks if len(replica.ranks) > 1 else ():
                found.setdefault(inputs.kinds[rank], set()).add(len(replica.ranks))
    return found
