"""What each rank recomputes and offloads: as its group says, its replica, or the rank itself."""

from collections.abc import Iterator
from dataclasses import dataclass, replace

from zorse_megatron.schema.plan.plan import Group, Offload, Plan, RankSettings, Recompute, Replica

_NOTHING = Offload()


@dataclass(frozen=True, kw_only=True)
class MemorySettings:
    """What a rank does with activations, parameters and optimizer state."""

    recompute: Recompute | None
    """None: as the training command says."""
    offload: Offload


@dataclass(frozen=True, kw_only=True)
class SaidSettings:
    """Settings of a rank, and where in the plan they stand."""

    rank: int
    settings: MemorySettings
    recompute_at: str
    """The place of `recompute`; of its group where nobody says."""
    offload_at: str


def settings_in(group: Group, replica: Replica, at: int = 0) -> MemorySettings:
    """What the rank at place `at` of a replica of the group does."""
    own = _own(replica, at)
    return MemorySettings(
        recompute=own.recompute or replica.recompute or group.recompute,
        offload=own.offload or replica.offload or group.offload or _NOTHING,
    )


def settings_of_rank(plan: Plan, rank: int) -> MemorySettings:
    """What `rank` does."""
    group, replica = plan.replica_of_rank(rank)
    found = plan.groups[group].replicas[replica]
    return settings_in(plan.groups[group], found, found.ranks.index(rank))


def settings_by_rank(plan: Plan) -> dict[int, MemorySettings]:
    """Rank -> what it does."""
    found = {}
    for group in plan.groups:
        for replica in group.replicas:
            if replica.rank_settings is None:
                found.update(dict.fromkeys(replica.ranks, settings_in(group, replica)))
                continue
            for at, rank in enumerate(replica.ranks):
                found[rank] = settings_in(group, replica, at)
    return found


def said_settings(plan: Plan) -> Iterator[SaidSettings]:
    """What each rank does, by groups and replicas."""
    for number, group in enumerate(plan.groups):
        for index, replica in enumerate(group.replicas):
            here = f"groups[{number}].replicas[{index}]"
            for at, rank in enumerate(replica.ranks):
                own, place = _own(replica, at), f"{here}.rank_settings[{at}]"
                places = ((own, place), (replica, here))
                yield SaidSettings(
                    rank=rank,
                    settings=settings_in(group, replica, at),
                    recompute_at=_first(
                        [where for said, where in places if said.recompute], f"groups[{number}]"
                    )
                    + ".recompute",
                    offload_at=_first(
                        [where for said, where in places if said.offload], f"groups[{number}]"
                    )
                    + ".offload",
                )


def ranks_that_offload_parameters(plan: Plan) -> frozenset[int]:
    """Ranks whose shards of parameters wait in host memory."""
    rows = settings_by_rank(plan).items()
    return frozenset(rank for rank, settings in rows if settings.offload.parameters)


def ranks_that_offload_gradients(plan: Plan) -> frozenset[int]:
    """Ranks whose shards of gradients wait in host memory."""
    rows = settings_by_rank(plan).items()
    return frozenset(rank for rank, settings in rows if settings.offload.gradients)


def recomputes_anything(plan: Plan) -> bool:
    """Whether the plan has any rank recompute anything."""
    found = (each.recompute for each in settings_by_rank(plan).values())
    return any(each is not None and each.mode != "none" for each in found)


def without_recompute(plan: Plan) -> Plan:
    """The plan, without a word about recomputation."""
    groups = tuple(
        replace(
            group,
            recompute=None,
            replicas=tuple(
                replace(
                    replica,
                    recompute=None,
                    rank_settings=replica.rank_settings
                    and tuple(replace(each, recompute=None) for each in replica.rank_settings),
                )
                for replica in group.replicas
            ),
        )
        for group in plan.groups
    )
    return replace(plan, groups=groups)


def offloads_anything(plan: Plan) -> bool:
    """Whether any rank keeps anything in host memory."""
    return any(each.offload != _NOTHING for each in settings_by_rank(plan).values())


def _own(replica: Replica, at: int) -> RankSettings:
    """Of a rank whose entry is missing: nothing, for the rule about their number to be told."""
    given = replica.rank_settings or ()
    return given[at] if at < len(given) else RankSettings()


def _first(places: list[str], otherwise: str) -> str:
    return places[0] if places else otherwise
