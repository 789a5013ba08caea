"""Communication time in closed form: transfers between stages, link loads, collectives."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, groupby, pairwise

from zorse_megatron.costs.topology import numbered
from zorse_megatron.plan.plan import Plan
from zorse_megatron.plan.rules import hierarchical_problems
from zorse_megatron.planner.closed_form.device_groups import DeviceGroup
from zorse_megatron.planner.groupings.pools import hardware_key
from zorse_megatron.planner.inputs.search_inputs import Inputs
from zorse_megatron.schedule.shards import RegionShards, regions_of
from zorse_megatron.simulate.assumptions import RUNTIME
from zorse_megatron.simulate.network import Hierarchical, LevelTimes, NetworkLoads

_STATISTIC_BYTES = 4
# Pairs of ranks of a path that are looked at; of more, as many at equal distances.
_MOST_PAIRS = 128


@dataclass(frozen=True, kw_only=True)
class TransferPath:
    """From one device group to the next, in one direction."""

    loads: tuple[tuple[str, float, float], ...]
    """(link, bytes per second, share of all samples that cross it)."""
    contended_s_per_byte: float
    """Time on the busiest of these links for each byte that all replicas send together."""
    source: int
    target: int
    """A typical pair of ranks."""


class CommunicationCosts:
    """Costs communication, each thing once."""

    def __init__(self, inputs: Inputs) -> None:
        self.inputs = inputs
        self.boundary = inputs.memory.boundary_bytes(1)
        self._paths: dict[tuple[DeviceGroup, DeviceGroup], TransferPath] = {}
        self._gathers: dict[tuple[DeviceGroup, int], float] = {}
        self._like: dict[tuple[object, ...], float] = {}
        self._look_of_node = numbered(map(hardware_key, inputs.spec.nodes))
        self._two_levels = TwoLevels(inputs)
        self._nodes: dict[DeviceGroup, tuple[int, ...]] = {}
        world = tuple(range(inputs.world_size))
        sums = RUNTIME.sums_at_scale + RUNTIME.sums_at_norm + RUNTIME.sums_after_step
        self.statistics_s = (
            sums * inputs.comm.all_reduce_s(world, _STATISTIC_BYTES) if len(world) > 1 else 0.0
        )
        """Time of all the scalar all-reduces of a step."""

    def path(self, source: DeviceGroup, target: DeviceGroup) -> TransferPath:
        """The links from one device group to another. O(ranks)."""
        key = (source, target)
        found = self._paths.get(key)
        if found is None:
            found = self._paths[key] = self._find(source.ranks, target.ranks)
        return found

    def _find(self, sources: Sequence[int], targets: Sequence[int]) -> TransferPath:
        count = min(_MOST_PAIRS, max(len(sources), len(targets)))
        pairs = [
            (sources[i * len(sources) // count], targets[i * len(targets) // count])
            for i in range(count)
        ]
        crossed: Counter[tuple[str, float]] = Counter()
        for pair in pairs:
            crossed.update(self.inputs.comm.shared_links(*pair))
        loads = tuple(
            (name, rate, number / count) for (name, rate), number in sorted(crossed.items())
        )
        return TransferPath(
            loads=loads,
            contended_s_per_byte=max((share / rate for _, rate, share in loads), default=0.0),
            source=pairs[0][0],
            target=pairs[0][1],
        )

    def transfer_s(self, path: TransferPath, *, size: int, round_samples: float) -> float:
        """One micro-batch's way, when all replicas of a round send at once."""
        alone_s = self.inputs.comm.transfer_s(path.source, path.target, size * self.boundary)
        return max(alone_s, round_samples * self.boundary * path.contended_s_per_byte)

    def busiest_link_s(self, paths: Sequence[TransferPath]) -> float:
        """How long the busiest link takes for all samples, which take one path after the other."""
        s_per_byte: dict[str, float] = {}
        for path in paths:
            for name, rate, share in path.loads:
                s_per_byte[name] = s_per_byte.get(name, 0.0) + share / rate
        busiest = max(s_per_byte.values(), default=0.0)
        return busiest * self.inputs.global_batch_size * self.boundary

    def even_gather_s(self, device_group: DeviceGroup, num_bytes: int, pieces: int = 1) -> float:
        """An all-gather (or reduce-scatter) of equal shards over a device group, on idle links.

        `pieces`: of how many even TP shards, one after the other. In two levels over several
        regions, where that is faster.
        """
        ranks = device_group.ranks
        if len(ranks) < 2:
            return 0.0
        shard_bytes = num_bytes // pieces // len(ranks)
        ring_s = pieces * self._ring_s(device_group, shard_bytes)
        levels = self._two_levels.times(ranks, shard_bytes)
        return ring_s if levels is None else min(ring_s, levels.several_s(pieces))

    def is_hierarchical(self, device_group: DeviceGroup) -> bool:
        """Whether two levels are faster than a ring for a layer's gradients."""
        ranks, memory = device_group.ranks, self.inputs.memory
        shard_bytes = memory.gradient_bytes(memory.layer_parameters()) // len(ranks)
        levels = self._two_levels.times(ranks, shard_bytes)
        return levels is not None and levels.several_s(1) < self._ring_s(device_group, shard_bytes)

    def _ring_s(self, device_group: DeviceGroup, shard_bytes: int) -> float:
        ranks, key = device_group.ranks, (device_group, shard_bytes)
        found = self._gathers.get(key)
        if found is None:
            found = self.inputs.comm.all_gather_s(ranks, (key[1],) * len(ranks))
            self._gathers[key] = found
        return found

    def like_gather_s(
        self, ranks: tuple[int, ...], num_bytes: int, on_node: Mapping[int, int]
    ) -> float:
        """As `even_gather_s`, computed once for all ranks that look like these.

        `on_node`: how many of them are on each node.
        """
        look = self._look_of_node
        key = tuple(sorted((look[node], count) for node, count in on_node.items())), num_bytes
        found = self._like.get(key)
        if found is None:
            shares = (num_bytes // len(ranks),) * len(ranks)
            alone, ascending = len(ranks) == 1, tuple(sorted(ranks))
            found = 0.0 if alone else self.inputs.comm.all_gather_s(ascending, shares)
            self._like[key] = found
        return found

    def groups_sharing_a_node(self, device_groups: Sequence[DeviceGroup]) -> tuple[int, ...]:
        """For each group with ranks on several nodes, how many such groups share a node with it."""
        on_node: Counter[int] = Counter()
        spread = []
        for device_group in device_groups:
            nodes = self.nodes(device_group)
            spread.append(nodes if len(nodes) > 1 else ())
            on_node.update(spread[-1])
        return tuple(max((on_node[node] for node in nodes), default=1) for nodes in spread)

    def nodes(self, device_group: DeviceGroup) -> tuple[int, ...]:
        """The nodes that a device group has ranks on."""
        found = self._nodes.get(device_group)
        if found is None:
            spec = self.inputs.spec
            found = tuple(sorted({spec.node_of(rank) for rank in device_group.ranks}))
            self._nodes[device_group] = found
        return found


# Sums and gathers of groups in several regions: whether two levels are faster than one ring.


class TwoLevels:
    """Times in two levels, each worked out once; see `simulate.network`."""

    def __init__(self, inputs: Inputs) -> None:
        self.inputs = inputs
        self._loads = NetworkLoads(inputs.comm)
        self._times: dict[tuple[tuple[int, ...], int], LevelTimes] = {}

    def times(self, ranks: tuple[int, ...], shard_bytes: int) -> LevelTimes | None:
        """A gather of equal shards over ascending ranks; None where two levels are not possible.

        Nor for sets, which count as one GPU in the search: the links that they share do not.
        """
        if self.inputs.tp_members is not None or not self.inputs.space.hierarchical:
            return None
        runs = [list(run) for _, run in groupby(ranks, key=self._region)]
        if len(runs) == 1 or len(runs) > len({self._region(run[0]) for run in runs}):
            return None
        key = ranks, shard_bytes
        if key not in self._times:
            bounds = tuple(pairwise(accumulate([0] + [shard_bytes] * len(ranks))))
            shards = RegionShards(bounds=bounds, regions=regions_of(runs))
            gather = Hierarchical(ranks=ranks, to_bytes=int, loads=self._loads, reduces=False)
            self._times[key] = gather.times(shards)
        return self._times[key]

    def _region(self, rank: int) -> str:
        return self.inputs.spec.node_with(rank).region


def in_two_levels(plan: Plan, numbers: Sequence[int]) -> Plan:
    """The plan, with these groups hierarchical as far as the rules of plans let them."""
    for number in numbers:
        changed = plan.with_group(number, hierarchical=True)
        if not any(hierarchical_problems(changed)):
            plan = changed
    return plan
