"""Adds to a profile what was measured, and finds what is there; nothing else is touched.

What unequal shards cost beside their bytes comes from timed collectives.
"""

import dataclasses
import hashlib
import json
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path

from zorse_megatron.costs.analytic_compute import element_bytes
from zorse_megatron.costs.communication import Shards
from zorse_megatron.gpus.gpu import Dtype
from zorse_megatron.inputs.model import ModelShape
from zorse_megatron.inputs.profile import (
    LinkCurve,
    Part,
    PartMemory,
    ProcessMemory,
    Profile,
    Sharded,
    Source,
    Times,
    Transfers,
    UnequalShards,
    UpdateTime,
    load_profile,
    unequal_parts,
)
from zorse_megatron.measure.tasks import MeasuredPass, MeasuredStep

_OPERATIONS: tuple[Sharded, ...] = ("all_gather", "reduce_scatter")


def unequal_factors(transfers: Iterable[Transfers]) -> list[UnequalShards]:
    """Return a factor for each collective, link and kinds of GPU that were timed both ways.

    It is that of the largest message that was timed over equal and over unequal shards. Of several
    kinds of node with the same GPUs the largest factor counts.
    """
    timed = {each.key: each for each in transfers}
    found: dict[tuple[object, ...], UnequalShards] = {}
    for each in timed.values():
        for operation in _OPERATIONS:
            unequal = timed.get((f"{operation}_unequal", each.nodes, each.gpu_kinds))
            factor = _factor(each, unequal)
            if each.operation != operation or unequal is None or factor is None:
                continue
            entry = UnequalShards(
                operation=operation,
                link="intra-node" if len(each.nodes) == 1 else "inter-node",
                gpu_kinds=tuple(sorted(set(each.gpu_kinds))),
                factor=factor,
                source=each.source,
            )
            key = (operation, entry.link, entry.gpu_kinds)
            if key not in found or found[key].factor < factor:
                found[key] = entry
    return list(found.values())


def _factor(equal: Transfers, unequal: Transfers | None) -> float | None:
    """By how much unequal shards take longer than their bytes tell; None: no message in common."""
    if unequal is None:
        return None
    equal_s = dict(zip(equal.num_bytes, equal.time_s, strict=True))
    common = [
        (size, time_s)
        for size, time_s in zip(unequal.num_bytes, unequal.time_s, strict=True)
        if equal_s.get(size)
    ]
    if not common:
        return None
    num_bytes, unequal_s = common[-1]
    count = len(equal.gpu_kinds)
    return unequal_s / equal_s[num_bytes] / (_load(unequal_parts(count)) / _load((1,) * count))


def _load(parts: tuple[int, ...]) -> float:
    """What a link of the ring carries, as `costs.communication` takes it, of a buffer of one
    byte.
    """
    return Shards.of(tuple(part / sum(parts) for part in parts)).ring_bytes


PARTS: tuple[Part, ...] = ("layer", "embedding", "head")


@dataclass(frozen=True, kw_only=True)
class MeasuredSeries:
    """What is measured together: one model in one dtype on one kind of GPU."""

    model: ModelShape
    gpu_kind: str
    dtype: Dtype

    @property
    def source(self) -> str:
        """Name of the source of its entries."""
        return f"zorse profile measure {self.model.name}"


def profiled_model(shape: ModelShape) -> ModelShape:
    """Return the model of its layers with experts, if it has any, under a name that says which
    they are.

    The number of layers is not part of the name: layers are measured one by one, and models that
    differ in it alone share their times.
    """
    shape = replace(shape, dense_layers=())
    facts = {k: v for k, v in dataclasses.asdict(shape).items() if k not in ("name", "num_layers")}
    text = json.dumps(facts, sort_keys=True)
    name = f"gpt-h{shape.hidden_size}-{hashlib.sha256(text.encode()).hexdigest()[:8]}"
    return replace(shape, name=name)


def loaded_or_empty(path: Path, source: Source) -> Profile:
    """Return the profile in a file, or one without entries where there is no file; with a source.

    Raises ProfileError for a file that cannot be used.
    """
    if not path.exists():
        return Profile(schema_version=1, sources=(source,))
    return with_source(load_profile(path), source)


def with_source(profile: Profile, source: Source) -> Profile:
    """Put a source in the place of one with the same name."""
    sources = {each.name: each for each in profile.sources} | {source.name: source}
    return replace(profile, sources=tuple(sources.values()))


def with_transfers(profile: Profile, transfers: Transfers) -> Profile:
    """Put the times of messages in the place of those with the same key."""
    others = tuple(each for each in profile.transfers if each.key != transfers.key)
    return replace(profile, transfers=(*others, transfers))


def without_transfers(profile: Profile, keys: Iterable[tuple[object, ...]]) -> Profile:
    """Take out the times of messages with these keys."""
    old = set(keys)
    return replace(profile, transfers=tuple(t for t in profile.transfers if t.key not in old))


def with_links(profile: Profile, source: str, curves: Iterable[LinkCurve]) -> Profile:
    """Put curves in the place of all of this source, and of others for the same links."""
    new = {_link_key(curve): curve for curve in curves}
    others = tuple(
        each for each in profile.links if each.source != source and _link_key(each) not in new
    )
    return replace(profile, links=(*others, *new.values()))


def with_unequal_shards(profile: Profile, source: str, factors: Iterable[UnequalShards]) -> Profile:
    """Put factors in the place of all of this source."""
    others = tuple(each for each in profile.unequal_shards if each.source != source)
    return replace(profile, unequal_shards=(*others, *factors))


