"""Boxes within boxes, set like words on lines. Geometry only; y grows downwards."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace


@dataclass(frozen=True, kw_only=True)
class Box:
    """A rectangle with boxes inside; x and y are relative to the box around it."""

    what: str
    title: str = ""
    key: object = None
    width: float
    height: float
    x: float = 0.0
    y: float = 0.0
    inside: tuple["Box", ...] = field(default=())


def set_on_lines(
    boxes: Sequence[Box], *, max_width: float, gap: float
) -> tuple[tuple[Box, ...], float, float]:
    """Place boxes left to right on lines of at most `max_width`: (placed, width, height)."""
    placed: list[Box] = []
    x = y = line_height = width = 0.0
    for box in boxes:
        if x and x + box.width > max_width:
            x, y, line_height = 0.0, y + line_height + gap, 0.0
        placed.append(replace(box, x=x, y=y))
        width = max(width, x + box.width)
        x, line_height = x + box.width + gap, max(line_height, box.height)
    return tuple(placed), width, y + line_height


def around(
    boxes: Sequence[Box],
    *,
    what: str,
    title: str,
    max_width: float,
    gap: float,
    margin: float,
    title_height: float,
    min_width: float = 0.0,
    key: object = None,
) -> Box:
    """A box around others, with room for a title above them."""
    placed, width, height = set_on_lines(boxes, max_width=max_width - 2 * margin, gap=gap)
    inside = tuple(replace(box, x=box.x + margin, y=box.y + title_height) for box in placed)
    return Box(
        what=what,
        title=title,
        key=key,
        width=max(width + 2 * margin, min_width),
        height=height + title_height + margin,
        inside=inside,
    )
