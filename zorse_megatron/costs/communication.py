"""Time of transfers and collectives over the topology graph.

Gathers and scatters are rings, which is what NCCL runs for them: bytes per link over the bandwidth
of the slowest link of the ring, plus the latency of the way round. Costs depend on the nodes of a
set, not on pairs of ranks: O(ranks) to look at the arguments and O(nodes) for a new ring.
"""

import math
from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from zorse_megatron.costs.interface import (
    NO_TIME,
    CommCost,
    ModelSection,
    PassTimes,
    TpCosts,
    TpTraits,
)
from zorse_megatron.costs.link_bandwidth import Curves, curve_for
from zorse_megatron.costs.topology import DirectedLink, MeasuredNode, Routes, Topology, numbered
from zorse_megatron.inputs.profile import Sharded

# The network view of a collective over a ring of ranks: nodes, not pairs of ranks.
#
# A ring visits the nodes one after the other, those on one switch and in one region together. It
# enters and leaves each node once, so the node's NICs carry the ring's traffic once, whatever the
# number of ranks on the node; the same holds for the uplink of a switch.


@dataclass(frozen=True, kw_only=True)
class Rate:
    """Bandwidth of several links in a row: constants, and curves for this many sharers."""

    constant_bytes_per_s: float
    curves: tuple[tuple[Curves, int], ...] = ()

    def at(self, message_bytes: float) -> float:
        """The lowest of all for messages of this size. O(distinct curves)."""
        if not self.curves:  # as in most clusters; asked for some 100,000 times in a search
            return self.constant_bytes_per_s
        rates = (
            curve_for(curves, sharing).bytes_per_s(message_bytes) for curves, sharing in self.curves
        )
        return min((self.constant_bytes_per_s, *rates))


@dataclass(frozen=True, kw_only=True)
class LocalRanks:
    """The ranks of a ring that are on one node."""

    count: int
    rate: Rate
    step_latency_s: float
    floor_s: float
    """A message of no size inside the node, by the curves where there are some."""


@dataclass(frozen=True, kw_only=True)
class RankRing:
    """Ranks of one collective, as a ring over nodes."""

    nodes: tuple[LocalRanks, ...]
    """In ring order."""
    inside: tuple[LocalRanks, ...]
    """The different kinds of nodes with two ranks or more."""
    between: Rate
    """What the ring gets between nodes; infinite with one node."""
    crossing_s: tuple[float, ...]
    """Latency from each node to the next, the last to the first."""
    near_latency_s: float
    """Longest time of a message of no size between nodes of one region."""
    far_latency_s: float
    """The same between regions; 0 in one region."""
    num_regions: int

    @property
    def ring_latency_s(self) -> float:
        """Latency of the longest way round: all steps but the shortest."""
        steps_s = sum((node.count - 1) * node.step_latency_s for node in self.nodes)
        alone = len(self.nodes) == 1
        crossings = (self.nodes[0].step_latency_s,) if alone else self.crossing_s
        shortest = min(*crossings, *(node.step_latency_s for node in self.inside), math.inf)
        return steps_s + sum(crossings) - (shortest if shortest < math.inf else 0.0)

    def ring_rate(self, message_bytes: float) -> float:
        """Bandwidth of the whole ring."""
        return min(
            self.between.at(message_bytes),
            *(node.rate.at(message_bytes) for node in self.inside),
            math.inf,
        )


