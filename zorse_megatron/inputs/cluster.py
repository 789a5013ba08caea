"""The cluster: which GPUs there are, and what joins them. Everything explicit, in SI units.

People write the short form (`cluster_file.py`); `cluster_yaml.py` reads it and makes this. Global
ranks follow the order of the nodes, and of the GPUs in a node.
"""

from bisect import bisect_right
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import combinations

from zorse_megatron.gpus.gpu import GpuKind, LinkType, PeakFlops
from zorse_megatron.gpus.known_gpus import GPU_KINDS, INSTANCES, Instance, kind_of_device
from zorse_megatron.inputs.cluster_file import (
    ClusterFile,
    GpuKindEntry,
    LinkEntry,
    NicsEntry,
    NodesEntry,
    SwitchEntry,
)
from zorse_megatron.plan.plan import ClusterFingerprint


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

    def with_gpus(self, ranks: Sequence[int], *, first_rank: int) -> "Node":
        """Return the node with the GPUs of these of its ranks alone, in their order."""
        local = [rank - self.first_rank for rank in ranks]
        numbers = tuple(self.numbers[at] for at in local)
        return replace(
            self,
            first_rank=first_rank,
            gpu_kinds=tuple(self.gpu_kinds[at] for at in local),
            gpu_numbers=None if numbers == tuple(range(len(numbers))) else numbers,
        )


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

    def joined_regions(self, regions: Collection[str]) -> list[set[str]]:
        """Return the parts of these regions that links between them join."""
        import networkx as nx  # a quarter of the time in which a command starts

        graph = nx.Graph()
        graph.add_nodes_from(regions)
        graph.add_edges_from(
            link.regions for link in self.region_links if set(link.regions) <= set(regions)
        )
        return list(nx.connected_components(graph))

    def fingerprint(self) -> ClusterFingerprint:
        """Return what a plan says about the cluster that it was made for."""
        return ClusterFingerprint(name=self.name, gpu_kinds=self.gpu_kinds)


# From the cluster file to the cluster: everything explicit, ranks dealt out.


# What a transfer waits before its first byte arrives, where the file does not say. Of the order
# that NCCL's own model of its links assumes (NVLink and PCIe some us) and that data-centre Ethernet
# shows between two hosts.
_LINK_LATENCY_S = {"nvswitch": 5e-6, "nvlink": 5e-6, "pcie": 10e-6}
_NIC_LATENCY_S = 20e-6
_UPLINK_LATENCY_S = 2e-6
# From the slowest: what a node with several kinds of GPU is taken to have.
_LINK_TYPES = ("pcie", "nvlink", "nvswitch")

# The region of a cluster whose file names none.
ONLY_REGION = "here"


def regions_of(file: ClusterFile) -> tuple[str, ...]:
    """Return the names of the regions, in order of first use by a node."""
    return tuple(dict.fromkeys(node.region or ONLY_REGION for node in file.nodes))


def first_region(file: ClusterFile) -> str:
    """Return the region of the first node: that of a file which names none."""
    return file.nodes[0].region or ONLY_REGION


def region_of(file: ClusterFile, switch: SwitchEntry) -> str:
    """Return the region of a switch; in a file with one region it need not say."""
    return switch.region or first_region(file)


def kind_name(file: ClusterFile, name: str) -> str:
    """Return the name under which a kind is known, whatever its spelling."""
    own = {entry.name for entry in file.gpu_kinds}
    return name if name in own else kind_of_device(name)


def kinds_of(file: ClusterFile) -> dict[str, GpuKind]:
    """Return all kinds by name: the well-known ones, and over them those of the file."""
    return GPU_KINDS | {entry.name: _kind(entry) for entry in file.gpu_kinds}


def gpu_kinds_in(file: ClusterFile, entry: NodesEntry) -> tuple[str, ...]:
    """Return the kinds of the GPUs of one such node, in local order."""
    if entry.gpus is None:
        instance = INSTANCES[entry.instance or ""]
        return (instance.gpu_kind,) * instance.gpu_count
    return tuple(kind_name(file, gpus.kind) for gpus in entry.gpus for _ in range(gpus.count))


def node_names(file: ClusterFile) -> Iterator[str]:
    """Yield the name of every node; one that has none is called by its number."""
    number = 0
    for entry in file.nodes:
        for index in range(entry.count):
            if entry.name is None:
                yield f"node-{number}"
            else:
                yield f"{entry.name}-{index}" if entry.count > 1 else entry.name
            number += 1


def slowest_link(gpus: list[GpuKind]) -> tuple[LinkType, float]:
    """Return what usually joins GPUs of these kinds: type and bytes per second."""
    slowest = min(gpus, key=lambda gpu: (_LINK_TYPES.index(gpu.link_type), gpu.link_bytes_per_s))
    return slowest.link_type, slowest.link_bytes_per_s


