"""Link curves: against the measured table, and what must hold for any of them."""

import csv
import math
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from zorse_megatron.costs.link_bandwidth import BandwidthCurve, LogFit, as_curves, curve_for

MEASURED = Path(__file__).resolve().parents[3] / "shared" / "measured" / "link_bandwidth.csv"
SIZES = [2**power for power in range(0, 36)]


def measured_rows() -> list[dict[str, str]]:
    if not MEASURED.is_file():
        pytest.skip("the measured link curves are not here (../shared/measured)")
    with MEASURED.open() as file:
        return list(csv.DictReader(file))


def curve_of(row: dict[str, str]) -> BandwidthCurve:
    a, b, c = (float(row[column]) for column in "abc")
    fit = LogFit(quadratic=a, linear=b, constant=c)
    return BandwidthCurve(max_bytes_per_s=float(row["max_bytes_per_s"]), fit=fit)


def test_measured_curves_are_met_where_messages_are_large() -> None:
    for row in measured_rows():
        curve = curve_of(row)
        a, b, c = (float(row[column]) for column in "abc")
        for megabytes in (2, 4, 8, 16):
            x = math.log2(megabytes)
            rate = min(1e9 * (a * x * x + b * x + c), float(row["max_bytes_per_s"]))
            assert curve.bytes_per_s(megabytes * 1e6) == pytest.approx(rate), row


def test_measured_curves_give_latencies_that_are_possible() -> None:
    # The fits know nothing below some hundred kilobytes, and taken literally turn negative there.
    for row in measured_rows():
        latency_s = curve_of(row).transfer_s(0)
        # 13 us for NVLink with all GPUs, 150 us for the slowest cloud network.
        assert 5e-6 < latency_s < 2e-4, row


def test_measured_curves_keep_their_order_by_sharing() -> None:
    rows = [row for row in measured_rows() if row["link"] == "inter-node"]
    pairs = [(int(row["gpus_sharing"]), curve_of(row)) for row in rows if row["gpu"] == "GH-96"]
    curves = as_curves(pairs)
    rates = [curve_for(curves, sharing).bytes_per_s(64e6) for sharing in (1, 2, 3, 4, 9)]
    assert rates[1] == rates[2] and rates[3] == rates[4]  # the next lower number, the highest
    assert rates[0] < rates[1] < rates[3]


coefficients = st.floats(-50, 50).map(lambda value: round(value, 3))


@given(coefficients, coefficients, coefficients, st.floats(1e6, 1e12))
def test_larger_messages_take_longer_and_go_faster(
    a: float, b: float, c: float, cap: float
) -> None:
    try:
        fit = LogFit(quadratic=a, linear=b, constant=c)
    except ValueError:
        assume(False)
    curve = BandwidthCurve(max_bytes_per_s=cap, fit=fit)
    times = [curve.transfer_s(size) for size in SIZES]
    rates = [curve.bytes_per_s(size) for size in SIZES]
    slack = 1 + 1e-9
    assert all(0 < first <= second * slack for first, second in pairwise(times))
    assert all(0 < first <= second * slack for first, second in pairwise(rates))
    assert max(rates) <= cap * slack
    assert curve.transfer_s(0) <= times[0] * slack


@given(coefficients, coefficients, coefficients)
def test_the_least_time_is_found(a: float, b: float, c: float) -> None:
    """Below `flat_below_bytes` the raw time would grow again; brute force over a fine grid."""
    try:
        fit = LogFit(quadratic=a, linear=b, constant=c)
    except ValueError:
        assume(False)
    assume(fit.flat_below_bytes > 0)
    start = math.log2(fit.flat_below_bytes / 1e6)
    end = -b / (2 * a) if a < 0 else max(start, 0) + 20
    grid = [start + (end - start) * i / 400 for i in range(401)]
    times = [2**x / (a * x * x + b * x + c) for x in grid if -150 < x < 150]
    assert all(first <= second * (1 + 1e-9) for first, second in pairwise(times))


def test_constant_link() -> None:
    curve = BandwidthCurve(max_bytes_per_s=1e9, latency_s=1e-3)
    assert curve.transfer_s(1e6) == pytest.approx(2e-3)
    assert curve.bytes_per_s(1e6) == pytest.approx(5e8)
    assert curve.transfer_s(0) == 1e-3 and curve.bytes_per_s(0) == 1e9


@pytest.mark.parametrize(
    "coefficients",
    [(0, 0, 0), (0, 0, -1), (0, -1, 5), (-1, 0, -1), (math.nan, 0, 1), (0, math.inf, 1)],
)
def test_useless_fits_are_refused(coefficients: tuple[float, float, float]) -> None:
    a, b, c = coefficients
    with pytest.raises(ValueError, match="expected"):
        LogFit(quadratic=a, linear=b, constant=c)


def test_useless_links_are_refused() -> None:
    with pytest.raises(ValueError, match="bandwidth > 0"):
        BandwidthCurve(max_bytes_per_s=0.0)
    with pytest.raises(ValueError, match="latency >= 0"):
        BandwidthCurve(max_bytes_per_s=1.0, latency_s=-1.0)
