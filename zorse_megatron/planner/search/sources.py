"""Where a search's candidates come from, which are the same plan, and which are best so far."""

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice, permutations, product, zip_longest
from typing import Literal, TypeVar

from zorse_megatron.costs.topology import numbered
from zorse_megatron.planner.closed_form.candidate import Candidate, Estimate
from zorse_megatron.planner.closed_form.device_groups import DeviceGroup
from zorse_megatron.planner.closed_form.estimator import Estimator
from zorse_megatron.planner.groupings.pools import hardware_key
from zorse_megatron.planner.groupings.proposals import GroupingProposal
from zorse_megatron.planner.inputs.search_inputs import Inputs
from zorse_megatron.planner.outcome import OnProgress, SearchProgress
from zorse_megatron.planner.search.device_orders import DeviceOrderSearch
from zorse_megatron.planner.search.effort import EVERY_PARTITION_UP_TO, Effort, Groupings

# Orders in which groups follow one another in the model.


_EVERY_ORDER_UP_TO = 4  # groups; 4! = 24


def orders(inputs: Inputs, device_groups: Sequence[DeviceGroup]) -> list[tuple[DeviceGroup, ...]]:
    """Orders worth trying, different from one another, regions together in each.

    By rank; by free memory, because early groups hold more in flight; by speed both ways; by
    bandwidth inside. With few groups: every order.
    """
    found: dict[tuple[object, ...], tuple[DeviceGroup, ...]] = {}
    for order in _orders(inputs, device_groups):
        found.setdefault(tuple(_place(inputs, device_group) for device_group in order), order)
    return list(found.values())


def _orders(
    inputs: Inputs, device_groups: Sequence[DeviceGroup]
) -> Iterator[tuple[DeviceGroup, ...]]:
    by_rank = sorted(device_groups, key=lambda device_group: device_group.ranks)
    region = {device_group.ranks: _region(inputs, device_group) for device_group in device_groups}
    regions = list(dict.fromkeys(region[device_group.ranks] for device_group in by_rank))
    for way in (regions, regions[::-1]) if len(regions) > 1 else (regions,):
        for ranked in (
            by_rank,
            sorted(by_rank, key=lambda device_group: -_memory_per_speed(inputs, device_group)),
            sorted(
                by_rank,
                key=lambda device_group: (_num_nodes(inputs, device_group), device_group.ranks),
            ),
            sorted(by_rank, key=lambda device_group: _memory_per_speed(inputs, device_group)),
            by_rank[::-1],
        ):
            yield tuple(
                sorted(ranked, key=lambda device_group: way.index(region[device_group.ranks]))
            )
    if len(device_groups) <= _EVERY_ORDER_UP_TO:
        yield from permutations(by_rank)


def _memory_per_speed(inputs: Inputs, device_group: DeviceGroup) -> float:
    """Bytes per layer that the device group will have: those with most can hold most in flight."""
    memory = sum(
        gpu_class.capacity_bytes * len(gpu_class.ranks) for gpu_class in device_group.gpu_classes
    )
    speed = sum(
        len(gpu_class.ranks) / inputs.compute.layer(gpu_class.kind, 1).forward_s
        for gpu_class in device_group.gpu_classes
    )
    return memory / speed


def _num_nodes(inputs: Inputs, device_group: DeviceGroup) -> int:
    """Groups on many nodes reduce slowly: last in the model, they finish while others compute."""
    return len({inputs.spec.node_of(rank) for rank in device_group.ranks})


def _region(inputs: Inputs, device_group: DeviceGroup) -> tuple[str, ...]:
    return tuple(sorted({inputs.spec.node_with(rank).region for rank in device_group.ranks}))


def _place(inputs: Inputs, device_group: DeviceGroup) -> tuple[object, ...]:
    """Equal for groups that look the same and are in the same nodes or in nodes of one look."""
    spec = inputs.spec
    nodes = tuple(
        (spec.nodes[node].region, spec.nodes[node].switch, spec.nodes[node].gpu_kinds)
        for node in sorted({spec.node_of(rank) for rank in device_group.ranks})
    )
    return (device_group.look, nodes)


# Which estimates are of the same plan, up to the names of like nodes and GPUs.


