"""Boxes of a flat interval: each element once, in flat order, few boxes."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from zorse_megatron.schedule.tensor_parallel_parts import interval_blocks

SHAPES = st.lists(st.integers(min_value=1, max_value=5), min_size=0, max_size=4).map(tuple)


@given(shape=SHAPES, data=st.data())
def test_boxes_hold_the_interval_in_flat_order(shape: tuple[int, ...], data: st.DataObject) -> None:
    numel = math.prod(shape)
    start = data.draw(st.integers(0, numel))
    stop = data.draw(st.integers(start, numel))
    tensor = np.arange(numel).reshape(shape)
    boxes = interval_blocks(shape, (start, stop))
    elements: list[int] = []
    for box in boxes:
        block = tensor[tuple(slice(o, o + s) for o, s in zip(box.offset, box.size, strict=True))]
        assert block.shape == box.size
        assert box.numel == block.size > 0
        elements += block.ravel().tolist()
    assert elements == list(range(start, stop))
    assert len(boxes) <= max(1, 2 * len(shape) - 1)
    assert len({box.offset for box in boxes}) == len(boxes)


def test_intervals_outside_the_tensor_are_refused() -> None:
    with pytest.raises(ValueError, match="inside a tensor"):
        interval_blocks((2, 3), (0, 7))
