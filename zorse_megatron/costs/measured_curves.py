"""Measured time by micro-batch size: a curve through the points that can be trusted.

Public measurements contain points that cannot be: one that is a third faster per sample than both
of its neighbours, or a larger micro-batch that takes less time. Such points are replaced, and every
replacement is reported.
"""

from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from statistics import median

from zorse_megatron.costs.analytic_compute import layer_flops
from zorse_megatron.gpus.gpu import GpuKind
from zorse_megatron.inputs.profile import Profile, Times

# A point is replaced if it is further than this from the lines between its neighbours. Honest
# curves bend: of the T4, whose clock falls with load, neighbours are off by up to 5 %. The points
# to be caught are off by 11 to 43 %.
TOLERANCE = 0.10
# Beyond the last point a sample costs at least and at most these shares of its mean cost there.
_LEAST_SLOPE, _MOST_SLOPE = 0.3, 1.5


@dataclass(frozen=True, kw_only=True)
class Replaced:
    """A measured point that is not used as it is."""

    micro_batch_size: int
    measured_s: float
    used_s: float


@dataclass(frozen=True, kw_only=True)
class Curve:
    """Seconds by micro-batch size; never falls."""

    sizes: tuple[int, ...]
    times_s: tuple[float, ...]
    slope_beyond_s: float
    """What each further sample costs beyond the last point."""

    def at(self, size: float) -> float:
        """Return the time at a size, which need not be whole."""
        sizes, times_s = self.sizes, self.times_s
        if size >= sizes[-1]:
            return times_s[-1] + (size - sizes[-1]) * self.slope_beyond_s
        if size < sizes[0]:
            return self._below(size)
        index = bisect_right(sizes, size) - 1
        share = (size - sizes[index]) / (sizes[index + 1] - sizes[index])
        return times_s[index] + share * (times_s[index + 1] - times_s[index])

    def _below(self, size: float) -> float:
        """Follow the first piece down, but never below what proportion gives."""
        first_s = self.times_s[0]
        slope_s = first_s / self.sizes[0]
        if len(self.sizes) > 1:
            slope_s = (self.times_s[1] - first_s) / (self.sizes[1] - self.sizes[0])
        line_s = first_s - slope_s * (self.sizes[0] - size)
        return max(line_s, first_s * size / self.sizes[0])


