from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from zorse_megatron.costs.measured_curves import TOLERANCE, fit_curve


def sizes_and_times():
    sizes = st.lists(st.integers(1, 64), min_size=1, max_size=12, unique=True).map(sorted)
    times = st.floats(1e-6, 10.0)
    return sizes.flatmap(
        lambda found: st.tuples(
            st.just(found), st.lists(times, min_size=len(found), max_size=len(found))
        )
    )


def test_passes_through_good_points():
    curve, replaced = fit_curve([1, 2, 4], [5.0, 7.0, 11.0])
    assert replaced == ()
    assert [curve.at(size) for size in (1, 2, 3, 4)] == [5.0, 7.0, 9.0, 11.0]
    assert curve.at(10) == pytest.approx(11.0 + 6 * 2.0)


def test_one_point():
    curve, _ = fit_curve([4], [8.0])
    assert [curve.at(size) for size in (1, 2, 4, 6)] == [2.0, 4.0, 8.0, 12.0]


def test_below_the_first_point():
    curve, _ = fit_curve([2, 4], [10.0, 16.0])
    assert curve.at(1) == 7.0
    steep, _ = fit_curve([4, 5], [4.0, 9.0])
    assert steep.at(1) == 1.0  # never less than in proportion


# The H100 NVL of the Zorse authors, Llama 13B at sequence 4096, forward and backward (ms).
H100_FORWARD = [8.50, 13.00, 24.81, 33.84, 41.55, 50.34]
H100_BACKWARD = [22.15, 25.00, 65.61, 86.88, 107.45, 127.14]


@pytest.mark.parametrize(
    ("times", "expected"), [(H100_FORWARD, 16.8), (H100_BACKWARD, 43.6)], ids=["forward", "back"]
)
def test_a_point_too_fast_per_sample_is_replaced_and_reported(times, expected):
    curve, replaced = fit_curve(range(1, 7), times)
    (point,) = replaced
    assert point.micro_batch_size == 2
    assert point.measured_s == times[1]
    assert point.used_s == curve.at(2) == pytest.approx(expected, rel=0.02)
    assert [curve.at(size) for size in (1, 3, 6)] == [times[0], times[2], times[5]]


def test_steps_and_bends_stay():
    # A100-80, Llama 13B, sequence 1024, forward: another kernel from five samples on.
    step = [3.66, 7.60, 11.46, 14.84, 15.95, 18.66, 22.12]
    assert fit_curve(range(1, 8), step)[1] == ()
    # L4, Llama 33B, float32, forward: slows down from nine samples on.
    bend = [55.0, 129.6, 213.2, 275.4, 332.7, 400.7, 489.8, 679.8, 1043.1, 1342.3, 1547.3, 1753.1]
    assert fit_curve(range(1, 13), bend)[1] == ()
    # A fixed cost of each micro-batch.
    assert fit_curve([1, 2, 4, 8], [10.0, 11.0, 13.0, 17.0])[1] == ()


def test_falls_are_pooled():
    curve, replaced = fit_curve([1, 2, 3, 4], [10.0, 11.05, 11.0, 12.0])
    assert [point.micro_batch_size for point in replaced] == [2, 3]
    assert curve.at(2) == curve.at(3) == pytest.approx(11.025)


@given(sizes_and_times())
def test_never_falls(points):
    curve, _ = fit_curve(*points)
    sizes = range(1, 130)
    assert all(curve.at(a) <= curve.at(b) * (1 + 1e-9) for a, b in pairwise(sizes))
    assert all(curve.at(size) > 0 for size in sizes)


@given(st.floats(0.0, 5.0), st.floats(0.1, 2.0), st.integers(3, 16))
def test_straight_lines_are_kept_exactly(fixed_samples, slope, count):
    fixed = fixed_samples * slope
    sizes = range(1, count + 1)
    times = [fixed + slope * size for size in sizes]
    curve, replaced = fit_curve(sizes, times)
    assert replaced == ()
    assert [curve.at(size) for size in sizes] == times
    assert curve.at(2 * count) == pytest.approx(fixed + slope * 2 * count)


@given(st.integers(5, 16), st.data())
def test_one_outlier_on_a_line_is_found(count, data):
    index = data.draw(st.integers(1, count - 2))
    factor = data.draw(st.sampled_from([0.5, 0.7, 0.85, 1.2, 1.6]))
    times = [2.0 + size for size in range(1, count + 1)]
    right = times[index]
    times[index] *= factor
    curve, replaced = fit_curve(range(1, count + 1), times)
    assert abs(factor - 1) > TOLERANCE
    assert index + 1 in [point.micro_batch_size for point in replaced]
    assert curve.at(index + 1) == pytest.approx(right, rel=0.1)


def test_no_time_at_all():
    curve, replaced = fit_curve([1, 2, 4], [0.0, 0.0, 0.0])
    assert (curve.at(8), replaced) == (0.0, ())
