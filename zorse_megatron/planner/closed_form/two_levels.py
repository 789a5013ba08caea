"""Sums and gathers of groups in several regions: whether two levels are faster than one ring."""

from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate, groupby, pairwise

from zorse_megatron.planner.inputs.search_inputs import Inputs
from zorse_megatron.schedules.region_shards import RegionShards, regions_of
from zorse_megatron.schema.plan.plan import Plan
from zorse_megatron.schema.plan.region_rules import hierarchical_problems
from zorse_megatron.simulate.hierarchical_work import Hierarchical, LevelTimes
from zorse_megatron.simulate.network_loads import NetworkLoads


class TwoLevels:
    """Times in two levels, each worked out once; see `simulate.hierarchical_work`."""

    def __init__(self, inputs: Inputs) -> None:
        self.inputs = inputs
        self._loads = NetworkLoads(inputs.comm)
        self._times: dict[tuple[tuple[int, ...], int], LevelTimes] = {}

    def times(self, ranks: tuple[int, ...], shard_bytes: int) -> LevelTimes | None:
        """A gather of equal shards over ascending ranks; None where two levels are not possible.

        Nor for sets, which count as one GPU in the search: the links that they share do not.
        """
        if self.inputs.joined_units is not None or not self.inputs.space.hierarchical:
            return None
        runs = self._runs(ranks)
        if len(runs) == 1 or len(runs) > len({self._region(run[0]) for run in runs}):
            return None
        key = ranks, shard_bytes
        if key not in self._times:
            bounds = tuple(pairwise(accumulate([0] + [shard_bytes] * len(ranks))))
            shards = RegionShards(bounds=bounds, regions=regions_of(runs))
            gather = Hierarchical(ranks=ranks, to_bytes=int, loads=self._loads, reduces=False)
            self._times[key] = gather.times(shards)
        return self._times[key]

    def _runs(self, ranks: Sequence[int]) -> list[list[int]]:
        return [list(run) for _, run in groupby(ranks, key=self._region)]

    def _region(self, rank: int) -> str:
        spec = self.inputs.spec
        return spec.nodes[spec.node_of(rank)].region


def in_two_levels(plan: Plan, numbers: Sequence[int]) -> Plan:
    """The plan, with these groups hierarchical as far as the rules of plans let them."""
    for number in numbers:
        groups = [*plan.groups]
        groups[number] = replace(groups[number], hierarchical=True)
        changed = replace(plan, groups=tuple(groups))
        if not any(hierarchical_problems(changed)):
            plan = changed
    return plan