def fit_curve(sizes: Sequence[int], times_s: Sequence[float]) -> tuple[Curve, tuple[Replaced, ...]]:
    """Return a curve through the points, and the points that it does not pass through.

    Outliers go first, the worst of all before the next is looked for, because one spoils the lines
    of its neighbours; then pooling of adjacent violators (Ayer et al. 1955) takes out every fall.
    O(n^2) for n points.
    """
    used = list(times_s)
    for _ in range(len(used) // 3):
        worst = max(_deviations(sizes, used), default=(0.0, 0, 0.0))
        if worst[0] <= TOLERANCE:
            break
        used[worst[1]] = worst[2]
    used = _without_falls(used)
    replaced = tuple(
        Replaced(micro_batch_size=size, measured_s=before, used_s=after)
        for size, before, after in zip(sizes, times_s, used, strict=True)
        if before != after
    )
    curve = Curve(sizes=tuple(sizes), times_s=tuple(used), slope_beyond_s=_slope(sizes, used))
    return curve, replaced


def _deviations(sizes: Sequence[int], times_s: Sequence[float]) -> list[tuple[float, int, float]]:
    """Return (relative deviation, index, expected time) of each point that looks wrong.

    Expected is the median of the lines between up to two points before and two points after. A
    point that continues the line of either side is right: there the curve has a bend or a step,
    as where another kernel takes over. The first point is never judged: the fixed cost of a
    micro-batch makes it differ with good reason.
    """
    found = []
    for index in range(1, len(sizes) - 1):
        before = range(max(0, index - 2), index)
        after = range(index + 1, min(len(sizes), index + 3))
        lines = [_between(sizes, times_s, i, j, index) for i in before for j in after]
        expected = median(lines)
        sides = [
            _between(sizes, times_s, side[0], side[1], index)
            for side in (before, after)
            if len(side) > 1
        ]
        if expected > 0 and all(_is_off(times_s[index], side, expected) for side in sides):
            found.append((abs(times_s[index] / expected - 1), index, expected))
    return found


def _is_off(time_s: float, side_s: float, expected_s: float) -> bool:
    """Whether a time is away from the line of one side, and in the direction of its deviation."""
    if abs(time_s - side_s) <= TOLERANCE * side_s:
        return False
    return (time_s > side_s) == (time_s > expected_s)


def _between(sizes: Sequence[int], times_s: Sequence[float], i: int, j: int, at: int) -> float:
    share = (sizes[at] - sizes[i]) / (sizes[j] - sizes[i])
    return times_s[i] + share * (times_s[j] - times_s[i])


def _without_falls(times_s: Sequence[float]) -> list[float]:
    """Return the closest sequence that never falls: falling runs become their mean."""
    blocks: list[tuple[float, int]] = []
    for value in times_s:
        blocks.append((value, 1))
        while len(blocks) > 1 and blocks[-2][0] > blocks[-1][0]:
            (low, n), (high, m) = blocks.pop(), blocks.pop()
            blocks.append(((low * n + high * m) / (n + m), n + m))
    return [mean for mean, count in blocks for _ in range(count)]


def _slope(sizes: Sequence[int], times_s: Sequence[float]) -> float:
    """Median slope over the second half of the points (Theil 1950), within reason."""
    mean_s = times_s[-1] / sizes[-1]
    start = min(len(sizes) // 2, max(0, len(sizes) - 2))
    tail = list(zip(sizes, times_s, strict=True))[start:]
    slopes = [(b - a) / (m - n) for (n, a), (m, b) in combinations(tail, 2)]
    slope = median(slopes) if slopes else mean_s
    return min(max(slope, _LEAST_SLOPE * mean_s), _MOST_SLOPE * mean_s)


# Detect implausible times in a profile: beyond the chip's peak, or in another unit.
#
# A time of milliseconds taken for seconds makes everything cost a thousand times too much, and no
# other check finds it: the file is valid.


# Clocks and figures are not exact to more; a published peak counts the boost clock.
_FASTEST = 0.9
# Half a percent of the peak, in what takes too long to be the start of kernels.
_SLOWEST = 200.0
_KERNEL_STARTS_S = 0.05


def unlikely_times(profile: Profile, kinds: Mapping[str, GpuKind]) -> Iterator[str]:
    """Yield a sentence for each series of layer times that cannot be, or hardly, with its place."""
    shapes = {model.name: model for model in profile.models}
    for index, times in enumerate(profile.times):
        kind = kinds.get(times.gpu_kind)
        if times.part != "layer" or kind is None:
            continue
        try:
            peak = kind.peak.of(times.dtype)
        except LookupError:
            continue  # none is published
        shape = replace(shapes[times.model], seq_length=times.seq_length)
        least_s = layer_flops(shape, times.tensor_parallel) / peak
        if sentence := _sentence(times, least_s):
            yield f"times[{index}], {times.model} on {times.gpu_kind} in {times.dtype}: {sentence}"


def _sentence(times: Times, least_s: float) -> str:
    """Compare with `least_s`: a forward pass of one sample at the chip's published peak."""
    for passes, measured in ((1, times.forward_s), (2, times.backward_s)):
        name = "forward" if passes == 1 else "backward"
        for size, time_s in zip(times.micro_batch_sizes, measured, strict=True):
            least = passes * size * least_s
            what = f"{name} of {size} sample{'s'[: size > 1]}"
            if time_s < _FASTEST * least:
                return (
                    f"{what} in {time_s:.2g} s, while the chip's published peak "
                    f"needs {least:.2g} s; times are in seconds"
                )
            if time_s > max(_SLOWEST * least, _KERNEL_STARTS_S):
                return (
                    f"{what} in {time_s:.2g} s, {time_s / least:,.0f} times what "
                    f"the chip's published peak needs; were milliseconds taken for seconds?"
                )
    return ""
