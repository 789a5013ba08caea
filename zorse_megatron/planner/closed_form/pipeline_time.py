"""Iteration time of a pipeline in closed form, and how much is in flight in each of its groups.

1f1b, with groups j = 0, 1, ... in model order: busy_j of the slowest replica, pass_j of one
micro-batch (forward and backward; the mean over samples, because what fills and drains hardly ever
is what the slowest replica has), transfer_j to the next group, and the in-flight limit W_j, the
samples that `schedule.pipeline_schedules` lets group j have in flight, extra ones for time in
transfer included:

    iteration = max(busy_j, loop_j, busiest link) + tail
                + pass_j and transfer_j of all but the slowest
    loop_j = batch / W_j * (passes and both ways of transfers from j on)
           or batch / (W_j - W_k + round_k) * (passes of j and k = j + 1, both ways of the transfer)

The loop is what makes unequal or slow transfers felt: an in-flight limit holds exactly the samples
of one round of each later group, so whatever time samples spend in transfer is not covered. The
tail is the last reduction, the sums over all ranks, the optimizer step and the gathers.

breadth_first: no in-flight limits; collectives hide behind computation but for the first gather and
the last reduction, and filling takes one chunk of each group.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

from zorse_megatron.planner.closed_form.candidate import Candidate, Estimate, layers_of_chunks
from zorse_megatron.planner.closed_form.communication import (
    CommunicationCosts,
    TransferPath,
)
from zorse_megatron.planner.closed_form.device_groups import (
    DeviceGroup,
    MicroBatchLevel,
    Stage,
    StagePosition,
    layers_per_s,
    round_samples_of,
)
from zorse_megatron.planner.closed_form.stage_costs import StageCost, StageCostModel

# How much is in flight in each group of a candidate, and where that puts the groups.


# From which part of a forward on the time of a message counts. On the paper's clusters 0.1, 0.25
# and 1 give iterations that differ by less than one in a thousand; with fewer of them the
# simulation is faster.
_COUNTS_FROM = 0.25
_FORWARDS = 3
"""What a forward and its backward take, in forwards."""


@dataclass(frozen=True, kw_only=True)
class SizedGroup:
    """A device group with its micro-batches."""

    device_group: DeviceGroup
    sizes: tuple[int, ...]
    """Micro-batch size of each GPU class."""
    round_samples: int
    """Samples of one micro-batch on every GPU."""


class InFlight:
    """Micro-batch sizes, rounds and in-flight limits of candidates."""

    def __init__(self, cost_model: StageCostModel, communication: CommunicationCosts) -> None:
        self.inputs = cost_model.inputs
        self.cost_model = cost_model
        self.communication = communication

    def sized_groups(self, candidate: Candidate) -> list[SizedGroup]:
        """The device groups with their micro-batches."""
        found = []
        for group, level in zip(candidate.device_groups, candidate.levels, strict=True):
            sizes = self.cost_model.sizes(group, level)
            samples = round_samples_of(group, sizes)
            found.append(SizedGroup(device_group=group, sizes=sizes, round_samples=samples))
        return found

    def speed(self, device_group: DeviceGroup, level: MicroBatchLevel) -> float:
        """Layers of one sample per second, forward and backward."""
        return layers_per_s(self.inputs, device_group, self.cost_model.sizes(device_group, level))

    def differs(self, candidate: Candidate) -> bool:
        """Whether the groups have rounds of different sizes."""
        return len({sized.round_samples for sized in self.sized_groups(candidate)}) > 1

    def positions(self, candidate: Candidate) -> tuple[StagePosition, ...]:
        """Where the device groups stand in the pipeline, with their in-flight limits."""
        last, slow = len(candidate.device_groups) - 1, self._slow_transfers(candidate)
        return tuple(
            StagePosition(
                is_first=index == 0,
                is_last=index == last,
                in_flight_limit=in_flight_limit,
                schedule=candidate.schedule,
                num_chunks=candidate.num_chunks,
                slow_before=slow[index - 1],
                slow_after=slow[index],
            )
            for index, in_flight_limit in enumerate(self._in_flight_limits(candidate))
        )

    def _slow_transfers(self, candidate: Candidate) -> list[bool]:
        """For each group, whether the plan says how long messages to the next one are on their way.

        It does where one takes longer than a small part of the shorter forward of the two, if all
        GPUs are equally busy; not under breadth_first, whose order does not depend on it.
        """
        sized_groups, number = self.sized_groups(candidate), len(candidate.device_groups)
        found = [False] * number
        if candidate.schedule == "breadth_first" or number < 2:
            return found
        speed = sum(map(self.speed, candidate.device_groups, candidate.levels))
        per_sample_s = self.inputs.num_layers / speed / candidate.num_chunks
        for at in range(number if candidate.num_chunks > 1 else number - 1):
            here, after = sized_groups[at], sized_groups[(at + 1) % number]
            path = self.communication.path(here.device_group, after.device_group)
            samples = min(here.round_samples, after.round_samples)
            forward_s = samples * per_sample_s / _FORWARDS
            found[at] = self.message_s(here, after, path) > _COUNTS_FROM * forward_s
        return found

    def _in_flight_limits(self, candidate: Candidate) -> list[float]:
        if candidate.schedule == "breadth_first":
            return [0.0] * len(candidate.device_groups)
        rounds = [sized.round_samples for sized in self.sized_groups(candidate)]
        from_here = list(accumulate(reversed(rounds)))[::-1]
        rows = list(zip(from_here, self.extras(candidate), rounds, strict=True))
        if candidate.schedule == "interleaved":
            before = (candidate.num_chunks - 1) * sum(rounds)
            return [
                float(before + 2 * (in_flight_limit + extra) - own)
                for in_flight_limit, extra, own in rows
            ]
        return [float(in_flight_limit + extra) for in_flight_limit, extra, _ in rows]

    def extras(self, candidate: Candidate) -> tuple[int, ...]:
        """Samples in flight under 1f1b beyond one round of each group from here on.

        A group has what the next one has, a round of its own, and what is on the way to the next
        one and back at the rate of all GPUs together; in whole rounds.
        """
        if candidate.schedule != "1f1b" or not candidate.slack or len(candidate.device_groups) < 2:
            return (0,) * len(candidate.device_groups)
        sized_groups = self.sized_groups(candidate)
        speed = sum(map(self.speed, candidate.device_groups, candidate.levels))
        per_s = candidate.slack * speed / self.inputs.num_layers
        in_flight_limit = from_here = sized_groups[-1].round_samples
        found = [0]
        for at in range(len(sized_groups) - 2, -1, -1):
            here, after = sized_groups[at], sized_groups[at + 1]
            path = self.communication.path(here.device_group, after.device_group)
            needed = (
                in_flight_limit + here.round_samples + 2 * per_s * self.message_s(here, after, path)
            )
            if not _nested(here, after):  # micro-batches wait for parts of others
                needed += candidate.slack * max(here.round_samples, after.round_samples)
            # Limits are whole micro-batches of each replica.
            in_flight_limit = math.ceil(needed / here.round_samples - 1e-9) * here.round_samples
            from_here += here.round_samples
            found.append(max(0, in_flight_limit - from_here))
        return tuple(reversed(found))

    def message_s(
        self, sender: SizedGroup | Stage, receiver: SizedGroup | Stage, path: TransferPath
    ) -> float:
        """One message; groups in step send all of a round's at once."""
        in_step = sender.round_samples == receiver.round_samples
        in_step = in_step and set(sender.sizes) == set(receiver.sizes)
        size = min(max(sender.sizes), max(receiver.sizes))
        at_once = sender.round_samples if in_step else 0
        return self.communication.transfer_s(path, size=size, round_samples=at_once)


