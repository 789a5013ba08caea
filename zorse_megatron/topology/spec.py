"""What the topology graph is made of: nodes, switches, links between regions. Plain data.

Ranks are dealt out in the order of the nodes: the first node has ranks 0 to num_gpus - 1.
"""

import math
from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import Literal

import networkx as nx

from zorse_megatron.topology.curves import Curves, curve_for

IntraKind = Literal["switch", "mesh", "pcie"]


@dataclass(frozen=True, kw_only=True)
class NodeSpec:
    """One machine with GPUs, of one kind or of several.

    `intra_bytes_per_s` is what one GPU sends to one other, each way, and `intra_kind` says what
    is shared inside. `switch`: each GPU has one port to a switch that does not block (NVSwitch).
    `mesh`: each pair of GPUs has a link of its own (NVLink without a switch). `pcie`: through the
    host, over the PCIe link that leads to host memory and NICs as well.
    """

    name: str
    gpu_kinds: tuple[str, ...]
    """In the order of the local ranks."""
    intra_kind: IntraKind
    intra_bytes_per_s: float
    intra_latency_s: float
    host_link_bytes_per_s: float
    """PCIe of one GPU; also its way to the NICs."""
    nic_bytes_per_s: float
    """Of one NIC, each way."""
    nic_latency_s: float
    """From one node to another on the same switch."""
    num_nics: int = 1
    """Dealt out to the GPUs in order; with fewer NICs than GPUs, neighbours share one."""
    region: str = "region"
    switch: str | None = None
    """None: attached to the region's core."""
    intra_curves: Curves = ()
    """Measured: what each of n GPUs of a ring sends; replace bandwidth and latency."""
    nic_curves: Curves = ()
    """Measured: what n GPUs of the node send to other nodes together."""

    def __post_init__(self) -> None:
        rates = (self.intra_bytes_per_s, self.host_link_bytes_per_s, self.nic_bytes_per_s)
        if not self.gpu_kinds or self.num_nics < 1:
            raise ValueError(f"node {self.name}: found no GPU or no NIC; expected 1 at least")
        if not all(0 < rate < math.inf for rate in rates):
            raise ValueError(f"node {self.name}: found bandwidths {rates}; expected all > 0")
        if min(self.intra_latency_s, self.nic_latency_s) < 0:
            raise ValueError(f"node {self.name}: found a latency below 0")

    @property
    def num_gpus(self) -> int:
        """GPUs of all kinds together."""
        return len(self.gpu_kinds)

    @property
    def num_ports(self) -> int:
        """What GPUs send through: single NICs, or as many bundles of NICs as there are GPUs."""
        return min(self.num_nics, self.num_gpus)

    @property
    def port_bytes_per_s(self) -> float:
        """Bandwidth of one NIC or bundle."""
        return self.nics_bytes_per_s / self.num_ports

    @property
    def nics_bytes_per_s(self) -> float:
        """Bandwidth of all NICs together."""
        if self.nic_curves:
            return max(curve.max_bytes_per_s for _, curve in self.nic_curves)
        return self.num_nics * self.nic_bytes_per_s

    @property
    def peer_bytes_per_s(self) -> float:
        """From one GPU to another one of the node."""
        if self.intra_curves:
            return curve_for(self.intra_curves, 2).max_bytes_per_s
        return self.intra_bytes_per_s

    def port_of(self, local_rank: int) -> int:
        """Number of the NIC or bundle that a GPU uses."""
        return local_rank * self.num_ports // self.num_gpus

    @property
    def hop_latency_s(self) -> float:
        """Latency of the link from a NIC to its switch; measured curves contain it already."""
        return 0.0 if self.nic_curves else self.nic_latency_s / 2


