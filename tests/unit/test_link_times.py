"""Times of links from what ranks tell, whatever their clocks say."""

import math
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.unit.test_step_times import SetClock
from zorse_megatron.live.run_status import LinkTimes, Messages
from zorse_megatron.runtime.step_times import StepTimes

EDGES = ((0, 1), (0, 2), (1, 0), (2, 0), (2, 1))
BYTES = 4096
STEP_S = 0.5
"""From one message of a link to the next."""


def told(
    links: LinkTimes,
    number: int,
    way_s: dict[tuple[int, int], float],
    offsets: Sequence[float],
    *,
    waited: bool = True,
    back_bytes: int = BYTES,
) -> list[list[float]]:
    """What all ranks tell of an iteration: three messages on each link."""
    rows = []
    for rank in range(3):
        sent = {
            target: [
                (
                    tag,
                    BYTES if source < target else back_bytes,
                    offsets[rank] + tag * STEP_S,
                )
                for tag in (2, 0, 1)
            ]
            for source, target in EDGES
            if source == rank
        }
        arrived = {
            source: [
                (tag, offsets[rank] + tag * STEP_S + way_s[source, target] if waited else None)
                for tag in (1, 0, 2)
            ]
            for source, target in EDGES
            if target == rank
        }
        rows.append(links.row(rank, Messages(number=number, sent=sent, arrived=arrived)))
    return rows


def of_three() -> LinkTimes:
    return LinkTimes(edges=EDGES, world_size=3)


@given(
    ways=st.lists(st.floats(0.001, 0.4), min_size=5, max_size=5),
    offsets=st.lists(st.floats(-1e5, 1e5), min_size=3, max_size=3),
)
def test_clocks_do_not_matter(ways: list[float], offsets: list[float]) -> None:
    links, way_s = of_three(), dict(zip(EDGES, ways, strict=True))
    for number in range(6):
        links.take(told(links, number, way_s, offsets))
    found = {each.ranks: each for each in links.links()}
    assert set(found) == {(0, 1), (0, 2)}  # of (1, 2) nothing goes there
    for (low, high), each in found.items():
        mean_s = (way_s[low, high] + way_s[high, low]) / 2
        assert each.seconds == pytest.approx(mean_s, abs=1e-9)  # of 1e5
        assert (each.num_bytes, each.messages) == (BYTES, 6)


def test_what_nobody_waited_for_does_not_count() -> None:
    links, way_s = of_three(), dict.fromkeys(EDGES, 0.1)
    for number in range(6):
        links.take(told(links, number, way_s, (0.0, 0.0, 0.0), waited=False))
    assert links.links() == ()


def test_messages_of_two_sizes_are_not_compared() -> None:
    links, way_s = of_three(), dict.fromkeys(EDGES, 0.1)
    for number in range(6):
        links.take(told(links, number, way_s, (0.0, 0.0, 0.0), back_bytes=2 * BYTES))
    assert links.links() == ()


def test_rows_are_of_one_length() -> None:
    links = of_three()
    rows = told(links, 0, dict.fromkeys(EDGES, 0.1), (0.0, 0.0, 0.0))
    rows.append(links.row(1, None))
    assert {len(row) for row in rows} == {links.width} == {6}
    assert all(map(math.isnan, rows[-1]))


def test_a_rank_notes_what_it_sends_and_what_it_waited_for() -> None:
    clock = SetClock()
    times = StepTimes(clock)
    times.begin(4)
    clock.now_s = 1.0
    times.sent(2, 7, BYTES)
    for tag, waited_s in ((1, 0.5), (3, 0.0)):
        with times.waiting():
            clock.now_s += waited_s
        times.arrived(0, tag)
    times.end()
    assert times.read() is not None
    assert times.messages == Messages(
        number=4, sent={2: [(7, BYTES, 1.0)]}, arrived={0: [(1, 1.5), (3, None)]}
    )
