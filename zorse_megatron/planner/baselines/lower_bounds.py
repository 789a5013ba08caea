"""Lower bounds of the iteration time: all GPUs at full speed, and what must cross the links."""

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import product

from zorse_megatron.costs.interface import WHOLE, ComputeCost, TpComputeCost, TpShard
from zorse_megatron.costs.topology import Topology
from zorse_megatron.gpus.gpu import ComputeDtype
from zorse_megatron.plan.plan import TpShards
from zorse_megatron.planner.inputs.search_inputs import Inputs
from zorse_megatron.planner.outcome import LinkBound

# All sizes up to here are looked at; beyond, powers of two, as a sample's time hardly changes.
_EVERY_SIZE_UP_TO = 128


@dataclass(frozen=True)
class _Rates:
    """GPUs of one kind, and the least time that one of them needs for a sample, by part."""

    name: str
    count: int
    layers_s: tuple[float, ...]
    """All layers of the model; each kind of them apart, and attention and MLP, where one GPU may
    have more of either."""
    ends_s: tuple[float, ...]
    """Embedding, head."""


def lower_bound_s(
    inputs: Inputs, *, recomputing: bool = False, dtypes: Iterable[ComputeDtype] = ()
) -> float:
    """Return a time that no plan that fits can beat; `recomputing`: none that recomputes it all.

    Every sample passes embedding, layers and head once, forward and backward, on some GPU. Each
    GPU does its part of that at the best micro-batch size that its memory can hold, and the work is
    cut at will: no bubbles, no communication, no optimizer step. `dtypes`: types that groups of a
    plan compute in, other than the job's.

    With tensor-parallel groups too: what is not cut makes a part take more than its part of the
    time, and sums over a TP group are left out. GPUs of several kinds on a node may share a layer
    as they like, one more of the attention and one more of the MLP.

    The best way to share three kinds of work among unlike GPUs is a linear programme; any prices of
    the work give a lower bound of it (weak duality), and the largest of those is taken at the
    ratios at which a kind is indifferent. O(kinds^3).
    """
    kinds = _all_rates(inputs, recomputing, tuple(dtypes))
    choices = [
        _dual_prices([kind.ends_s[end] / sum(kind.layers_s) for kind in kinds]) for end in range(2)
    ]
    return inputs.global_batch_size * max(
        _dual_value(kinds, layers, prices)
        for layers in _layer_prices(kinds)
        for prices in product(*choices)
    )


def best_layers_per_s(inputs: Inputs, kind: str) -> float:
    """Highest rate of a kind: layers of one sample per second, forward, recompute and backward."""
    compute = inputs.compute
    rates = []
    for size in inputs.best_sizes[kind]:
        times = compute.layer(kind, size)
        whole_s = times.both_s + compute.recompute_s(kind, size, "full")
        rates.append(size / whole_s)
    return max(rates)


def _all_rates(inputs: Inputs, recomputing: bool, dtypes: tuple[ComputeDtype, ...]) -> list[_Rates]:
    return [
        _rates(inputs, kind, count, recomputing, dtypes)
        for kind, count in sorted(Counter(inputs.kinds).items())
    ]


def _layer_prices(kinds: Sequence[_Rates]) -> list[tuple[float, ...]]:
    """Prices of the layers' parts to try, which add up to 1."""
    return sorted(
        {tuple(part_s / sum(kind.layers_s) for part_s in kind.layers_s) for kind in kinds}
    )


def _dual_prices(ratios: Sequence[float]) -> list[float]:
    """Prices of an end to try; an end that takes a kind no time can have none above 0."""
    return [0.0] if min(ratios) <= 0 else sorted({0.0, *ratios})


def _dual_value(kinds: Sequence[_Rates], layers: Sequence[float], ends: Sequence[float]) -> float:
    """Seconds per sample if the layers' parts and the ends have these prices."""

    def best_per_s(kind: _Rates) -> float:
        rates = [p / s for p, s in zip(layers, kind.layers_s, strict=True)]
        return max(*rates, *(p / s for p, s in zip(ends, kind.ends_s, strict=True) if p), 0.0)

    return (1 + sum(ends)) / sum(kind.count * best_per_s(kind) for kind in kinds)


