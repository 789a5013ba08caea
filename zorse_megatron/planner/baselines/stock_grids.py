"""Stock Megatron's even layouts: tensor times data times pipeline parallelism, uniform settings.

Stages have equally many layers, where stock may count embedding and output layer as one each
(`--account-for-embedding-in-pipeline-split`, `--account-for-loss-in-pipeline-split`); so 26 layers
make four stages, of 6, 7, 7 and 6. Tensor-parallel sets are neighbours on a node. One micro-batch
size, one recomputation setting, a distributed optimizer with equal shards, 1F1B or, with virtual
stages, interleaved, ranks in the order of the cluster: what a user gets without writing a layout by
hand.
"""

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from zorse_megatron.costs.interface import RecomputeMode
from zorse_megatron.planner.closed_form.device_groups import DeviceGroup, DeviceGroups
from zorse_megatron.planner.closed_form.stage import MemorySettings, Stage, StagePosition
from zorse_megatron.planner.closed_form.stage_costs import StageCostModel
from zorse_megatron.planner.inputs.joined_inputs import joined
from zorse_megatron.planner.inputs.possible_sets import may_join, parts_are_equal
from zorse_megatron.planner.inputs.search_inputs import Inputs
from zorse_megatron.planner.inputs.units import JoinedSet
from zorse_megatron.schema.plan.plan import Chunk, Group, Plan, Recompute, Replica, Schedule

_SIZES = (1, 2, 4, 8, 16)
_MODES: tuple[RecomputeMode, ...] = ("none", "selective", "full")


@dataclass(frozen=True, kw_only=True)
class Grid:
    """One even layout."""

    layers: tuple[int, ...]
    """Layers of each virtual stage, in model order; of each stage where these have one."""
    counts_ends: tuple[bool, bool]
    """Whether embedding and output layer count as a layer each."""
    width: int
    """Data-parallel replicas of each stage."""
    micro_batch_size: int
    mode: RecomputeMode
    tensor: int = 1
    """Tensor-parallel ranks of each replica."""
    virtual: int = 1
    """Virtual stages of each rank (`--num-virtual-stages-per-pipeline-rank`)."""

    @property
    def stages(self) -> int:
        """Pipeline stages."""
        return len(self.layers) // self.virtual

    @property
    def schedule(self) -> Literal["1f1b", "interleaved"]:
        """Stock's interleaved schedule is for virtual stages."""
        return "1f1b" if self.virtual == 1 else "interleaved"

    def layers_of(self, stage: int) -> int:
        """Layers of a stage in all of its virtual stages."""
        return sum(self.layers[stage :: self.stages])

    @property
    def description(self) -> str:
        """For people."""
        return (
            f"{self.parallelism}, micro-batches of {self.micro_batch_size}, recompute {self.mode}"
        )

    @property
    def parallelism(self) -> str:
        """For people: degrees of parallelism."""
        each = [str(self.layers_of(stage)) for stage in range(self.stages)]
        layers = "" if len(set(each)) == 1 else f" ({'+'.join(each)})"
        tensor = "" if self.tensor == 1 else f"TP {self.tensor} "
        virtual = "" if self.virtual == 1 else f" VPP {self.virtual}"
        return f"{tensor}PP {self.stages}{layers}{virtual} DP {self.width}"


@dataclass(frozen=True, kw_only=True)
class GridEstimate:
    """What the closed form says of a layout."""

    grid: Grid
    iteration_s: float
    """Computing alone."""
    sending_s: float
    """Messages of the busiest pair of stages, one after the other, and the slowest stage's sums."""
    fullest: float
    """Memory of the fullest rank over what its GPU may hold."""


def grids(inputs: Inputs) -> Iterator[Grid]:
    """All even layouts."""
    for tensor in tensor_degrees(inputs):
        yield from _grids_of(inputs, tensor)


