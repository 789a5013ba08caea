"""From timed messages to latencies, bandwidths and curves, and the cluster file of a cluster."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from statistics import median
from typing import Any

import numpy as np
import yaml

from zorse_megatron.costs.link_bandwidth import BandwidthCurve, LogFit
from zorse_megatron.gpus.known_gpus import GPU_KINDS
from zorse_megatron.inputs.cluster import Cluster
from zorse_megatron.inputs.cluster_yaml import parse_cluster
from zorse_megatron.inputs.profile import LinkCurve, Transfers
from zorse_megatron.measure.machine import SeenNode

# A parabola that is further off its own points, in the median, says less than latency and
# bandwidth do. Sailor's published curves are given without their points, so this is a choice.
LARGEST_ERROR = 0.10
_FEWEST_POINTS = 4
# Of a link that only shows its latency the bandwidth is not known; it is taken to be so many times
# what the largest message reached, as the transfer is then lost in that message's noise.
_HIDDEN_TRANSFER = 10.0


@dataclass(frozen=True, kw_only=True)
class Line:
    """Time of a message: latency_s + bytes / bytes_per_s."""

    latency_s: float
    bytes_per_s: float

    def at(self, num_bytes: float) -> float:
        """Return the seconds of one message."""
        return self.latency_s + num_bytes / self.bytes_per_s


def fit_line(num_bytes: Sequence[float], time_s: Sequence[float]) -> Line:
    """Fit a line with the least squares of relative deviations; no latency below 0.

    Relative, because the sizes span several powers of ten: otherwise the largest message alone
    would decide, and the latency would be its noise. Raises ValueError for times of 0 or less.
    """
    if not num_bytes or min(time_s) <= 0 or min(num_bytes) <= 0:
        raise ValueError(f"found {num_bytes} bytes in {time_s} s; expected both above 0")
    sizes, times = np.array(num_bytes, dtype=float), np.array(time_s, dtype=float)
    ones, slopes = 1 / times, sizes / times  # we want ones * latency + slopes * pace = 1
    if len(sizes) > 1:
        (latency_s, pace), *_ = np.linalg.lstsq(
            np.stack([ones, slopes / slopes.max()], axis=1), np.ones_like(times), rcond=None
        )
        pace /= slopes.max()
        if latency_s >= 0 and pace > 0:
            return Line(latency_s=float(latency_s), bytes_per_s=float(1 / pace))
        if pace <= 0:  # large messages take no longer than small ones: all is latency
            best_s = float(ones.sum() / (ones * ones).sum())
            return Line(
                latency_s=best_s, bytes_per_s=_HIDDEN_TRANSFER * float((sizes / times).max())
            )
    pace = float(slopes.sum() / (slopes * slopes).sum())
    return Line(latency_s=0.0, bytes_per_s=1 / pace)


def line_of(transfers: Transfers) -> Line:
    """Return latency and bandwidth of one pair of GPUs (of a send)."""
    return fit_line(transfers.num_bytes, transfers.time_s)


def link_curve(transfers: Transfers) -> LinkCurve | None:
    """Return the curve of a link as the planner reads it, or None where a parabola does not fit.

    Inside a node: what each GPU of a ring sends, for all gathers, or of two GPUs for a send.
    Between nodes: what GPUs of one node send to the other together. Only for GPUs of one kind.
    """
    messages = _messages(transfers)
    if messages is None or len(set(transfers.gpu_kinds)) > 1:
        return None
    sizes, rates = messages
    if len(sizes) < _FEWEST_POINTS:
        return None
    logs = np.log2(np.array(sizes) / 1e6)
    quadratic, linear, constant = map(float, np.polyfit(logs, np.array(rates) / 1e9, 2))
    highest = max(rates)
    try:
        fit = LogFit(quadratic=quadratic, linear=linear, constant=constant)
        curve = BandwidthCurve(max_bytes_per_s=highest, fit=fit)
        errors = [abs(curve.transfer_s(n) * r / n - 1) for n, r in zip(sizes, rates, strict=True)]
    except (ValueError, ZeroDivisionError):
        return None
    if not all(map(math.isfinite, errors)) or median(errors) > LARGEST_ERROR:
        return None
    return LinkCurve(
        link="intra-node" if len(transfers.nodes) == 1 else "inter-node",
        gpu_kind=transfers.gpu_kinds[0],
        gpus_sharing=_sharing(transfers),
        quadratic=quadratic,
        linear=linear,
        constant=constant,
        max_bytes_per_s=highest,
        source=transfers.source,
    )


def total_bytes_per_s(transfers: Transfers) -> float:
    """Return what all pairs of a send reach together, at best."""
    pairs = len(transfers.gpu_kinds) // 2
    return pairs * fit_line(transfers.num_bytes, transfers.time_s).bytes_per_s


def _sharing(transfers: Transfers) -> int:
    """GPUs of one node that use the link at once; two GPUs of a node make a ring of two."""
    if len(transfers.nodes) == 1:
        return len(transfers.gpu_kinds)
    return len(transfers.gpu_kinds) // 2


def _messages(transfers: Transfers) -> tuple[list[float], list[float]] | None:
    """Return sizes of single messages and bytes per second; None for what is no link's curve."""
    count = len(transfers.gpu_kinds)
    is_inside = len(transfers.nodes) == 1
    pairs = list(zip(transfers.num_bytes, transfers.time_s, strict=True))
    if transfers.operation == "send":
        together = 1 if is_inside else count // 2
        return [n for n, _ in pairs], [together * n / t for n, t in pairs]
    if transfers.operation == "all_gather" and is_inside and count > 2:
        # A ring of n ranks: n - 1 steps, in each of which everyone sends an nth.
        return [n / count for n, _ in pairs], [(count - 1) / count * n / t for n, t in pairs]
    return None


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
