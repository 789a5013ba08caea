"""A profile and a cluster in which each GPU has the speed that a run found it to have.

GPUs of a kind that take as long as each other stay one kind. One that differs becomes a kind of its
own, which computes so many times as long as the kind it was of: in all that the profile has of it,
and in the rates of the cluster where the profile has nothing.
"""

import dataclasses
import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

from zorse_megatron.gpus.gpu import GpuKind, PeakFlops
from zorse_megatron.gpus.known_gpus import GPU_KINDS
from zorse_megatron.inputs.cluster import Cluster
from zorse_megatron.inputs.profile import (
    LinkCurve,
    PartMemory,
    ProcessMemory,
    Profile,
    Source,
    Times,
)

# GPUs of a kind are alike within this, beyond three standard errors; a factor that is closer to 1
# than that is 1.
_ALIKE = 0.03
_SURE = 3.0


@dataclass(frozen=True, kw_only=True)
class GpuSpeed:
    """What a GPU was found to take."""

    factor: float
    """How many times as long as the profile says."""
    noise: float
    """Standard error of it, as a part of it."""


@dataclass(frozen=True, kw_only=True)
class OwnSpeeds:
    """What knows it."""

    cluster: Cluster
    profile: Profile | None
    kinds: tuple[str, ...]
    """Rank -> kind there."""
    factors: Mapping[str, tuple[str, float]]
    """New kind -> the kind it is made of, and how many times as long it computes."""


def with_own_speeds(
    cluster: Cluster,
    profile: Profile | None,
    speeds: Sequence[GpuSpeed | None],
    *,
    origin: str,
) -> OwnSpeeds:
    """Correct both by what each rank was found to take (None: it is not known).

    `origin`: of the new figures.
    """
    found = alike_factors(cluster.gpu_kinds, speeds)
    factors: dict[str, tuple[str, float]] = {}
    kinds = []
    for kind, factor in zip(cluster.gpu_kinds, found, strict=True):
        name = kind if factor == 1.0 else f"{kind}-x{factor:.3g}"
        if factor != 1.0:
            factors[name] = kind, factor
        kinds.append(name)
    return OwnSpeeds(
        cluster=_of_kinds(cluster, kinds, factors),
        profile=None if profile is None else _with_kinds(profile, cluster, factors, origin),
        kinds=tuple(kinds),
        factors=factors,
    )


def _of_kinds(
    cluster: Cluster, kinds: Sequence[str], factors: Mapping[str, tuple[str, float]]
) -> Cluster:
    slower = {
        name: _slower(cluster.kinds[base], name, factor) for name, (base, factor) in factors.items()
    }
    return replace(
        cluster,
        kinds={name: slower.get(name) or cluster.kinds[name] for name in dict.fromkeys(kinds)},
        nodes=tuple(
            replace(node, gpu_kinds=tuple(kinds[rank] for rank in node.ranks))
            for node in cluster.nodes
        ),
    )


def _slower(base: GpuKind, name: str, factor: float) -> GpuKind:
    """The same with lower rates, of arithmetic and of its own memory."""
    rates = {key: rate and rate / factor for key, rate in vars(base.peak).items()}
    return replace(
        base,
        name=name,
        memory_bytes_per_s=base.memory_bytes_per_s / factor,
        peak=PeakFlops(**rates),
        source=f"{base.source}; {factor:g} times slower in a run",
        unconfirmed=(),
    )


def alike_factors(kinds: Sequence[str], speeds: Sequence[GpuSpeed | None]) -> tuple[float, ...]:
    """Rank -> one factor for all that are alike; 1.0 where nothing is known of a kind.

    A GPU of which nothing is known is taken to be like most of its kind.
    """
    factors = [1.0] * len(kinds)
    for kind in dict.fromkeys(kinds):
        ranks = [rank for rank, each in enumerate(kinds) if each == kind]
        left = {rank: each for rank in ranks if (each := speeds[rank]) is not None}
        common = 1.0
        while left:
            alike = _most_alike(left)
            factor = statistics.fmean(left[rank].factor for rank in alike)
            factor = 1.0 if abs(factor - 1) <= _ALIKE else float(f"{factor:.3g}")
            if len(left) == len([rank for rank in ranks if speeds[rank] is not None]):
                common = factor
            for rank in alike:
                factors[rank] = factor
                del left[rank]
        for rank in ranks:
            if speeds[rank] is None:
                factors[rank] = common
    return tuple(factors)


