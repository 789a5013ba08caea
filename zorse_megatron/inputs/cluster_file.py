"""`cluster.yaml` as people write it, short forms spelled out: names, types, single values.

Sizes, bandwidths and latencies carry units in the file (`quantities.py`) and are SI numbers here.
The rules between values are in `cluster_rules.py`.
"""

import re
from typing import Annotated, Any

from pydantic import ConfigDict, Field
from pydantic.dataclasses import dataclass

from zorse_megatron.files.quantities import (
    Bytes,
    BytesPerSecond,
    FlopsPerSecond,
    NetworkBytesPerSecond,
    Seconds,
)
from zorse_megatron.gpus.gpu import Attention, LinkType
from zorse_megatron.plan.plan import Count, Positive

_CONFIG = ConfigDict(extra="forbid", strict=True, use_attribute_docstrings=True)

Name = Annotated[str, Field(min_length=1)]


@dataclass(frozen=True, kw_only=True, config=_CONFIG)
class PeakEntry:
    """Peak rates of dense matrix products."""

    float16: FlopsPerSecond | None = None
    """With sums in float32."""
    bfloat16: FlopsPerSecond | None = None
    """With sums in float32."""
    tf32: FlopsPerSecond | None = None
    """float32 on tensor cores."""
    float32: FlopsPerSecond | None = None
    """On the plain cores."""


@dataclass(frozen=True, kw_only=True, config=_CONFIG)
class GpuKindEntry:
    """A kind of GPU that is not well known, or differs from what is known."""

    name: Name
    """What the nodes call it."""
    like: str | None = None
    """A well-known kind that gives the values that are left out."""
    memory: Bytes | None = None
    """What may be filled."""
    memory_bandwidth: BytesPerSecond | None = None
    """Bandwidth of the GPU's memory."""
    peak: PeakEntry | None = None
    """Peak rates by type of number."""
    attention: Attention | None = None
    """What Transformer Engine runs there; left out: flash from compute capability 8.0 on."""


@dataclass(frozen=True, kw_only=True, config=_CONFIG)
class GpusEntry:
    """Some equal GPUs of a node."""

    kind: Name
    """A well-known kind or one of gpu_kinds."""
    count: Positive = 1
    """How many."""


@dataclass(frozen=True, kw_only=True, config=_CONFIG)
class LinkEntry:
    """What joins the GPUs of a node."""

    type: LinkType
    """nvswitch, nvlink or pcie."""
    bandwidth: BytesPerSecond | None = None
    """Per GPU, one way."""
    latency: Seconds | None = None
    """Per transfer."""


@dataclass(frozen=True, kw_only=True, config=_CONFIG)
class NicsEntry:
    """The network adapters of a node."""

    bandwidth: NetworkBytesPerSecond
    """Per adapter, one way."""
    count: Positive = 1
    """How many; all GPUs of the node share them."""
    latency: Seconds | None = None
    """To another node."""


@dataclass(frozen=True, kw_only=True, config=_CONFIG)
class NodesEntry:
    """Some equal nodes."""

    name: Name | None = None
    """With a count above 1, a number is appended: name-0, name-1."""
    count: Positive = 1
    """How many."""
    instance: str | None = None
    """A cloud instance that gives what is left out."""
    gpus: Annotated[tuple[GpusEntry, ...], Field(min_length=1)] | None = None
    """The GPUs in local order."""
    gpu_numbers: tuple[Count, ...] | None = None
    """Their numbers on the node, as nvidia-smi has them; left out: 0, 1 and so on."""
    link: LinkEntry | None = None
    """Left out: what is usual for the kind of GPU."""
    nics: NicsEntry | None = None
    """May be left out for an instance, and where there is one node only."""
    host_link: BytesPerSecond | None = None
    """PCIe of one GPU to host memory; left out: what is usual for the kind of GPU."""
    host_memory: Bytes | None = None
    """Memory of the host."""
    switch: Name | None = None
    """The switch that its adapters lead to; left out: the core of the region."""
    region: Name | None = None
    """Where it is; left out: the cluster has one region."""


