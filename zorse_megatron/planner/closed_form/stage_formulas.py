"""Time and memory of a pipeline stage: the formulas, for single numbers and numpy arrays alike.

`stage_costs` and `stage_memory` call them with the numbers of one stage, `segment_costs` with
arrays [GPU class, segment, layers] for all segments of a device order at once. Sequences are by GPU
class of the stage's group: sums over them run in the same order for both.
"""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

Value = Any
"""A number, or an array of numbers; arguments of one call broadcast against one another."""
ByClass = Sequence[Value] | np.ndarray
"""A value for each GPU class."""


def pass_s(
    layers: Value, layer_s: Value, again_s: Value = 0.0, first_s: Value = 0.0, last_s: Value = 0.0
) -> Value:
    """One micro-batch through a stage: forward, backward, or both.

    `again_s`: of all layers that are recomputed. `first_s`, `last_s`: embedding and head, where the
    stage has them.
    """
    return layers * layer_s + again_s + first_s + last_s


def samples_per_s(samples: ByClass, both_s: ByClass) -> Value:
    """Throughput of a group.

    `samples`: of one micro-batch on every GPU of a class; `both_s`: forward and backward of one.
    """
    return sum(n / s for n, s in zip(samples, both_s, strict=True))


def micro_batches_per_replica(
    batch: float, num_gpus: ByClass, sizes: ByClass, both_s: ByClass
) -> list[Value]:
    """Micro-batches of one replica of each GPU class if replicas finish together; not rounded."""
    rates = [size / s for size, s in zip(sizes, both_s, strict=True)]
    total = sum(n * rate for n, rate in zip(num_gpus, rates, strict=True))
    return [batch * rate / total / size for rate, size in zip(rates, sizes, strict=True)]


def in_flight_micro_batches(limit_samples: Value, count: Value, batch: float) -> Value:
    """A replica's part of its group's in-flight limit: whole micro-batches, at least 1.

    `count`: micro-batches that it runs of a batch of `batch` samples.
    """
    part = limit_samples * count / batch - 1e-9
    if isinstance(part, np.ndarray):
        return np.maximum(1, np.ceil(part))
    return max(1, math.ceil(part))


def stage_parameters(layers: Value, layer: int, first: Value, last: Value) -> Value:
    """Parameters of layers, and of embedding and head where the stage has them."""
    return layers * layer + first + last


def activation_bytes(
    layers_in_flight: Value, layers: Value, kept: Value, spared: Value, recomputed: Value = 0
) -> Value:
    """What a sample keeps between forward and backward, in all layers and micro-batches in flight.

    `kept`: of one layer; `spared`: how much less of it where it is recomputed.
    """
    return layers_in_flight * (kept - spared * recomputed / layers)


def replica_bytes(
    unsharded: Value, size: Value, activations: Value, working: Value, reserve: int = 0
) -> Value:
    """What a GPU holds beside its shards: `unsharded` parameters and gradients, and for each of the
    `size` samples of a micro-batch activations and what is in work at the moment."""
    return unsharded + size * (activations + working) + reserve