def _most_alike(left: Mapping[int, GpuSpeed]) -> list[int]:
    """The most ranks that are alike, the faster ones where it is a draw."""
    around = (
        [rank for rank, each in left.items() if _is_alike(each, middle.factor)]
        for middle in sorted(left.values(), key=lambda each: each.factor)
    )
    return max(around, key=len)


def _is_alike(speed: GpuSpeed, factor: float) -> bool:
    # Of the ratio's logarithm: one third of noise must not make a GPU like all that are slower.
    return abs(math.log(speed.factor / factor)) <= _ALIKE + _SURE * speed.noise


def _with_kinds(
    profile: Profile, cluster: Cluster, factors: Mapping[str, tuple[str, float]], origin: str
) -> Profile:
    """The profile, with entries of the new kinds: those of what they are made of, slower."""
    if not factors:
        return profile
    names = {each.name for each in profile.sources}
    source = next(
        each for n in range(len(names) + 1) if (each := f"corrected{n or ''}") not in names
    )
    found = replace(
        profile, sources=(*profile.sources, Source(name=source, kind="measured", origin=origin))
    )
    for name, (base, factor) in factors.items():
        found = _with_kind(found, name, _like(profile, base, cluster), factor, source)
    return found


def _like(profile: Profile, base: str, cluster: Cluster) -> str:
    """The kind whose times stand for this one's: its own, or those of the same chip."""
    there = set(profile.gpu_kinds())
    return next((each for each in equal_kinds(base, cluster.kinds) if each in there), base)


def _with_kind(profile: Profile, name: str, base: str, factor: float, source: str) -> Profile:
    times: list[Times] = [
        replace(
            each,
            gpu_kind=name,
            source=source,
            forward_s=tuple(factor * seconds for seconds in each.forward_s),
            backward_s=tuple(factor * seconds for seconds in each.backward_s),
        )
        for each in profile.times
        if each.gpu_kind == base
    ]
    updates = [
        replace(each, gpu_kind=name, source=source, update_s=factor * each.update_s)
        for each in profile.updates
        if each.gpu_kind == base
    ]
    unequal = [
        replace(each, gpu_kinds=tuple(sorted({*each.gpu_kinds} - {base} | {name})))
        for each in profile.unequal_shards
        if base in each.gpu_kinds
    ]
    return replace(
        profile,
        times=(*profile.times, *times),
        updates=(*profile.updates, *updates),
        unequal_shards=(*profile.unequal_shards, *unequal),
        memory=(*profile.memory, *_named(profile.memory, base, name)),
        links=(*profile.links, *_named(profile.links, base, name)),
        processes=(*profile.processes, *_named(profile.processes, base, name)),
    )


_Entry = TypeVar("_Entry", PartMemory, LinkCurve, ProcessMemory)


def _named(entries: Sequence[_Entry], base: str, name: str) -> list[_Entry]:
    """Those of a kind, as of another one."""
    return [replace(each, gpu_kind=name) for each in entries if each.gpu_kind == base]


# Kinds of GPU with the same chip.


def equal_kinds(kind: str, kinds: Mapping[str, GpuKind]) -> Iterator[str]:
    """Yield the kind, and those with the same figures but for memory size and links.

    Among them are the well-known ones: what a cluster file makes of an A100 by giving it less
    memory still computes as an A100.
    """
    yield kind
    gpu = kinds.get(kind)
    for name, other in {**GPU_KINDS, **kinds}.items():
        if gpu is not None and name != kind:
            same_bandwidth = other.memory_bytes_per_s == gpu.memory_bytes_per_s
            if same_bandwidth and other.peak == gpu.peak:
                yield name


def kinds_at_any_speed(kind: str, kinds: Mapping[str, GpuKind]) -> Iterator[str]:
    """Yield those of `equal_kinds`, and the well-known ones that are faster or slower in all alike.

    Such as a GPU that somebody has found to take 1.5 times as long as others of its kind.
    """
    yield from equal_kinds(kind, kinds)
    gpu = kinds.get(kind)
    for name, other in GPU_KINDS.items():
        if gpu is not None and name != kind and _is_in_proportion(gpu, other):
            yield name


def _is_in_proportion(gpu: GpuKind, other: GpuKind) -> bool:
    ratio = gpu.memory_bytes_per_s / other.memory_bytes_per_s
    ours, theirs = dataclasses.astuple(gpu.peak), dataclasses.astuple(other.peak)
    return all(
        mine is yours is None
        or (mine is not None and yours is not None and math.isclose(mine, ratio * yours))
        for mine, yours in zip(ours, theirs, strict=True)
    )
