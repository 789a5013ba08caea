"""Short descriptions of plans."""

from collections import Counter
from collections.abc import Sequence

from zorse_megatron.schema.plan.plan import Group, Plan
from zorse_megatron.schema.text.counted import number_of


def describe_plan(plan: Plan, kinds: Sequence[str]) -> str:
    """The plan's groups in model order, with what they do to fit."""
    parts = []
    for number, group in enumerate(plan.groups):
        layers = sum(c.layers[1] - c.layers[0] for c in plan.chunks if c.group == number)
        chunks = len(plan.chunks_of_group(number))
        split = f" in {chunks} chunks" if chunks > 1 else ""
        parts.append(
            f"{members(group, kinds)}: {number_of(layers, 'layer')}{split}{_settings(group)}"
        )
    return f"{plan.schedule.name}; " + "; ".join(parts)


def structure(plan: Plan, kinds: Sequence[str]) -> tuple[object, ...]:
    """Equal for plans that differ in layers, sizes, recomputation or shares alone."""
    chunks = Counter(chunk.group for chunk in plan.chunks)
    groups = [(members(group, kinds), chunks[number]) for number, group in enumerate(plan.groups)]
    return plan.schedule.name, *groups


def members(group: Group, kinds: Sequence[str]) -> str:
    """How many GPUs of which kinds a group has."""
    counts = Counter(kinds[rank] for rank in group.ranks)
    return " + ".join(f"{count} {kind}" for kind, count in sorted(counts.items()))


def _settings(group: Group) -> str:
    said = ""
    if group.recompute and group.recompute.mode != "none":
        number = group.recompute.num_layers
        said += f", recompute {group.recompute.mode}" + (f" {number}" if number else "")
    if group.offload:
        names = ("parameters", "optimizer_state", "activations")
        said += ", offload " + " and ".join(n for n in names if getattr(group.offload, n))
    return said
