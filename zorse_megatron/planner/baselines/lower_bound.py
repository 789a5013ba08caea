"""Lower bounds of the iteration time: all work at full speed on all GPUs, without waiting."""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product

from zorse_megatron.planner.baselines.bound_ways import (
    Way,
    both_s,
    largest_set,
    may_share_layers,
    ways_to_compute,
)
from zorse_megatron.planner.inputs.search_inputs import Inputs
from zorse_megatron.schema.gpus.gpu import ComputeDtype
from zorse_megatron.schema.plan.plan import Plan

# All sizes up to here are looked at; beyond, powers of two, as a sample's time hardly changes.
_EVERY_SIZE_UP_TO = 128


@dataclass(frozen=True)
class _Rates:
    """GPUs of one kind, and the least time that one of them needs for a sample, by part."""

    name: str
    count: int
    layers_s: tuple[float, ...]
    """All layers of the model; attention and MLP apart, where one GPU may have more of either."""
    ends_s: tuple[float, ...]
    """Embedding, head."""


def lower_bound_s(
    inputs: Inputs, *, recomputing: bool = False, dtypes: Iterable[ComputeDtype] = ()
) -> float:
    """Return a time that no plan that fits can beat; `recomputing`: none that recomputes it all.

    Every sample passes embedding, layers and head once, forward and backward, on some GPU. Each
    GPU does its part of that at the best micro-batch size that its memory can hold, and the work is
    cut at will: no bubbles, no communication, no optimizer step. `dtypes`: types that groups of a
    plan compute in, other than the job's.

    With tensor-parallel sets too: what is not cut makes a part take more than its part of the time,
    and sums over a set are left out. GPUs of several kinds on a node may share a layer as they
    like, one more of the attention and one more of the MLP.

    The best way to share three kinds of work among unlike GPUs is a linear programme; any prices of
    the work give a lower bound of it (weak duality), and the largest of those is taken at the
    ratios at which a kind is indifferent. O(kinds^3).
    """
    kinds = _all_rates(inputs, recomputing, tuple(dtypes))
    choices = [
        _dual_prices([kind.ends_s[end] / sum(kind.layers_s) for kind in kinds]) for end in range(2)
    ]
    return inputs.global_batch_size * max(
        _dual_value(kinds, half, prices) for half in _halves(kinds) for prices in product(*choices)
    )


class LayerBounds:
    """What no plan can beat for the layers alone, on some of the GPUs; as `lower_bound_s`."""

    def __init__(self, inputs: Inputs, *, dtypes: Iterable[ComputeDtype] = ()) -> None:
        self.batch = inputs.global_batch_size
        self._rates = {kind.name: kind for kind in _all_rates(inputs, False, tuple(dtypes))}

    def of(self, counts: Mapping[str, int]) -> float:
        """All layers of all samples, in seconds; `counts`: kind -> how many GPUs of it."""
        kinds = [replace(self._rates[kind], count=count) for kind, count in counts.items()]
        return self.batch * max(_dual_value(kinds, half, (0.0, 0.0)) for half in _halves(kinds))


def plan_bound_s(inputs: Inputs, plan: Plan, *, recomputing: bool = False) -> float:
    """Return the bound for plans whose groups compute in the types of this one's."""
    types = {group.compute_dtype for group in plan.groups if group.compute_dtype}
    return lower_bound_s(inputs, recomputing=recomputing, dtypes=sorted(types))


def best_layers_per_s(inputs: Inputs, kind: str) -> float:
    """Highest rate of a kind: layers of one sample per second, forward, recompute and backward."""
    compute = inputs.compute
    rates = []
    for size in inputs.best_sizes[kind]:
        times = compute.layer(kind, size)
        whole_s = times.forward_s + times.backward_s + compute.recompute_s(kind, size, "full")
        rates.append(size / whole_s)
    return max(rates)


def _all_rates(inputs: Inputs, recomputing: bool, dtypes: tuple[ComputeDtype, ...]) -> list[_Rates]:
    return [
        _rates(inputs, kind, count, recomputing, dtypes)
        for kind, count in sorted(Counter(inputs.kinds).items())
    ]


def _halves(kinds: Sequence[_Rates]) -> list[float]:
    """Prices of the attentions to try, where that of all layers is 1."""
    return sorted({kind.layers_s[0] / sum(kind.layers_s) for kind in kinds})


def _dual_prices(ratios: Sequence[float]) -> list[float]:
    """Prices of an end to try; an end that takes a kind no time can have none above 0."""
    return [0.0] if min(ratios) <= 0 else sorted({0.0, *ratios})


def _dual_value(kinds: Sequence[_Rates], half: float, ends: Sequence[float]) -> float:
    """Seconds per sample if all layers together have the price 1, and the ends these prices.

    `half`: the price of the attentions, where they have one of their own.
    """

    def best_per_s(kind: _Rates) -> float:
        prices = (half, 1 - half) if len(kind.layers_s) > 1 else (1.0,)
        rates = [p / s for p, s in zip(prices, kind.layers_s, strict=True)]
        return max(*rates, *(p / s for p, s in zip(ends, kind.ends_s, strict=True) if p), 0.0)

    return (1 + sum(ends)) / sum(kind.count * best_per_s(kind) for kind in kinds)


def _rates(
    inputs: Inputs, kind: str, count: int, recomputing: bool, dtypes: tuple[ComputeDtype, ...]
) -> _Rates:
    ways = list(ways_to_compute(inputs, kind, dtypes))
    sizes = _sizes(inputs, kind)

    def least_s(part: Callable[[Way, int], float]) -> float:
        return min(part(way, size) / size for way in ways for size in sizes)

    def layer_s(way: Way, size: int) -> float:
        return way.layer_s(kind, size, recomputing=recomputing)

    def half_s(half: int) -> float:
        return least_s(lambda way, size: way.halves_s(kind, size, recomputing=recomputing)[half])

    layers_s = (least_s(layer_s),) if not may_share_layers(inputs) else (half_s(0), half_s(1))
    return _Rates(
        name=kind,
        count=count,
        layers_s=tuple(inputs.num_layers * each for each in layers_s),
        ends_s=(
            least_s(lambda way, size: both_s(way.compute.embedding(kind, size)) / way.rows),
            least_s(lambda way, size: both_s(way.compute.head(kind, size)) / way.rows),
        ),
    )


def _sizes(inputs: Inputs, kind: str) -> tuple[int, ...]:
    """Micro-batches that the batch has and the memory of a kind can hold.

    A layer's backward has all of its activations, kept or made again, so more than these fit in no
    plan; in types of half the bytes twice as many do.
    """
    capacity = max(
        bytes_
        for bytes_, each in zip(inputs.capacities_bytes, inputs.kinds, strict=True)
        if each == kind
    )
    memories = [inputs.memory, *(costs.memory for costs in inputs.by_dtype.values())]
    least = min(memory.activation_bytes(1, "none", kind) for memory in memories)
    held = int(capacity / (1 - inputs.memory_margin)) // max(1, least)
    if (most_ranks := largest_set(inputs)) > 1:  # together they hold a layer of more samples
        most_bytes = max(inputs.capacities_bytes) / (1 - inputs.memory_margin)
        held = int(most_ranks * most_bytes) // max(1, least)
    most = max(1, min(inputs.global_batch_size, held))
    sizes = set(range(1, min(most, _EVERY_SIZE_UP_TO) + 1)) | {most}
    size = _EVERY_SIZE_UP_TO
    while size < most:
        sizes.add(size)
        size *= 2
    return tuple(sorted(sizes))
