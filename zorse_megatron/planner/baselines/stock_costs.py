"""Stock's layouts in closed form: what they take, what they fill, and how layers are shared out."""

import heapq
import operator
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

from zorse_megatron.costs.communication import once_s
from zorse_megatron.costs.interface import TpShard
from zorse_megatron.costs.stage_formulas import exchanges_s
from zorse_megatron.planner.baselines.stock_layouts import Grid, even_grids, tensor_degrees
from zorse_megatron.planner.closed_form.device_groups import (
    DeviceGroup,
    DeviceGroups,
    MemorySettings,
    Stage,
    StagePosition,
)
from zorse_megatron.planner.closed_form.stage_costs import StageCostModel
from zorse_megatron.planner.inputs.search_inputs import Inputs
from zorse_megatron.planner.inputs.tensor_parallel_members import TpGroup, with_tp_groups

_PROBE_BYTES = 10**8
_ROOMS = (1.0, 1.1)


@dataclass(frozen=True, kw_only=True)
class GridEstimate:
    """What the closed form says of a layout."""

    grid: Grid
    iteration_s: float
    least_s: float
    """Of the iteration what its slowest stage computes: the layout takes no less."""
    fullest: float
    """Memory of the fullest rank over what its GPU may hold."""


@dataclass(frozen=True, kw_only=True)
class StageEstimate:
    """A stage, whatever the links."""

    both_s: float
    """Forward and backward of a micro-batch on its slowest replica."""
    step_s: float
    gradient_bytes: int
    fullest: float


@dataclass(frozen=True, kw_only=True)
class _Line:
    """Stages by their number of layers, which time and memory are linear in.

    Beyond `knee` layers those that are added are not recomputed.
    """

    least: int
    knee: int
    layers: int
    """Of the model."""
    first: StageEstimate
    """With `least` layers."""
    slope: tuple[float, float]
    """Seconds and memory that a layer adds."""
    slope_behind: tuple[float, float]

    def both_s(self, layers: int) -> float:
        """Forward and backward of a micro-batch."""
        ahead = min(layers, self.knee) - self.least
        behind = max(0, layers - self.knee)
        return self.first.both_s + self.slope[0] * ahead + self.slope_behind[0] * behind

    def most(self, room: float) -> int:
        """Layers that fit into so much of the memory; 0 where not even `least` do."""
        fullest, found = self.first.fullest, self.least
        if fullest > room:
            return 0
        while found < self.layers:
            fullest += (self.slope if found < self.knee else self.slope_behind)[1]
            if fullest > room:
                break
            found += 1
        return found


_Known = dict[tuple[object, ...], StageEstimate | _Line]
"""Stages that were estimated, also by others."""


def grid_estimates(inputs: Inputs, *, spreads_experts: bool = False) -> list[GridEstimate]:
    """All even layouts without expert parallelism, or all with it: first those that fit, fastest
    first; then least full first."""
    found = []
    for tensor in tensor_degrees(inputs):
        by_degree: dict[int, GridCosts] = {}
        for grid in even_grids(inputs, tensor):
            degree = grid.expert_parallel
            if (degree > 1) == spreads_experts:
                if degree not in by_degree:
                    by_degree[degree] = GridCosts(inputs, tensor, degree)
                found.append(by_degree[degree].estimate(grid))
    return sorted(found, key=lambda each: (max(1.0, each.fullest), each.iteration_s, each.fullest))


