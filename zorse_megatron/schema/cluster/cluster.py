"""The cluster: which GPUs there are, and what joins them. Everything explicit, in SI units.

People write the short form (`cluster_file.py`); `cluster_yaml.py` reads it and makes this. Global
ranks follow the order of the nodes, and of the GPUs in a node.
"""

from bisect import bisect_right
from dataclasses import dataclass
from functools import cached_property

from zorse_megatron.schema.gpus.gpu import GpuKind, LinkType
from zorse_megatron.schema.plan.plan import ClusterFingerprint


@dataclass(frozen=True, kw_only=True)
class Link:
    """One way of a connection."""

    bandwidth_bytes_per_s: float
    latency_s: float


@dataclass(frozen=True, kw_only=True)
class NodeLink(Link):
    """What joins the GPUs inside a node; the bandwidth is that of one GPU."""

    type: LinkType
    """nvswitch: every pair at full rate; nvlink: direct lines; pcie: through the host."""


@dataclass(frozen=True, kw_only=True)
class Nics:
    """The network adapters of a node, shared by its GPUs; bandwidth is that of one adapter."""

    count: int
    bandwidth_bytes_per_s: float
    latency_s: float

    @property
    def total_bytes_per_s(self) -> float:
        """All adapters together, one way."""
        return self.count * self.bandwidth_bytes_per_s


@dataclass(frozen=True, kw_only=True)
class Node:
    """One machine."""

    name: str
    first_rank: int
    gpu_kinds: tuple[str, ...]
    """The kind of each of its GPUs, in local order."""
    link: NodeLink
    nics: Nics | None
    """None only where there is no other node."""
    host_link_bytes_per_s: float
    """PCIe of one GPU to pinned host memory, one way."""
    host_memory_bytes: int | None
    """None where the file does not say."""
    region: str
    switch: str | None = None
    """None: its adapters lead to the core of the region."""
    gpu_numbers: tuple[int, ...] | None = None
    """Their numbers on the node, which may have more GPUs; None: 0, 1 and so on."""

    @property
    def numbers(self) -> tuple[int, ...]:
        """As CUDA_VISIBLE_DEVICES takes them, in local order."""
        return self.gpu_numbers or tuple(range(len(self.gpu_kinds)))

    @property
    def ranks(self) -> range:
        """Global ranks of its GPUs."""
        return range(self.first_rank, self.first_rank + len(self.gpu_kinds))


@dataclass(frozen=True, kw_only=True)
class Switch:
    """A switch between nodes; it limits only what goes up. The core of a region never limits."""

    name: str
    region: str
    uplink_to: str | None
    """The switch above; None: the core of the region."""
    uplink: Link | None
    """All lines up together, one way; None: they never limit."""

    @property
    def uplink_latency_s(self) -> float:
        """What the way up adds."""
        return self.uplink.latency_s if self.uplink else 0.0


@dataclass(frozen=True, kw_only=True)
class RegionLink(Link):
    """What two regions share, each way."""

    regions: tuple[str, str]


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """All nodes and what is between them."""

    name: str | None
    kinds: dict[str, GpuKind]
    """The kinds that occur, by name, in order of first rank."""
    nodes: tuple[Node, ...]
    switches: tuple[Switch, ...]
    region_links: tuple[RegionLink, ...]
    """Between the cores of two regions; together they join all regions."""

    @cached_property
    def world_size(self) -> int:
        """Number of GPUs."""
        return sum(len(node.gpu_kinds) for node in self.nodes)

    @cached_property
    def gpu_kinds(self) -> tuple[str, ...]:
        """The kind of each global rank."""
        return tuple(kind for node in self.nodes for kind in node.gpu_kinds)

    @cached_property
    def regions(self) -> tuple[str, ...]:
        """Names of the regions, in order of first rank."""
        return tuple(dict.fromkeys(node.region for node in self.nodes))

    @cached_property
    def _first_ranks(self) -> tuple[int, ...]:
        return tuple(node.first_rank for node in self.nodes)

    def node_of_rank(self, rank: int) -> Node:
        """Return the node that holds `rank`."""
        if not 0 <= rank < self.world_size:
            raise ValueError(f"no rank {rank}; the cluster has ranks 0 to {self.world_size - 1}")
        return self.nodes[bisect_right(self._first_ranks, rank) - 1]

    def gpu_of_rank(self, rank: int) -> GpuKind:
        """Return what the GPU of `rank` can do."""
        node = self.node_of_rank(rank)
        return self.kinds[node.gpu_kinds[rank - node.first_rank]]

    def fingerprint(self) -> ClusterFingerprint:
        """Return what a plan says about the cluster that it was made for."""
        return ClusterFingerprint(name=self.name, gpu_kinds=self.gpu_kinds)
