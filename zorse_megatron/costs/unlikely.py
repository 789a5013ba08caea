"""Detect implausible times in a profile: beyond the chip's peak, or in another unit.

A time of milliseconds taken for seconds makes everything cost a thousand times too much, and no
other check finds it: the file is valid.
"""

from collections.abc import Iterator, Mapping
from dataclasses import replace

from zorse_megatron.costs.flops import layer_flops
from zorse_megatron.schema.gpus.gpu import GpuKind
from zorse_megatron.schema.profile.profile import Profile, Times

# Clocks and figures are not exact to more; a published peak counts the boost clock.
_FASTEST = 0.9
# Half a percent of the peak, in what takes too long to be the start of kernels.
_SLOWEST = 200.0
_KERNEL_STARTS_S = 0.05


def unlikely_times(profile: Profile, kinds: Mapping[str, GpuKind]) -> Iterator[str]:
    """Yield a sentence for each series of layer times that cannot be, or hardly, with its place."""
    shapes = {model.name: model.shape() for model in profile.models}
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
