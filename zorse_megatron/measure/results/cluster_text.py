"""The cluster file of what was seen and measured."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import yaml

from zorse_megatron.measure.machine.nodes import SeenNode
from zorse_megatron.measure.results.link_fits import line_of, total_bytes_per_s
from zorse_megatron.schema.cluster.cluster import Cluster
from zorse_megatron.schema.cluster.cluster_yaml import parse_cluster
from zorse_megatron.schema.gpus.gpu_presets import GPU_KINDS
from zorse_megatron.schema.profile.profile import Transfers

_HEADER = (
    "# Written by `zorse discover`: ranks in the order of this file. Bandwidths and latencies\n"
)
_HEADER += (
    "# are measured; docs/cluster-file.md describes every field. Edit what you know better.\n"
)


@dataclass(frozen=True, kw_only=True)
class MeasuredKind:
    """What a kind of device was found to be able to do."""

    memory_bytes: int
    memory_bytes_per_s: float
    """Read and written by a copy."""
    flops_per_s: Mapping[str, float]
    """dtype -> rate of a large matrix product."""
    host_link_bytes_per_s: float
    """From pinned host memory."""
    is_well_known: bool
    """Then its published figures stay."""


def kinds_in(cluster: Cluster) -> dict[str, MeasuredKind]:
    """Return what a cluster file that was written earlier says of its kinds."""
    return {
        name: MeasuredKind(
            memory_bytes=kind.memory_bytes,
            memory_bytes_per_s=kind.memory_bytes_per_s,
            flops_per_s={
                dtype: rate
                for dtype in ("float32", "bfloat16", "float16")
                if (rate := getattr(kind.peak, f"{dtype}_flops_per_s")) is not None
            },
            host_link_bytes_per_s=min(
                node.host_link_bytes_per_s for node in cluster.nodes if name in node.gpu_kinds
            ),
            is_well_known=name in GPU_KINDS,
        )
        for name, kind in cluster.kinds.items()
    }


def cluster_text(
    nodes: Sequence[SeenNode],
    kinds: Mapping[str, MeasuredKind],
    transfers: Sequence[Transfers],
    *,
    name: str | None = None,
) -> str:
    """Return the text of `cluster.yaml`. Raises ClusterError if it could not be read back."""
    own = [kind_entry(kind, found) for kind, found in kinds.items() if not found.is_well_known]
    content = {
        **({"name": name} if name else {}),
        **({"gpu_kinds": own} if own else {}),
        "nodes": [_node(node, nodes, kinds, transfers) for node in nodes],
    }
    text = _HEADER + yaml.safe_dump(content, sort_keys=False, allow_unicode=True, width=100)
    parse_cluster(text.encode(), source="the cluster file that was to be written")
    return text


def kind_entry(name: str, found: MeasuredKind) -> dict[str, Any]:
    """Return what a cluster file says of a kind under `gpu_kinds`."""
    return {
        "name": name,
        "memory": found.memory_bytes,
        "memory_bandwidth": _rate(found.memory_bytes_per_s),
        "peak": {dtype: f"{rate / 1e12:.4g} TFLOP/s" for dtype, rate in found.flops_per_s.items()},
    }


def _node(
    node: SeenNode,
    nodes: Sequence[SeenNode],
    kinds: Mapping[str, MeasuredKind],
    transfers: Sequence[Transfers],
) -> dict[str, Any]:
    entry: dict[str, Any] = {"name": node.name, "gpus": _gpus(node)}
    inside = [t for t in transfers if t.operation == "send" and t.nodes == (node.kind,)]
    if inside:
        entry["link"] = {"type": node.link_type, **_slowest(inside)}
    if len(nodes) > 1:
        entry["nics"] = _nics(node, transfers)
    entry["host_link"] = _rate(min(kinds[kind].host_link_bytes_per_s for kind in node.gpu_kinds))
    entry["host_memory"] = node.host_memory_bytes
    return entry


def _gpus(node: SeenNode) -> list[dict[str, Any]]:
    return [{"kind": kind, "count": len(list(same))} for kind, same in groupby(node.gpu_kinds)]


def _slowest(sends: Iterable[Transfers]) -> dict[str, str]:
    """The one link that the file has for a node with several kinds of GPU: the slowest pair's."""
    line = min(map(line_of, sends), key=lambda each: each.bytes_per_s)
    return {"bandwidth": _rate(line.bytes_per_s), "latency": _seconds(line.latency_s)}


def _nics(node: SeenNode, transfers: Sequence[Transfers]) -> dict[str, Any]:
    """What the node reached with the partner that it was fastest with.

    The slower of two nodes limits both, so the fastest partner shows the most of what a node can.
    """
    between = [
        t for t in transfers if t.operation == "send" and len(t.nodes) == 2 and node.kind in t.nodes
    ]
    count = max(1, len(node.nics))
    singles = [line_of(t).latency_s for t in between if len(t.gpu_kinds) == 2]
    return {
        "count": count,
        "bandwidth": _rate(max(map(total_bytes_per_s, between)) / count),
        "latency": _seconds(min(singles)),
    }


def _rate(bytes_per_s: float) -> str:
    return f"{bytes_per_s / 1e9:.4g} GB/s"


def _seconds(seconds: float) -> str:
    return f"{seconds * 1e6:.4g} us"
