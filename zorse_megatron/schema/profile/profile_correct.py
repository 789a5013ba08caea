"""Correct a profile by what a run took: the times of a kind, where all of its GPUs say the same."""

import dataclasses
import statistics
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from zorse_megatron.errors import Problem, ProfileError
from zorse_megatron.schema.profile.profile import Profile, Source
from zorse_megatron.schema.status.status import RankStatus, Status

# GPUs of a kind are alike within this, beyond three standard errors; a kind whose factor is
# closer to 1 than that stays as it is.
_ALIKE = 0.03
_SURE = 3.0


@dataclass(frozen=True, kw_only=True)
class Correction:
    """A profile, and what was found."""

    profile: Profile
    factors: Mapping[str, float]
    """Kind -> how many times as long it takes as the profile said."""
    notes: tuple[str, ...]


def corrected(profile: Profile, status: Status, *, origin: str) -> Correction:
    """Scale the times of kinds that take longer or less than the run's plan says.

    Of a kind whose GPUs differ, those that most are like count; the others are named in the notes.
    `origin`: of the new figures. Raises ProfileError where the plan says nothing, or where its
    kinds are not in the profile.
    """
    by_kind: dict[str, list[RankStatus]] = defaultdict(list)
    for rank in status.ranks:
        if rank.kind and rank.slowdown and rank.planned_micro_batch_s:
            by_kind[rank.kind].append(rank)
    _refuse(profile, by_kind)
    factors, notes = {}, []
    for kind, ranks in sorted(by_kind.items()):
        factor, others = _common(ranks)
        notes += [_note(rank, factor) for rank in others]
        if abs(factor - 1) > _ALIKE:
            factors[kind] = factor
    return Correction(
        profile=_scaled(profile, factors, origin), factors=factors, notes=tuple(notes)
    )


def _refuse(profile: Profile, by_kind: Mapping[str, object]) -> None:
    problems = list(_problems(profile, by_kind))
    if problems:
        raise ProfileError("the profile cannot be corrected by this run", problems)


def _problems(profile: Profile, by_kind: Mapping[str, object]) -> Iterator[Problem]:
    if not by_kind:
        yield Problem(
            where="the run's status",
            found="no rank with a kind of GPU, and times of the plan and of the run",
            expected="cluster.gpu_kinds and predictions.micro_batch_s in the run's plan",
            remedy="Make the plan with zorse plan, and let the run make four iterations or more.",
        )
    known = profile.gpu_kinds()
    for kind in sorted(set(by_kind) - set(known)):
        yield Problem(
            where="times",
            found=f"none of {kind}, which the run has",
            expected=f"one of {', '.join(known)}",
            remedy="Give the profile that the run's plan was made from.",
        )


def _common(ranks: list[RankStatus]) -> tuple[float, list[RankStatus]]:
    """The factor that most have, the faster ones where it is a draw; and who has another one."""
    factors = sorted(rank.slowdown or 1.0 for rank in ranks)
    middle = factors[(len(factors) - 1) // 2]
    alike = [rank for rank in ranks if _is_alike(rank, middle)]
    factor = statistics.fmean(rank.slowdown or 1.0 for rank in alike)
    return factor, [rank for rank in ranks if rank not in alike]


def _is_alike(rank: RankStatus, factor: float) -> bool:
    ratio = (rank.slowdown or 1.0) / factor
    return abs(ratio - 1) <= _ALIKE + _SURE * (rank.noise or 0.0)


def _note(rank: RankStatus, factor: float) -> str:
    ratio = (rank.slowdown or 1.0) / factor
    return (
        f"rank {rank.rank} takes {ratio:.2f} times as long as the other {rank.kind}: a profile is "
        "of kinds. If that is to stay, give the cluster file another kind for this GPU"
    )


def _scaled(profile: Profile, factors: Mapping[str, float], origin: str) -> Profile:
    if not factors:
        return profile
    names = {source.name for source in profile.sources}
    name = next(each for n in range(len(names) + 1) if (each := f"corrected{n or ''}") not in names)
    times = tuple(
        dataclasses.replace(
            entry,
            source=name,
            forward_s=tuple(factors[entry.gpu_kind] * each for each in entry.forward_s),
            backward_s=tuple(factors[entry.gpu_kind] * each for each in entry.backward_s),
        )
        if entry.gpu_kind in factors
        else entry
        for entry in profile.times
    )
    sources = (*profile.sources, Source(name=name, kind="measured", origin=origin))
    return dataclasses.replace(profile, sources=sources, times=times)