class RankRings:
    """Summarises rings of ranks of one cluster; what nodes that look alike add to them is kept.

    A search asks for thousands of rings of the same nodes.
    """

    def __init__(self, routes: Routes) -> None:
        self._routes = routes
        spec = routes.spec
        self._look = numbered(map(_look, spec.nodes))
        in_order = sorted(range(len(spec.nodes)), key=lambda node: (*_location(spec, node), node))
        self._place = {node: place for place, node in enumerate(in_order)}
        self._local: dict[tuple[int, int], LocalRanks] = {}
        self._crossings: dict[tuple[int, int], _Crossing] = {}
        self._exits: dict[tuple[int, tuple[int, ...]], float] = {}

    def of(self, ranks: tuple[int, ...]) -> RankRing:
        """Summarise a ring of ranks. O(ranks + nodes * length of a route)."""
        spec = self._routes.spec
        on_node: dict[int, list[int]] = {}
        for rank, owner in zip(ranks, map(spec.node_of, ranks), strict=True):
            on_node.setdefault(owner, []).append(rank)
        order = sorted(on_node, key=self._place.__getitem__)
        nodes = tuple(self._local_of(node, len(on_node[node])) for node in order)
        crossings = [
            self._crossing(first, second)
            for first, second in zip(order, order[1:] + order[:1], strict=True)
            if first != second
        ]
        kinds = tuple({id(each): each for each in crossings}.values())
        inside = {id(node): node for node in nodes if node.count > 1}  # equal ones are mostly one
        return RankRing(
            nodes=nodes,
            inside=tuple(dict.fromkeys(inside.values())),
            between=self._between(on_node, crossings),
            crossing_s=tuple(crossing.latency_s for crossing in crossings),
            near_latency_s=max((each.floor_s for each in kinds if not each.is_far), default=0.0),
            far_latency_s=max((each.floor_s for each in kinds if each.is_far), default=0.0),
            num_regions=len({spec.nodes[node].region for node in order}),
        )

    def _local_of(self, index: int, count: int) -> LocalRanks:
        key = self._look[index], count
        if key not in self._local:
            self._local[key] = _local(self._routes.spec.nodes[index], count)
        return self._local[key]

    def _crossing(self, first: int, second: int) -> "_Crossing":
        key = self._look[first], self._look[second]
        if key not in self._crossings:
            nodes = self._routes.spec.nodes
            self._crossings[key] = _Crossing(
                ends=(nodes[first], nodes[second]), links=self._routes.between_nodes(first, second)
            )
        return self._crossings[key]

    def _between(self, on_node: dict[int, list[int]], crossings: list["_Crossing"]) -> Rate:
        """NICs of every node, and links between nodes by how often the ring passes them."""
        if len(on_node) == 1:
            return Rate(constant_bytes_per_s=math.inf)
        passes: Counter[DirectedLink] = Counter()
        times = Counter(map(id, crossings))
        for number, crossing in {id(each): each for each in crossings}.items():
            for link in crossing.links:
                passes[link] += times[number]
        rates = [link.bytes_per_s / count for link, count in passes.items()]
        curves: dict[tuple[Curves, int], None] = {}
        for index, ranks in on_node.items():
            node = self._routes.spec.nodes[index]
            if node.nic_curves:  # measured from the GPUs on
                curves[node.nic_curves, len(ranks)] = None
            else:
                rates.append(self._exit_bytes_per_s(index, tuple(ranks)))
        return Rate(constant_bytes_per_s=min(rates, default=math.inf), curves=tuple(curves))

    def _exit_bytes_per_s(self, index: int, ranks: tuple[int, ...]) -> float:
        """What GPUs of a node get through their host links and ports together."""
        key = index, ranks
        if key not in self._exits:
            spec = self._routes.spec
            node = spec.nodes[index]
            ports = {node.port_of(rank - spec.first_ranks[index]) for rank in ranks}
            self._exits[key] = min(
                len(ranks) * node.host_link_bytes_per_s, len(ports) * node.port_bytes_per_s
            )
        return self._exits[key]


def _look(node: MeasuredNode) -> tuple[object, ...]:
    """Equal for nodes that are the same in a ring."""
    return (
        node.region,
        node.switch,
        node.link,
        node.intra_curves,
        node.nic_curves,
        node.nic_to_switch_latency_s,
    )


@dataclass(frozen=True, kw_only=True)
class _Crossing:
    """The ring's way from one node to the next."""

    ends: tuple[MeasuredNode, MeasuredNode]
    links: tuple[DirectedLink, ...]

    @cached_property
    def is_far(self) -> bool:
        """Whether it leaves the region."""
        return self.ends[0].region != self.ends[1].region

    @cached_property
    def latency_s(self) -> float:
        """Without what measured curves contain."""
        return sum(node.nic_to_switch_latency_s for node in self.ends) + sum(
            link.latency_s for link in self.links
        )

    @cached_property
    def floor_s(self) -> float:
        """Time of a message of no size, measured curves included."""
        measured = (
            curve_for(node.nic_curves, 1).transfer_s(0) for node in self.ends if node.nic_curves
        )
        return self.latency_s + max(measured, default=0.0)