def _nested(here: SizedGroup, after: SizedGroup) -> bool:
    """Whether rounds of two neighbours consist of each other's, of equal micro-batches."""
    rounds = here.round_samples, after.round_samples
    return len({*here.sizes, *after.sizes}) == 1 and max(rounds) % min(rounds) == 0


# How much of a forward and backward a micro-batch waits for the others of its round where rounds
# of two groups differ, so that they cannot work in step: fitted to simulations of unequal groups.
_OUT_OF_STEP = 0.4
# A message shares the NICs with the gathers and reductions of groups on several nodes, which run
# nearly all the time under breadth_first: it gets half.
_BESIDE_COLLECTIVES = 2.0


@dataclass(frozen=True, kw_only=True)
class CostedPipeline:
    """A candidate with layers, and what its stages cost; sequences are by group."""

    candidate: Candidate
    stages: tuple[Stage, ...]
    costs: tuple[StageCost, ...]
    paths: tuple[TransferPath, ...]
    """From each group to the next one; with several chunks also from the last to the first."""
    in_flight_limits: Sequence[float]
    """Samples that groups may really have in flight; not of breadth_first."""

    @property
    def num_chunks(self) -> int:
        """Chunks of each group."""
        return self.candidate.num_chunks


class PipelineTimes:
    """Iteration times of pipelines on one cluster."""

    def __init__(self, in_flight: InFlight) -> None:
        self.inputs, self.cost_model = in_flight.inputs, in_flight.cost_model
        self.communication = in_flight.communication
        self.in_flight = in_flight

    def estimate(self, pipeline: CostedPipeline) -> Estimate:
        """Iteration time of a pipeline, by part."""
        if pipeline.candidate.schedule == "breadth_first":
            return self._breadth_first(pipeline)
        return self._one_f_one_b(pipeline)

    def _one_f_one_b(self, pipeline: CostedPipeline) -> Estimate:
        stages, costs = pipeline.stages, pipeline.costs
        transfer_s = self._transfer_times(pipeline)
        stalls = self._stalls(pipeline)
        busy_s = max(cost.busy_s + stall for cost, stall in zip(costs, stalls, strict=True))
        loop_s = max(self._loops(pipeline, transfer_s))
        link_s = self.communication.busiest_link_s(pipeline.paths) * pipeline.num_chunks
        chunk_s = [
            cost.mean_micro_batch_s / stage.num_chunks
            for cost, stage in zip(costs, stages, strict=True)
        ]
        slowest = max(range(len(costs)), key=lambda index: costs[index].busy_s)
        return self._summed(
            pipeline,
            busy_s=busy_s,
            loop_s=loop_s,
            link_s=link_s,
            fill_s=sum(chunk_s) - chunk_s[slowest] + 2 * sum(transfer_s),
            tail_s=self._tail(pipeline),
        )

    def _breadth_first(self, pipeline: CostedPipeline) -> Estimate:
        collective_s, exposed_s, step_s = self._collectives(pipeline)
        transfer_s = self._transfer_times(pipeline)
        chunk_s = [
            (cost.forward_s + cost.backward_s) / stage.num_chunks
            for cost, stage in zip(pipeline.costs, pipeline.stages, strict=True)
        ]
        return self._summed(
            pipeline,
            busy_s=_turns_s(pipeline, self._stalls(pipeline)),
            loop_s=collective_s,
            link_s=self.communication.busiest_link_s(pipeline.paths) * pipeline.num_chunks,
            fill_s=sum(chunk_s) - max(chunk_s) + 2 * sum(transfer_s),
            tail_s=exposed_s + self.communication.statistics_s + step_s,
        )

    def _summed(
        self,
        pipeline: CostedPipeline,
        *,
        busy_s: float,
        loop_s: float,
        link_s: float,
        fill_s: float,
        tail_s: float,
    ) -> Estimate:
        return Estimate(
            candidate=pipeline.candidate,
            layers=tuple(stage.num_layers for stage in pipeline.stages),
            stages=pipeline.stages,
            costs=pipeline.costs,
            extras=self.in_flight.extras(pipeline.candidate),
            iteration_s=max(busy_s, loop_s, link_s) + fill_s + tail_s,
            busy_s=busy_s,
            fill_s=fill_s,
            tail_s=tail_s,
        )

    def _transfer_times(self, pipeline: CostedPipeline) -> list[float]:
        """Time of one micro-batch along each path."""
        times = []
        for stage, path in zip(pipeline.stages, pipeline.paths, strict=False):
            size, samples = max(stage.sizes), stage.round_samples
            times.append(self.communication.transfer_s(path, size=size, round_samples=samples))
        return times

    def _loops(self, pipeline: CostedPipeline, transfer_s: Sequence[float]) -> list[float]:
        """For each group how long the batch takes if it always has all in flight that it may."""
        stages, costs, chunks = pipeline.stages, pipeline.costs, pipeline.num_chunks
        after_s = [*transfer_s, *([0.0] * (len(stages) - len(transfer_s)))]
        waits = _waits(pipeline)
        around_s = (
            sum(waits) + sum(cost.mean_micro_batch_s for cost in costs) + 2 * chunks * sum(after_s)
        )
        loops, way_s = [], around_s * (chunks - 1) / 2
        rows = list(zip(pipeline.in_flight_limits, costs, after_s, waits, strict=True))
        for in_flight_limit, cost, to_next_s, wait_s in reversed(rows):
            way_s += cost.mean_micro_batch_s + 2 * to_next_s + wait_s  # of one chunk and all before
            loops.append(self.inputs.global_batch_size / in_flight_limit * way_s)
        if chunks == 1:
            loops += self._pair_loops(pipeline, transfer_s)
        return loops

    def _pair_loops(self, pipeline: CostedPipeline, transfer_s: Sequence[float]) -> list[float]:
        """How long the batch takes for each transfer if both its ends keep all they may in flight.

        What only the first has in flight, and one round of the second, goes around between them:
        through a forward and a backward of both, and the transfer both ways.
        """
        limits, found = pipeline.in_flight_limits, []
        for at, (first, second) in enumerate(pairwise(pipeline.costs)):
            own = pipeline.stages[at + 1].round_samples
            around = max(own, limits[at] - limits[at + 1] + own)
            way_s = first.mean_micro_batch_s + second.mean_micro_batch_s + 2 * transfer_s[at]
            found.append(self.inputs.global_batch_size / around * way_s)
        return found

    def _stalls(self, pipeline: CostedPipeline) -> list[float]:
        """For each group, how long it stops in all for messages that take longer than it hides.

        A receive may begin two computations early, so a message hides behind those only: in
        1f1b behind a forward and a backward, in breadth_first behind two of its own kind. Groups
        in step send all at once. Where the plan says how long a transfer is, nobody stops for it:
        the order has something else to do, as far as in-flight limits and links allow.
        """
        stages, costs = pipeline.stages, pipeline.costs
        found = [0.0] * len(stages)
        for at, path in enumerate(pipeline.paths):
            source, target = at % len(stages), (at + 1) % len(stages)
            for sender, receiver, forward in ((source, target, True), (target, source, False)):
                stage, cost = stages[receiver], costs[receiver]
                if stage.position.slow_before if forward else stage.position.slow_after:
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

    def _tail(self, pipeline: CostedPipeline) -> float:
        """Last reduction, sums over all ranks, optimizer step and gathers."""
        memory = self.inputs.memory
        sharing = self.communication.groups_sharing_a_node(pipeline.candidate.device_groups)
        reduce_s, gather_s, step_s, ahead_s = 0.0, 0.0, 0.0, 0.0
        for stage, cost, num_sharing in zip(pipeline.stages, pipeline.costs, sharing, strict=True):
            parameters = self.cost_model.memory.parameters(stage.num_layers, stage.position)
            mine_s = num_sharing * self.communication.even_gather_s(
                stage.device_group, memory.gradient_bytes(parameters)
            )
            # A later group is done earlier, by the backwards of the groups before it.
            reduce_s = max(reduce_s, mine_s - ahead_s)
            ahead_s += cost.backward_s
            back_s = num_sharing * self.communication.even_gather_s(
                stage.device_group, memory.parameter_bytes(parameters)
            )
            gather_s = max(gather_s, back_s)
            step_s = max(step_s, cost.step_s)
        return reduce_s + self.communication.statistics_s + step_s + gather_s

    def _collectives(self, pipeline: CostedPipeline) -> tuple[float, float, float]:
        """breadth_first: collectives of the slowest group, or its fetches of parameters beside
        them; what is exposed of collectives; the step."""
        memory = self.inputs.memory
        layer = memory.layer_parameters()
        sharing = self.communication.groups_sharing_a_node(pipeline.candidate.device_groups)
        collective_s, exposed_s, step_s = 0.0, 0.0, 0.0
        for stage, cost, num_sharing in zip(pipeline.stages, pipeline.costs, sharing, strict=True):
            parameters = self.cost_model.memory.parameters(stage.num_layers, stage.position)
            parts = stage.num_chunks
            part = -(-parameters // parts)
            gather_s, reduce_s = (
                num_sharing
                * self.communication.even_gather_s(
                    stage.device_group, to_bytes(part), -(-part // layer)
                )
                for to_bytes in (memory.parameter_bytes, memory.gradient_bytes)
            )
            collective_s = max(collective_s, parts * (2 * gather_s + reduce_s), cost.fetches_s)
            exposed_s = max(exposed_s, gather_s + reduce_s)
            step_s = max(step_s, cost.step_s)
        return collective_s, exposed_s, step_s


def _waits(pipeline: CostedPipeline) -> list[float]:
    """What a sample waits at each group for being out of step with the next one."""
    rounds = [stage.round_samples for stage in pipeline.stages]
    waits = [
        _OUT_OF_STEP * (pipeline.costs[at + 1].mean_micro_batch_s if one != other else 0.0)
        for at, (one, other) in enumerate(pairwise(rounds))
    ]
    return [*waits, 0.0]


def _turns_s(pipeline: CostedPipeline, stalls: Sequence[float]) -> float:
    """Sum over turns of the slowest group's chunk: a turn cannot end before its slowest."""
    chunks = pipeline.num_chunks
    per_layer = [
        (cost.busy_s + stall) / cost.num_layers
        for cost, stall in zip(pipeline.costs, stalls, strict=True)
    ]
    parts = [
        layers_of_chunks(stage.num_layers, chunks, is_last=stage.position.is_last)
        for stage in pipeline.stages
    ]
    return sum(
        max(row[turn] * time_s for row, time_s in zip(parts, per_layer, strict=True))
        for turn in range(chunks)
    )