class GridCosts:
    """Costs layouts of one tensor-parallel degree, among its TP groups, and of one degree of expert
    parallelism."""

    def __init__(self, inputs: Inputs, tensor: int, expert_parallel: int = 1) -> None:
        self.spread = 0
        """Parameters of a layer's experts that a rank has not, though its group has."""
        self.expert_parallel = expert_parallel
        self._once: dict[tuple[int, int, int], float] = {}
        if expert_parallel > 1:
            assert inputs.tp_costs is not None
            own = inputs.tp_costs.of_rank(TpShard(expert_parallel=expert_parallel), None)
            whole = inputs.memory.layer_parameters()
            self.spread = whole - own.memory.layer_parameters()
            inputs = replace(inputs, compute=own.compute, memory=own.memory)
        self.known: _Known = inputs.shared("stock's stages", dict)
        spec = inputs.spec
        keys: list[tuple[object, ...]] = []
        for first in range(0, inputs.world_size, tensor):
            ranks, node = range(first, first + tensor), spec.node_with(first)
            sizes = tuple((inputs.kinds[n], inputs.capacities_bytes[n]) for n in ranks)
            keys.append((tensor, sizes, node.link if tensor > 1 else None))
        self._keys = keys
        if tensor > 1:
            firsts = range(0, inputs.world_size, tensor)
            tp_groups = [TpGroup(ranks=tuple(range(n, n + tensor))) for n in firsts]
            inputs = with_tp_groups(inputs, tuple(tp_groups))
        self.inputs = inputs
        self.cost_model = StageCostModel(inputs)
        self.device_groups = DeviceGroups(inputs)
        self._exchanges: dict[tuple[int, int], float] = {}
        self._transfers: dict[tuple[int, int, int], float] = {}
        self._stage_keys: dict[tuple[int, int], frozenset[tuple[object, ...]]] = {}

    def estimate(self, grid: Grid) -> GridEstimate:
        """Slowest stage, time to fill and to update; memory of the fullest rank."""
        stages = self._stages(grid)
        # The last stage sends its forwards on to the first one where there are virtual stages.
        transfers_s = [self._transfer_s(grid, at) for at in range(grid.stages)]
        count = self.inputs.global_batch_size // (grid.width * grid.micro_batch_size)
        beat_s = self._beat_s(grid, [stage.both_s for stage in stages], transfers_s)
        slowest_s = max(stage.both_s for stage in stages)
        fill_s = (sum(stage.both_s for stage in stages) - slowest_s) / grid.virtual
        # Of what is exchanged about a micro-batch's time is hidden.
        tail_s = max(
            stage.step_s
            + max(0.0, self._exchange_s_per_byte(grid, at) * stage.gradient_bytes - stage.both_s)
            for at, stage in enumerate(stages)
        )
        return GridEstimate(
            grid=grid,
            iteration_s=count * beat_s + fill_s + 2 * sum(transfers_s[:-1]) + tail_s,
            least_s=count * slowest_s,
            fullest=max(stage.fullest for stage in stages),
        )

    @staticmethod
    def _beat_s(grid: Grid, both_s: Sequence[float], transfers_s: Sequence[float]) -> float:
        """What one more micro-batch adds.

        A stage computes, and stops while it sends: under 1F1B an activation and a gradient pass
        each other. And it has but so many micro-batches in flight, one of which goes to the last
        stage and back, or once around to the next virtual stage.
        """
        stages, virtual = grid.stages, grid.virtual
        if virtual > 1:
            around_s = sum(transfers_s) + sum(both_s) / (3 * virtual)  # forwards are a third
            alone_s = max(
                one + virtual * transfer for one, transfer in zip(both_s, transfers_s, strict=True)
            )
            return max(alone_s, virtual * around_s / stages)
        found, there_and_back_s = 0.0, 0.0
        for after, at in enumerate(reversed(range(stages))):
            there_and_back_s += both_s[at] + (2 * transfers_s[at] if after else 0.0)
            nearest_s = (transfers_s[at] if after else 0.0) + (transfers_s[at - 1] if at else 0.0)
            found = max(found, both_s[at] + nearest_s, there_and_back_s / (after + 1))
        return found

    def loads_s(self, grid: Grid) -> list[float]:
        """Forward and backward of a micro-batch through each stage."""
        return [stage.both_s for stage in self._stages(grid)]

    def filled(self, grid: Grid) -> tuple[list[Grid], bool]:
        """The layout with layers shared out anew: each next one to the stage that is then fastest.

        That makes the slowest stage as fast as can be; each stage has one layer at least for each
        of its virtual stages. Where memory stands in the way: within it, and a little beyond, as
        the simulator counts it more closely. Empty where layers do not fit. Returns also whether
        memory does not stand in the way.
        """
        lines = [self._line(grid, at) for at in range(grid.stages)]
        most = [[line.most(room) for line in lines] for room in _ROOMS]
        free = self._shared_out(grid, lines, [self.inputs.num_layers] * grid.stages)
        has_room = free is None or all(map(operator.le, free, most[0]))
        found = [free] if has_room else [self._shared_out(grid, lines, each) for each in most]
        layouts = {
            replace(grid, layers=in_virtual_stages(each, grid.virtual)): None
            for each in found
            if each is not None
        }
        return list(layouts), has_room

    def _shared_out(
        self, grid: Grid, lines: Sequence[_Line], most: Sequence[int]
    ) -> list[int] | None:
        """Layers of each stage."""
        if min(most) < grid.virtual:
            return None
        counts = [grid.virtual] * grid.stages
        waiting = [
            (line.both_s(grid.virtual + 1), at)
            for at, line in enumerate(lines)
            if most[at] > grid.virtual
        ]
        heapq.heapify(waiting)
        for _ in range(self.inputs.num_layers - sum(counts)):
            if not waiting:
                return None
            _, at = heapq.heappop(waiting)
            counts[at] += 1
            if counts[at] < most[at]:
                heapq.heappush(waiting, (lines[at].both_s(counts[at] + 1), at))
        return counts

    def _line(self, grid: Grid, at: int) -> _Line:
        """Of layers of which the first are recomputed, where any are."""
        least, layers = grid.virtual, self.inputs.num_layers
        knee = layers if grid.recomputed is None else min(layers, grid.recomputed * least)
        key = ("line", *self._key(grid, at))
        found = self.known.get(key)
        if found is None:
            found = self.known[key] = self._find_line(grid, at)
        assert isinstance(found, _Line)
        return found if found.knee == knee else replace(found, knee=knee)

    def _find_line(self, grid: Grid, at: int) -> _Line:
        least, some = grid.virtual, grid.mode != "none"
        first = self._stage_estimate(grid, at, least, least * some)
        slope = _slope(first, self._stage_estimate(grid, at, least + 1, (least + 1) * some))
        behind = slope
        if some:
            behind = _slope(first, self._stage_estimate(grid, at, least + 1, least))
        layers = self.inputs.num_layers
        return _Line(
            least=least, knee=layers, layers=layers, first=first, slope=slope, slope_behind=behind
        )

    def _stages(self, grid: Grid) -> list[StageEstimate]:
        return [
            self._stage_estimate(grid, at, grid.layers_of(at), grid.recomputed_of(at))
            for at in range(grid.stages)
        ]

    def _key(self, grid: Grid, at: int) -> tuple[object, ...]:
        """Equal for stages that take the same, with the same number of layers."""
        place = at, grid.width
        if place not in self._stage_keys:
            ranks = range(at * grid.width, (at + 1) * grid.width)
            self._stage_keys[place] = frozenset(self._keys[rank] for rank in ranks)
        return (
            self._stage_keys[place],
            *(at, grid.stages, grid.width, grid.virtual, grid.micro_batch_size),
            *(grid.mode, grid.distributed, self._once_s(grid, at)),
        )

    def _stage_estimate(self, grid: Grid, at: int, layers: int, recomputed: int) -> StageEstimate:
        key = (*self._key(grid, at), layers, recomputed)
        found = self.known.get(key)
        if found is None:
            settings = MemorySettings(mode=grid.mode, recomputed=recomputed)
            stage, once_s = self._stage(grid, at, layers), self._once_s(grid, at)
            found = self.known[key] = self._find(grid, stage, settings, once_s)
        assert isinstance(found, StageEstimate)
        return found

    def _find(
        self, grid: Grid, stage: Stage, settings: MemorySettings, once_s: float
    ) -> StageEstimate:
        width, size, memory = grid.width, grid.micro_batch_size, self.cost_model.memory
        count = self.inputs.global_batch_size // (width * size)
        owners = width if grid.distributed else 1
        # An equal part of all experts is owned, whatever experts are there.
        spread = stage.num_layers * self.spread if grid.distributed else 0
        shared = memory.shared_bytes(stage, settings) + self.inputs.memory.state_bytes(spread)
        share = shared / owners
        gpu_classes = stage.device_group.gpu_classes
        parameters = memory.parameters(stage.num_layers, stage.position)
        both_s = max(each.both_s for each in self.cost_model.passes(stage, stage.alike(settings)))
        owned = (parameters + spread) // owners
        return StageEstimate(
            both_s=both_s + self._exchanges_s(grid, stage, settings, both_s, once_s),
            step_s=max(self.inputs.compute.step_s(g.kind, owned) for g in gpu_classes),
            gradient_bytes=self.inputs.memory.gradient_bytes(self._summed(grid, stage)),
            fullest=max(
                (share + memory.local_bytes(stage, settings, size, count, each.kind))
                / each.capacity_bytes
                for each in gpu_classes
            ),
        )

    def _summed(self, grid: Grid, stage: Stage) -> int:
        """Parameters whose gradients replicas sum: no experts where each has its own."""
        parameters = self.cost_model.memory.parameters(stage.num_layers, stage.position)
        if not self.spread or grid.expert_parallel < grid.width:
            return parameters
        return parameters - stage.num_layers * self.spread // (grid.expert_parallel - 1)

    def _exchanges_s(
        self,
        grid: Grid,
        stage: Stage,
        settings: MemorySettings,
        computed_s: float,
        once_s: float,
    ) -> float:
        """What tokens on their way to experts add to a micro-batch, as the simulator counts it."""
        if not once_s:
            return 0.0
        assert self.inputs.tp_costs is not None
        is_whole = settings.mode == "full"
        is_combined = (grid.stages == 1 or grid.virtual > 1) and not is_whole
        again = settings.recomputed if is_whole else 0
        hides = is_combined or self.inputs.tp_costs.traits.has_shared_expert
        return sum(exchanges_s(computed_s, once_s, stage.num_layers, again, hides=hides))

    def _once_s(self, grid: Grid, at: int) -> float:
        """The tokens of a micro-batch on their way to their experts."""
        key = at, grid.width, grid.micro_batch_size
        if self.expert_parallel == 1:
            return 0.0
        if key not in self._once:
            inputs, ranks = self.inputs, range(at * grid.width, (at + 1) * grid.width)
            assert inputs.tp_costs is not None
            num_bytes = inputs.memory.boundary_bytes(grid.micro_batch_size)
            self._once[key] = once_s(
                inputs.comm, inputs.tp_costs, ranks, self.expert_parallel, num_bytes
            )
        return self._once[key]

    def _exchange_s_per_byte(self, grid: Grid, at: int) -> float:
        """Of gradients that a stage sums, with the parameters that it gathers then."""
        place = at, grid.width
        if place not in self._exchanges:
            exchange_s, width = 0.0, grid.width
            if width > 1:
                ranks = tuple(range(at * width, (at + 1) * width))
                parts = (_PROBE_BYTES // width,) * width
                # Gradients in fp32, parameters mostly in 16 bits.
                exchange_s = 1.5 * self.inputs.comm.reduce_scatter_s(ranks, parts)
            self._exchanges[place] = exchange_s / _PROBE_BYTES
        return self._exchanges[place]

    def _transfer_s(self, grid: Grid, at: int) -> float:
        """A micro-batch's way to the next stage, and from the last one to the first: as long as
        the longest of its replicas, those of one node behind one another."""
        width, size = grid.width, grid.micro_batch_size
        key = at, width, size
        if grid.stages == 1:
            return 0.0
        if key not in self._transfers:
            spec, found = self.inputs.spec, 0.0
            num_bytes = self.inputs.memory.boundary_bytes(size)
            sources = range(at * width, (at + 1) * width)
            from_node = Counter(map(spec.node_of, sources))
            for source in {sources[0], sources[-1]}:
                target = (source + width) % self.inputs.world_size
                node = spec.node_of(source)
                together = from_node[node] if node != spec.node_of(target) else 1
                alone_s = self.inputs.comm.transfer_s(source, target, num_bytes)
                latency_s = self.inputs.comm.transfer_s(source, target, 0)
                found = max(found, latency_s + together * (alone_s - latency_s))
            self._transfers[key] = found
        return self._transfers[key]

    def _stage(self, grid: Grid, at: int, layers: int) -> Stage:
        after, width = grid.stages - at - 1, grid.width
        in_flight = after + 1
        if grid.virtual > 1:  # see `schedule.pipeline_schedules`
            in_flight = (grid.virtual - 1) * grid.stages + 2 * after + 1
        position = StagePosition(
            is_first=at == 0,
            is_last=at == grid.stages - 1,
            in_flight_limit=float(in_flight * width * grid.micro_batch_size),
            schedule=grid.schedule,
            num_chunks=grid.virtual,
        )
        group: DeviceGroup = self.device_groups.of(tuple(range(at * width, (at + 1) * width)))
        return Stage(group, layers, (grid.micro_batch_size,) * len(group.gpu_classes), position)


def _slope(one: StageEstimate, other: StageEstimate) -> tuple[float, float]:
    return other.both_s - one.both_s, other.fullest - one.fullest


def in_virtual_stages(
    counts: Sequence[int], virtual: int, *, more_first: bool = False
) -> tuple[int, ...]:
    """Layers of each virtual stage, in model order, of stages with so many layers.

    What does not come out even is in the last ones; or in the first ones, but for the first stage,
    whose first one has the embedding, too.

    >>> in_virtual_stages((5, 3, 2), 2)
    (2, 1, 1, 3, 2, 1)
    >>> in_virtual_stages((5, 3, 2), 2, more_first=True)
    (2, 2, 1, 3, 1, 1)
    """
    rows = []
    for turn in range(virtual):
        row = [(count + turn) // virtual for count in counts]
        if more_first:
            row[1:] = [(count + virtual - 1 - turn) // virtual for count in counts[1:]]
        rows.append(row)
    return tuple(layers for row in rows for layers in row)
