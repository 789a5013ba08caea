"""Time and memory of a pipeline stage: the formulas, for numbers and numpy arrays alike.

The simulator calls them with the numbers of one rank's chunk, the planner with those of one stage
(`planner.closed_form.stage_memory`, `stage_costs`), or with arrays [GPU class, segment, layers] for
all segments of a device order at once (`segment_costs`). Sequences are by GPU class of the stage's
group: sums over them run in the same order for both.
"""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from zorse_megatron.costs.interface import MemoryCost

_FLOAT32_BYTES = 4

Value = Any
"""A number, or an array of numbers; arguments of one call broadcast against one another."""
ByClass = Sequence[Value] | np.ndarray
"""A value for each GPU class."""


def pass_s(
    layers: Value, layer_s: Value, again_s: Value = 0, first_s: Value = 0, last_s: Value = 0
) -> Value:
    """One micro-batch through a stage: forward, backward, or both.

    `again_s`: of all layers that are recomputed. `first_s`, `last_s`: embedding and head, where the
    stage has them.
    """
    return layers * layer_s + again_s + first_s + last_s


def exchanges_s(
    computed_s: float, once_s: float, layers: int, again: int = 0, *, hides: bool
) -> tuple[float, float]:
    """What a micro-batch's exchanges of tokens add to forward and backward through experts that
    stock spreads over ranks; at least.

    Each layer has two forward, and two backward, of which one passes while gradients of weights are
    computed (`--overlap-dispatch-backward-with-experts-wgrad`); `again`, layers that are recomputed
    in whole, have two more. `hides`: whether all may pass while other micro-batches are computed
    (`--overlap-moe-expert-parallel-comm`), or shared experts. `computed_s`: of both passes.
    """
    forward_s, backward_s = 2 * layers * once_s, (layers + 2 * again) * once_s
    if hides:
        sent_s = 4 * layers * once_s
        share = max(0.0, sent_s - computed_s) / (forward_s + backward_s) if sent_s else 0.0
        forward_s, backward_s = min(1.0, share) * forward_s, min(1.0, share) * backward_s
    return forward_s, backward_s


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


def section_parameters(
    memory: MemoryCost, is_first: Value, is_last: Value, *, tied_on_same_rank: bool
) -> tuple[Value, int, Value]:
    """Parameters of the embedding, of one layer, and of the head that are trained; 0 of ends that
    others have."""
    return (
        is_first * memory.embedding_parameters(),
        memory.layer_parameters(),
        is_last * memory.head_parameters(tied_on_same_rank=tied_on_same_rank),
    )


def stage_parameters(layers: Value, embedding: Value, layer: int, head: Value) -> Value:
    """Parameters of so many layers, and of embedding and head where the stage has them."""
    return layers * layer + embedding + head


def frozen_bytes(
    memory: MemoryCost, layers: Value, is_first: Value, is_last: Value, *, tied_on_same_rank: bool
) -> Value:
    """What parameters that are not trained take: all of them, all the time, on every GPU."""
    embedding, layer, head = (
        memory.frozen_parameters(section, tied_on_same_rank=tied_on_same_rank)
        for section in ("embedding", "layer", "head")
    )
    number = stage_parameters(layers, is_first * embedding, layer, is_last * head)
    return memory.parameter_bytes(number)


def saved_bytes(
    layers: Value, recomputed: Value, whole: Value, saved: Value, *, at_once: int = 1
) -> Value:
    """What layers keep of a micro-batch from its forward to its backward.

    `whole`: of one layer; `saved`: of `at_once` layers that are recomputed, one input between them.
    """
    return (layers - recomputed) * whole + -(-recomputed // at_once) * saved


def working_bytes(
    layers: int, recomputed: int, whole: int, saved: int, *, at_once: int = 1, left: int = 0
) -> int:
    """What a backward needs while layers are computed again, beyond what is there before or after.

    Arguments as of `saved_bytes`; `left`: what each layer leaves behind for weight gradients that
    are computed apart. The first layers are computed again (Megatron's "block"), so the others have
    had their backwards.
    """
    if not recomputed:
        return 0
    behind, further = layers - recomputed, -(-recomputed // at_once) - 1
    at_first = behind * left + further * saved
    at_last = (behind + further * at_once) * left
    again = max(at_first, at_last) + at_once * whole
    before: int = saved_bytes(layers, recomputed, whole, saved, at_once=at_once)
    return max(0, again - max(before, layers * left))


def working_bytes_of_layers(
    layers: Sequence[tuple[int, int, int, int]], recomputed: int, *, at_once: int = 1
) -> tuple[int, int]:
    """Return `saved_bytes` and `working_bytes` of layers that are not alike.

    `layers`: of each what it keeps whole, what it keeps if it is recomputed, of the first of
    `at_once` layers, what it leaves behind, and what arrives beside that.
    """
    now = before = sum(
        (0 if number % at_once else saved) if number < recomputed else whole
        for number, (whole, saved, *_) in enumerate(layers)
    )
    most = after = sum(left for _, _, left, _ in layers)
    for number, (whole, _, left, arriving) in reversed([*enumerate(layers)]):
        if number < recomputed and (number + 1 == recomputed or not (number + 1) % at_once):
            start = number - number % at_once
            now += sum(each[0] for each in layers[start : number + 1]) - layers[start][1]
        most = max(most, now + arriving)
        now += left - whole
        most = max(most, now + arriving)
    return before, max(0, most - max(before, after))


def widened_bytes(memory: MemoryCost, num_parameters: int) -> int:
    """fp32 copies that an optimizer step makes of gradients in 16 bits; 0 where they are in fp32.

    Source: `DistributedOptimizer._copy_model_grads_to_main_grads` in
    megatron/core/optimizer/distrib_optimizer.py.
    """
    wide_bytes = _FLOAT32_BYTES * num_parameters
    return wide_bytes if memory.gradient_bytes(num_parameters) < wide_bytes else 0


def replica_bytes(
    unsharded: Value, size: Value, activations: Value, working: Value, reserve: int = 0
) -> Value:
    """What a GPU holds beside its shards: `unsharded` parameters and gradients, and for each of the
    `size` samples of a micro-batch activations and what is in work at the moment."""
    return unsharded + size * (activations + working) + reserve
