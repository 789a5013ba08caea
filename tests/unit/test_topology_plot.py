"""Pictures of clusters: drawn, the same each time, and with a box for each thing."""

from collections import Counter
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.topologies import many_nodes, two_regions
from zorse_megatron.planner.groupings.split import split_groupings
from zorse_megatron.plots.boxes import Box, around, set_on_lines
from zorse_megatron.plots.topology import draw_topology
from zorse_megatron.plots.topology_boxes import boxes_of
from zorse_megatron.topology.cluster_topology import Topology


def every_box(box: Box) -> list[Box]:
    return [box, *(inner for each in box.inside for inner in every_box(each))]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("spec", "groups"), [(two_regions(), 6), (many_nodes(32), 20), (many_nodes(200), 3)]
)
def test_pictures_are_drawn_and_repeatable(tmp_path: Path, spec: Topology, groups: int) -> None:
    *_, step = split_groupings(spec, groups)
    paths = [
        draw_topology(tmp_path / name, spec=spec, grouping=step.grouping, title="A cluster")
        for name in ("one.png", "two.png")
    ]
    first, second = (path.read_bytes() for path in paths)
    assert first == second and first.startswith(b"\x89PNG")


def test_small_clusters_show_each_gpu_and_large_ones_each_node() -> None:
    small = Counter(box.what for top in boxes_of(two_regions()) for box in every_box(top))
    assert small == {"region": 2, "switch": 3, "node": 6, "gpu": 24}
    large = Counter(box.what for top in boxes_of(many_nodes(32)) for box in every_box(top))
    assert large == {"region": 1, "switch": 2, "bar": 32}


def test_boxes_lie_inside_the_boxes_around_them() -> None:
    for spec in (two_regions(), many_nodes(32), many_nodes(1250)):
        for top in boxes_of(spec):
            for box in every_box(top):
                for inner in box.inside:
                    assert inner.x > 0 and inner.x + inner.width < box.width + 1e-9
                    assert inner.y > 0 and inner.y + inner.height < box.height + 1e-9


@given(st.lists(st.tuples(st.floats(0.5, 5), st.floats(0.5, 5)), max_size=30))
def test_boxes_on_lines_do_not_overlap(sizes: list[tuple[float, float]]) -> None:
    boxes = [Box(what="gpu", width=width, height=height) for width, height in sizes]
    placed, width, height = set_on_lines(boxes, max_width=12, gap=0.25)
    assert width <= 12 and len(placed) == len(boxes)
    for number, one in enumerate(placed):
        assert one.x + one.width <= width + 1e-9 and one.y + one.height <= height + 1e-9
        for other in placed[:number]:
            beside = one.x >= other.x + other.width or other.x >= one.x + one.width
            below = one.y >= other.y + other.height or other.y >= one.y + one.height
            assert beside or below
    box = around(
        boxes, what="node", title="", max_width=12.5, gap=0.25, margin=0.25, title_height=1.0
    )
    assert box.width == pytest.approx(width + 0.5) and box.height == pytest.approx(height + 1.25)
