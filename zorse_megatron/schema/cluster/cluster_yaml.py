"""Reading `cluster.yaml`: short forms, strict checks, and everything made explicit. Writing it."""

import dataclasses
from itertools import groupby
from pathlib import Path
from typing import Any

from zorse_megatron.errors import ClusterError
from zorse_megatron.schema.cluster.cluster import Cluster, Link, Nics, Node, Switch
from zorse_megatron.schema.cluster.cluster_file import ClusterFile, PeakEntry
from zorse_megatron.schema.cluster.cluster_rules import problems_of
from zorse_megatron.schema.cluster.resolve import resolved
from zorse_megatron.schema.cluster.short_forms import spelled_out
from zorse_megatron.schema.gpus.gpu import GpuKind
from zorse_megatron.schema.gpus.gpu_presets import GPU_KINDS
from zorse_megatron.schema.text.file_kind import FileKind
from zorse_megatron.schema.text.json_text import layout
from zorse_megatron.schema.text.strict import built, read_file
from zorse_megatron.schema.text.yaml_text import read_yaml

CLUSTER_FILE = FileKind(
    name="cluster",
    syntax="YAML",
    document="docs/cluster-file.md",
    error=ClusterError,
    root=ClusterFile,
    removed={"price_per_gpu_hour": "Prices are not counted: plan for the GPUs that you pay for."},
)


def load_cluster(path: str | Path) -> Cluster:
    """Read, check and return the cluster in a file. Raises ClusterError with every problem."""
    return parse_cluster(read_file(path, CLUSTER_FILE), source=str(path))


def parse_cluster(data: bytes, *, source: str = "cluster") -> Cluster:
    """Check and return the cluster in `data`; Problems call it `source`. Raises ClusterError."""
    value, lines, problems = read_yaml(data, source, CLUSTER_FILE)
    file: ClusterFile = built(
        spelled_out(value), problems, CLUSTER_FILE, source, rules=problems_of, lines=lines
    )
    return resolved(file)


def dump_cluster(cluster: Cluster, header: str = "") -> str:
    """Return the text of a file that loads to an equal cluster, with nothing left out.

    `header`: lines of comment above it, without `#`.
    """
    content = {
        "name": cluster.name,
        "gpu_kinds": [
            _kind(kind) for name, kind in cluster.kinds.items() if GPU_KINDS.get(name) != kind
        ],
        "nodes": [_node(node) for node in cluster.nodes],
        "switches": [_switch(switch) for switch in cluster.switches],
        "between_regions": [
            {"regions": list(link.regions), **_line(link)} for link in cluster.region_links
        ],
    }
    comment = "".join(f"# {line}\n" for line in header.splitlines())
    return comment + layout(_given(content)) + "\n"


def _kind(kind: GpuKind) -> dict[str, Any]:
    return _given(
        {
            "name": kind.name,
            "like": kind.like,
            # Of a well-known kind the file says who saw it, where its own word stays.
            "memory": None if kind.memory_source else kind.memory_bytes,
            "memory_bandwidth": kind.memory_bytes_per_s,
            "peak": _given(
                {
                    field.name: getattr(kind.peak, f"{field.name}_flops_per_s")
                    for field in dataclasses.fields(PeakEntry)
                }
            ),
            "attention": kind.attention,
        }
    )


def _node(node: Node) -> dict[str, Any]:
    gpus = [{"kind": kind, "count": len(list(same))} for kind, same in groupby(node.gpu_kinds)]
    return _given(
        {
            "name": node.name,
            "gpus": gpus,
            "gpu_numbers": node.gpu_numbers and list(node.gpu_numbers),
            "link": {"type": node.link.type, **_line(node.link)},
            "nics": {"count": node.nics.count, **_line(node.nics)} if node.nics else None,
            "host_link": node.host_link_bytes_per_s,
            "host_memory": node.host_memory_bytes,
            "switch": node.switch,
            "region": node.region,
        }
    )


def _switch(switch: Switch) -> dict[str, Any]:
    uplink = _given({"to": switch.uplink_to, **_line(switch.uplink)}) if switch.uplink else None
    return _given({"name": switch.name, "region": switch.region, "uplink": uplink})


def _line(link: Link | Nics) -> dict[str, float]:
    return {"bandwidth": link.bandwidth_bytes_per_s, "latency": link.latency_s}


def _given(content: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in content.items() if value not in (None, [])}
