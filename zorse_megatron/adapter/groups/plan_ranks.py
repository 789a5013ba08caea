"""The ranks of each axis of parallelism, as Megatron's `RankGenerator` lists them, from a plan.

Megatron's own makes them from one size per axis, which only describes grids of equal groups. Those
that ask by token (`tp`, `dp`, `tp-dp`, `tp-pp`...) can be given this one.
"""

from megatron.core.parallel_state import RankGenerator

from zorse_megatron.schema.plan.plan import Plan
from zorse_megatron.schema.plan.rank_axes import data_parallel_ranks


class PlanRankGenerator(RankGenerator):
    """`RankGenerator` for a plan: lists of ranks, one for each group of a kind."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.world_size = plan.world_size
        self.rank_offset = 0

    def get_ranks(self, token: str) -> list[list[int]]:
        """Return the groups along the axes of `token`, joined by hyphens, such as `tp-dp`.

        `cp`, `ep` and `gtp_remat` have size 1. Raises ValueError for the pipeline without `tp` and
        `dp`: stages have different numbers of ranks, so none has one previous and one next rank.
        """
        axes = set(token.split("-")) - {"cp", "ep", "gtp_remat"}
        groups = self.plan.groups
        if not axes:
            return [[rank] for rank in range(self.world_size)]
        if axes == {"tp"}:
            return [list(replica.ranks) for group in groups for replica in group.replicas]
        if axes == {"dp"}:
            return [list(ranks) for group in groups for ranks in data_parallel_ranks(group)]
        if axes == {"tp", "dp"}:
            return [sorted(group.ranks) for group in groups]
        if axes == {"tp", "dp", "pp"}:
            return [list(range(self.world_size))]
        raise ValueError(
            f"found {token!r}; expected tp, dp, tp-dp or tp-dp-pp: a plan's groups have different "
            "numbers of ranks, so ranks of different stages are not paired"
        )