_OnNode = tuple[tuple[int, tuple[tuple[str, int], ...]], ...]
"""Of a device group, by node: GPUs of each kind."""


_EXACT_UP_TO_GPUS = 32


class PlanKeys:
    """Names plans of one cluster.

    Nodes that are alike, below one switch of one region, get numbers in the order in which a plan
    has them, and of a node's GPUs their kinds alone count. So plans with equal keys are the same
    but for the names of such nodes and GPUs: simulating one of them tells of all. The reverse fails
    where nodes come together first and apart later: then one is simulated twice.

    With few GPUs all plans keep their names: simulations cost little, and which of them the local
    search starts from changes what it finds, by 0.6 and 0.9 % on two of four small clusters.
    """

    def __init__(self, inputs: Inputs, *, few_gpus: int = _EXACT_UP_TO_GPUS) -> None:
        """`few_gpus`: up to how many GPUs plans keep their names."""
        self.inputs = inputs
        self._keeps_names = inputs.world_size <= few_gpus
        self._look_of_node = numbered(
            (node.region, node.switch, node.host_memory_bytes, hardware_key(node))
            for node in inputs.spec.nodes
        )
        self._on_nodes: dict[DeviceGroup, _OnNode] = {}

    def of(self, estimate: Estimate) -> object:
        """Equal for estimates of the same plan."""
        candidate = estimate.candidate
        return (
            self.place(candidate.device_groups),
            tuple(stage.sizes for stage in estimate.stages),
            estimate.extras,
            candidate.schedule,
            candidate.num_chunks,
            tuple(cost.settings for cost in estimate.costs),
            estimate.layers,
        )

    def place(self, device_groups: Sequence[DeviceGroup]) -> object:
        """Equal for groups in this order that differ in names of nodes and GPUs alone."""
        if self._keeps_names:
            return tuple(each.ranks for each in device_groups)
        numbers: dict[int, int] = {}
        seen: Counter[int] = Counter()
        found = []
        for device_group in device_groups:
            rows, new = [], []
            for node, kinds in self._on_node(device_group):
                if node in numbers:
                    rows.append((self._look_of_node[node], numbers[node], kinds))
                else:
                    new.append((self._look_of_node[node], kinds, node))
            for look, kinds, node in sorted(new):
                numbers[node] = seen[look]
                seen[look] += 1
                rows.append((look, numbers[node], kinds))
            found.append(tuple(sorted(rows)))
        return tuple(found)

    def _on_node(self, device_group: DeviceGroup) -> _OnNode:
        found = self._on_nodes.get(device_group)
        if found is None:
            spec, kinds = self.inputs.spec, self.inputs.kinds
            counts = Counter((spec.node_of(rank), kinds[rank]) for rank in device_group.ranks)
            by_node: dict[int, list[tuple[str, int]]] = {}
            for (node, kind), count in sorted(counts.items()):
                by_node.setdefault(node, []).append((kind, count))
            found = tuple((node, tuple(row)) for node, row in by_node.items())
            self._on_nodes[device_group] = found
        return found


# The candidates costed in closed form so far, and the best of them.


ScheduleChoice = tuple[str, int]
"""Schedule and chunks of each group."""


