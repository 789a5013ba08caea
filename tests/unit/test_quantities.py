import doctest

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic_core import PydanticCustomError

from zorse_megatron.files import quantities
from zorse_megatron.files.quantities import (
    BANDWIDTH,
    COMPUTE_RATE,
    LATENCY,
    MEMORY_SIZE,
    NETWORK_BANDWIDTH,
)


def test_examples():
    assert doctest.testmod(quantities).failed == 0


@pytest.mark.parametrize(
    ("quantity", "text", "value"),
    [
        (MEMORY_SIZE, "80GiB", 80 * 2**30),
        (MEMORY_SIZE, "80 GB", 80e9),
        (MEMORY_SIZE, "1.5 TB", 1.5e12),
        (MEMORY_SIZE, 16_000_000_000, 16e9),
        (BANDWIDTH, "50 Gb/s", 6.25e9),
        (BANDWIDTH, "50Gbps", 6.25e9),
        (BANDWIDTH, "220 GB/s", 220e9),
        (BANDWIDTH, "1 GiB/s", 2**30),
        (BANDWIDTH, 1e9, 1e9),
        (BANDWIDTH, "1e9 B/s", 1e9),
        (LATENCY, "5 us", 5e-6),
        (LATENCY, "50 us", 50e-6),
        (LATENCY, "5 µs", 5e-6),
        (LATENCY, "60ms", 60e-3),
        (LATENCY, 0, 0.0),
        (COMPUTE_RATE, "312 TFLOP/s", 312e12),
        (COMPUTE_RATE, "35TFLOPS", 35e12),
        (MEMORY_SIZE, "80gb", 80e9),
        (MEMORY_SIZE, "80 GIB", 80 * 2**30),
        (LATENCY, "5 US", 5e-6),
        (COMPUTE_RATE, "35 tflops", 35e12),
        (NETWORK_BANDWIDTH, "100 gb/s", 12.5e9),
        (NETWORK_BANDWIDTH, "100gbps", 12.5e9),
        (NETWORK_BANDWIDTH, "100 Gb/S", 12.5e9),
        (NETWORK_BANDWIDTH, "100 gB/s", 100e9),
        (NETWORK_BANDWIDTH, "100 GBIT/S", 12.5e9),
        (BANDWIDTH, "100 Gb/S", 12.5e9),
        (BANDWIDTH, "100 gB/s", 100e9),
        (BANDWIDTH, "100 GB/S", 100e9),
        (NETWORK_BANDWIDTH, "100 GB/S", 100e9),
        (NETWORK_BANDWIDTH, "100 GiB/S", 100 * 2**30),
        (BANDWIDTH, "100 gbit/s", 12.5e9),
    ],
)
def test_values(quantity, text, value):
    assert quantity.parse(text) == value


@pytest.mark.parametrize(
    ("quantity", "text", "expected"),
    [
        (MEMORY_SIZE, "80", "with its unit"),
        (MEMORY_SIZE, 80, "1 MB to 1 PB"),
        (MEMORY_SIZE, "80 Gb", "with its unit"),
        (MEMORY_SIZE, "-80 GB", "1 MB to 1 PB"),
        (MEMORY_SIZE, "80 GB/s", "with its unit"),
        (BANDWIDTH, "fast", "with its unit"),
        (BANDWIDTH, 50, "1 kB/s to 1 PB/s"),
        (BANDWIDTH, "1e999 GB/s", "1 kB/s to 1 PB/s"),
        (BANDWIDTH, float("nan"), "1 kB/s to 1 PB/s"),
        (BANDWIDTH, 10**4000, "1 kB/s to 1 PB/s"),
        (BANDWIDTH, True, "such as"),
        (BANDWIDTH, ["50 Gb/s"], "such as"),
        (BANDWIDTH, "100 gb/s", "100 GB/s or 100 Gb/s: whether gb/s is bytes or bits"),
        (BANDWIDTH, "100 gbps", "100 GBps or 100 Gbps"),
        (BANDWIDTH, "100 GBPS", "100 GBps or 100 Gbps"),
        (NETWORK_BANDWIDTH, "100 GBPS", "100 GBps or 100 Gbps"),
        (LATENCY, "3 h", "with its unit"),
        (LATENCY, 5000, "0 to 100 s"),
        (COMPUTE_RATE, 312, "1 GFLOP/s"),
    ],
)
def test_refused(quantity, text, expected):
    with pytest.raises(PydanticCustomError) as caught:
        quantity.parse(text)
    assert expected in str(caught.value)


@given(st.floats(1e3, 1e14), st.sampled_from(["B/s", "kB/s", "MB/s", "GB/s"]))
def test_a_byte_is_eight_bits(value, unit):
    in_bits = unit.replace("B", "b")
    rate = value / BANDWIDTH.units[unit]
    assert BANDWIDTH.parse(f"{8 * rate!r} {in_bits}") == pytest.approx(value)


@given(
    st.sampled_from([MEMORY_SIZE, BANDWIDTH, NETWORK_BANDWIDTH]),
    st.integers(1, 900),
    st.data(),
)
def test_the_case_of_letters_never_takes_bits_for_bytes(quantity, number, data):
    """Of a unit in any case of letters: what its `b` or `B` says, or a refusal."""
    unit = data.draw(st.sampled_from(sorted(each for each in quantity.units if each)))
    upper = data.draw(st.lists(st.booleans(), min_size=len(unit), max_size=len(unit)))
    text = "".join(s.upper() if up else s.lower() for s, up in zip(unit, upper, strict=True))
    expected = quantity.units[unit] * number
    try:
        found = quantity.parse(f"{number} {text}")
    except PydanticCustomError:
        return
    kept = "bit" in unit or text[unit.lower().index("b")] == unit[unit.lower().index("b")]
    if kept and not (unit.count("/") and text.islower()):
        assert found == pytest.approx(expected)
