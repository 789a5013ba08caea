"""A time that no plan with full recomputation can beat."""

from collections import Counter

from zorse_megatron.planner.inputs import Inputs


def lower_bound_s(inputs: Inputs) -> float:
    """All layers' work with every layer recomputed, shared out among the GPUs without rest.

    Each GPU works at its best rate over the measured micro-batch sizes. No bubbles, no
    communication, no embedding and head, no optimizer step, whole layers and samples cut at will.
    """
    layers = inputs.global_batch_size * inputs.num_layers
    per_kind = Counter(inputs.kinds)
    rate = sum(count * best_layers_per_s(inputs, kind) for kind, count in sorted(per_kind.items()))
    return layers / rate


def best_layers_per_s(inputs: Inputs, kind: str) -> float:
    """Highest rate of a kind: layers of one sample per second, forward, recompute and backward."""
    compute = inputs.compute
    rates = []
    for size in inputs.best_sizes[kind]:
        times = compute.layer(kind, size)
        whole_s = times.forward_s + times.backward_s + compute.recompute_s(kind, size, "full")
        rates.append(size / whole_s)
    return max(rates)
