"""Stock Megatron's layouts: tensor times data times pipeline parallelism, on GPUs in any order.

Tensor-parallel groups are neighbours on a node. One micro-batch size, one recomputation setting, a
distributed optimizer with equal shards, 1F1B or, with virtual stages, interleaved. Each virtual
stage may have layers of its own (`--pipeline-model-parallel-layout`). Even layouts are those that a
user gets without writing one by hand: virtual stages have equally many layers, where embedding and
output layer may count as one each (`--account-for-embedding-in-pipeline-split`,
`--account-for-loss-in-pipeline-split`); so 26 layers make four stages, of 6, 7, 7 and 6.

Replicas of a stage may spread the experts of each layer (`--expert-model-parallel-size`). That is
costed as the least that any of stock's dispatchers and overlaps may take, with even routing
(`costs.communication.once_s`, `costs.stage_formulas.exchanges_s`): stock may be slower, not faster.

Ranks are those of the inputs: see `stock_layouts` for which GPUs these are, and in which order.
"""

import itertools
import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

from zorse_megatron.costs.interface import RecomputeMode
from zorse_megatron.plan.plan import Chunk, Group, Plan, Recompute, Replica, Schedule
from zorse_megatron.plan.rules import STOCK_EXPERT_PARALLEL
from zorse_megatron.planner.baselines.lower_bounds import best_layers_per_s
from zorse_megatron.planner.inputs.search_inputs import (
    Inputs,
    NodeLike,
    allows_tp_degree,
    on_nodes,
    tp_shards_are_even,
)

_SIZES = (1, 2, 4, 8, 16)
_MODES: tuple[RecomputeMode, ...] = ("none", "selective", "full")
STOCK_OPTIMIZER, REPLICATED = "stock_optimizer", "replicated"
"""Setting of a plan's schedule, and its value for a job without `--use-distributed-optimizer`."""
_ENDS = ((False, False), (True, True), (False, True), (True, False))


@dataclass(frozen=True, kw_only=True)
class Grid:
    """One layout."""

    layers: tuple[int, ...]
    """Layers of each virtual stage, in model order; of each stage where these have one. The first
    one has the embedding, too, and the last one the output layer."""
    width: int
    """Data-parallel replicas of each stage."""
    micro_batch_size: int
    mode: RecomputeMode
    recomputed: int | None = None
    """With mode full: how many layers of each virtual stage are recomputed (`--recompute-method
    block`), of those that have as many; None: all."""
    tensor: int = 1
    """Tensor-parallel ranks of each replica."""
    virtual: int = 1
    """Virtual stages of each rank."""
    distributed: bool = True
    """Whether each rank owns a part of its stage's optimizer state, and not all of it."""
    expert_parallel: int = 1
    """Ranks that the experts of each layer are spread over, of the replicas of a stage."""

    @property
    def stages(self) -> int:
        """Pipeline stages."""
        return len(self.layers) // self.virtual

    @property
    def world_size(self) -> int:
        """Ranks."""
        return self.stages * self.width * self.tensor

    @property
    def schedule(self) -> Literal["1f1b", "interleaved"]:
        """Stock's interleaved schedule is for virtual stages."""
        return "1f1b" if self.virtual == 1 else "interleaved"

    @property
    def counts_ends(self) -> tuple[bool, bool] | None:
        """Whether embedding and output layer count as a layer each; None: it is not even."""
        first, *between, last = (self.layers[0], *self.layers[1:-1], self.layers[-1])
        for ends in _ENDS if len(self.layers) > 1 else _ENDS[:1]:
            if len({first + ends[0], *between, last + ends[1]}) == 1:
                return ends
        return None

    def layers_of(self, stage: int) -> int:
        """Layers of a stage in all of its virtual stages."""
        return sum(self.layers[stage :: self.stages])

    def recomputed_of(self, stage: int) -> int:
        """Those of them that are recomputed, in whole or in part."""
        if self.mode == "none":
            return 0
        counts = self.layers[stage :: self.stages]
        return sum(min(count, self.recomputed or count) for count in counts)

    @property
    def layout(self) -> str:
        """As `--pipeline-model-parallel-layout` writes it.

        >>> Grid(layers=(4, 1, 2, 1), virtual=2, width=1, micro_batch_size=1, mode="none").layout
        'Et*4|t|tt|tL'
        """
        words = ["t" * count if count < 4 else f"t*{count}" for count in self.layers]
        return f"E{'|'.join(words)}L"

    @property
    def description(self) -> str:
        """For people."""
        mode = self.mode if self.recomputed is None else f"block {self.recomputed}"
        owned = "" if self.distributed else ", optimizer not distributed"
        return (
            f"{self.parallelism}, micro-batches of {self.micro_batch_size}, recompute {mode}{owned}"
        )

    @property
    def parallelism(self) -> str:
        """For people: degrees of parallelism."""
        each = [str(self.layers_of(stage)) for stage in range(self.stages)]
        layers = "" if len(set(each)) == 1 else f" ({'+'.join(each)})"
        tensor = "" if self.tensor == 1 else f"TP {self.tensor} "
        virtual = "" if self.virtual == 1 else f" VPP {self.virtual}"
        experts = "" if self.expert_parallel == 1 else f" EP {self.expert_parallel}"
        return f"{tensor}PP {self.stages}{layers}{virtual} DP {self.width}{experts}"


