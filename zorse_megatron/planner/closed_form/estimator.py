"""Iteration time of a candidate in closed form, and the best layers for its groups.

1f1b, with groups j = 0, 1, ... in model order: busy_j of the slowest replica, pass_j of one
micro-batch (forward and backward; the mean over samples, because what fills and drains hardly ever
is what the slowest replica has), hop_j to the next group, and the in-flight limit W_j, the samples
that `schedules.one_f_one_b` lets group j have in flight, extra ones for time in transfer included:

    iteration = max(busy_j, loop_j, busiest link) + pass_j and hop_j of all but the slowest + tail
    loop_j = batch / W_j * (passes and both ways of hops from j on)
           or batch / (W_j - W_k + round_k) * (passes of j and k = j + 1, both ways of the hop)

The loop is what makes unequal or slow hops felt: an in-flight limit holds exactly the samples of
one round of each later group, so whatever time samples spend in transfer is not covered. The tail
is the last reduction, the sums over all ranks, the optimizer step and the gathers.

breadth_first: no in-flight limits; collectives hide behind computation but for the first gather and
the last reduction, and filling takes one chunk of each group.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

from zorse_megatron.planner.closed_form.balance import balanced_layers
from zorse_megatron.planner.closed_form.candidate import Candidate, Estimate, layers_of_chunks
from zorse_megatron.planner.closed_form.communication import CommunicationCosts, TransferPath
from zorse_megatron.planner.closed_form.device_groups import DeviceGroup
from zorse_megatron.planner.closed_form.in_flight import InFlight, SizedGroup
from zorse_megatron.planner.closed_form.layer_assignment import GroupCost, best_layer_assignments
from zorse_megatron.planner.closed_form.stage import Stage, StagePosition
from zorse_megatron.planner.closed_form.stage_costs import StageCost, StageCostModel
from zorse_megatron.planner.inputs.search_inputs import Inputs

# Numbers of layers that are costed for a group: those that balance speeds, and so many around, in
# all and as a part of them.
_AROUND, _AROUND_PART = 1, 0.2
# How much of a forward and backward a micro-batch waits for the others of its round where rounds
# of two groups differ, so that they cannot work in step: fitted to simulations of unequal groups.
_OUT_OF_STEP = 0.4
# A message shares the NICs with the gathers and reductions of groups on several nodes, which run
# nearly all the time under breadth_first: it gets half.
_BESIDE_COLLECTIVES = 2.0


@dataclass(frozen=True, kw_only=True)
class _CostRow:
    """A group with its layers."""

    stage: Stage
    cost: StageCost | None
    """None where it does not fit."""
    group_cost: GroupCost | None
    in_flight_limit: float
    """Samples that the device group may really have in flight: limits are rounded up."""


class _CostTable:
    """A group but for its layers; each number of them is costed once."""

    def __init__(
        self,
        cost_model: StageCostModel,
        sized: SizedGroup,
        position: StagePosition,
        reserve_bytes: int,
    ) -> None:
        self.cost_model = cost_model
        self.sized = sized
        self.position = position
        self.reserve_bytes = reserve_bytes
        self._rows: dict[int, _CostRow] = {}

    def row(self, num_layers: int) -> _CostRow:
        found = self._rows.get(num_layers)
        if found is None:
            found = self._rows[num_layers] = self._find(num_layers)
        return found

    def _find(self, num_layers: int) -> _CostRow:
        sized, position = self.sized, self.position
        stage = Stage(sized.device_group, num_layers, sized.sizes, position, self.reserve_bytes)
        cost = self.cost_model.cost(stage)
        if cost is None:
            return _CostRow(stage=stage, cost=None, group_cost=None, in_flight_limit=0.0)
        fill_drain_s = cost.mean_micro_batch_s / stage.num_chunks
        group_cost = GroupCost(busy_s=cost.busy_s, fill_drain_s=fill_drain_s)
        return _CostRow(
            stage=stage,
            cost=cost,
            group_cost=group_cost,
            in_flight_limit=self._in_flight_limit(stage),
        )

    def _in_flight_limit(self, stage: Stage) -> float:
        if stage.position.schedule == "breadth_first":
            return 0.0  # it has none
        counts = self.cost_model.counts(stage)
        return sum(
            len(gpu_class.ranks) * size * self.cost_model.memory.limit(stage.position, count)
            for gpu_class, size, count in zip(
                stage.device_group.gpu_classes, stage.sizes, counts, strict=True
            )
        )


class Estimator:
    """Costs candidates."""

    def __init__(self, inputs: Inputs) -> None:
        self.inputs = inputs
        self.cost_model = StageCostModel(inputs)
        self.communication = CommunicationCosts(inputs)
        self.in_flight = InFlight(inputs, self.cost_model, self.communication)
        self.num_estimated = 0
        self._made: dict[tuple[DeviceGroup, tuple[int, ...], StagePosition, int], _CostTable] = {}

    def best(self, candidate: Candidate, *, most: int = 1) -> list[Estimate]:
        """Estimates with the best layers, best first; empty where nothing fits."""
        num_groups = len(candidate.device_groups)
        if num_groups > self.inputs.num_layers:
            return []
        if (
            candidate.schedule == "interleaved"
            and candidate.num_chunks > 1
            and self.in_flight.differs(candidate)
        ):
            return []  # groups that are out of step in every turn: never worth it
        found: list[Estimate] = []
        chunks = candidate.num_chunks
        if chunks > 1 and self.inputs.num_layers % chunks == 0:
            found += self._best(candidate, most=most, step=chunks)
        found += self._best(candidate, most=most, step=1)
        return sorted(found, key=lambda each: (each.iteration_s, each.layers))[:most]

    def _best(self, candidate: Candidate, *, most: int, step: int) -> list[Estimate]:
        """As `best`, with numbers of layers that are multiples of a step: equal chunks."""
        for center in self._centers(candidate):
            tables = self._tables(candidate, center, step)
            assignments = best_layer_assignments(tables, self.inputs.num_layers, most=most)
            if assignments:
                found = [self.estimate(candidate, assignment.layers) for assignment in assignments]
                return [each for each in found if each is not None]
        return []

    def _centers(self, candidate: Candidate) -> Iterator[tuple[int, ...]]:
        """Layers of each group to look around: balanced; then balanced as far as they fit."""
        speeds = [
            self.in_flight.speed(device_group, level)
            for device_group, level in zip(candidate.device_groups, candidate.levels, strict=True)
        ]
        num_layers = self.inputs.num_layers
        yield balanced_layers(num_layers, speeds)[0]
        most = [
            self._most_layers(candidate, index) for index in range(len(candidate.device_groups))
        ]
        layers, slowest = balanced_layers(num_layers, speeds, most)
        if slowest < math.inf:
            yield layers

    def _most_layers(self, candidate: Candidate, index: int) -> int:
        """The most that a group can hold, by bisection."""
        table = self._cost_tables(candidate)[index]
        low, high = 0, self.inputs.num_layers - len(candidate.device_groups) + 1
        while low < high:
            middle = (low + high + 1) // 2
            if table.row(middle).group_cost is None:
                high = middle - 1
            else:
                low = middle
        return low

    def estimate(self, candidate: Candidate, layers: Sequence[int]) -> Estimate | None:
        """The cost of a candidate with these layers; None where it does not fit."""
        self.num_estimated += 1
        rows = [
            table.row(count)
            for table, count in zip(self._cost_tables(candidate), layers, strict=True)
        ]
        found = tuple(row.cost for row in rows if row.cost is not None)
        if len(found) < len(rows):
            return None
        stages = tuple(row.stage for row in rows)
        paths = self._paths(candidate)
        if candidate.schedule == "breadth_first":
            return self._breadth_first(candidate, stages, found, paths)
        return self._one_f_one_b(
            candidate, stages, found, paths, [row.in_flight_limit for row in rows]
        )

    def _tables(
        self, candidate: Candidate, center: Sequence[int], step: int
    ) -> list[dict[int, GroupCost]]:
        """For each group costs of the numbers of layers around the center, multiples of a step."""
        most = self.inputs.num_layers - len(candidate.device_groups) + 1
        result = []
        for table, middle in zip(self._cost_tables(candidate), center, strict=True):
            around = max(step, _AROUND + int(_AROUND_PART * middle + 0.5))
            low, high = max(1, middle - around), min(most, middle + around)
            group_costs = {
                n: table.row(n).group_cost for n in range(low, high + 1) if n % step == 0
            }
            result.append(
                {n: group_cost for n, group_cost in group_costs.items() if group_cost is not None}
            )
        return result

    def _cost_tables(self, candidate: Candidate) -> list[_CostTable]:
        sized_groups, positions = (
            self.in_flight.sized_groups(candidate),
            self.in_flight.positions(candidate),
        )
        reserves = candidate.reserves or (0,) * len(sized_groups)
        return [
            self._cost_table(*row) for row in zip(sized_groups, positions, reserves, strict=True)
        ]

    def _cost_table(
        self, sized: SizedGroup, position: StagePosition, reserve_bytes: int
    ) -> _CostTable:
        key = (sized.device_group, sized.sizes, position, reserve_bytes)
        found = self._made.get(key)
        if found is None:
            found = self._made[key] = _CostTable(self.cost_model, sized, position, reserve_bytes)
        return found

    def _paths(self, candidate: Candidate) -> list[TransferPath]:
        paths = [self.communication.path(a, b) for a, b in pairwise(candidate.device_groups)]
        if candidate.num_chunks > 1 and len(candidate.device_groups) > 1:
            paths.append(
                self.communication.path(candidate.device_groups[-1], candidate.device_groups[0])
            )
        return paths

    def _transfer_times(
        self, stages: Sequence[Stage], paths: Sequence[TransferPath]
    ) -> list[float]:
        times = []
        for stage, path in zip(stages, paths, strict=False):
            size, samples = max(stage.sizes), stage.round_samples
            times.append(self.communication.transfer_s(path, size=size, round_samples=samples))
        return times

    def _one_f_one_b(
        self,
        candidate: Candidate,
        stages: tuple[Stage, ...],
        costs: tuple[StageCost, ...],
        paths: Sequence[TransferPath],
        in_flight_limits: Sequence[float],
    ) -> Estimate:
        batch = self.inputs.global_batch_size
        transfer_s = self._transfer_times(stages, paths)
        transfer_s += [0.0] * (len(stages) - len(transfer_s))
        stalls = self._stalls(stages, costs, paths)
        busy_s = max(cost.busy_s + stall for cost, stall in zip(costs, stalls, strict=True))
        chunks = candidate.num_chunks
        waits = self._waits(stages, costs)
        around_s = (
            sum(waits)
            + sum(cost.mean_micro_batch_s for cost in costs)
            + 2 * chunks * sum(transfer_s)
        )
        loops, way_s = [], around_s * (chunks - 1) / 2
        rows = list(zip(in_flight_limits, costs, transfer_s, waits, strict=True))
        for in_flight_limit, cost, its_transfer_s, wait_s in reversed(rows):
            way_s += (
                cost.mean_micro_batch_s + 2 * its_transfer_s + wait_s
            )  # of one chunk and all before
            loops.append(batch / in_flight_limit * way_s)
        if chunks == 1:
            loops += self._pair_loops(stages, costs, transfer_s, in_flight_limits)
        link_s = self.communication.busiest_link_s(paths) * chunks
        chunk_s = [
            cost.mean_micro_batch_s / stage.num_chunks
            for cost, stage in zip(costs, stages, strict=True)
        ]
        slowest = max(range(len(costs)), key=lambda index: costs[index].busy_s)
        fill_s = sum(chunk_s) - chunk_s[slowest] + 2 * sum(transfer_s)
        tail_s = self._tail(candidate, stages, costs)
        steady_s = max(busy_s, *loops, link_s)
        return Estimate(
            candidate=candidate,
            layers=tuple(stage.num_layers for stage in stages),
            stages=stages,
            costs=costs,
            extras=self.in_flight.extras(candidate),
            iteration_s=steady_s + fill_s + tail_s,
            busy_s=busy_s,
            loop_s=max(loops),
            link_s=link_s,
            fill_s=fill_s,
            tail_s=tail_s,
        )

    def _pair_loops(
        self,
        stages: Sequence[Stage],
        costs: Sequence[StageCost],
        transfer_s: Sequence[float],
        in_flight_limits: Sequence[float],
    ) -> list[float]:
        """For each hop how long the batch takes if both ends always have all in flight they may.

        What only the first has in flight, and one round of the second, goes around between them:
        through a forward and a backward of both, and the hop both ways.
        """
        found = []
        for at, (first, second) in enumerate(pairwise(costs)):
            own = stages[at + 1].round_samples
            around = max(own, in_flight_limits[at] - in_flight_limits[at + 1] + own)
            way_s = first.mean_micro_batch_s + second.mean_micro_batch_s + 2 * transfer_s[at]
            found.append(self.inputs.global_batch_size / around * way_s)
        return found

    def _stalls(
        self, stages: Sequence[Stage], costs: Sequence[StageCost], paths: Sequence[TransferPath]
    ) -> list[float]:
        """For each group, how long it stops in all for messages that take longer than it hides.

        A receive is started two computations early, so a message hides behind those only: in
        1f1b behind a forward and a backward, in breadth_first behind two of its own kind. Groups
        in step send all at once. Where the plan says how long a hop is, nobody stops for it: the
        order has something else to do, as far as in-flight limits and links allow.
        """
        found = [0.0] * len(stages)
        for at, path in enumerate(paths):
            source, target = at % len(stages), (at + 1) % len(stages)
            for sender, receiver, forward in ((source, target, True), (target, source, False)):
                stage, cost = stages[receiver], costs[receiver]
                if stage.position.slow_before if forward else stage.position.slow_behind:
                    continue
                message_s = self.in_flight.message_s(stages[sender], stage, path)
                own_kind = stage.position.schedule == "breadth_first"
                if own_kind and any(
                    len(self.communication.nodes(stages[at].device_group)) > 1
                    for at in (sender, receiver)
                ):
                    message_s *= _BESIDE_COLLECTIVES
                hidden_s = cost.forward_s + cost.backward_s
                if own_kind:
                    hidden_s = 2 * (cost.forward_s if forward else cost.backward_s)
                parts = stage.num_chunks
                number = self.inputs.global_batch_size / stage.round_samples
                found[receiver] += number * max(0.0, parts * message_s - hidden_s)
        return found

    def _waits(self, stages: Sequence[Stage], costs: Sequence[StageCost]) -> list[float]:
        """What a sample waits at each group for being out of step with the next one."""
        rounds = [stage.round_samples for stage in stages]
        waits = [
            _OUT_OF_STEP * (costs[at + 1].mean_micro_batch_s if one != other else 0.0)
            for at, (one, other) in enumerate(pairwise(rounds))
        ]
        return [*waits, 0.0]

    def _tail(
        self, candidate: Candidate, stages: Sequence[Stage], costs: Sequence[StageCost]
    ) -> float:
        memory = self.inputs.memory
        crowding = self.communication.crowding(candidate.device_groups)
        reduce_s, gather_s, step_s, ahead_s = 0.0, 0.0, 0.0, 0.0
        for stage, cost, crowd in zip(stages, costs, crowding, strict=True):
            parameters = self.cost_model.memory.parameters(stage.num_layers, stage.position)
            mine_s = crowd * self.communication.even_gather_s(
                stage.device_group, memory.gradient_bytes(parameters)
            )
            # A later group is done earlier, by the backwards of the groups before it.
            reduce_s = max(reduce_s, mine_s - ahead_s)
            ahead_s += cost.backward_s
            back_s = crowd * self.communication.even_gather_s(
                stage.device_group, memory.parameter_bytes(parameters)
            )
            gather_s = max(gather_s, back_s)
            step_s = max(step_s, self.cost_model.step_s(stage, cost.settings))
        return reduce_s + self.communication.statistics_s + step_s + gather_s

    @staticmethod
    def _turns_s(
        stages: Sequence[Stage], costs: Sequence[StageCost], stalls: Sequence[float], chunks: int
    ) -> float:
        """Sum over turns of the slowest group's chunk: a turn cannot end before its slowest."""
        per_layer = [
            (cost.busy_s + stall) / cost.num_layers
            for cost, stall in zip(costs, stalls, strict=True)
        ]
        parts = [
            layers_of_chunks(stage.num_layers, chunks, is_last=stage.position.is_last)
            for stage in stages
        ]
        return sum(
            max(row[turn] * time_s for row, time_s in zip(parts, per_layer, strict=True))
            for turn in range(chunks)
        )

    def _breadth_first(
        self,
        candidate: Candidate,
        stages: tuple[Stage, ...],
        costs: tuple[StageCost, ...],
        paths: Sequence[TransferPath],
    ) -> Estimate:
        memory, chunks = self.inputs.memory, candidate.num_chunks
        layer = memory.layer_parameters()
        crowding = self.communication.crowding(candidate.device_groups)
        collective_s, exposed_s, step_s = 0.0, 0.0, 0.0
        for stage, cost, crowd in zip(stages, costs, crowding, strict=True):
            parameters = self.cost_model.memory.parameters(stage.num_layers, stage.position)
            parts = stage.num_chunks
            part = -(-parameters // parts)
            gather_s, reduce_s = (
                crowd
                * self.communication.even_gather_s(
                    stage.device_group, to_bytes(part), -(-part // layer)
                )
                for to_bytes in (memory.parameter_bytes, memory.gradient_bytes)
            )
            collective_s = max(collective_s, parts * (2 * gather_s + reduce_s))
            exposed_s = max(exposed_s, gather_s + reduce_s)
            step_s = max(step_s, self.cost_model.step_s(stage, cost.settings))
        transfer_s = self._transfer_times(stages, paths)
        busy_s = self._turns_s(stages, costs, self._stalls(stages, costs, paths), chunks)
        chunk_s = [
            (cost.forward_s + cost.backward_s) / stage.num_chunks
            for cost, stage in zip(costs, stages, strict=True)
        ]
        link_s = self.communication.busiest_link_s(paths) * chunks
        fill_s = sum(chunk_s) - max(chunk_s) + 2 * sum(transfer_s)
        tail_s = exposed_s + self.communication.statistics_s + step_s
        return Estimate(
            candidate=candidate,
            layers=tuple(stage.num_layers for stage in stages),
            stages=stages,
            costs=costs,
            extras=self.in_flight.extras(candidate),
            iteration_s=max(busy_s, collective_s, link_s) + fill_s + tail_s,
            busy_s=busy_s,
            loop_s=collective_s,
            link_s=link_s,
            fill_s=fill_s,
            tail_s=tail_s,
        )