def resolved(file: ClusterFile) -> Cluster:
    """Make everything explicit. The file has no problems."""
    kinds = kinds_of(file)
    nodes = tuple(_nodes(file, kinds))
    used = dict.fromkeys(kind for node in nodes for kind in node.gpu_kinds)
    return Cluster(
        name=file.name,
        kinds={name: kinds[name] for name in used},
        nodes=nodes,
        switches=tuple(_switch(entry, region_of(file, entry)) for entry in file.switches),
        region_links=tuple(_region_links(file)),
    )


def _kind(entry: GpuKindEntry) -> GpuKind:
    """Put the values of the file over those of the well-known kind."""
    base = GPU_KINDS.get(kind_of_device(entry.like or entry.name))
    peak = entry.peak
    rates = {
        f"{dtype}_flops_per_s": (peak and getattr(peak, dtype))
        or (getattr(base.peak, f"{dtype}_flops_per_s") if base else None)
        for dtype in ("float32", "float16", "bfloat16", "tf32")
    }
    # A kind that is not like another one is taken to sit on PCIe.
    model = base or GPU_KINDS["A10G"]
    return GpuKind(
        name=entry.name,
        like=base.name if base else None,
        memory_bytes=entry.memory or model.memory_bytes,
        memory_bytes_per_s=entry.memory_bandwidth or model.memory_bytes_per_s,
        peak=PeakFlops(**rates),  # type: ignore[arg-type]
        link_type=model.link_type,
        link_bytes_per_s=model.link_bytes_per_s,
        host_link_bytes_per_s=model.host_link_bytes_per_s,
        source="the cluster file" + (f"; the rest: {base.source}" if base else ""),
        advertised_gb=base.advertised_gb if base else None,
        memory_source=None if entry.memory or base is None else base.memory_source,
        capability=base.capability if base else None,
        multiprocessors=base.multiprocessors if base else None,
        attention=entry.attention,
    )


def _nodes(file: ClusterFile, kinds: dict[str, GpuKind]) -> Iterator[Node]:
    rank = 0
    names = node_names(file)
    for entry in file.nodes:
        gpu_kinds = gpu_kinds_in(file, entry)
        gpus = [kinds[kind] for kind in dict.fromkeys(gpu_kinds)]
        instance = INSTANCES.get(entry.instance or "")
        link, nics = _node_link(entry.link, gpus), _nics(entry.nics, instance)
        host_link = entry.host_link or min(gpu.host_link_bytes_per_s for gpu in gpus)
        host_memory = entry.host_memory or (instance.host_memory_bytes if instance else None)
        for _ in range(entry.count):
            yield Node(
                name=next(names),
                first_rank=rank,
                gpu_kinds=gpu_kinds,
                link=link,
                nics=nics,
                host_link_bytes_per_s=host_link,
                host_memory_bytes=host_memory,
                region=entry.region or first_region(file),
                switch=entry.switch,
                gpu_numbers=entry.gpu_numbers,
            )
            rank += len(gpu_kinds)


def _node_link(entry: LinkEntry | None, gpus: list[GpuKind]) -> NodeLink:
    link_type, rate = slowest_link(gpus)
    if entry is not None:
        link_type, rate = entry.type, entry.bandwidth or rate
    latency_s = entry.latency if entry else None
    return NodeLink(
        type=link_type,
        bandwidth_bytes_per_s=rate,
        latency_s=_LINK_LATENCY_S[link_type] if latency_s is None else latency_s,
    )


def _nics(entry: NicsEntry | None, instance: Instance | None) -> Nics | None:
    if entry is not None:
        return Nics(
            count=entry.count,
            bandwidth_bytes_per_s=entry.bandwidth,
            latency_s=_NIC_LATENCY_S if entry.latency is None else entry.latency,
        )
    if instance is None:
        return None
    return Nics(
        count=instance.nic_count,
        bandwidth_bytes_per_s=instance.nic_bytes_per_s,
        latency_s=_NIC_LATENCY_S,
    )


def _switch(entry: SwitchEntry, region: str) -> Switch:
    uplink = None
    if entry.uplink is not None:
        latency_s = entry.uplink.latency
        uplink = Link(
            bandwidth_bytes_per_s=entry.uplink.bandwidth,
            latency_s=_UPLINK_LATENCY_S if latency_s is None else latency_s,
        )
    above = entry.uplink.to if entry.uplink else None
    return Switch(name=entry.name, region=region, uplink_to=above, uplink=uplink)


def _region_links(file: ClusterFile) -> Iterator[RegionLink]:
    """Explicit pairs first; the entry without regions is for all pairs that are left."""
    explicit = {frozenset(link.regions) for link in file.between_regions if link.regions}
    for link in file.between_regions:
        pairs = combinations(regions_of(file), 2) if link.regions is None else [link.regions]
        for first, second in pairs:
            if link.regions is not None or frozenset((first, second)) not in explicit:
                yield RegionLink(
                    regions=(first, second),
                    bandwidth_bytes_per_s=link.bandwidth,
                    latency_s=link.latency,
                )
