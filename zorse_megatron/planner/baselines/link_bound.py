"""A lower bound that counts what must cross the links between two sides of the cluster.

Take the GPUs behind a link (a node's NICs, a switch's uplink, the links of a region) as one side.
An iteration of any plan is one of these:

- A layer's computation is on one side only, and another's on the other only. Then every sample
  crosses: its activation one way, the gradient of it the other.
- Both sides compute all layers. Then gradients of all parameters are summed over the link, and new
  parameters come back: whoever owns a parameter, its gradient crosses one way or its value the
  other way, so one direction carries half of both at least.
- One side computes everything, and the other a part of k layers, for a fraction f of the samples.
  Those samples cross, and the k layers' gradients and parameters do. So the other side can take a
  share f k / L of the work off, and for each share there is a k that sends least.

Each direction of the link then carries what crosses, so the iteration takes that over its bandwidth
at least, and what computing takes at least. The same holds for ranks of a tensor-parallel set on
both sides: each of them has to learn what the others' parts of a layer add up to. Latencies,
embedding and head are left out.
"""

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from zorse_megatron.planner.baselines.lower_bound import LayerBounds, lower_bound_s
from zorse_megatron.planner.inputs.search_inputs import Inputs
from zorse_megatron.planner.outcome import LinkBound
from zorse_megatron.schema.gpus.gpu import ComputeDtype
from zorse_megatron.schema.plan.plan import Plan
from zorse_megatron.topology.cluster_topology import Topology

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
    layers = LayerBounds(inputs, dtypes=dtypes)
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
            *(_mostly_s(layers.of(near), crossing, side.bytes_per_s) for near in (inside, outside)),
        )
        if bound_s > found.bound_s:
            found = LinkBound(bound_s=bound_s, link=side.link)
    return found


def plan_link_bound(inputs: Inputs, plan: Plan) -> LinkBound:
    """Return the bound for plans whose groups compute and send gradients in this one's types."""
    types = {group.compute_dtype for group in plan.groups if group.compute_dtype}
    wires = any(group.gradient_wire for group in plan.groups)
    return link_bound(inputs, dtypes=sorted(types), narrow_gradients=wires)


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
    if narrow or inputs.space.gradient_comm_dtype is not None:
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
