"""The file of a cluster in which some GPUs are of kinds of their own: slower than others alike.

What has no such GPU stays as it is written. Nodes keep their names and order, so ranks stay.
"""

from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from typing import Any

from zorse_megatron.schema.cluster.cluster import Cluster, Node
from zorse_megatron.schema.cluster.cluster_yaml import CLUSTER_FILE, dump_cluster, parse_cluster
from zorse_megatron.schema.gpus.gpu import GpuKind
from zorse_megatron.schema.gpus.gpu_presets import GPU_KINDS
from zorse_megatron.schema.text.yaml_text import read_yaml

_RATES = ("float32", "float16", "bfloat16", "tf32")


def text_with_own_kinds(
    data: bytes,
    kinds: Sequence[str],
    factors: Mapping[str, tuple[str, float]],
    *,
    source: str = "cluster",
    header: str = "",
) -> str:
    """Return the text of a cluster file in which the GPU of each rank is of the kind in `kinds`.

    `factors`: name of a new kind -> the kind that it is made of, and how many times as long it
    computes. `header`: lines of comment above it. Raises ClusterError for a file with problems.
    """
    cluster = parse_cluster(data, source=source)
    value, _, _ = read_yaml(data, source, CLUSTER_FILE)
    content = dict(value) | {"nodes": list(_nodes(value["nodes"], cluster, kinds))}
    written = {entry["name"]: entry for entry in value.get("gpu_kinds") or ()}
    used = set(kinds)
    content["gpu_kinds"] = [each for name, each in written.items() if name in used] + [
        _slower(name, cluster.kinds[base], written.get(base, {}), factor)
        for name, (base, factor) in factors.items()
    ]
    if not content["gpu_kinds"]:
        del content["gpu_kinds"]
    comment = "".join(f"# {line}\n" for line in header.splitlines())
    text = dump_cluster(content)
    parse_cluster(text.encode(), source="the cluster file that was to be written")
    return comment + text


def _nodes(entries: Sequence[Any], cluster: Cluster, kinds: Sequence[str]) -> Iterator[Any]:
    """Entries of `nodes`: as written where no GPU changes, else one for each node."""
    nodes = iter(cluster.nodes)
    for entry in entries:
        written: dict[str, Any] = {"instance": entry} if isinstance(entry, str) else entry
        its = [next(nodes) for _ in range(written.get("count", 1))]
        if all(_stays(node, kinds) for node in its):
            yield entry
            continue
        for node in its:
            rest = {k: v for k, v in written.items() if k not in {"name", "count"}}
            of_node = groupby(kinds[rank] for rank in node.ranks)
            gpus = [{"kind": kind, "count": len(list(same))} for kind, same in of_node]
            yield {"name": node.name} | rest | ({} if _stays(node, kinds) else {"gpus": gpus})


def _stays(node: Node, kinds: Sequence[str]) -> bool:
    return node.gpu_kinds == tuple(kinds[rank] for rank in node.ranks)


def _slower(name: str, base: GpuKind, written: Mapping[str, Any], factor: float) -> dict[str, Any]:
    """An entry of `gpu_kinds`: the same with lower rates, of arithmetic and of its own memory."""
    like = written.get("like") or (base.name if base.name in GPU_KINDS else None)
    rates = {each: getattr(base.peak, f"{each}_flops_per_s") for each in _RATES}
    return (
        dict(written)
        | {"name": name}
        | ({"like": like} if like else {})
        | {
            "memory_bandwidth": base.memory_bytes_per_s / factor,
            "peak": {each: rate / factor for each, rate in rates.items() if rate is not None},
        }
    )
