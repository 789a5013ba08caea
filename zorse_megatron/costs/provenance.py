"""Where a cost comes from, and how far such costs are off."""

from dataclasses import dataclass
from typing import Literal

Basis = Literal["measured", "scaled", "analytic"]
_WORDS = {"measured": "measured", "scaled": "scaled", "analytic": "estimated"}
# (basis, whether 16 bits) -> share that nine of ten of the public layer times (forward and
# backward together) are off by at most: docs/simulator.md, from
# tests/unit/test_compute_measured.py.
_OFF = {
    ("scaled", True): 0.10,
    ("scaled", False): 0.28,
    ("analytic", True): 0.14,
    ("analytic", False): 0.34,
}
_OFF_UNCALIBRATED = {True: 0.36, False: 0.44}


@dataclass(frozen=True, kw_only=True)
class Provenance:
    """measured: on this kind with this model; scaled: from others; analytic: from data sheets."""

    basis: Basis
    detail: str
    off_by: float
    """Share that nine of ten such layer times are off by at most; 0 where they were measured."""
    is_calibrated: bool = True
    """Whether anybody measured this chip; analytic costs know of some that nobody did."""

    def __str__(self) -> str:
        return f"{_WORDS[self.basis]}: {self.detail}"


def off_by(basis: Basis, *, sixteen_bit: bool, is_calibrated: bool = True) -> float:
    """Return how far such layer times are off, see `Provenance.off_by`."""
    if not is_calibrated:
        return _OFF_UNCALIBRATED[sixteen_bit]
    return _OFF.get((basis, sixteen_bit), 0.0)