def _rates(
    inputs: Inputs, kind: str, count: int, recomputing: bool, dtypes: tuple[ComputeDtype, ...]
) -> _Rates:
    def least_s(of: Inputs, part: Callable[[Way, int], float]) -> float:
        sizes = _sizes(of, kind)
        return min(
            part(way, size) / size for way in ways_to_compute(of, kind, dtypes) for size in sizes
        )

    def layer_s(way: Way, size: int) -> float:
        return way.layer_s(kind, size, recomputing=recomputing)

    def half_s(half: int, way: Way, size: int) -> float:
        return way.halves_s(kind, size, recomputing=recomputing)[half]

    parts = [partial(half_s, half) for half in (0, 1)] if may_share_layers(inputs) else [layer_s]
    return _Rates(
        name=kind,
        count=count,
        layers_s=tuple(
            number * least_s(of, part) for of, number in _kinds_of_layers(inputs) for part in parts
        ),
        ends_s=(
            least_s(inputs, lambda way, size: way.compute.embedding(kind, size).both_s / way.rows),
            least_s(inputs, lambda way, size: way.compute.head(kind, size).both_s / way.rows),
        ),
    )


def _kinds_of_layers(inputs: Inputs) -> list[tuple[Inputs, int]]:
    """Inputs of models whose layers are all like some of this one's, and how many these are."""
    if inputs.layer_kinds is None:
        return [(inputs, inputs.num_layers)]
    counts, costs_of = Counter[int](), {}
    for costs, count in inputs.runs(0, inputs.num_layers):
        counts[id(costs)] += count
        costs_of[id(costs)] = replace(inputs, **vars(costs), layer_kinds=None)
    return [(costs_of[key], count) for key, count in counts.items()]


def _sizes(inputs: Inputs, kind: str) -> tuple[int, ...]:
    """Micro-batches that the batch has and the memory of a kind can hold.

    A layer's backward has all of its activations, kept or made again, so more than these fit in no
    plan; in types of half the bytes twice as many do.
    """
    capacity = max(
        bytes_
        for bytes_, each in zip(inputs.capacities_bytes, inputs.kinds, strict=True)
        if each == kind
    )
    memories = [inputs.memory, *(costs.memory for costs in inputs.by_dtype.values())]
    least = min(memory.activation_bytes(1, "none", kind) for memory in memories)
    held = int(capacity / (1 - inputs.memory_margin)) // max(1, least)
    if (most_ranks := largest_tp_degree(inputs)) > 1:  # together they hold a layer of more samples
        most_bytes = max(inputs.capacities_bytes) / (1 - inputs.memory_margin)
        held = int(most_ranks * most_bytes) // max(1, least)
    most = max(1, min(inputs.global_batch_size, held))
    sizes = set(range(1, min(most, _EVERY_SIZE_UP_TO) + 1)) | {most}
    size = _EVERY_SIZE_UP_TO
    while size < most:
        sizes.add(size)
        size *= 2
    return tuple(sorted(sizes))


# A lower bound that counts what must cross the links between two sides of the cluster.
#
# Take the GPUs behind a link (a node's NICs, a switch's uplink, the links of a region) as one side.
# An iteration of any plan is one of these:
#
# - A layer's computation is on one side only, and another's on the other only. Then every sample
#   crosses: its activation one way, the gradient of it the other.
# - Both sides compute all layers. Then gradients of all parameters are summed over the link, and
#   new parameters come back: whoever owns a parameter, its gradient crosses one way or its value
#   the other way, so one direction carries half of both at least.
# - One side computes everything, and the other a part of k layers, for a fraction f of the samples.
#   Those samples cross, and the k layers' gradients and parameters do. So the other side can take a
#   share f k / L of the work off, and for each share there is a k that sends least.
#
# Each direction of the link then carries what crosses, so the iteration takes that over its
# bandwidth at least, and what computing takes at least. The same holds for ranks of a
# tensor-parallel group on both sides: each of them has to learn what the others' parts of a layer
# add up to. Latencies, embedding and head are left out.


_HALVINGS = 60


@dataclass(frozen=True, kw_only=True)
class Side:
    """GPUs behind a link, and what it carries each way."""

    link: str
    ranks: tuple[int, ...]
    bytes_per_s: float


@dataclass(frozen=True, kw_only=True)
class Crossing:
    """What crosses a link at least, in bytes each way."""

    num_layers: int
    samples_bytes: float
    """Of an activation (or its gradient) of all samples."""
    layer_bytes: float
    """Of a layer of which both sides compute a part: its gradients and parameters."""

    def all_layers_bytes(self) -> float:
        """Both sides compute all layers, or every sample crosses."""
        return min(self.samples_bytes, self.num_layers * self.layer_bytes)

    def share_bytes(self, share: float) -> float:
        """One side takes this share of the layers' work off the other, which has all layers."""
        work = share * self.num_layers
        if work == 0.0:
            return 0.0
        # Of k layers and work / k of the samples: falls up to the root, then rises.
        best = math.sqrt(work * self.samples_bytes / self.layer_bytes)
        layers = min(max(best, work), self.num_layers)
        return work / layers * self.samples_bytes + layers * self.layer_bytes