def _location(spec: Topology, index: int) -> tuple[str, tuple[str, ...]]:
    """Region, then switches from the top: nodes that share much come next to one another."""
    node = spec.nodes[index]
    chain = spec.switches_above(node.switch)
    return node.region, tuple(switch.name for switch in reversed(chain))


def _local(node: MeasuredNode, count: int) -> LocalRanks:
    if not node.intra_curves:
        rate = Rate(constant_bytes_per_s=node.link.bandwidth_bytes_per_s)
        return LocalRanks(
            count=count, rate=rate, step_latency_s=node.link.latency_s, floor_s=node.link.latency_s
        )
    # The curve's own floor is the latency, paid with every message.
    rate = Rate(constant_bytes_per_s=math.inf, curves=((node.intra_curves, count),))
    floor_s = curve_for(node.intra_curves, count).transfer_s(0)
    return LocalRanks(count=count, rate=rate, step_latency_s=0.0, floor_s=floor_s)


# Load of one link in a ring gather or scatter, over equal or unequal shards.
#
# A gather is one broadcast per owner, passed on from rank to rank, all at once: NCCL's all-gather
# over equal shards, its grouped broadcasts over unequal ones. The link into a rank carries every
# shard but that rank's own, so the busiest link carries all but the smallest: S - s_min bytes,
# S * (N - 1) / N where all are equal. A reduce-scatter is a gather backwards: each link carries the
# same, so one formula serves both (the additions hide behind the transfers). Shards padded to the
# largest would carry s_max * (N - 1), which is never less, and need room in GPUs that are full.


UNEVEN_PENALTY = 1.25
"""Factor on the time of collectives over unequal shards where it was not measured.

Cephalo (ICS 2025, section 4: "x 1.25 on collectives when uneven") measured NCCL's to take a quarter
longer than over equal shards of the same total. `zorse discover` measures it on a cluster.
"""


@dataclass(frozen=True, kw_only=True)
class Shards:
    """What matters of a list of shard sizes."""

    count: int
    total_bytes: float
    smallest_bytes: float
    is_even: bool

    @classmethod
    def of(cls, sizes: tuple[float, ...]) -> "Shards":
        """Summarise. O(shards)."""
        smallest = min(sizes)
        return cls(
            count=len(sizes),
            total_bytes=sum(sizes),
            smallest_bytes=smallest,
            is_even=max(sizes) == smallest,
        )

    @property
    def mean_bytes(self) -> float:
        """Size of a message when the buffer is sent shard by shard."""
        return self.total_bytes / self.count

    @property
    def ring_bytes(self) -> float:
        """What the busiest link of a ring carries.

        >>> Shards.of((60.0, 20.0, 20.0)).ring_bytes
        80.0
        """
        return self.total_bytes - self.smallest_bytes


# Transfers between pairs of ranks, some hundred bytes each.
_MOST_REMEMBERED = 1 << 15