def with_pass(profile: Profile, series: MeasuredSeries, found: MeasuredPass) -> Profile:
    """Add a measured micro-batch to its series, and what it held to the memory of the part."""
    old = series_of(profile, series, found.part)
    points = {} if old is None else _points(old)
    points[found.micro_batch_size] = found.forward_s, found.backward_s, found.weight_gradients_s
    sizes = sorted(points)
    weights_s = [each for *_, each in map(points.__getitem__, sizes) if each is not None]
    times = Times(
        part=found.part,
        model=series.model.name,
        gpu_kind=series.gpu_kind,
        seq_length=series.model.seq_length,
        dtype=series.dtype,
        source=series.source,
        micro_batch_sizes=tuple(sizes),
        forward_s=tuple(points[size][0] for size in sizes),
        backward_s=tuple(points[size][1] for size in sizes),
        weight_gradients_s=tuple(weights_s) if len(weights_s) == len(sizes) else None,
        attention=found.attention,
    )
    return replace(
        profile,
        times=(*(each for each in profile.times if each is not old), times),
        memory=_with_memory(profile.memory, series, found),
    )


def with_step(profile: Profile, series: MeasuredSeries, found: MeasuredStep) -> Profile:
    """Add an optimizer step, which says that everything else of the series is there."""
    step = UpdateTime(
        gpu_kind=series.gpu_kind,
        dtype=series.dtype,
        num_parameters=found.num_parameters,
        update_s=found.update_s,
        source=series.source,
    )
    others = tuple(each for each in profile.updates if not _is_step_of(each, series))
    return replace(
        profile, updates=(*others, step), processes=_with_process(profile, series, found)
    )


def _with_process(
    profile: Profile, series: MeasuredSeries, found: MeasuredStep
) -> tuple[ProcessMemory, ...]:
    """One entry for each kind of GPU, the newest."""
    if found.context_bytes is None:
        return profile.processes
    others = tuple(each for each in profile.processes if each.gpu_kind != series.gpu_kind)
    new = ProcessMemory(
        gpu_kind=series.gpu_kind, context_bytes=found.context_bytes, source=series.source
    )
    return (*others, new)


def with_model(profile: Profile, model: ModelShape) -> Profile:
    """Add a model, unless there is one with its layers."""
    if any(each.name == model.name for each in profile.models):
        return profile
    return replace(profile, models=(*profile.models, model))


def without_series(profile: Profile, series: MeasuredSeries) -> Profile:
    """Take out what was measured of a model on a kind of GPU."""
    old = [series_of(profile, series, part) for part in PARTS]
    return replace(
        profile,
        times=tuple(each for each in profile.times if each not in old),
        updates=tuple(each for each in profile.updates if not _is_step_of(each, series)),
    )


def is_complete(profile: Profile, series: MeasuredSeries) -> bool:
    """Whether nothing of it is missing: the step is measured last."""
    return any(_is_step_of(each, series) for each in profile.updates)


def first_sizes(profile: Profile, series: MeasuredSeries) -> dict[Part, int]:
    """Return the micro-batch size at which each part goes on."""
    found = {part: series_of(profile, series, part) for part in PARTS}
    return {part: 2 * old.micro_batch_sizes[-1] if old else 1 for part, old in found.items()}


def series_of(profile: Profile, series: MeasuredSeries, part: Part) -> Times | None:
    """Return what was measured of one part; None where nothing was."""
    key = (part, series.model.name, series.gpu_kind, series.model.seq_length, series.dtype, 1)
    for times in profile.times:
        found = (times.part, times.model, times.gpu_kind, times.seq_length, times.dtype)
        if (*found, times.tensor_parallel) == key:
            return times
    return None


def _with_memory(
    memory: tuple[PartMemory, ...], series: MeasuredSeries, found: MeasuredPass
) -> tuple[PartMemory, ...]:
    """The most of what the kind of GPU held of a sample."""
    model = series.model
    key = (found.part, model.name, model.seq_length, 1)
    old = [
        m
        for m in memory
        if (m.part, m.model, m.seq_length, m.tensor_parallel) == key
        and m.gpu_kind == series.gpu_kind
    ]
    # Layers keep their activations until their backward; of the head there is one at a time.
    held_bytes = found.peak_bytes if found.part == "head" else found.saved_bytes
    elements = -(-held_bytes // found.micro_batch_size // element_bytes(series.dtype))
    entry = PartMemory(
        part=found.part,
        model=model.name,
        seq_length=model.seq_length,
        source=series.source,
        parameters=found.parameters,
        activation_elements=max([elements, *(m.activation_elements for m in old)]),
        output_elements=model.seq_length * (1 if found.part == "head" else model.hidden_size),
        gpu_kind=series.gpu_kind,
        attention=found.attention,
    )
    return (*(each for each in memory if each not in old), entry)


def _points(times: Times) -> dict[int, tuple[float, float, float | None]]:
    """Micro-batch size -> forward, backward, and of it weight gradients."""
    weights_s = times.weight_gradients_s or (None,) * len(times.micro_batch_sizes)
    columns = zip(times.forward_s, times.backward_s, weights_s, strict=True)
    return dict(zip(times.micro_batch_sizes, columns, strict=True))


def _is_step_of(step: UpdateTime, series: MeasuredSeries) -> bool:
    found = (step.source, step.gpu_kind, step.dtype)
    return found == (series.source, series.gpu_kind, series.dtype)


def _link_key(curve: LinkCurve) -> tuple[object, ...]:
    return (curve.link, curve.gpu_kind, curve.gpus_sharing)
