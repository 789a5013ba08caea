"""What each rank recomputes and offloads: as its replica says, or its group."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Literal

from zorse_megatron.plan.plan import Group, Offload, Plan, Recompute, Replica

_NOTHING = Offload()


@dataclass(frozen=True, kw_only=True)
class MemorySettings:
    """What a rank does with activations, parameters and optimizer state."""

    recompute: Recompute | None
    """None: as the training command says."""
    offload: Offload


@dataclass(frozen=True, kw_only=True)
class SaidSettings:
    """Settings of a replica, and where in the plan they stand."""

    settings: MemorySettings
    recompute_at: str
    """The place of `recompute`; of its group where nobody says."""
    offload_at: str


def settings_in(group: Group, replica: Replica) -> MemorySettings:
    """What the ranks of a replica of the group do."""
    return MemorySettings(
        recompute=replica.recompute or group.recompute,
        offload=replica.offload or group.offload or _NOTHING,
    )


def settings_of_rank(plan: Plan, rank: int) -> MemorySettings:
    """What `rank` does."""
    group, replica = plan.replica_of_rank(rank)
    return settings_in(plan.groups[group], plan.groups[group].replicas[replica])


def settings_by_rank(plan: Plan) -> dict[int, MemorySettings]:
    """Rank -> what it does."""
    found: dict[int, MemorySettings] = {}
    for number, _, replica in plan.numbered_replicas():
        found.update(dict.fromkeys(replica.ranks, settings_in(plan.groups[number], replica)))
    return found


def said_settings(plan: Plan) -> Iterator[SaidSettings]:
    """What each replica does, by groups."""
    for number, index, replica in plan.numbered_replicas():
        place = f"groups[{number}]"
        own = f"{place}.replicas[{index}]"
        yield SaidSettings(
            settings=settings_in(plan.groups[number], replica),
            recompute_at=f"{own if replica.recompute else place}.recompute",
            offload_at=f"{own if replica.offload else place}.offload",
        )


def ranks_that_offload(plan: Plan, what: Literal["parameters", "gradients"]) -> frozenset[int]:
    """Ranks whose shards of these wait in host memory."""
    rows = settings_by_rank(plan).items()
    return frozenset(rank for rank, settings in rows if getattr(settings.offload, what))


def recomputes_anything(plan: Plan) -> bool:
    """Whether the plan has any rank recompute anything."""
    found = (each.recompute for each in settings_by_rank(plan).values())
    return any(each is not None and each.mode != "none" for each in found)


def without_recompute(plan: Plan) -> Plan:
    """The plan, without a word about recomputation."""
    silent = (replace(each, recompute=None) for _, _, each in plan.numbered_replicas())
    plan = plan.with_replicas(silent)
    return replace(plan, groups=tuple(replace(group, recompute=None) for group in plan.groups))


def offloads_anything(plan: Plan) -> bool:
    """Whether any rank keeps anything in host memory."""
    return any(each.offload != _NOTHING for each in settings_by_rank(plan).values())