def _grids_of(inputs: Inputs, tensor: int) -> Iterator[Grid]:
    batch, replicas = inputs.global_batch_size, inputs.world_size // tensor
    for stages in range(1, replicas + 1):
        width = replicas // stages
        if replicas % stages or batch % width:
            continue
        # Stock interleaves stages, not a single one.
        for virtual in range(1, inputs.num_layers + 1) if stages > 1 else (1,):
            split = even_stages(inputs.num_layers, stages * virtual)
            if split is None:
                continue
            for size, mode in itertools.product(_SIZES, _MODES):
                count, rest = divmod(batch // width, size)
                in_rounds = virtual == 1 or count % stages == 0
                if mode in inputs.space.recompute and not rest and in_rounds:
                    yield Grid(
                        layers=split[0],
                        counts_ends=split[1],
                        width=width,
                        micro_batch_size=size,
                        mode=mode,
                        tensor=tensor,
                        virtual=virtual,
                    )


def tensor_degrees(inputs: Inputs) -> list[int]:
    """Degrees of which stock can make all GPUs sets: 1, and powers of 2 that divide everything."""
    found, degree = [1], 2
    while degree <= inputs.world_size and inputs.sets is not None and inputs.units is None:
        divides = inputs.world_size % degree == 0 and parts_are_equal(inputs, degree)
        if divides and may_join(inputs, degree):
            firsts = range(0, inputs.world_size, degree)
            nodes = inputs.spec.node_of
            if all(nodes(first) == nodes(first + degree - 1) for first in firsts):
                found.append(degree)
        degree *= 2
    return found


def even_stages(num_layers: int, stages: int) -> tuple[tuple[int, ...], tuple[bool, bool]] | None:
    """Layers of each stage, and which ends count as one; None where they cannot be even.

    >>> even_stages(26, 4)
    ((6, 7, 7, 6), (True, True))
    """
    for ends in ((False, False), (True, True), (False, True), (True, False)):
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
    sets = [str(degree) for degree in tensor_degrees(inputs)[1:]]
    with_sets = f". Tensor parallelism of {_listed(sets)} does not help" if sets else ""
    return (
        f"divisibility: {world} GPUs make {_listed(stages)} stages, of which {inputs.num_layers} "
        f"layers can be split evenly into {_listed(even)}; data parallelism would then be "
        f"{widths}, and none of these divides a batch of {batch}{with_sets}"
    )


def _listed(numbers: Sequence[int | str]) -> str:
    *most, last = map(str, numbers)
    return f"{', '.join(most)} or {last}" if most else last


def plan_of_grid(inputs: Inputs, grid: Grid) -> Plan:
    """The same layout as a plan, for the simulator."""
    count = inputs.global_batch_size // (grid.width * grid.micro_batch_size)
    # Stock knows one type for the whole job.
    one_type = inputs.dtype_of(range(inputs.world_size))
    groups = []
    for stage in range(grid.stages):
        in_stage = range(stage * grid.width, (stage + 1) * grid.width)
        replicas = tuple(
            Replica(
                ranks=tuple(range(replica * grid.tensor, (replica + 1) * grid.tensor)),
                micro_batch_size=grid.micro_batch_size,
                num_microbatches=count,
                shard_weight=1.0,
            )
            for replica in in_stage
        )
        recompute = None if grid.mode == "none" else Recompute(mode=grid.mode)
        groups.append(Group(replicas=replicas, recompute=recompute, compute_dtype=one_type))
    starts = itertools.accumulate(grid.layers[:-1], initial=0)
    return Plan(
        schema_version=1,
        global_batch_size=inputs.global_batch_size,
        model=inputs.model,
        groups=tuple(groups),
        chunks=tuple(
            Chunk(group=number % grid.stages, layers=layers)
            for number, layers in enumerate(itertools.pairwise([*starts, inputs.num_layers]))
        ),
        schedule=Schedule(name=grid.schedule),
        cluster=inputs.cluster,
    )


def grid_estimates(inputs: Inputs) -> list[GridEstimate]:
    """All layouts in closed form: first those that fit, fastest first; then least full first."""
    found = []
    for tensor in tensor_degrees(inputs):
        costs = _GridCosts(_among_sets(inputs, tensor))
        found += [costs.estimate(grid) for grid in _grids_of(inputs, tensor)]
    return sorted(found, key=lambda each: (max(1.0, each.fullest), each.iteration_s, each.fullest))


def _among_sets(inputs: Inputs, tensor: int) -> Inputs:
    if tensor == 1:
        return inputs
    firsts = range(0, inputs.world_size, tensor)
    return joined(inputs, tuple(JoinedSet(ranks=tuple(range(n, n + tensor))) for n in firsts))


class _GridCosts:
    """Costs layouts of one tensor-parallel degree in closed form, among its sets."""

    def __init__(self, inputs: Inputs) -> None:
        self.inputs = inputs
        self.cost_model = StageCostModel(inputs)
        self.device_groups = DeviceGroups(inputs)

    def estimate(self, grid: Grid) -> GridEstimate:
        """Slowest stage and time to fill; memory of the fullest rank."""
        width, size = grid.width, grid.micro_batch_size
        count = self.inputs.global_batch_size // (width * size)
        busy_s = fill_s = fullest = 0.0
        for at in range(grid.stages):
            layers = grid.layers_of(at)
            device_group = self.device_groups.of(tuple(range(at * width, (at + 1) * width)))
            settings = MemorySettings(
                mode=grid.mode, recomputed=0 if grid.mode == "none" else layers
            )
            stage = self._stage(device_group, grid, at)
            share = self.cost_model.memory.shared_bytes(stage, settings) / width
            local_bytes = self.cost_model.memory.local_bytes
            fullest = max(
                fullest,
                *(
                    (share + local_bytes(stage, settings, size, count, each.kind))
                    / each.capacity_bytes
                    for each in device_group.gpu_classes
                ),
            )
            passes = self.cost_model.passes(stage, stage.alike(settings))
            both_s = max(each.both_s for each in passes)
            busy_s = max(busy_s, count * both_s)
            fill_s += both_s / grid.virtual
        return GridEstimate(
            grid=grid,
            iteration_s=busy_s + fill_s,
            sending_s=self._sending_s(grid, count) + self._summing_s(grid),
            fullest=fullest,
        )

    def _sending_s(self, grid: Grid, count: int) -> float:
        """Replicas of a node share its NICs; the last stage sends to the first one between rounds.

        Two neighbours of a ring of stages exchange as much as any others of their links.
        """
        inputs, width = self.inputs, grid.width
        num_bytes = inputs.memory.boundary_bytes(grid.micro_batch_size)
        node = inputs.spec.node_of
        worst_s = 0.0
        for at in range(grid.stages if grid.virtual > 1 else grid.stages - 1):
            source, target = at * width, (at + 1) % grid.stages * width
            crossings = grid.virtual - (at == grid.stages - 1)
            sharing = 1
            if node(source) != node(target):
                sharing = sum(node(source + each) == node(source) for each in range(width))
            once_s = inputs.comm.transfer_s(source, target, num_bytes)
            worst_s = max(worst_s, 2 * crossings * count * sharing * once_s)
        return worst_s

    def _summing_s(self, grid: Grid) -> float:
        """Gradients of the layers summed over replicas, and parameters gathered."""
        inputs, width = self.inputs, grid.width
        slowest_s = 0.0
        for at in range(grid.stages if width > 1 else 0):
            ranks = tuple(range(at * width, (at + 1) * width))
            parameters = grid.layers_of(at) * inputs.memory.layer_parameters()
            gradients = (inputs.memory.gradient_bytes(parameters) // width,) * width
            values = (inputs.memory.parameter_bytes(parameters) // width,) * width
            both_s = inputs.comm.reduce_scatter_s(ranks, gradients)
            both_s += inputs.comm.all_gather_s(ranks, values)
            slowest_s = max(slowest_s, both_s)
        return slowest_s

    @staticmethod
    def _stage(device_group: DeviceGroup, grid: Grid, at: int) -> Stage:
        after = grid.stages - at - 1
        in_flight = after + 1
        if grid.virtual > 1:  # see `schedules.interleaved`
            in_flight = (grid.virtual - 1) * grid.stages + 2 * after + 1
        position = StagePosition(
            is_first=at == 0,
            is_last=at == grid.stages - 1,
            in_flight_limit=float(in_flight * grid.width * grid.micro_batch_size),
            schedule=grid.schedule,
            num_chunks=grid.virtual,
        )
        return Stage(
            device_group,
            grid.layers_of(at),
            (grid.micro_batch_size,) * len(device_group.gpu_classes),
            position,
        )