def link_bound(
    inputs: Inputs, *, dtypes: Sequence[ComputeDtype] = (), narrow_gradients: bool = False
) -> LinkBound:
    """Return the largest bound over all links; that of `lower_bound_s` where no link counts.

    `dtypes`: types that groups compute in, other than the job's. `narrow_gradients`: gradients may
    be sent in 16 bits though the search may not choose that. O(links x kinds).
    """
    computing_s = lower_bound_s(inputs, dtypes=dtypes)
    rates = {kind.name: kind for kind in _all_rates(inputs, False, tuple(dtypes))}

    def layers_s(counts: Mapping[str, int]) -> float:
        """All layers of all samples, with so many GPUs of each kind; as `lower_bound_s`."""
        kinds = [replace(rates[kind], count=count) for kind, count in counts.items()]
        values = (_dual_value(kinds, layers, (0.0, 0.0)) for layers in _layer_prices(kinds))
        return inputs.global_batch_size * max(values)

    crossing = _crossing(inputs, dtypes, narrow_gradients)
    found = LinkBound(bound_s=computing_s, link=None)
    seen: set[object] = set()
    for side in sides(inputs.spec):
        inside = Counter(inputs.kinds[rank] for rank in side.ranks)
        key = frozenset(inside.items()), side.bytes_per_s
        if key in seen:
            continue
        seen.add(key)
        outside = Counter(inputs.kinds) - inside
        bound_s = min(
            crossing.all_layers_bytes() / side.bytes_per_s,
            *(_mostly_s(layers_s(near), crossing, side.bytes_per_s) for near in (inside, outside)),
        )
        if bound_s > found.bound_s:
            found = LinkBound(bound_s=bound_s, link=side.link)
    return found


def sides(spec: Topology) -> Iterator[Side]:
    """What lies behind the links of a cluster; nothing where all of it is on one side."""
    for number, node in enumerate(spec.nodes):
        name = f"the NICs of node {node.name}"
        yield from _side(spec, name, [number], node.nics_bytes_per_s)
    for switch in spec.switches:
        below = [
            number
            for number, node in enumerate(spec.nodes)
            if switch in spec.switches_above(node.switch)
        ]
        if below:
            rate = spec.uplink_bytes_per_s[switch.name]
            yield from _side(spec, f"the uplink of switch {switch.name}", below, rate)
    for region in spec.regions:
        links = [link for link in spec.region_links if region in link.regions]
        inside = [number for number, node in enumerate(spec.nodes) if node.region == region]
        rate = sum(link.bandwidth_bytes_per_s for link in links)
        if inside and rate:
            yield from _side(spec, f"the links of region {region}", inside, rate)


def _side(spec: Topology, link: str, nodes: Sequence[int], bytes_per_s: float) -> Iterator[Side]:
    if len(nodes) < len(spec.nodes):
        ranks = tuple(rank for node in nodes for rank in spec.ranks_of(node))
        yield Side(link=link, ranks=ranks, bytes_per_s=bytes_per_s)


def _crossing(inputs: Inputs, dtypes: Sequence[ComputeDtype], narrow: bool) -> Crossing:
    memories = [inputs.memory]
    if inputs.own_types is not None or dtypes:
        memories += [costs.memory for costs in inputs.by_dtype.values()]
    parameters = inputs.memory.layer_parameters()
    gradients = min(memory.gradient_bytes(parameters) for memory in memories)
    if narrow or inputs.space.grad_reduce_dtype is not None:
        gradients = min(gradients, 2 * parameters)
    values = min(memory.parameter_bytes(parameters) for memory in memories)
    samples = min(memory.boundary_bytes(1) for memory in memories) * inputs.global_batch_size
    return Crossing(
        num_layers=inputs.num_layers,
        samples_bytes=samples,
        layer_bytes=min(gradients, (gradients + values) / 2),
    )


def _mostly_s(near_s: float, crossing: Crossing, bytes_per_s: float) -> float:
    """Least time where the near side, which takes `near_s` for all layers, has all of them.

    What it still computes falls with the share that the far side takes off, what crosses rises.
    """

    def times(share: float) -> tuple[float, float]:
        return (1 - share) * near_s, crossing.share_bytes(share) / bytes_per_s

    low, high = 0.0, 1.0
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        computing_s, crossing_s = times(middle)
        low, high = (middle, high) if crossing_s < computing_s else (low, middle)
    return min(max(times(share)) for share in (low, high))