@dataclass(frozen=True, kw_only=True)
class SwitchSpec:
    """A switch between nodes: a leaf, or one that leaves hang on. It limits only what goes up."""

    name: str
    region: str = "region"
    uplink: str | None = None
    """The switch above; None: the region's core."""
    uplink_bytes_per_s: float | None = None
    """All links up together, each way; None: as much as all that is below."""
    uplink_latency_s: float = 0.0


@dataclass(frozen=True, kw_only=True)
class RegionLink:
    """The link between the cores of two regions."""

    regions: tuple[str, str]
    bytes_per_s: float
    latency_s: float


@dataclass(frozen=True, kw_only=True)
class TopologySpec:
    """A whole cluster. The core of a region does not block."""

    nodes: tuple[NodeSpec, ...]
    switches: tuple[SwitchSpec, ...] = ()
    region_links: tuple[RegionLink, ...] = ()

    def __post_init__(self) -> None:
        if not self.nodes:
            raise ValueError("found no nodes; expected one at least")
        _refuse_repeated("node", (node.name for node in self.nodes))
        _refuse_repeated("switch", (switch.name for switch in self.switches))
        self._check_switches()
        self._check_regions()

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

    @cached_property
    def _node_of(self) -> tuple[int, ...]:
        """Asked for all the time: a table."""
        return tuple(at for at, node in enumerate(self.nodes) for _ in range(node.num_gpus))

    def ranks_of(self, node: int) -> range:
        """The ranks of a node."""
        return range(self.first_ranks[node], self.first_ranks[node + 1])

    @cached_property
    def switch_named(self) -> dict[str, SwitchSpec]:
        """Switches by name."""
        return {switch.name: switch for switch in self.switches}

    @cached_property
    def regions(self) -> tuple[str, ...]:
        """Regions with nodes, and those that only pass traffic on, in order of appearance."""
        named = [node.region for node in self.nodes]
        named += [region for link in self.region_links for region in link.regions]
        return tuple(dict.fromkeys(named))

    def switches_above(self, switch: str | None) -> tuple[SwitchSpec, ...]:
        """A switch and those above it, up to the region's core."""
        chain: list[SwitchSpec] = []
        while switch is not None:
            chain.append(self.switch_named[switch])
            switch = chain[-1].uplink
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
            if switch.uplink_bytes_per_s is not None:
                below[switch.name] = switch.uplink_bytes_per_s
            if switch.uplink is not None:
                below[switch.uplink] += below[switch.name]
        return dict(below)

    def _check_switches(self) -> None:
        for node in self.nodes:
            if node.switch is not None and node.switch not in self.switch_named:
                raise ValueError(f"node {node.name}: found no switch {node.switch}")
            if node.switch and self.switch_named[node.switch].region != node.region:
                raise ValueError(f"node {node.name}: its switch is not in region {node.region}")
        for switch in self.switches:
            seen: set[str] = set()
            above: SwitchSpec | None = switch
            while above is not None:
                if above.name in seen:
                    raise ValueError(f"switch {switch.name}: found a circle of uplinks")
                if above.region != switch.region:
                    raise ValueError(f"switch {switch.name}: found an uplink into another region")
                seen.add(above.name)
                if above.uplink is not None and above.uplink not in self.switch_named:
                    raise ValueError(f"switch {above.name}: found no switch {above.uplink}")
                above = self.switch_named[above.uplink] if above.uplink is not None else None

    def _check_regions(self) -> None:
        pairs = ["--".join(sorted(link.regions)) for link in self.region_links]
        _refuse_repeated("region link", pairs)
        graph = nx.Graph(link.regions for link in self.region_links)
        graph.add_nodes_from(self.regions)
        if not nx.is_connected(graph):
            parts = sorted(sorted(part) for part in nx.connected_components(graph))
            raise ValueError(f"found no link between the regions {parts}")


def _refuse_repeated(what: str, names: Iterable[str]) -> None:
    repeated = sorted(name for name, count in Counter(names).items() if count > 1)
    if repeated:
        raise ValueError(f"found the {what} names {repeated} twice; expected different names")