@dataclass(frozen=True, kw_only=True, config=_CONFIG)
class UplinkEntry:
    """From a switch to the one above."""

    bandwidth: NetworkBytesPerSecond
    """All lines up together, one way; shared by all that is below."""
    to: Name | None = None
    """The switch above; left out: the core of the region, which never limits."""
    latency: Seconds | None = None
    """What the link adds."""


@dataclass(frozen=True, kw_only=True, config=_CONFIG)
class SwitchEntry:
    """A switch between nodes."""

    name: Name
    """What nodes and other switches call it."""
    region: Name | None = None
    """Where it is; left out: the cluster has one region."""
    uplink: UplinkEntry | None = None
    """What leads up from it; left out: it never limits."""


@dataclass(frozen=True, kw_only=True, config=_CONFIG)
class RegionLinkEntry:
    """The connection between regions."""

    bandwidth: NetworkBytesPerSecond
    """One way, shared by all traffic between the two regions."""
    latency: Seconds
    """One way."""
    regions: tuple[Name, ...] | None = None
    """The two regions; left out: every pair that has no entry of its own."""


@dataclass(frozen=True, kw_only=True, config=_CONFIG)
class ClusterFile:
    """A cluster as it is written."""

    nodes: Annotated[tuple[NodesEntry, ...], Field(min_length=1)]
    """The machines, in the order of their global ranks."""
    name: str | None = None
    """A name for people."""
    gpu_kinds: tuple[GpuKindEntry, ...] = ()
    """Kinds of GPU that are not well known, or differ."""
    switches: tuple[SwitchEntry, ...] = ()
    """Switches that limit; left out: all nodes of a region meet in a core that never limits."""
    between_regions: tuple[RegionLinkEntry, ...] = ()
    """Links between regions."""


# The short forms of `cluster.yaml`, spelled out.
#
# `gpus: 8 x A100-40`, `link: NVSwitch 220 GB/s` and `nics: 4 x 100 Gb/s` become the objects that
# `cluster_file.py` describes. What is not a short form is left as it is: if it is wrong, the strict
# reader says so at its place.


_COUNT = re.compile(r"\s*(\d{1,9})\s*[xX×*]\s*(.*\S)\s*", re.DOTALL)  # noqa: RUF001


def spelled_out(value: Any) -> Any:
    """Return the value of a cluster file without short forms."""
    if not isinstance(value, dict):
        return value
    result = dict(value)
    if isinstance(result.get("nodes"), list):
        result["nodes"] = [_node(node) for node in result["nodes"]]
    if isinstance(result.get("switches"), list):
        names = result["switches"]
        result["switches"] = [{"name": n} if isinstance(n, str) else n for n in names]
    return result


def _node(node: Any) -> Any:
    if isinstance(node, str):
        return {"instance": node}
    if not isinstance(node, dict):
        return node
    forms = {"gpus": _gpus, "link": _link, "nics": _nics}
    return {key: forms[key](item) if key in forms else item for key, item in node.items()}


def _gpus(value: Any) -> Any:
    """`8 x A100-40`, or a list of such texts and of objects, or one object."""
    entries = value if isinstance(value, list) else [value]
    if value is None or not all(isinstance(entry, str | dict) for entry in entries):
        return value
    return [_counted(entry, "kind") if isinstance(entry, str) else entry for entry in entries]


def _link(value: Any) -> Any:
    """`NVSwitch`, or with its bandwidth: `PCIe 10 GB/s`."""
    if isinstance(value, dict) and isinstance(value.get("type"), str):
        return {**value, "type": value["type"].lower()}
    if not isinstance(value, str):
        return value
    link_type, _, bandwidth = value.strip().partition(" ")
    spelled = {"type": link_type.lower()}
    return {**spelled, "bandwidth": bandwidth.strip()} if bandwidth else spelled


def _nics(value: Any) -> Any:
    """`400 Gb/s` or `4 x 100 Gb/s`."""
    if isinstance(value, str | int | float) and not isinstance(value, bool):
        return _counted(value, "bandwidth")
    return value


def _counted(value: Any, key: str) -> dict[str, Any]:
    match = _COUNT.fullmatch(value) if isinstance(value, str) else None
    return {"count": int(match[1]), key: match[2]} if match else {key: value}
