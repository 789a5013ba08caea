"""Rules of groups that sum and gather in two levels: within regions, and between them."""

from collections.abc import Iterator

from zorse_megatron.errors import Problem
from zorse_megatron.schema.plan.plan import Group, Plan
from zorse_megatron.schema.plan.rank_axes import (
    data_parallel_ranks,
    holds_equal_parts,
    ranks_by_region,
)


def hierarchical_problems(plan: Plan) -> Iterator[Problem]:
    """Each hierarchical group has regions, ranks region by region, and nothing against it."""
    for number, group in enumerate(plan.groups):
        if group.hierarchical:
            where = f"groups[{number}]"
            yield from _regions(where, group)
            yield from _settings(where, group)


def _regions(where: str, group: Group) -> Iterator[Problem]:
    nowhere = [at for at, replica in enumerate(group.replicas) if replica.region is None]
    regions = {replica.region for replica in group.replicas}
    if nowhere:
        yield Problem(
            where=f"{where}.replicas[{nowhere[0]}].region",
            found=f"nothing, in a hierarchical group ({len(nowhere)} such replicas)",
            expected="the region of each replica",
            remedy="Name it, or remove hierarchical.",
        )
    elif len(regions) == 1:
        yield Problem(
            where=f"{where}.hierarchical",
            found=f"true, with all replicas in region {regions.pop()}",
            expected="replicas in two regions or more",
            remedy="Remove it: there is one level only.",
        )
    elif holds_equal_parts(group):
        yield from _scattered(where, group, len(regions))


def _scattered(where: str, group: Group, num_regions: int) -> Iterator[Problem]:
    """Shards are cut in the order of ranks, so a region's must be neighbours."""
    for ranks in data_parallel_ranks(group):
        runs = ranks_by_region(group, ranks)
        if len(runs) > num_regions:
            yield Problem(
                where=f"{where}.hierarchical",
                found=f"true, with the ranks of {num_regions} regions mixed: rank {runs[1][0]} is "
                f"between ranks {runs[0][0]} and {runs[2][0]}",
                expected="the ranks of each region next to each other among those of the group",
                remedy="List the cluster's nodes region by region, or remove hierarchical.",
            )
            return


def _settings(where: str, group: Group) -> Iterator[Problem]:
    if not holds_equal_parts(group):
        yield Problem(
            where=f"{where}.hierarchical",
            found="true, with replicas that cut their layers differently",
            expected="replicas of equal numbers of ranks, with equal parts",
            remedy="Remove it: such replicas exchange parts directly.",
        )
    if group.gradient_wire is not None:
        yield Problem(
            where=f"{where}.gradient_wire",
            found=f'"{group.gradient_wire}" with hierarchical',
            expected="one of the two",
            remedy="Remove one: 16-bit gradients go to their owners directly.",
        )
