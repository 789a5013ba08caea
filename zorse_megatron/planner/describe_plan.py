"""Short descriptions of plans."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

from zorse_megatron.files.wording import number_of
from zorse_megatron.plan.memory_settings import MemorySettings, settings_in
from zorse_megatron.plan.plan import Group, Plan, Replica


def describe_plan(plan: Plan, kinds: Sequence[str]) -> str:
    """The plan's groups in model order, with what they do to fit."""
    parts = []
    for number, group in enumerate(plan.groups):
        layers = plan.num_layers_of_group(number)
        chunks = len(plan.chunks_of_group(number))
        split = f" in {chunks} chunks" if chunks > 1 else ""
        parts.append(
            f"{members(group, kinds)}: {number_of(layers, 'layer')}{split}{_settings(group, kinds)}"
            + (", hierarchical" if group.hierarchical else "")
        )
    return f"{plan.schedule.name}; " + "; ".join(parts)


def structure(plan: Plan, kinds: Sequence[str]) -> tuple[object, ...]:
    """Equal for plans that differ in layers, sizes, recomputation or shares alone."""
    chunks = Counter(chunk.group for chunk in plan.chunks)
    groups = [(members(group, kinds), chunks[number]) for number, group in enumerate(plan.groups)]
    return plan.schedule.name, *groups


def members(group: Group, kinds: Sequence[str]) -> str:
    """How many GPUs of which kinds a group has, those in TP groups with their number of ranks."""
    counts = Counter(_of(replica, kinds) for replica in group.replicas)
    return " + ".join(f"{count}{said}" for said, count in sorted(counts.items()))


def _of(replica: Replica, kinds: Sequence[str]) -> str:
    """What comes after the number of replicas like this one."""
    if len(replica.ranks) == 1:
        return f" {kinds[replica.ranks[0]]}"
    inside = Counter(kinds[rank] for rank in replica.ranks)
    return f" x ({' + '.join(f'{count} {kind}' for kind, count in sorted(inside.items()))})"


def _settings(group: Group, kinds: Sequence[str]) -> str:
    """What the group does to fit; where its replicas differ, which of them do what."""
    found: dict[str, list[Replica]] = {}
    for replica in group.replicas:
        found.setdefault(_said(settings_in(group, replica)), []).append(replica)
    if len(found) == 1:
        return "".join(f", {said}" for said in found if said)
    return "".join(
        f", {said} on {members(replace(group, replicas=tuple(replicas)), kinds)}"
        for said, replicas in found.items()
        if said
    )


def _said(settings: MemorySettings) -> str:
    said, recompute = [], settings.recompute
    if recompute is not None and recompute.mode != "none":
        number = f" {recompute.num_layers}" if recompute.num_layers else ""
        said.append(f"recompute {recompute.mode}{number}")
    names = ("parameters", "gradients", "optimizer_state", "activations")
    offloaded = [name for name in names if getattr(settings.offload, name)]
    if offloaded:
        said.append("offload " + " and ".join(offloaded))
    return ", ".join(said)
