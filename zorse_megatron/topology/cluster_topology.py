"""What the topology graph is made of: the nodes, switches and region links of a cluster file, and
what was measured of the nodes' links.

Whether they fit each other is checked where the cluster file is read (`schema/cluster`).
"""

import dataclasses
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate

from zorse_megatron.schema.cluster.cluster import Nics, Node, RegionLink, Switch
from zorse_megatron.schema.profile.profile import UnequalShards
from zorse_megatron.topology.link_curves import Curves, curve_for


@dataclass(frozen=True, kw_only=True)
class MeasuredNode(Node):
    """A node, and the measured curves of its links, which replace bandwidth and latency.

    `link.bandwidth_bytes_per_s` is what one GPU sends to one other, each way, and `link.type` says
    what is shared inside. `nvswitch`: each GPU has one port to a switch that does not block.
    `nvlink`: each pair of GPUs has a link of its own. `pcie`: through the host, over the PCIe link
    that leads to host memory and NICs as well.
    """

    intra_curves: Curves = ()
    """What each of n GPUs of a ring sends; none: not measured."""
    nic_curves: Curves = ()
    """What n GPUs of the node send to other nodes together; none: not measured."""

    @property
    def num_gpus(self) -> int:
        """GPUs of all kinds together."""
        return len(self.gpu_kinds)

    @cached_property
    def adapters(self) -> Nics:
        """Its NICs. Without any there is no other node, and nothing ever takes this link."""
        lone = Nics(count=1, bandwidth_bytes_per_s=self.host_link_bytes_per_s, latency_s=0.0)
        return self.nics or lone

    @cached_property
    def num_ports(self) -> int:
        """What GPUs send through: single NICs, or as many bundles of NICs as there are GPUs.

        NICs are dealt out to the GPUs in order; with fewer NICs than GPUs, neighbours share one.
        """
        return min(self.adapters.count, self.num_gpus)

    @cached_property
    def port_bytes_per_s(self) -> float:
        """Bandwidth of one NIC or bundle."""
        return self.nics_bytes_per_s / self.num_ports

    @cached_property
    def nics_bytes_per_s(self) -> float:
        """Bandwidth of all NICs together."""
        if self.nic_curves:
            return max(curve.max_bytes_per_s for _, curve in self.nic_curves)
        return self.adapters.total_bytes_per_s

    @cached_property
    def peer_bytes_per_s(self) -> float:
        """From one GPU to another one of the node."""
        if self.intra_curves:
            return curve_for(self.intra_curves, 2).max_bytes_per_s
        return self.link.bandwidth_bytes_per_s

    def port_of(self, local_rank: int) -> int:
        """Number of the NIC or bundle that a GPU uses."""
        return local_rank * self.num_ports // self.num_gpus

    @property
    def nic_to_switch_latency_s(self) -> float:
        """Latency of the link from a NIC to its switch; measured curves contain it already."""
        return 0.0 if self.nic_curves else self.adapters.latency_s / 2


@dataclass(frozen=True, kw_only=True)
class Topology:
    """A whole cluster. The core of a region does not block."""

    nodes: tuple[MeasuredNode, ...]
    switches: tuple[Switch, ...] = ()
    region_links: tuple[RegionLink, ...] = ()
    unequal_shards: tuple[UnequalShards, ...] = ()
    """What collectives over unequal shards were measured to cost."""

    @classmethod
    def of(
        cls,
        nodes: Sequence[MeasuredNode],
        switches: Sequence[Switch] = (),
        region_links: Sequence[RegionLink] = (),
        unequal_shards: Sequence[UnequalShards] = (),
    ) -> "Topology":
        """Deal out ranks in the order of the nodes: the first has ranks 0 to num_gpus - 1."""
        stops = accumulate(node.num_gpus for node in nodes)
        return cls(
            nodes=tuple(
                dataclasses.replace(node, first_rank=stop - node.num_gpus)
                for node, stop in zip(nodes, stops, strict=True)
            ),
            switches=tuple(switches),
            region_links=tuple(region_links),
            unequal_shards=tuple(unequal_shards),
        )

    @property
    def num_gpus(self) -> int:
        """Number of ranks."""
        return self.first_ranks[-1]

    @cached_property
    def first_ranks(self) -> tuple[int, ...]:
        """First rank of each node, and the number of ranks at the end."""
        return (0, *accumulate(node.num_gpus for node in self.nodes))

    def node_of(self, rank: int) -> int:
        """Number of the node that a rank is on."""
        if not 0 <= rank < len(self._node_of):
            raise ValueError(f"found rank {rank}; expected one of 0 to {self.num_gpus - 1}")
        return self._node_of[rank]

    def kind_of(self, rank: int) -> str:
        """Kind of a rank's GPU."""
        node = self.node_of(rank)
        return self.nodes[node].gpu_kinds[rank - self.first_ranks[node]]

    @cached_property
    def _node_of(self) -> tuple[int, ...]:
        """Asked for all the time: a table."""
        return tuple(at for at, node in enumerate(self.nodes) for _ in range(node.num_gpus))

    def ranks_of(self, node: int) -> range:
        """The ranks of a node."""
        return range(self.first_ranks[node], self.first_ranks[node + 1])

    @cached_property
    def switch_named(self) -> dict[str, Switch]:
        """Switches by name."""
        return {switch.name: switch for switch in self.switches}

    @cached_property
    def regions(self) -> tuple[str, ...]:
        """Regions with nodes, and those that only pass traffic on, in order of appearance."""
        named = [node.region for node in self.nodes]
        named += [region for link in self.region_links for region in link.regions]
        return tuple(dict.fromkeys(named))

    def switches_above(self, switch: str | None) -> tuple[Switch, ...]:
        """A switch and those above it, up to the region's core."""
        chain: list[Switch] = []
        while switch is not None:
            chain.append(self.switch_named[switch])
            switch = chain[-1].uplink_to
        return tuple(chain)

    @cached_property
    def uplink_bytes_per_s(self) -> dict[str, float]:
        """What the uplink of each switch with nodes carries; if not said, all that is below it."""
        below: defaultdict[str, float] = defaultdict(float)
        for node in self.nodes:
            if node.switch is not None:
                below[node.switch] += node.nics_bytes_per_s
        # Leaves first, so that what is below a switch is complete when its turn comes.
        for switch in sorted(self.switches, key=lambda s: -len(self.switches_above(s.name))):
            if switch.uplink is not None:
                below[switch.name] = switch.uplink.bandwidth_bytes_per_s
            if switch.uplink_to is not None:
                below[switch.uplink_to] += below[switch.name]
        return dict(below)
