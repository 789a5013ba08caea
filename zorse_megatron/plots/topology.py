"""The cluster as nested boxes (regions, switches, nodes, GPUs), groups in colours."""

from collections import Counter
from collections.abc import Mapping
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.patches import FancyBboxPatch, Patch, Rectangle

from zorse_megatron.planner.groupings.grouping import Grouping
from zorse_megatron.plots.boxes import Box, set_on_lines
from zorse_megatron.plots.figure import FAINT, TEXT, new_figure, save_figure
from zorse_megatron.plots.topology_boxes import DrawingScale, boxes_of, spell_kinds
from zorse_megatron.schema.text.quantities import spell_bandwidth
from zorse_megatron.topology.cluster_topology import Topology

_LEGEND_UP_TO = 18
_LEGEND_COLUMNS = 3
_LINK_ROOM = 1.1  # for each link between regions
# Okabe and Ito's colours, which colour-blind people can tell apart, then paler ones. The number
# of the group is in every box, so colours may repeat.
_COLOURS = (
    "#56B4E9",
    "#E69F00",
    "#009E73",
    "#F0E442",
    "#CC79A7",
    "#0072B2",
    "#D55E00",
    "#999999",
    "#B3DDF5",
    "#F6D18A",
    "#8FD6BF",
    "#F9F3B0",
    "#E8C3D7",
    "#8CB8DA",
    "#EFB48C",
    "#CFCFCF",
)
_DARK = {"#0072B2", "#D55E00", "#009E73"}
_FRAMES = {"region": "#F4F4F4", "switch": "#E9EDF2", "node": "#FFFFFF"}


def draw_topology(path: Path, *, spec: Topology, grouping: Grouping, title: str) -> Path:
    """Draw the cluster; a group's number is its place in `grouping`.

    Single GPUs are drawn up to 64 of them; beyond, each node is a bar with its groups' shares.
    """
    scale = DrawingScale.of(spec)
    # One below the other, so that the links between them have room at the right.
    regions, width, height = set_on_lines(boxes_of(spec), max_width=0, gap=1.2)
    room = _LINK_ROOM * len(spec.region_links) + (0.5 if spec.region_links else 0.0)
    legend = _legend(spec, grouping)
    figure = new_figure(
        width_inches=max(7.0, (width + room) * scale.unit_inches),
        height_inches=0.8 + height * scale.unit_inches + 0.24 * -(-len(legend) // _LEGEND_COLUMNS),
    )
    axes = figure.subplots()
    axes.set_title(title, fontsize=12, loc="left", color=TEXT)
    painter = _Painter(axes, spec, grouping)
    for box in regions:
        painter.draw(box, 0.0, 0.0)
    _draw_region_links(axes, spec, {box.key: box for box in regions}, width)
    axes.set_xlim(-0.2, width + room + 0.2)
    axes.set_ylim(height + 0.2, -0.2)
    axes.set_aspect("equal")
    axes.set_axis_off()
    figure.legend(
        handles=legend,
        loc="outside lower center",
        ncols=_LEGEND_COLUMNS,
        frameon=False,
        fontsize=8.5,
    )
    return save_figure(figure, path)


class _Painter:
    """Draws the boxes of one cluster."""

    def __init__(self, axes: Axes, spec: Topology, grouping: Grouping) -> None:
        self.axes = axes
        self.spec = spec
        self.group_of = {rank: number for number, group in enumerate(grouping) for rank in group}

    def draw(self, box: Box, left: float, top: float) -> None:
        """Draw a box and all inside it."""
        x, y = left + box.x, top + box.y
        if box.what == "gpu":
            assert isinstance(box.key, int)
            self._draw_share(self.group_of[box.key], x, y, box.width, box.height, font=9)
        elif box.what == "bar":
            self._draw_bar(box, x, y)
        else:
            self._draw_frame(box, x, y)
        for each in box.inside:
            self.draw(each, x, y)

    def _draw_frame(self, box: Box, x: float, y: float) -> None:
        frame = FancyBboxPatch(
            (x, y),
            box.width,
            box.height,
            boxstyle="round,pad=0,rounding_size=0.25",
            facecolor=_FRAMES[box.what],
            edgecolor="#BBBBBB",
            linewidth=0.8,
        )
        self.axes.add_patch(frame)
        size = 7.5 if box.what == "node" else 9
        self.axes.text(x + 0.35, y + 0.2, box.title, va="top", fontsize=size, color=TEXT)

    def _draw_bar(self, box: Box, x: float, y: float) -> None:
        """A node as a bar, with a part for each group that has GPUs there."""
        assert isinstance(box.key, int)
        node = self.spec.nodes[box.key]
        counts = Counter(self.group_of[rank] for rank in self.spec.ranks_of(box.key))
        is_large = box.width > 2
        left, height = x, 1.0 if is_large else box.height
        for group, count in sorted(counts.items()):
            width = box.width * count / node.num_gpus
            is_numbered = is_large or len(counts) == 1
            font = (8 if is_large else 5) if is_numbered else 0
            self._draw_share(group, left, y, width, height, font=font)
            left += width
        if is_large:
            told = spell_kinds(node.gpu_kinds)
            self.axes.text(x, y + 1.05, told, va="top", fontsize=6, color=FAINT)

    def _draw_share(
        self, group: int, x: float, y: float, width: float, height: float, *, font: float
    ) -> None:
        colour = _COLOURS[group % len(_COLOURS)]
        self.axes.add_patch(
            Rectangle((x, y), width, height, facecolor=colour, edgecolor="white", linewidth=0.8)
        )
        if font:
            self.axes.text(
                x + width / 2,
                y + height / 2,
                str(group),
                ha="center",
                va="center",
                fontsize=font,
                color="white" if colour in _DARK else TEXT,
            )


def _legend(spec: Topology, grouping: Grouping) -> list[Patch]:
    """One entry for each group, with its GPUs; the first ones only if there are many."""
    kinds = [kind for node in spec.nodes for kind in node.gpu_kinds]
    entries = [
        Patch(
            facecolor=_COLOURS[number % len(_COLOURS)],
            label=f"{number}: {spell_kinds([kinds[rank] for rank in group])}",
        )
        for number, group in enumerate(grouping)
    ]
    if len(entries) <= _LEGEND_UP_TO:
        return entries
    left_out = len(entries) - _LEGEND_UP_TO + 1
    more = Patch(facecolor="none", label=f"and {left_out} more groups")
    return [*entries[: _LEGEND_UP_TO - 1], more]


def _draw_region_links(
    axes: Axes, spec: Topology, boxes: Mapping[object, Box], width: float
) -> None:
    """Brackets at the right, one for each link between regions that have nodes."""
    links = [link for link in spec.region_links if all(name in boxes for name in link.regions)]
    for column, link in enumerate(links):
        ends = [boxes[region] for region in link.regions]
        x = width + 0.5 + _LINK_ROOM * column
        # Brackets of one region start at different heights.
        heights = [box.y + box.height * (column + 1) / (len(links) + 1) for box in ends]
        for box, y in zip(ends, heights, strict=True):
            axes.plot([box.x + box.width, x], [y, y], color=TEXT, linewidth=1)
        axes.plot([x, x], heights, color=TEXT, linewidth=1.6)
        told = f"{spell_bandwidth(link.bandwidth_bytes_per_s)}, {link.latency_s * 1e3:g} ms"
        y = sum(heights) / 2
        axes.text(x + 0.15, y, told, va="center", rotation=90, fontsize=8.5, color=TEXT)