class GraphComm:
    """Communication cost over a cluster's topology; see `costs.interface.CommCost`."""

    def __init__(self, spec: Topology) -> None:
        self.spec = spec
        self.routes = Routes(spec)
        self._rings = RankRings(self.routes)
        self._known: dict[tuple[int, ...], RankRing] = {}
        self._look = numbered(node.unnamed for node in spec.nodes)
        self._transfers: dict[tuple[int, int, bool, int], float] = {}
        self._links: dict[tuple[int, int], tuple[tuple[str, float], ...]] = {}

    def transfer_s(self, source: int, target: int, num_bytes: int) -> float:
        """Point to point: the latency of the way, and the time on its slowest link."""
        if source == target:
            return 0.0
        first, second = self.spec.node_of(source), self.spec.node_of(target)
        key = self._look[first], self._look[second], first == second, num_bytes
        found = self._transfers.get(key)
        if found is None:
            _make_room(self._transfers)
            found = self._transfers[key] = self._transfer_s(source, target, num_bytes)
        return found

    def _transfer_s(self, source: int, target: int, num_bytes: int) -> float:
        """The same for all GPUs of nodes that look alike."""
        route = self.routes.route(source, target)
        first, second = self.spec.node_of(source), self.spec.node_of(target)
        nodes = (self.spec.nodes[first], self.spec.nodes[second])
        if first == second and nodes[0].intra_curves:
            return curve_for(nodes[0].intra_curves, 2).transfer_s(num_bytes)
        if first == second:
            return route.latency_s + num_bytes / route.bytes_per_s
        between = self.routes.between_nodes(first, second)
        slowest = min((link.bytes_per_s for link in between), default=math.inf)
        ends_s = (_leave_node_s(node, num_bytes) for node in nodes)
        return route.latency_s + max(num_bytes / slowest, *ends_s)

    def shared_links(self, source: int, target: int) -> tuple[tuple[str, float], ...]:
        """Links on the way with what each carries, in the order of travel."""
        key = source, target
        found = self._links.get(key)
        if found is None:
            _make_room(self._links)
            route = self.routes.route(source, target)
            found = tuple((link.name, link.bytes_per_s) for link in route.links)
            self._links[key] = found
        return found

    def reduce_scatter_s(self, ranks: tuple[int, ...], shard_bytes: tuple[int, ...]) -> float:
        """As the all-gather backwards, but for what unequal shards cost."""
        return self._ring_s(ranks, shard_bytes, "reduce_scatter")

    def all_gather_s(self, ranks: tuple[int, ...], shard_bytes: tuple[int, ...]) -> float:
        """Once around a ring; 0 for one rank or no bytes."""
        return self._ring_s(ranks, shard_bytes, "all_gather")

    def _ring_s(
        self, ranks: tuple[int, ...], shard_bytes: tuple[int, ...], operation: Sharded
    ) -> float:
        if len(ranks) == 1 or not any(shard_bytes):
            return 0.0
        shards = Shards.of(shard_bytes)
        factor = 1.0 if shards.is_even else self._factor(ranks, operation)
        ring_s = factor * _around_s(self._ring(ranks), shards)
        if not self.spec.unequal_shards or shards.is_even:
            return ring_s
        # No measured factor makes unequal shards faster than equal ones of the same total.
        equal = (-(-sum(shard_bytes) // len(ranks)),) * len(ranks)
        return max(ring_s, self._ring_s(ranks, equal, operation))

    def _factor(self, ranks: tuple[int, ...], operation: Sharded) -> float:
        """Of unequal shards: the largest that was measured with these kinds of GPU, or some."""
        if not self.spec.unequal_shards:
            return UNEVEN_PENALTY
        nodes = {self.spec.node_of(rank) for rank in ranks}
        link = "intra-node" if len(nodes) == 1 else "inter-node"
        kinds = {self.spec.kind_of(rank) for rank in ranks}
        measured = (
            each.factor
            for each in self.spec.unequal_shards
            if (each.operation, each.link) == (operation, link) and kinds.issuperset(each.gpu_kinds)
        )
        return max(measured, default=UNEVEN_PENALTY)

    def exchange_s(self, ranks: tuple[int, ...], shard_bytes: tuple[int, ...]) -> float:
        """All messages at once: the busiest GPU, node or region, and the longest way."""
        if len(ranks) == 1 or not any(shard_bytes):
            return 0.0
        members, message = self._ring(ranks), Shards.of(shard_bytes).mean_bytes
        nodes = [self.spec.node_of(rank) for rank in ranks]
        regions = [self.spec.nodes[node].region for node in nodes]
        between = max(largest_load(nodes, shard_bytes), largest_load(regions, shard_bytes))
        inside = largest_load(ranks, shard_bytes) if members.inside else 0.0
        slowest_inside = min((node.rate.at(message) for node in members.inside), default=math.inf)
        inside_s = [node.floor_s for node in members.inside]
        latency_s = max(members.near_latency_s, members.far_latency_s, *inside_s)
        return latency_s + max(between / members.between.at(message), inside / slowest_inside)

    def tokens_s(self, ranks: tuple[int, ...], bytes_to: Callable[[int], float]) -> float:
        """Tokens of each rank on their way to those with their experts, or back, at least: each
        crosses once to another rank of its node, and once to another node, both at the same time.

        `bytes_to`: what a rank has for so many of the ranks together.
        """
        on_node: dict[int, list[int]] = {}
        for rank in ranks:
            on_node.setdefault(self.spec.node_of(rank), []).append(rank)
        one = round(bytes_to(1))
        found_s = max(self.exchange_s(tuple(some), (one,) * len(some)) for some in on_node.values())
        if len(on_node) == 1:
            return found_s
        counts = [len(on_node[self.spec.node_of(rank)]) for rank in ranks]
        between = tuple(round(bytes_to(count) / count) for count in counts)
        return max(found_s, self.exchange_s(ranks, between))

    def all_reduce_s(self, ranks: tuple[int, ...], num_bytes: int) -> float:
        """The faster of a ring (scatter, then gather) and a tree over regions, nodes and GPUs."""
        if len(ranks) < 2:
            return 0.0
        members = self._ring(ranks)
        even = Shards.of((num_bytes / len(ranks),) * len(ranks))
        ring_s = 2 * _around_s(members, even)
        return min(ring_s, _tree_s(members, num_bytes))

    def host_link_bytes_per_s(self, rank: int) -> float:
        """PCIe of one GPU to host memory."""
        return self.spec.node_with(rank).host_link_bytes_per_s

    def _ring(self, ranks: tuple[int, ...]) -> RankRing:
        if ranks not in self._known:
            self._known[ranks] = self._rings.of(ranks)
        return self._known[ranks]


def _make_room(remembered: dict[Any, Any]) -> None:
    """Forget everything where it has become much: a search asks for the same again and again."""
    if len(remembered) >= _MOST_REMEMBERED:
        remembered.clear()


def _leave_node_s(node: MeasuredNode, num_bytes: int) -> float:
    """Time from one GPU through the NIC, or the other way; as measured where it was."""
    if node.nic_curves:
        return curve_for(node.nic_curves, 1).transfer_s(num_bytes)
    return num_bytes / min(node.host_link_bytes_per_s, node.port_bytes_per_s)


def _around_s(members: RankRing, shards: Shards) -> float:
    return shards.ring_bytes / members.ring_rate(shards.mean_bytes) + members.ring_latency_s


def _tree_s(members: RankRing, num_bytes: int) -> float:
    """Reduce to one rank over a binary tree and send the result back the same way."""
    most_inside = max((node.count for node in members.nodes), default=1)
    inside_latency_s = max((node.floor_s for node in members.inside), default=0.0)
    depth_s = math.ceil(math.log2(most_inside)) * inside_latency_s
    depth_s += math.ceil(math.log2(len(members.nodes))) * members.near_latency_s
    depth_s += math.ceil(math.log2(members.num_regions)) * members.far_latency_s
    return 2 * (depth_s + num_bytes / members.ring_rate(num_bytes))


# Time of an exchange in which every rank sends each owner its part of a buffer directly.
#
# Unlike around a ring, what the ranks behind a slow link have to say crosses it rank by rank: of a
# buffer of S bytes over n ranks, k of which are behind the link and own O bytes, k (S - O) bytes
# leave and (n - k) O arrive. A ring carries about S each way, whatever k is. So narrow messages pay
# where few ranks are on each side, and lose where many share a NIC.


def largest_load(sides: Sequence[Hashable], shard_bytes: Sequence[float]) -> float:
    """Most bytes that enter or leave a side. O(ranks).

    `sides`: for each rank, what it is in (a node, a region; itself).

    >>> largest_load(["a", "a", "b"], [30.0, 10.0, 20.0])
    40.0
    >>> largest_load([0, 1, 2], [30.0, 10.0, 20.0])
    60.0
    """
    counts = Counter(sides)
    owned: Counter[Hashable] = Counter()
    for side, size in zip(sides, shard_bytes, strict=True):
        owned[side] += size  # type: ignore[assignment]  # bytes may be fractions
    total, ranks = sum(shard_bytes), len(sides)
    loads = (
        max(count * (total - owned[side]), (ranks - count) * owned[side])
        for side, count in counts.items()
    )
    return max(loads, default=0.0)


# Communication of tensor-parallel groups: inside computations, and between TP groups.
#
# Without sequence parallelism a layer sums two activations over the TP group forward and two
# gradients backward; the vocabulary-parallel embedding sums its output, the output layer its
# input's gradient (Shoeybi et al. 2019, arXiv 1909.08053, section 3). With it each sum is a reduce-
# scatter and an all-gather, which are as many bytes (Korthikanti et al. 2022, arXiv 2205.05198,
# section 4.2); inputs that are gathered once more for the gradients of weights are not counted, as
# that gather overlaps with a product. The loss sums one number per token three times
# (`vocab_parallel_cross_entropy`). Of adapters what crosses is A x: where inputs are cut forward,
# and where outputs are its gradient backward (`adapter.model.lora`).
#
# Links are taken to be idle, and nothing overlaps with computation.


_FLOAT32_BYTES = 4
_SUMS_OF_LOSS = 3


@dataclass(frozen=True, kw_only=True)
class TpCollectives:
    """Collectives of TP groups; `num_bytes` is a whole activation of a micro-batch, `ranks` a TP
    group."""

    comm: CommCost
    traits: TpTraits

    def of(
        self, section: ModelSection, ranks: Sequence[int], num_bytes: int, num_tokens: int
    ) -> PassTimes:
        """One layer, the embedding, or output layer and loss."""
        sum_s = self._sum_s(ranks, num_bytes)
        if section == "layer":
            sums = PassTimes(forward_s=2 * sum_s, backward_s=2 * sum_s)
            return sums + self._of_adapters(ranks, num_bytes)
        half_s = self.gather_s(ranks, num_bytes) if self.traits.sequence_parallel else 0.0
        if section == "embedding":
            # Its output is summed and cut; the gradient is gathered from its parts. Learned
            # positions are added in between, to the whole (`LanguageModelEmbedding.forward`).
            whole_s = self.comm.all_reduce_s(tuple(ranks), num_bytes)
            forward_s = whole_s if self.traits.learns_positions else sum_s - half_s
            return PassTimes(forward_s=forward_s, backward_s=half_s)
        loss_s = _SUMS_OF_LOSS * self.comm.all_reduce_s(tuple(ranks), num_tokens * _FLOAT32_BYTES)
        return PassTimes(forward_s=half_s + loss_s, backward_s=sum_s - half_s)

    def gather_s(self, ranks: Sequence[int], num_bytes: int) -> float:
        """An activation of which every rank has its part of the sequence."""
        return self.comm.all_gather_s(tuple(ranks), _parts(num_bytes, len(ranks)))

    def _of_adapters(self, ranks: Sequence[int], num_bytes: int) -> PassTimes:
        """Of one layer; `num_bytes`: of a whole activation."""
        columns, rows = (
            [round(num_bytes * each) for each in x] for x in self.traits.adapter_shares
        )
        if not columns and not rows:
            return NO_TIME
        group, comm = tuple(ranks), self.comm
        if not self.traits.sequence_parallel:
            return PassTimes(
                forward_s=sum(comm.all_reduce_s(group, each) for each in rows),
                backward_s=sum(comm.all_reduce_s(group, each) for each in columns),
            )
        gathers_s, scatters_s = (
            [
                sum(time_s(group, _parts(each, len(group))) for each in sizes)
                for sizes in (columns, rows)
            ]
            for time_s in (comm.all_gather_s, comm.reduce_scatter_s)
        )
        return PassTimes(
            forward_s=gathers_s[0] + scatters_s[1], backward_s=scatters_s[0] + gathers_s[1]
        )

    def _sum_s(self, ranks: Sequence[int], num_bytes: int) -> float:
        if not self.traits.sequence_parallel:
            return self.comm.all_reduce_s(tuple(ranks), num_bytes)
        scatter_s = self.comm.reduce_scatter_s(tuple(ranks), _parts(num_bytes, len(ranks)))
        return scatter_s + self.gather_s(ranks, num_bytes)


# Stock's expert parallelism, at least: of whatever dispatcher sends least, on idle links.


def once_s(
    comm: CommCost, tp_costs: TpCosts, ranks: Sequence[int], degree: int, num_bytes: int
) -> float:
    """The tokens of a micro-batch on their way to their experts, or back, in the slowest of the
    groups of `degree` that `ranks`, the replicas of a stage, make one after the other.

    `num_bytes`: of a micro-batch's activation.
    """

    def bytes_to(count: int) -> float:
        held = range(tp_costs.traits.num_experts // degree * count)
        return num_bytes * tp_costs.share_of_tokens(held)

    assert isinstance(comm, GraphComm), "stock's layouts are costed on a cluster"
    groups = (tuple(ranks[at : at + degree]) for at in range(0, len(ranks), degree))
    return max(comm.tokens_s(group, bytes_to) for group in groups)


def _parts(num_bytes: int, count: int) -> tuple[int, ...]:
    return tuple(num_bytes * (n + 1) // count - num_bytes * n // count for n in range(count))
