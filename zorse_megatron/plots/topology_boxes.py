"""A cluster as nested boxes: regions, switches, nodes, GPUs. Large clusters: nodes as bars."""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from zorse_megatron.plots.boxes import Box, around
from zorse_megatron.schema.text.quantities import spell_bandwidth
from zorse_megatron.topology.cluster_topology import MeasuredNode, Topology

# Up to this many GPUs each one is a box; beyond, a node is a bar.
_SINGLE_GPUS_UP_TO = 64
_LARGE_BARS_UP_TO = 160
_LEAST_WIDTH = 36.0  # in units; a GPU is one unit wide
_WIDEST_SWITCH = 30.0


@dataclass(frozen=True, kw_only=True)
class DrawingScale:
    """How much is shown of a cluster, by its size."""

    has_single_gpus: bool
    has_large_bars: bool
    max_width: float
    unit_inches: float

    @classmethod
    def of(cls, spec: Topology) -> "DrawingScale":
        """Wide enough for a picture that is about as wide as it is high, or wider."""
        has_single_gpus = spec.num_gpus <= _SINGLE_GPUS_UP_TO
        has_large_bars = len(spec.nodes) <= _LARGE_BARS_UP_TO
        area = (14.0 if has_large_bars else 2.6) * len(spec.nodes)
        area += 30.0 * len(spec.uplink_bytes_per_s)
        return cls(
            has_single_gpus=has_single_gpus,
            has_large_bars=has_large_bars,
            max_width=_LEAST_WIDTH if has_single_gpus else max(_LEAST_WIDTH, (1.8 * area) ** 0.5),
            unit_inches=0.34 if has_large_bars else 0.2,
        )


def boxes_of(spec: Topology) -> list[Box]:
    """One box for each region with nodes; the key of a box is what it stands for."""
    scale = DrawingScale.of(spec)
    names = dict.fromkeys(node.region for node in spec.nodes)
    is_named = len(names) > 1
    return [
        around(
            list(_below(spec, scale, None, region)),
            what="region",
            title=region if is_named else "",
            key=region,
            max_width=scale.max_width,
            gap=0.5,
            margin=0.5,
            title_height=1.2 if is_named else 0.5,
        )
        for region in names
    ]


def spell_kinds(kinds: Sequence[str]) -> str:
    """The kinds with their numbers.

    >>> spell_kinds(["T4", "T4", "L4"])
    '2 x T4 + 1 x L4'
    """
    return " + ".join(f"{count} x {kind}" for kind, count in Counter(kinds).items())


def _below(spec: Topology, scale: DrawingScale, switch: str | None, region: str) -> Iterator[Box]:
    """Switches that hang on `switch` (None: the region's core), then nodes."""
    for each in spec.switches:
        uplink = spec.uplink_bytes_per_s.get(each.name)
        if each.uplink_to == switch and each.region == region and uplink is not None:
            yield around(
                list(_below(spec, scale, each.name, region)),
                what="switch",
                title=f"{each.name}, up {spell_bandwidth(uplink)}",
                key=each.name,
                max_width=_WIDEST_SWITCH,
                gap=0.4,
                margin=0.4,
                title_height=1.1,
                min_width=6.0 if scale.has_large_bars else 10.0,
            )
    for index, node in enumerate(spec.nodes):
        if node.switch == switch and node.region == region:
            yield _node(spec, scale, index, node)


def _node(spec: Topology, scale: DrawingScale, index: int, node: MeasuredNode) -> Box:
    if not scale.has_single_gpus:
        width, height = (3.0, 1.6) if scale.has_large_bars else (1.2, 0.8)
        return Box(what="bar", key=index, width=width, height=height)
    gpus = [Box(what="gpu", key=rank, width=1.0, height=1.0) for rank in spec.ranks_of(index)]
    inside = spell_bandwidth(node.peer_bytes_per_s)
    out = spell_bandwidth(node.nics_bytes_per_s)
    return around(
        gpus,
        what="node",
        title=f"{node.name}: {spell_kinds(node.gpu_kinds)}\ninside {inside}\nout {out}",
        key=index,
        max_width=5.2,
        gap=0.1,
        margin=0.3,
        title_height=1.8,
        min_width=5.2,
    )