def grids(inputs: Inputs) -> Iterator[Grid]:
    """All even layouts."""
    for tensor in tensor_degrees(inputs):
        yield from even_grids(inputs, tensor)


def even_grids(inputs: Inputs, tensor: int) -> Iterator[Grid]:
    """Those of one tensor-parallel degree."""
    for stages, width in shapes(inputs, tensor):
        # Stock interleaves stages, not a single one.
        for virtual in range(1, inputs.num_layers + 1) if stages > 1 else (1,):
            split = even_stages(inputs.num_layers, stages * virtual)
            if split is None:
                continue
            for size, mode in itertools.product(inputs.space.sizes(_SIZES), _MODES):
                may_take = in_rounds(inputs, stages, width, size) or virtual == 1
                if mode in inputs.space.recompute and may_take and takes(inputs, width, size):
                    for degree in expert_degrees(inputs, width):
                        yield Grid(
                            layers=split[0],
                            width=width,
                            micro_batch_size=size,
                            mode=mode,
                            tensor=tensor,
                            virtual=virtual,
                            expert_parallel=degree,
                        )


def shapes(inputs: Inputs, tensor: int) -> Iterator[tuple[int, int]]:
    """Yield (stages, data-parallel width) that GPUs, layers and batch allow."""
    replicas = inputs.world_size // tensor
    for stages in range(1, min(replicas, inputs.num_layers) + 1):
        if replicas % stages == 0 and inputs.global_batch_size % (replicas // stages) == 0:
            yield stages, replicas // stages


def takes(inputs: Inputs, width: int, size: int) -> bool:
    """Whether the batch is whole micro-batches of all replicas."""
    return inputs.global_batch_size % (width * size) == 0


def in_rounds(inputs: Inputs, stages: int, width: int, size: int) -> bool:
    """Whether micro-batches are whole rounds of all stages, as interleaving asks for."""
    return inputs.global_batch_size % (width * size * stages) == 0


def may_run(inputs: Inputs, grid: Grid) -> bool:
    """Whether Megatron's argument check takes a layout, and its schedule the micro-batches."""
    size, width = grid.micro_batch_size, grid.width
    return (
        grid.world_size == inputs.world_size
        and sum(grid.layers) == inputs.num_layers
        and min(grid.layers) > 0
        and grid.tensor in tensor_degrees(inputs)
        and grid.expert_parallel in expert_degrees(inputs, width)
        and takes(inputs, width, size)
        and (grid.virtual == 1 or in_rounds(inputs, grid.stages, width, size))
    )


def tensor_degrees(inputs: Inputs) -> list[int]:
    """Degrees of which stock can make all GPUs TP groups: 1, and powers of 2 that divide
    everything; of a model with experts 1, as what it makes of them there is not costed."""
    found, degree = [1], 2
    if inputs.model.num_experts is not None:
        return found
    while degree <= inputs.world_size and inputs.tp_costs is not None and inputs.tp_members is None:
        divides = inputs.world_size % degree == 0 and tp_shards_are_even(inputs, degree)
        if divides and allows_tp_degree(inputs, degree):
            firsts = range(0, inputs.world_size, degree)
            nodes = inputs.spec.node_of
            if all(nodes(first) == nodes(first + degree - 1) for first in firsts):
                found.append(degree)
        degree *= 2
    return found


def expert_degrees(inputs: Inputs, width: int) -> list[int]:
    """Degrees of expert parallelism that a stage's replicas and the experts can be divided by: 1,
    and of a model with experts others."""
    if inputs.model.num_experts is None or inputs.tp_costs is None:
        return [1]
    most = math.gcd(inputs.model.num_experts, width)
    return [each for each in range(1, most + 1) if most % each == 0]


def even_stages(num_layers: int, stages: int) -> tuple[tuple[int, ...], tuple[bool, bool]] | None:
    """Layers of each stage, and which ends count as one; None where they cannot be even.

    >>> even_stages(26, 4)
    ((6, 7, 7, 6), (True, True))
    """
    for ends in _ENDS:
        total = num_layers + sum(ends)
        if total % stages or (stages == 1 and any(ends)):
            continue
        layers = [total // stages] * stages
        layers[0] -= ends[0]
        layers[-1] -= ends[1]
        if min(layers) > 0:
            return tuple(layers), ends
    return None


def no_grid(inputs: Inputs) -> str:
    """Say why GPUs, layers and batch cannot be divided evenly."""
    world, batch = inputs.world_size, inputs.global_batch_size
    stages = [s for s in range(1, world + 1) if world % s == 0]
    even = [s for s in stages if even_stages(inputs.num_layers, s) is not None]
    widths = ", ".join(f"{world // s} (PP {s})" for s in even)
    tp_costs = [str(degree) for degree in tensor_degrees(inputs)[1:]]
    with_tp = f". Tensor parallelism of {_listed(tp_costs)} does not help" if tp_costs else ""
    return (
        f"divisibility: {world} GPUs make {_listed(stages)} stages, of which {inputs.num_layers} "
        f"layers can be split evenly into {_listed(even)}; data parallelism would then be "
        f"{widths}, and none of these divides a batch of {batch}{with_tp}"
    )


def _listed(numbers: Sequence[int | str]) -> str:
    *most, last = map(str, numbers)
    return f"{', '.join(most)} or {last}" if most else last


def _settings(grid: Grid) -> dict[str, str]:
    """What a plan's schedule says of a layout."""
    found = {} if grid.distributed else {STOCK_OPTIMIZER: REPLICATED}
    if grid.expert_parallel > 1:
        found[STOCK_EXPERT_PARALLEL] = str(grid.expert_parallel)
    return found


def plan_of_grid(
    inputs: Inputs, grid: Grid, order: Sequence[int] | None = None, *, is_written: bool = True
) -> Plan:
    """The same layout as a plan, which `stock_plans.grid_of_plan` reads back.

    `order`: rank of stock's job -> rank of the plan; None: they are the same. `is_written`: with
    what unmodified Megatron alone does: with expert parallelism it has no lists of actions.
    """
    names = order or range(inputs.world_size)
    count = inputs.global_batch_size // (grid.width * grid.micro_batch_size)
    # Stock knows one type for the whole job.
    one_type = inputs.dtype_of(range(inputs.world_size))
    says = grid.mode != "none" or inputs.recompute is not None
    recompute = Recompute(mode=grid.mode, num_layers=grid.recomputed) if says else None
    groups = []
    for stage in range(grid.stages):
        in_stage = range(stage * grid.width, (stage + 1) * grid.width)
        replicas = tuple(
            Replica(
                ranks=tuple(sorted(names[replica * grid.tensor : (replica + 1) * grid.tensor])),
                micro_batch_size=grid.micro_batch_size,
                num_microbatches=count,
                shard_weight=1.0,
            )
            for replica in in_stage
        )
        groups.append(Group(replicas=replicas, recompute=recompute, compute_dtype=one_type))
    starts = itertools.accumulate(grid.layers[:-1], initial=0)
    return Plan(
        schema_version=2,
        global_batch_size=inputs.global_batch_size,
        model=inputs.model,
        groups=tuple(groups),
        chunks=tuple(
            Chunk(group=number % grid.stages, layers=layers)
            for number, layers in enumerate(itertools.pairwise([*starts, inputs.num_layers]))
        ),
        schedule=Schedule(
            name=grid.schedule,
            parameters=_settings(grid) if is_written else {},
        ),
        cluster=inputs.cluster,
    )


# Which GPUs stock trains on, and in which order its ranks are on them.
#
# torchrun numbers ranks node by node, so nodes may be in any order (`--node-rank`), the GPUs of a
# node among themselves (`CUDA_VISIBLE_DEVICES`), and any of them may be left out.


_MOST_SETS_OF_FEW = 100
"""Up to so many sets of GPUs, alike ones counted once, all are tried."""
_MOST_KINDS = 5  # beyond, only the fastest ones together
_MOST_ORDERS_OF_FEW = 48
_MOST_GPUS_IN_ALL_ORDERS = 6  # of a node
_MOST_SWAPPED = 16  # nodes


@dataclass(frozen=True, kw_only=True)
class Placement:
    """GPUs in the order of stock's ranks."""

    nodes: tuple[tuple[int, ...], ...]
    """Ranks of the cluster, node by node."""

    @cached_property
    def ranks(self) -> tuple[int, ...]:
        """Rank of stock's job -> rank of the cluster."""
        return tuple(itertools.chain.from_iterable(self.nodes))

    def inputs(self, base: Inputs) -> Inputs:
        """With these GPUs alone, in this order."""
        if self.ranks == tuple(range(base.world_size)):
            return base
        return on_nodes(
            base,
            [NodeLike(node=base.spec.node_of(ranks[0]), ranks=ranks) for ranks in self.nodes],
        )

    def look(self, base: Inputs) -> tuple[object, ...]:
        """Equal for placements that take the same."""
        return tuple(
            (_look_of_node(base, ranks), tuple(base.kinds[rank] for rank in ranks))
            for ranks in self.nodes
        )


def in_order(base: Inputs, ranks: tuple[int, ...]) -> Placement:
    """As the cluster file has them."""
    return Placement(nodes=tuple(_by_node(base, ranks)))


def placements(base: Inputs, ranks: tuple[int, ...]) -> list[Placement]:
    """Orders of these GPUs that are worth trying: all of few nodes; else by speed or memory.

    Nodes of a site stay together.
    """
    nodes = list(_by_node(base, ranks))
    speeds = {kind: best_layers_per_s(base, kind) for kind in set(base.kinds)}

    def speed(rank: int) -> float:
        return speeds[base.kinds[rank]]

    def memory(rank: int) -> float:
        return base.capacities_bytes[rank]

    found = [Placement(nodes=tuple(nodes))]
    for key in (speed, memory):
        for upwards in (True, False):
            found.append(_sorted(base, nodes, key, upwards=upwards))
            found.append(_with_last(base, found[-1], speed))
    found.append(Placement(nodes=tuple(reversed(nodes))))
    inside = [tuple(dict.fromkeys(_orders_inside(base, each))) for each in nodes]
    number = math.factorial(len(nodes)) * math.prod(map(len, inside))
    if number <= _MOST_ORDERS_OF_FEW:
        found += [
            Placement(nodes=tuple(each))
            for some in itertools.product(*inside)
            for each in itertools.permutations(some)
        ]
    seen: dict[tuple[object, ...], Placement] = {}
    for each in found:
        seen.setdefault(each.look(base), each)
    return list(seen.values())


def _orders_inside(base: Inputs, ranks: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
    """Those of a node's GPUs: all of few, else kind by kind."""
    counts = Counter(base.kinds[rank] for rank in ranks)
    number = math.factorial(len(ranks)) // math.prod(map(math.factorial, counts.values()))
    if len(ranks) > _MOST_GPUS_IN_ALL_ORDERS or number > _MOST_ORDERS_OF_FEW:
        for order in itertools.permutations(counts):
            yield tuple(sorted(ranks, key=lambda rank: (order.index(base.kinds[rank]), rank)))
        return
    words = dict.fromkeys(itertools.permutations(base.kinds[rank] for rank in ranks))
    for word in words:
        waiting = {kind: [rank for rank in ranks if base.kinds[rank] == kind] for kind in counts}
        yield tuple(waiting[kind].pop(0) for kind in word)


def swapped(placement: Placement, base: Inputs) -> Iterator[Placement]:
    """Yield placements with two nodes exchanged, or with one node's GPUs in another order."""
    nodes, seen = placement.nodes, {placement.look(base)}
    if len(nodes) > _MOST_SWAPPED:
        return
    for one, other in itertools.combinations(range(len(nodes)), 2):
        changed = list(nodes)
        changed[one], changed[other] = nodes[other], nodes[one]
        yield from _if_new(Placement(nodes=tuple(changed)), base, seen)
    for at, ranks in enumerate(nodes):
        for order in _orders_inside(base, ranks):
            changed = list(nodes)
            changed[at] = order
            yield from _if_new(Placement(nodes=tuple(changed)), base, seen)


def _if_new(
    placement: Placement, base: Inputs, seen: set[tuple[object, ...]]
) -> Iterator[Placement]:
    if placement.look(base) not in seen:
        seen.add(placement.look(base))
        yield placement


def _sorted(
    base: Inputs,
    nodes: list[tuple[int, ...]],
    key: Callable[[int], float],
    *,
    upwards: bool,
) -> Placement:
    """GPUs in each node, nodes in each site, and sites by their means."""
    way = 1 if upwards else -1

    def mean(ranks: tuple[int, ...]) -> float:
        return way * sum(map(key, ranks)) / len(ranks)

    sites: dict[str | None, list[tuple[int, ...]]] = {}
    for ranks in nodes:
        inner = tuple(sorted(ranks, key=lambda rank: (way * key(rank), rank)))
        sites.setdefault(base.spec.node_with(ranks[0]).region, []).append(inner)
    ordered = sorted(sites.values(), key=lambda some: mean(tuple(itertools.chain(*some))))
    return Placement(nodes=tuple(ranks for some in ordered for ranks in sorted(some, key=mean)))


def _with_last(base: Inputs, placement: Placement, speed: Callable[[int], float]) -> Placement:
    """The fastest node last, for the loss, or first where it is last."""
    nodes = list(placement.nodes)
    fastest = max(range(len(nodes)), key=lambda at: max(map(speed, nodes[at])))
    node = nodes.pop(fastest)
    nodes.insert(0 if fastest == len(nodes) else len(nodes), node)
    return Placement(nodes=tuple(nodes))


def subsets(base: Inputs) -> Iterator[tuple[int, ...]]:
    """Yield sets of GPUs, not all of them, each once.

    Every one of few; else some kinds, all of them and a power of two, the fastest kinds first; one
    site, all but one; and all but some alike nodes.
    """
    everything = tuple(range(base.world_size))
    seen = {everything}
    for ranks in (*_every_one(base), *_of_some_kinds(base), *_of_nodes(base)):
        if ranks and ranks not in seen:
            seen.add(ranks)
            yield ranks


def _every_one(base: Inputs) -> Iterator[tuple[int, ...]]:
    """If they are few: of each kind in each node the first ones."""
    parts: dict[tuple[int, str], list[int]] = {}
    for rank, kind in enumerate(base.kinds):
        parts.setdefault((base.spec.node_of(rank), kind), []).append(rank)
    if math.prod(len(part) + 1 for part in parts.values()) > _MOST_SETS_OF_FEW:
        return
    keys_seen = set()
    for counts in itertools.product(*(range(len(part) + 1) for part in parts.values())):
        some = [part[:count] for part, count in zip(parts.values(), counts, strict=True)]
        ranks = tuple(sorted(itertools.chain(*some)))
        look = frozenset(Counter(in_order(base, ranks).look(base)).items())
        if look not in keys_seen:
            keys_seen.add(look)
            yield ranks


def _of_some_kinds(base: Inputs) -> Iterator[tuple[int, ...]]:
    kinds = dict.fromkeys(base.kinds)
    fastest = sorted(kinds, key=lambda kind: -best_layers_per_s(base, kind))
    for count in range(1, len(fastest) + 1):
        for some in itertools.combinations(fastest, count):
            if len(fastest) > _MOST_KINDS and some != tuple(fastest[:count]):
                continue
            ranks = tuple(rank for rank, kind in enumerate(base.kinds) if kind in some)
            yield ranks
            yield ranks[: 2 ** (len(ranks).bit_length() - 1)]


def _of_nodes(base: Inputs) -> Iterator[tuple[int, ...]]:
    """One site, all but one; all but the last, or the last half, of alike nodes."""
    nodes = list(_by_node(base, tuple(range(base.world_size))))
    sites: dict[object, list[tuple[int, ...]]] = {}
    alike: dict[object, list[tuple[int, ...]]] = {}
    for ranks in nodes:
        sites.setdefault(base.spec.node_with(ranks[0]).region, []).append(ranks)
        alike.setdefault(Placement(nodes=(ranks,)).look(base), []).append(ranks)
    yield from (_without(nodes, some) for some in sites.values())
    yield from (tuple(itertools.chain(*some)) for some in sites.values())
    for some in alike.values():
        yield from (_without(nodes, some[-count:]) for count in {1, -(-len(some) // 2)})


def _without(nodes: list[tuple[int, ...]], some: list[tuple[int, ...]]) -> tuple[int, ...]:
    return tuple(rank for ranks in nodes if ranks not in some for rank in ranks)


def _by_node(base: Inputs, ranks: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
    for _, some in itertools.groupby(sorted(ranks), key=base.spec.node_of):
        yield tuple(some)


def _look_of_node(base: Inputs, ranks: tuple[int, ...]) -> tuple[object, ...]:
    node = base.spec.node_with(ranks[0])
    capacities = tuple(base.capacities_bytes[rank] for rank in ranks)
    return (
        *(node.link, node.nics, node.host_link_bytes_per_s, node.region, node.switch),
        *(node.intra_curves, capacities),
    )
