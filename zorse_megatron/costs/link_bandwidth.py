"""Bandwidth of a link by message size: where bytes on a link become seconds.

Either a constant bandwidth after a latency, or a curve fitted to measurements:
GB/s = quadratic * x^2 + linear * x + constant with x = log2(message size in MB, 10^6 bytes), the
form in which Sailor (SOSP 2025) publishes its links.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property

_MB = 1e6
_GB = 1e9
_LN2 = math.log(2)
_LARGEST_LOG2_MB = 40.0  # 10^18 bytes


@dataclass(frozen=True, kw_only=True)
class LogFit:
    """Bandwidth in GB/s as a parabola over x = log2(MB), as fitted.

    A fit holds in the middle of what was measured and not at the ends, so it is used between two
    points only. Below `flat_below_bytes`, where the time n / bandwidth(n) would grow as messages
    shrink, the time stays as it is there: that time is the link's latency. Above the top of the
    parabola, where larger messages would be slower, the bandwidth stays at the top.
    """

    quadratic: float
    linear: float
    constant: float

    def __post_init__(self) -> None:
        if not all(map(math.isfinite, (self.quadratic, self.linear, self.constant))):
            raise ValueError(f"found {self}; expected finite coefficients")
        is_line = self.quadratic == 0
        falls = is_line and self.linear < 0
        has_top = self.quadratic < 0 or (is_line and self.linear == 0)
        never_positive = has_top and self._at(self._vertex) <= 0
        if falls or never_positive or self._flat_below > _LARGEST_LOG2_MB:
            raise ValueError(
                f"found {self}; expected a bandwidth that is positive for messages that exist and "
                "does not fall with the size of every message"
            )

    def bytes_per_s(self, num_bytes: float) -> float:
        """The fitted bandwidth, with the ends held as the class says."""
        x = max(math.log2(num_bytes / _MB) if num_bytes > 0 else -math.inf, self._flat_below)
        if self.quadratic < 0:
            x = min(x, self._vertex)
        return self._at(x) * _GB

    @property
    def flat_below_bytes(self) -> float:
        """Messages smaller than this take as long as one of this size."""
        return _MB * 2.0**self._flat_below

    def _at(self, x: float) -> float:
        if math.isinf(x):  # only of a constant
            return self.constant
        return (self.quadratic * x + self.linear) * x + self.constant

    @property
    def _vertex(self) -> float:
        return -self.linear / (2 * self.quadratic) if self.quadratic else -math.inf

    @cached_property
    def _flat_below(self) -> float:
        """Where the time 2^x / p(x) is least: where ln(2) p(x) - p'(x) turns positive."""
        a = _LN2 * self.quadratic
        b = _LN2 * self.linear - 2 * self.quadratic
        c = _LN2 * self.constant - self.linear
        if a == 0:
            return -c / b if b else -math.inf
        under_root = b * b - 4 * a * c
        if under_root < 0:  # the time grows everywhere (then the parabola is positive everywhere)
            return self._vertex
        # (-b + root) / 2a is the larger root for a > 0 and the smaller one for a < 0: that in
        # which the sign turns from - to + in both cases.
        return (-b + math.sqrt(under_root)) / (2 * a)


@dataclass(frozen=True, kw_only=True)
class BandwidthCurve:
    """Time and effective bandwidth of one message over a link. Both grow with the message."""

    max_bytes_per_s: float
    latency_s: float = 0.0
    fit: LogFit | None = None

    def __post_init__(self) -> None:
        if not (self.max_bytes_per_s > 0 and 0 <= self.latency_s < math.inf):
            raise ValueError(f"found {self}; expected a bandwidth > 0 and a latency >= 0")

    def transfer_s(self, num_bytes: float) -> float:
        """Time of one message; never less than that of an empty one."""
        if self.fit is None:
            return self.latency_s + num_bytes / self.max_bytes_per_s
        num_bytes = max(num_bytes, self.fit.flat_below_bytes)
        rate = min(self.max_bytes_per_s, self.fit.bytes_per_s(num_bytes))
        return self.latency_s + num_bytes / rate

    def bytes_per_s(self, num_bytes: float) -> float:
        """Effective bandwidth, latency included; that of a huge message for no bytes at all."""
        return num_bytes / self.transfer_s(num_bytes) if num_bytes > 0 else self.max_bytes_per_s


Curves = tuple[tuple[int, BandwidthCurve], ...]
"""(number of GPUs that use the link at once, curve), ascending by the number."""


def as_curves(pairs: Iterable[tuple[int, BandwidthCurve]]) -> Curves:
    """Sort measured curves by the number of GPUs that shared the link."""
    return tuple(sorted(dict(pairs).items()))


def curve_for(curves: Curves, num_sharing: int) -> BandwidthCurve:
    """The curve measured with `num_sharing` GPUs, or with the next lower number that there is.

    With fewer GPUs than any measurement: the lowest.
    """
    fitting = [curve for sharing, curve in curves if sharing <= num_sharing]
    return fitting[-1] if fitting else curves[0][1]
