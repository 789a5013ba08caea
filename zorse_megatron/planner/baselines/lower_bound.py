"""Lower bounds of the iteration time: all work at full speed on all GPUs, without waiting."""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import product

from zorse_megatron.costs.interface import ComputeCost, PassTimes
from zorse_megatron.planner.inputs.search_inputs import Inputs
from zorse_megatron.schema.gpus.gpu import ComputeDtype
from zorse_megatron.schema.plan.plan import Plan

# All sizes up to here are looked at; beyond, powers of two, as a sample's time hardly changes.
_EVERY_SIZE_UP_TO = 128


@dataclass(frozen=True)
class _Rates:
    """GPUs of one kind, and the least time that one of them needs for a sample, by part."""

    count: int
    layers_s: float
    """All layers of the model."""
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

    The best way to share three kinds of work among unlike GPUs is a linear programme; any prices of
    the work give a lower bound of it (weak duality), and the largest of those is taken at the
    ratios at which a kind is indifferent. O(kinds^3).
    """
    kinds = [
        _rates(inputs, kind, count, recomputing, tuple(dtypes))
        for kind, count in sorted(Counter(inputs.kinds).items())
    ]
    batch = inputs.global_batch_size
    choices = [
        _dual_prices([kind.ends_s[end] / kind.layers_s for kind in kinds]) for end in range(2)
    ]
    return max(batch * _dual_value(kinds, prices) for prices in product(*choices))


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


def _dual_prices(ratios: Sequence[float]) -> list[float]:
    """Prices of an end to try; an end that takes a kind no time can have none above 0."""
    return [0.0] if min(ratios) <= 0 else sorted({0.0, *ratios})


def _dual_value(kinds: Sequence[_Rates], ends: Sequence[float]) -> float:
    """Seconds per sample if all layers together have the price 1, and the ends these prices."""
    earned_per_s = sum(
        kind.count
        * max(
            1 / kind.layers_s,
            *(p / s for p, s in zip(ends, kind.ends_s, strict=True) if p),
            0.0,
        )
        for kind in kinds
    )
    return (1 + sum(ends)) / earned_per_s


def _rates(
    inputs: Inputs, kind: str, count: int, recomputing: bool, dtypes: tuple[ComputeDtype, ...]
) -> _Rates:
    computes = list(_computes(inputs, kind, dtypes))
    sizes = _sizes(inputs, kind)

    def least_s(part: Callable[[ComputeCost, int], float]) -> float:
        return min(part(compute, size) / size for compute in computes for size in sizes)

    def layer_s(compute: ComputeCost, size: int) -> float:
        again_s = compute.recompute_s(kind, size, "full") if recomputing else 0.0
        return _both_s(compute.layer(kind, size)) + again_s

    return _Rates(
        count=count,
        layers_s=inputs.num_layers * least_s(layer_s),
        ends_s=(
            least_s(lambda compute, size: _both_s(compute.embedding(kind, size))),
            least_s(lambda compute, size: _both_s(compute.head(kind, size))),
        ),
    )


def _both_s(times: PassTimes) -> float:
    return times.forward_s + times.backward_s


def _computes(inputs: Inputs, kind: str, dtypes: tuple[ComputeDtype, ...]) -> Iterator[ComputeCost]:
    """Every way in which a plan may let a kind compute."""
    yield inputs.compute
    own = inputs.own_types[kind] if inputs.own_types is not None else None
    for dtype, costs in inputs.by_dtype.items():
        if dtype in dtypes or (own is not None and own.computes_in(dtype)):
            yield costs.compute


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
    most = max(1, min(inputs.global_batch_size, held))
    sizes = set(range(1, min(most, _EVERY_SIZE_UP_TO) + 1)) | {most}
    size = _EVERY_SIZE_UP_TO
    while size < most:
        sizes.add(size)
        size *= 2
    return tuple(sorted(sizes))