# How a GPU may compute its part of a plan, as far as lower bounds have to know.


@dataclass(frozen=True, kw_only=True)
class Way:
    """Costs of a rank that has these parts of each layer and of the vocabulary."""

    compute: ComputeCost
    in_two: TpComputeCost | None = None
    """The same, attention and MLP apart; None: where they are not asked for."""
    attention: float = 1.0
    mlp: float = 1.0
    rows: float = 1.0

    def layer_s(self, kind: str, size: int, *, recomputing: bool) -> float:
        """A whole layer at this rank's rate."""
        if (self.attention, self.mlp) != (1.0, 1.0):
            return sum(self.halves_s(kind, size, recomputing=recomputing))
        again_s = self.compute.recompute_s(kind, size, "full") if recomputing else 0.0
        return self.compute.layer(kind, size).both_s + again_s

    def halves_s(self, kind: str, size: int, *, recomputing: bool) -> tuple[float, float]:
        """A whole attention and a whole MLP."""
        assert self.in_two is not None
        halves = self.in_two.layer_in_two(kind, size)
        attention_s, mlp_s = (
            each.both_s + (each.forward_s if recomputing else 0.0)
            for each in (halves.attention, halves.mlp)
        )
        return attention_s / self.attention, mlp_s / self.mlp


def largest_tp_degree(inputs: Inputs) -> int:
    """Most ranks that a tensor-parallel group of a plan may have."""
    groups, space = inputs.model.num_query_groups, inputs.space
    if inputs.tp_costs is None or inputs.tp_members is not None or groups is None:
        return 1
    on_node = max(node.num_gpus for node in inputs.spec.nodes)
    near = inputs.world_size if space.tp_across_nodes else on_node
    return min(near, groups, space.max_tensor_parallel or near)


def may_share_layers(inputs: Inputs) -> bool:
    """Whether GPUs of several kinds may have other parts of the attention than of the MLP."""
    if largest_tp_degree(inputs) == 1 or not inputs.space.uneven_tp_shards:
        return False
    if inputs.space.tp_across_nodes:
        return len(set(inputs.kinds)) > 1
    return any(len(set(node.gpu_kinds)) > 1 for node in inputs.spec.nodes)


def ways_to_compute(inputs: Inputs, kind: str, dtypes: tuple[ComputeDtype, ...]) -> Iterator[Way]:
    """Yield every way in which a plan may let a kind compute.

    Of TP groups only what was measured in them: otherwise a part takes no less than its part of the
    time of the whole, as what is not cut takes as long.
    """
    own = inputs.own_types[kind] if inputs.own_types is not None else None
    allowed: list[ComputeDtype | None] = [None]
    allowed += [
        dtype
        for dtype in inputs.by_dtype
        if (dtype in dtypes if own is None else own.computes_in(dtype))
    ]
    for dtype in allowed:
        compute = inputs.compute if dtype is None else inputs.by_dtype[dtype].compute
        if largest_tp_degree(inputs) == 1:
            yield Way(compute=compute)
            continue
        assert inputs.tp_costs is not None
        yield Way(compute=compute, in_two=inputs.tp_costs.of_rank(WHOLE, dtype).compute)
        for degree in range(2, largest_tp_degree(inputs) + 1):
            equal = inputs.tp_costs.of_rank(TpShard(degree=degree), dtype).compute
            if equal.includes_collectives(kind, "layer"):
                part = 1 / degree
                yield Way(compute=equal, in_two=equal, attention=part, mlp=part, rows=part)
                yield from _most_unequal(inputs, degree, dtype)


def _most_unequal(inputs: Inputs, degree: int, dtype: ComputeDtype | None) -> Iterator[Way]:
    """The rank that has as much as can be: nearly all of what is not cut is done once there."""
    model = inputs.model
    groups, columns, rows = model.num_query_groups, model.ffn_hidden_size, model.vocab_size
    if not inputs.space.uneven_tp_shards or groups is None or columns is None or rows is None:
        return
    assert inputs.tp_costs is not None
    others = degree - 1
    tp_shards = TpShards(
        kv_groups=(groups - others, *(1,) * others),
        mlp_columns=(columns - others, *(1,) * others),
        vocabulary_rows=(rows - others, *(1,) * others),
    )
    found = inputs.tp_costs.of_rank(TpShard(degree=degree, tp_shards=tp_shards), dtype).compute
    yield Way(
        compute=found,
        in_two=found,
        attention=(groups - others) / groups,
        mlp=(columns - others) / columns,
        rows=(rows - others) / rows,
    )
