"""Quantities as people write them: `80GiB`, `50 Gb/s`, `220 GB/s`, `5 us`, `312 TFLOP/s`.

A text needs a unit. A plain number is one of the SI base unit (bytes, bytes per second, seconds,
operations per second); ranges of what exists catch the number whose unit was forgotten.

`b` is a bit and `B` a byte, as on data sheets; all other letters may be of any case: `100 GB/S` is
bytes. Two spellings do not say which. `100 gb/s` in small letters means bits of a network, in which
all networks are sold; of anything else it is refused. So is `100 GBPS`, which is written for both.
"""

import dataclasses
import re
from dataclasses import dataclass
from decimal import Decimal
from typing import Annotated, Any

from pydantic import BeforeValidator
from pydantic_core import PydanticCustomError

# The error type of every problem with a quantity; `strict.py` shows its message as it is.
QUANTITY_ERROR = "quantity"

_DECIMAL = {"": 1.0, "k": 1e3, "K": 1e3, "M": 1e6, "G": 1e9, "T": 1e12, "P": 1e15}
_BINARY = {f"{prefix}i": 1024.0**power for power, prefix in enumerate("KMGT", start=1)}
_PREFIXES = {**_DECIMAL, **_BINARY}
_NUMBER = r"[+-]?(?:\d[\d_]{0,40}\.?\d{0,40}|\.\d{1,40})(?:[eE][+-]?\d{1,4})?"
_NUMBER_AND_UNIT = re.compile(rf"\s*({_NUMBER})\s*(\S.*?)?\s*")


def _sizes() -> dict[str, float]:
    return {f"{prefix}B": factor for prefix, factor in _PREFIXES.items()}


def _bandwidths() -> dict[str, float]:
    units: dict[str, float] = {}
    for prefix, factor in _PREFIXES.items():
        units |= dict.fromkeys((f"{prefix}B/s", f"{prefix}Bps"), factor)
        units |= dict.fromkeys((f"{prefix}b/s", f"{prefix}bps", f"{prefix}bit/s"), factor / 8)
    return units


def _rates() -> dict[str, float]:
    endings = ("FLOP/s", "FLOPS", "FLOPs")
    return {f"{prefix}{end}": f for prefix, f in _DECIMAL.items() for end in endings}


@dataclass(frozen=True, kw_only=True)
class Quantity:
    """A physical quantity: its units as factors of the base unit, and what can be."""

    name: str
    units: dict[str, float]
    examples: str
    lowest: float
    highest: float
    range_text: str
    small_letters_are_bits: bool = False
    """What `gb/s` is: bits, or not to be told."""

    def parse(self, value: Any) -> float:
        """Return the value in the base unit. Raises PydanticCustomError with what is expected."""
        number = self._number(value)
        if not self.lowest <= number <= self.highest:
            raise self._error(f"a {self.name} of {self.range_text}, such as {self.examples}")
        return number

    def _number(self, value: Any) -> float:
        if isinstance(value, bool) or not isinstance(value, int | float | str):
            raise self._error(f"a {self.name} such as {self.examples}")
        if not isinstance(value, str):
            # Of a whole number beyond what a float holds only the range is to be reported.
            return float(min(value, 2**1000)) if isinstance(value, int) else value
        match = _NUMBER_AND_UNIT.fullmatch(value)
        unit = (match[2] or "") if match else ""
        unit = "us" if unit in ("µs", "μs") else unit
        factors = self._factors(unit)
        if match is None or not factors:
            raise self._error(f"a {self.name} with its unit, such as {self.examples}")
        if len(factors) > 1:
            asked = " or ".join(f"{match[1]} {each}" for each in factors.values())
            raise self._error(f"{asked}: whether {unit} is bytes or bits, its letters do not say")
        # In decimals, so that 50 us is 5e-05 and not the float next to it.
        (factor,) = factors
        return float(Decimal(match[1].replace("_", "")) * Decimal(repr(factor)))

    def _factors(self, unit: str) -> dict[float, str]:
        """What a unit may mean: no factor, one or two, and the spelling that has it for sure."""
        if unit in self.units:
            return {self.units[unit]: unit}
        alike = [each for each in self.units if each.lower() == unit.lower()]
        is_small, is_shouted = unit.islower(), unit.isupper() and "/" not in unit
        if self.small_letters_are_bits if is_small else not is_shouted:
            alike = [each for each in alike if _byte_sign(each) == _byte_sign(unit)]
        found = {self.units[each]: each for each in reversed(alike)}
        return {factor: found[factor] for factor in sorted(found, reverse=True)}

    def _error(self, expected: str) -> PydanticCustomError:
        # The message goes through str.format, so braces must not come from outside.
        return PydanticCustomError(QUANTITY_ERROR, "{expected}", {"expected": expected})


def _byte_sign(unit: str) -> str:
    """B or b, as the unit has it, and b where it spells out bits; "" without one."""
    if "bit" in unit.lower():
        return "b"
    return next((sign for sign in unit if sign in "bB"), "")


MEMORY_SIZE = Quantity(
    name="memory size",
    units=_sizes(),
    examples="80GiB or 40 GB",
    lowest=1e6,
    highest=1e15,
    range_text="1 MB to 1 PB",
)
BANDWIDTH = Quantity(
    name="bandwidth",
    units=_bandwidths(),
    examples="50 Gb/s (bits) or 220 GB/s (bytes)",
    lowest=1e3,
    highest=1e15,
    range_text="1 kB/s to 1 PB/s",
)
NETWORK_BANDWIDTH = dataclasses.replace(BANDWIDTH, small_letters_are_bits=True)
LATENCY = Quantity(
    name="latency",
    units={"s": 1.0, "ms": 1e-3, "us": 1e-6, "ns": 1e-9},
    examples="5 us or 60 ms",
    lowest=0.0,
    highest=100.0,
    range_text="0 to 100 s",
)
COMPUTE_RATE = Quantity(
    name="compute rate",
    units=_rates(),
    examples="312 TFLOP/s",
    lowest=1e9,
    highest=1e18,
    range_text="1 GFLOP/s to 1,000 PFLOP/s",
)


def _whole_bytes(value: Any) -> int:
    return round(MEMORY_SIZE.parse(value))


Bytes = Annotated[int, BeforeValidator(_whole_bytes)]
BytesPerSecond = Annotated[float, BeforeValidator(BANDWIDTH.parse)]
NetworkBytesPerSecond = Annotated[float, BeforeValidator(NETWORK_BANDWIDTH.parse)]
Seconds = Annotated[float, BeforeValidator(LATENCY.parse)]
FlopsPerSecond = Annotated[float, BeforeValidator(COMPUTE_RATE.parse)]


def spell_bandwidth(bytes_per_s: float) -> str:
    """Spell a bandwidth for people.

    >>> spell_bandwidth(6.25e9)
    '6.2 GB/s'
    """
    for prefix, factor in (("P", 1e15), ("T", 1e12), ("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if bytes_per_s >= factor:
            return f"{bytes_per_s / factor:.1f} {prefix}B/s"
    return f"{bytes_per_s:.0f} B/s"
