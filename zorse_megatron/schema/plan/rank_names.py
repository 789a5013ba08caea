"""What a rank is called in messages."""

from zorse_megatron.schema.plan.plan import Plan
from zorse_megatron.schema.plan.spans import spell


def rank_name(plan: Plan, rank: int) -> str:
    """Name a rank by its number, its group and the layers that it trains."""
    number = plan.group_of_rank(rank)
    name = plan.groups[number].name
    layers = [plan.chunks[chunk].layers for chunk in plan.chunks_of_group(number)]
    label = "" if name is None else f" '{name}'"
    return f"rank {rank} (group {number}{label}, layers {spell(layers)})"