class CostedCandidates:
    """Estimates, each plan once."""

    def __init__(
        self, estimator: Estimator, *, assignments: int, keys: PlanKeys | None = None
    ) -> None:
        """`assignments`: layer assignments that are kept of each candidate."""
        self.estimator = estimator
        self.assignments = assignments
        self._keys = keys or PlanKeys(estimator.inputs)
        self._found: dict[object, Estimate] = {}

    def add(self, estimate: Estimate) -> None:
        """Keep an estimate, unless the same plan is known."""
        self._found.setdefault(self._keys.of(estimate), estimate)

    def cost(self, candidate: Candidate) -> None:
        """Cost a candidate with its best layers."""
        for estimate in self.estimator.best(candidate, most=self.assignments):
            self.add(estimate)

    def finalists(self, most: int) -> list[Estimate]:
        """The best, of each schedule and number of chunks in turn.

        No more than half of them with one grouping, whatever the sizes and layers.
        """
        queues: dict[ScheduleChoice, list[Estimate]] = {}
        for estimate in sorted(self._found.values(), key=lambda e: (e.iteration_s, e.layers)):
            candidate = estimate.candidate
            queues.setdefault((candidate.schedule, candidate.num_chunks), []).append(estimate)
        taken: list[Estimate] = []
        per_grouping: dict[object, int] = {}
        turns = zip_longest(*queues.values())
        for estimate in (each for turn in turns for each in turn if each is not None):
            ranks = tuple(device_group.ranks for device_group in estimate.candidate.device_groups)
            key = ranks, estimate.candidate.schedule
            if per_grouping.get(key, 0) < max(1, most // 2):
                per_grouping[key] = per_grouping.get(key, 0) + 1
                taken.append(estimate)
            if len(taken) == most:
                break
        return taken


CandidateSource = Literal["groupings", "device orders"]
_CHUNKS = {"1f1b": (1,), "interleaved": (1, 2), "breadth_first": (1, 2, 4)}
_MORE_CHUNKS_UP_TO_GPUS = 16  # up to which more numbers of chunks are tried
_SMALL_CHUNK = 2  # layers
_QUICK_LEVELS = (2, 4)
_TURNS = 3  # of looking around the best groupings


@dataclass(frozen=True, kw_only=True)
class Sources:
    """Costs candidates of either source."""

    inputs: Inputs
    effort: Effort
    estimator: Estimator
    costed_candidates: CostedCandidates
    groupings: Groupings
    report: OnProgress

    def cost(self, source: CandidateSource) -> None:
        """Cost what comes from a source."""
        if source == "groupings":
            self._cost_proposals(self._promising())
        else:
            self._partition_device_orders()

    # Groupings.

    def _promising(self) -> list[GroupingProposal]:
        """The groupings that are worth a closer look."""
        rows = self.groupings.start(self.effort.listed)
        self.report(SearchProgress(phase="grouping", done=1, total=1 + _TURNS))
        costed: dict[tuple[tuple[int, ...], ...], tuple[float, GroupingProposal]] = {}

        def cost(found: list[tuple[float, GroupingProposal]], most: int) -> None:
            feasible = 0
            for tries, (_, proposal) in enumerate(found, start=1):
                estimate = self._quick(proposal)
                if estimate is not None:
                    feasible += 1
                    costed[proposal.grouping] = (estimate.iteration_s, proposal)
                if feasible >= most or tries >= 2 * most:
                    return

        cost(rows, self.effort.costed)
        for turn in range(_TURNS):
            self.report(SearchProgress(phase="grouping", done=1 + turn, total=1 + _TURNS))
            best = sorted(costed.values(), key=lambda row: (row[0], row[1].grouping))
            for _, proposal in best[: max(1, self.effort.widened // 2)]:
                near = self.groupings.around(proposal.grouping, 2 * self.effort.costed)
                cost(near, max(2, self.effort.costed // 4))
        best = sorted(costed.values(), key=lambda row: (row[0], row[1].grouping))
        chosen = [proposal for _, proposal in best[: self.effort.widened]]
        # All GPUs in one group may fit in ways that are not tried to see what is promising.
        plain = [
            proposal
            for _, proposal in rows
            if proposal.origin in ("together", "by kind", "by node") or len(proposal.grouping) == 1
        ]
        return list(dict.fromkeys([*chosen, *plain]))

    def _quick_ways(self) -> list[ScheduleChoice]:
        """One with little to recompute, and two that fit where memory is short."""
        schedules = self.inputs.space.schedules
        first = [name for name in ("1f1b", "interleaved") if name in schedules][:1]
        ways = [(name, 1) for name in first]
        return ways + [("breadth_first", n) for n in (2, 4) if "breadth_first" in schedules]

    def _quick(self, proposal: GroupingProposal) -> Estimate | None:
        groups = [self.estimator.device_groups.of(group) for group in proposal.grouping]
        found: list[Estimate] = []
        for device_groups in orders(self.inputs, groups)[: self.effort.quick_orders]:
            for levels, way in product((_QUICK_LEVELS, (1,)), self._quick_ways()):
                new = [
                    estimate
                    for level in self.levels(levels)
                    for estimate in self.estimator.best(self.candidate(device_groups, level, way))
                ]
                found += new
                if new:
                    break
        return min(found, key=lambda estimate: estimate.iteration_s, default=None)

    def in_order(self, proposal: GroupingProposal) -> tuple[DeviceGroup, ...]:
        """A candidate's groups in the first of the orders worth trying."""
        return orders(
            self.inputs, [self.estimator.device_groups.of(group) for group in proposal.grouping]
        )[0]

    def levels(self, wanted: tuple[int, ...]) -> list[int]:
        """Micro-batch levels of so many blocks, as far as they are allowed; one where none is."""
        space = self.inputs.space
        wanted = space.sizes(wanted)
        most = min(space.max_micro_batch_size or wanted[-1], self.inputs.global_batch_size)
        return [level for level in wanted if level <= most] or [space.sample_block]

    @staticmethod
    def candidate(
        device_groups: tuple[DeviceGroup, ...], level: int, way: ScheduleChoice
    ) -> Candidate:
        """All groups at one level."""
        return Candidate(
            device_groups=device_groups,
            levels=(level,) * len(device_groups),
            schedule=way[0],
            num_chunks=way[1],
        )

    def ways(self, num_groups: int) -> list[ScheduleChoice]:
        """Schedules and numbers of chunks."""
        return [
            (schedule, chunks)
            for schedule in self.inputs.space.schedules
            for chunks in self._numbers_of_chunks(schedule, num_groups)
        ]

    def _numbers_of_chunks(self, schedule: str, num_groups: int) -> tuple[int, ...]:
        """Interleaved also with chunks of about two layers: the fewer, the shorter the bubble."""
        inputs, usual = self.inputs, _CHUNKS[schedule]
        if (
            schedule != "interleaved"
            or num_groups == 1
            or inputs.world_size > _MORE_CHUNKS_UP_TO_GPUS
        ):
            return usual
        small = -(-inputs.num_layers // (num_groups * _SMALL_CHUNK))
        return (*usual, *sorted({each for each in (4, small) if each > usual[-1]}))

    def _cost_proposals(self, found: list[GroupingProposal]) -> None:
        """Cost groupings in all ways."""
        for number, proposal in enumerate(found):
            self.report(SearchProgress(phase="costing", done=number, total=len(found)))
            groups = [self.estimator.device_groups.of(group) for group in proposal.grouping]
            for device_groups in orders(self.inputs, groups)[: self.effort.orders]:
                for way in self.ways(len(device_groups)):
                    for level in self.levels(self.effort.levels):
                        candidate = self.candidate(device_groups, level, way)
                        for slack in self.effort.slacks if way[0] == "1f1b" else (1.0,):
                            self.costed_candidates.cost(replace(candidate, slack=slack))
                if len(device_groups) == 1 and "breadth_first" in self.inputs.space.schedules:
                    self._cost_layer_by_layer(device_groups)

    def _cost_layer_by_layer(self, device_groups: tuple[DeviceGroup, ...]) -> None:
        """One group with a chunk for every layer or two: what Cephalo does."""
        for chunks in (self.inputs.num_layers, -(-self.inputs.num_layers // 2)):
            for level in self.levels(self.effort.levels):
                way = ("breadth_first", chunks)
                self.costed_candidates.cost(self.candidate(device_groups, level, way))

    # Device orders.

    def _partition_device_orders(self) -> None:
        """Partitions of device orders, where there are too many GPUs for every grouping."""
        if self.inputs.world_size <= EVERY_PARTITION_UP_TO:
            return
        for number, schedule in enumerate(("1f1b", "interleaved")):
            self.report(SearchProgress(phase="partitioning", done=number, total=2))
            if schedule in self.inputs.space.schedules:
                search = DeviceOrderSearch(
                    self.estimator,
                    nested=schedule == "1f1b",
                    most_groups=self.groupings.most,
                )
                for candidate in islice(search.candidates(), self.effort.partitions):
                    self.costed_candidates.cost(candidate)


# Items in batches: `itertools.batched`, which Python has from 3.12 on only.


_Item = TypeVar("_Item")


def batched(items: Iterable[_Item], size: int) -> Iterator[tuple[_Item, ...]]:
    """Yield the items in tuples of `size`, at least 1; the last one may be shorter.

    >>> list(batched("abcde", 2))
    [('a', 'b'), ('c', 'd'), ('e',)]
    """
    remaining = iter(items)
    while batch := tuple(islice(remaining, size)):
        yield batch
