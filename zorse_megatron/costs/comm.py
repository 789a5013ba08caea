"""Time of transfers and collectives over the topology graph: the `CommCost` of the simulator.

Gathers and scatters are rings, which is what NCCL runs for them: bytes per link over the bandwidth
of the slowest link of the ring, plus the latency of the way round. Costs depend on the nodes of a
set, not on pairs of ranks: O(ranks) to look at the arguments and O(nodes) for a new set.
"""

import math
from typing import Any

from zorse_megatron.costs.direct_exchange import largest_load
from zorse_megatron.costs.rank_set import RankSet, RankSets
from zorse_megatron.costs.rings import UNEVEN_PENALTY, Shards
from zorse_megatron.schema.profile.profile import Sharded
from zorse_megatron.topology.cluster_topology import MeasuredNode, Topology
from zorse_megatron.topology.link_curves import curve_for
from zorse_megatron.topology.routes import Routes

# Transfers between pairs of ranks, some hundred bytes each.
_MOST_REMEMBERED = 1 << 15


class GraphComm:
    """Communication cost over a cluster's topology; see `costs.interface.CommCost`."""

    def __init__(self, spec: Topology) -> None:
        self.spec = spec
        self.routes = Routes(spec)
        self._rank_sets = RankSets(self.routes)
        self._sets: dict[tuple[int, ...], RankSet] = {}
        self._factors: dict[tuple[tuple[int, ...], Sharded], float] = {}
        self._transfers: dict[tuple[int, int, int], float] = {}
        self._links: dict[tuple[int, int], tuple[tuple[str, float], ...]] = {}

    def transfer_s(self, source: int, target: int, num_bytes: int) -> float:
        """Point to point: the latency of the way, and the time on its slowest link."""
        key = source, target, num_bytes
        found = self._transfers.get(key)
        if found is None:
            _make_room(self._transfers)
            found = self._transfers[key] = self._transfer_s(source, target, num_bytes)
        return found

    def _transfer_s(self, source: int, target: int, num_bytes: int) -> float:
        if source == target:
            return 0.0
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
        _check(ranks, shard_bytes)
        if len(ranks) == 1 or not any(shard_bytes):
            return 0.0
        shards = Shards.of(shard_bytes)
        factor = 1.0 if shards.is_even else self._factor(ranks, operation)
        ring_s = factor * _around_s(self._set(ranks), shards)
        if not self.spec.unequal_shards or shards.is_even:
            return ring_s
        # No measured factor makes unequal shards faster than equal ones of the same total.
        equal = (-(-sum(shard_bytes) // len(ranks)),) * len(ranks)
        return max(ring_s, self._ring_s(ranks, equal, operation))

    def _factor(self, ranks: tuple[int, ...], operation: Sharded) -> float:
        """Of unequal shards: the largest that was measured with these kinds of GPU, or some."""
        if not self.spec.unequal_shards:
            return UNEVEN_PENALTY
        key = ranks, operation
        if key not in self._factors:
            _make_room(self._factors)
            nodes = {self.spec.node_of(rank) for rank in ranks}
            link = "intra-node" if len(nodes) == 1 else "inter-node"
            kinds = {self.spec.kind_of(rank) for rank in ranks}
            measured = (
                each.factor
                for each in self.spec.unequal_shards
                if (each.operation, each.link) == (operation, link)
                and kinds.issuperset(each.gpu_kinds)
            )
            self._factors[key] = max(measured, default=UNEVEN_PENALTY)
        return self._factors[key]

    def exchange_s(self, ranks: tuple[int, ...], shard_bytes: tuple[int, ...]) -> float:
        """All messages at once: the busiest GPU, node or region, and the longest way."""
        _check(ranks, shard_bytes)
        if len(ranks) == 1 or not any(shard_bytes):
            return 0.0
        members, message = self._set(ranks), Shards.of(shard_bytes).mean_bytes
        nodes = [self.spec.node_of(rank) for rank in ranks]
        regions = [self.spec.nodes[node].region for node in nodes]
        between = max(largest_load(nodes, shard_bytes), largest_load(regions, shard_bytes))
        inside = largest_load(ranks, shard_bytes) if members.inside else 0.0
        slowest_inside = min((node.rate.at(message) for node in members.inside), default=math.inf)
        inside_s = [node.floor_s for node in members.inside]
        latency_s = max(members.near_latency_s, members.far_latency_s, *inside_s)
        return latency_s + max(between / members.between.at(message), inside / slowest_inside)

    def all_reduce_s(self, ranks: tuple[int, ...], num_bytes: int) -> float:
        """The faster of a ring (scatter, then gather) and a tree over regions, nodes and GPUs."""
        if len(ranks) < 2:
            return 0.0
        members = self._set(ranks)
        even = Shards.of((num_bytes / len(ranks),) * len(ranks))
        ring_s = 2 * _around_s(members, even)
        return min(ring_s, _tree_s(members, num_bytes))

    def host_link_bytes_per_s(self, rank: int) -> float:
        """PCIe of one GPU to host memory."""
        return self.spec.nodes[self.spec.node_of(rank)].host_link_bytes_per_s

    def _set(self, ranks: tuple[int, ...]) -> RankSet:
        if ranks not in self._sets:
            self._sets[ranks] = self._rank_sets.of(ranks)
        return self._sets[ranks]


def _make_room(remembered: dict[Any, Any]) -> None:
    """Forget everything where it has become much: a search asks for the same again and again."""
    if len(remembered) >= _MOST_REMEMBERED:
        remembered.clear()


def _check(ranks: tuple[int, ...], shard_bytes: tuple[int, ...]) -> None:
    if len(ranks) != len(shard_bytes) or not ranks:
        raise ValueError(
            f"found {len(ranks)} ranks and {len(shard_bytes)} shards; expected as many of both"
        )


def _leave_node_s(node: MeasuredNode, num_bytes: int) -> float:
    """Time from one GPU through the NIC, or the other way; as measured where it was."""
    if node.nic_curves:
        return curve_for(node.nic_curves, 1).transfer_s(num_bytes)
    return num_bytes / min(node.host_link_bytes_per_s, node.port_bytes_per_s)


def _around_s(members: RankSet, shards: Shards) -> float:
    return shards.ring_bytes / members.ring_rate(shards.mean_bytes) + members.ring_latency_s


def _tree_s(members: RankSet, num_bytes: int) -> float:
    """Reduce to one rank over a binary tree and send the result back the same way."""
    most_inside = max((node.count for node in members.nodes), default=1)
    inside_latency_s = max((node.floor_s for node in members.inside), default=0.0)
    depth_s = math.ceil(math.log2(most_inside)) * inside_latency_s
    depth_s += math.ceil(math.log2(len(members.nodes))) * members.near_latency_s
    depth_s += math.ceil(math.log2(members.num_regions)) * members.far_latency_s
    return 2 * (depth_s + num_bytes / members.ring_rate(num_bytes))
