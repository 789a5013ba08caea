"""Costs of all actions of a plan, those of sums and gathers among them: durations and flows."""

import dataclasses
import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from operator import attrgetter

from zorse_megatron.costs.communication import TpCollectives
from zorse_megatron.costs.expert_passes import ExpertPass
from zorse_megatron.costs.interface import (
    NO_TIME,
    ComputeCost,
    ModelSection,
    PassTimes,
    TpComputeCost,
    TpShard,
)
from zorse_megatron.costs.stage_formulas import exchanges_s, pass_s
from zorse_megatron.schedule.actions import COMPUTE, Kind
from zorse_megatron.schedule.pipeline_schedules import RESIDENT, parameters_setting
from zorse_megatron.schedule.shards import Interval
from zorse_megatron.simulate.assumptions import SimulationError
from zorse_megatron.simulate.between_experts import BetweenExperts
from zorse_megatron.simulate.network import BufferWork, Hierarchical, NetworkLoads, TaskWork
from zorse_megatron.simulate.rank_bytes import RankSizes, low_precision_bytes
from zorse_megatron.simulate.residency import SteppedUnit

# What the first forward after a UNSHARD waits for: each layer for its own parameters.
#
# The runtime gathers a sharded chunk in buckets of a layer each, in the order in which a forward
# asks for them, and each layer waits for its own (`adapter.data_parallel.chunk_shards`). Of n
# layers that take f each, and whose parameters arrive every g from when the first have, the last
# ends at max((n - 1) g, (n - 1) f) + f after that: either no layer after the first waits, or the
# last one starts when its parameters arrive. So the gather is three parts at most: the first layer
# with the embedding before it, the other layers, and the head. All layers but one run after the
# first, the last layer after the second, the head after the third.


@dataclass(frozen=True, kw_only=True)
class GatherPart:
    """Buckets that are waited for together, and what a forward computes once they are there."""

    buckets: int
    """How many; all that there are in `EVERYTHING`."""
    layers: float
    """Share of the layers' time."""
    embedding: bool = False
    head: bool = False


EVERYTHING = GatherPart(buckets=0, layers=1.0, embedding=True, head=True)


def gather_parts(sizes: RankSizes, rank: int, chunk: int) -> tuple[GatherPart, ...]:
    """The parts of a chunk's UNSHARD in the order in which they arrive.

    `EVERYTHING` where a forward waits for all: where chunks stay unsharded buckets are Megatron's,
    which without --overlap-grad-reduce is one, and where replicas cut layers differently UNSHARD
    stops the main stream.
    """
    if (
        parameters_setting(sizes.plan) == RESIDENT
        or sizes.mixed_tp[chunk] is not None
        or len(sizes.peers_of(rank, chunk)) == 1
    ):
        return (EVERYTHING,)
    layers = sizes.num_layers(chunk)
    embedding, each_layer, head = sizes.sections(chunk, sizes.part(rank))
    if not any(each_layer):
        return (EVERYTHING,)
    last = 1 / layers if layers > 1 else 0.0
    parts = (
        GatherPart(buckets=bool(embedding) + 1, layers=1.0 - last, embedding=True),
        GatherPart(buckets=layers - 1, layers=last),
        GatherPart(buckets=int(bool(head)), layers=0.0),
    )
    *found, last_part = (part for part in parts if part.buckets)
    return (*found, replace(last_part, head=True)) if found else (EVERYTHING,)


# Costs of what ranks sum and gather, and of what all of them are told.


_STATISTIC_BYTES = 4  # a number of tokens (int32) or the square of a norm (fp32)


class CollectiveCosts:
    """Durations and flows of collectives, each evaluated once."""

    def __init__(self, sizes: RankSizes, loads: NetworkLoads) -> None:
        self.sizes = sizes
        self.loads = loads
        self._collectives: dict[tuple[Kind, int, tuple[int, ...]], TaskWork] = {}
        self._gathers: dict[tuple[int, tuple[int, ...]], tuple[TaskWork, ...]] = {}
        self._buffers: dict[
            tuple[Kind, int, tuple[int, ...]], tuple[tuple[BufferWork, ...], tuple[Interval, ...]]
        ] = {}
        self._statistic_s: float | None = None

    def collective(self, kind: Kind, chunk: int, ranks: tuple[int, ...]) -> TaskWork:
        """A REDUCE_GRAD or a UNSHARD of the chunk over `ranks`, which are among its `peers`."""
        key = kind, chunk, ranks
        if key not in self._collectives:
            if self.sizes.framework.state == "replicated":
                work = self._replicated_collective(kind, chunk, ranks)
            elif self.sizes.mixed_tp[chunk] is not None:
                work = self._mixed_tp_collective(kind, chunk)
            else:
                work = self._sharded_collective(kind, chunk, ranks)
            if kind is Kind.REDUCE_GRAD:
                sums_s = self._sums_in_tp_groups_s(chunk)
                work = dataclasses.replace(work, seconds_s=work.seconds_s + sums_s)
            self._collectives[key] = work
        return self._collectives[key]

    def gather_in_parts(
        self, chunk: int, ranks: tuple[int, ...], parts: Sequence[GatherPart]
    ) -> tuple[TaskWork, ...]:
        """A UNSHARD of the chunk over `ranks`, as `gather_parts` splits it up: in several."""
        key = chunk, ranks
        if key not in self._gathers:
            pieces = iter(self.sizes.pieces(chunk, ranks))
            self._gathers[key] = tuple(
                self._of_pieces(
                    Kind.UNSHARD, chunk, ranks, list(itertools.islice(pieces, part.buckets))
                )
                for part in parts
            )
        return self._gathers[key]

    def buffers(
        self, kind: Kind, chunk: int, ranks: tuple[int, ...]
    ) -> tuple[tuple[BufferWork, ...], tuple[Interval, ...]]:
        """A REDUCE_GRAD or a UNSHARD of a chunk of a hierarchical group over its `peers`.

        Also [first, stop) of each region's ranks among the ascending ones.
        """
        key = kind, chunk, ranks
        if key not in self._buffers:
            memory, reduces = self.sizes.memory_of(chunk), kind is Kind.REDUCE_GRAD
            operation = Hierarchical(
                ranks=sorted(ranks),
                to_bytes=memory.gradient_bytes if reduces else memory.parameter_bytes,
                loads=self.loads,
                reduces=reduces,
            )
            shards = self.sizes.region_shards(chunk, ranks)
            works = {each: operation.work(each) for each in dict.fromkeys(shards)}
            found = [works[each] for each in shards]
            self._buffers[key] = tuple(found), shards[0].regions
        return self._buffers[key]

    def sums_in_tp_groups(self, chunk: int) -> TaskWork:
        """What comes before a REDUCE_GRAD's messages; see `collective`."""
        return TaskWork(seconds_s=self._sums_in_tp_groups_s(chunk))

    def statistics(self, count: int) -> TaskWork:
        """Sums of one number over all ranks, one after the other."""
        if self._statistic_s is None:
            self._statistic_s = self._all_reduce_s(range(self.sizes.plan.world_size))
        return TaskWork(seconds_s=count * self._statistic_s)

    def at_scale(self) -> TaskWork:
        """What all ranks tell each other before gradients are scaled; see `Framework`."""
        framework, groups = self.sizes.framework, self.sizes.plan.groups
        seconds_s = self.statistics(framework.sums_at_scale).seconds_s
        if framework.broadcasts_tokens:
            stages = [list(zip(*(r.ranks for r in g.replicas), strict=True)) for g in groups]
            pipelines = zip(*(itertools.chain(*g) for g in stages), strict=True)
            # A broadcast is the way down of the tree that an all-reduce goes up and down.
            seconds_s += max(map(self._all_reduce_s, pipelines)) / 2
            seconds_s += max(map(self._all_reduce_s, itertools.chain(*stages)))
        return TaskWork(seconds_s=seconds_s)

    def at_norm(self) -> TaskWork:
        """What they tell each other of their gradients then; see `Framework`."""
        return self.statistics(self.sizes.framework.sums_at_norm)

    def loss(self, ranks: Sequence[int]) -> TaskWork:
        """The sum of the loss over `ranks`."""
        return TaskWork(seconds_s=self._all_reduce_s(ranks))

    def loss_message_s(self, source: int, target: int) -> float:
        """The loss on its way from one rank to another."""
        return self.loads.comm.transfer_s(source, target, _STATISTIC_BYTES)

    def report(self) -> TaskWork:
        """What all ranks are told after a step: sums over all of them, and the loss.

        That is summed over the last group, and sent to the job's last rank if that is not in it.
        """
        plan, comm = self.sizes.plan, self.loads.comm
        group = plan.groups[plan.chunks[-1].group]
        last, loss_s = plan.world_size - 1, self._all_reduce_s(group.ranks)
        if last not in group.ranks:
            loss_s += comm.transfer_s(group.ranks[0], last, _STATISTIC_BYTES)
        sums = self.statistics(self.sizes.framework.sums_after_step)
        return TaskWork(seconds_s=sums.seconds_s + loss_s)

    def _all_reduce_s(self, ranks: Sequence[int]) -> float:
        if len(ranks) < 2:
            return 0.0
        return self.loads.comm.all_reduce_s(tuple(ranks), _STATISTIC_BYTES)

    def _mixed_tp_collective(self, kind: Kind, chunk: int) -> TaskWork:
        """Overlaps of what replicas that differ in TP shards hold and own; units one after the
        other."""
        mixed_tp, memory = self.sizes.mixed_tp[chunk], self.sizes.memory_of(chunk)
        assert mixed_tp is not None
        reduces = kind is Kind.REDUCE_GRAD
        to_bytes = memory.gradient_bytes if reduces else memory.parameter_bytes
        return self.loads.exchanges(
            ({pair: to_bytes(count) for pair, count in messages.items()}, times)
            for messages, times in (mixed_tp.sums if reduces else mixed_tp.gathers)
        )

    def _sums_in_tp_groups_s(self, chunk: int) -> float:
        """Sums of gradients that have seen a part on every rank of a TP group."""
        sizes, comm = self.sizes, self.loads.comm
        number = 0 if sizes.tp_costs is None else sizes.summed_in_tp_groups(chunk)
        if not number:
            return 0.0
        gradient_bytes = sizes.memory_of(chunk).gradient_bytes(number)
        return max(
            comm.all_reduce_s(replica.ranks, gradient_bytes) if replica.tp_degree > 1 else 0.0
            for replica in sizes.group_of(chunk).replicas
        )

    def _sharded_collective(self, kind: Kind, chunk: int, ranks: tuple[int, ...]) -> TaskWork:
        if len(ranks) == 1:
            return TaskWork(seconds_s=0.0)
        pieces, experts = self.sizes.pieces(chunk, ranks), self._experts(chunk, ranks)
        if not experts:
            return self._of_pieces(kind, chunk, ranks, pieces)
        others = [tuple(count - experts for count in counts) for counts in pieces]
        work = self._of_pieces(kind, chunk, ranks, others)
        experts_s = self._experts_s(kind, chunk, ranks, experts)
        return dataclasses.replace(work, seconds_s=work.seconds_s + experts_s)

    def _same_experts(self, ranks: tuple[int, ...]) -> int:
        """How many of a stage's ranks have the same experts."""
        return len(ranks) // self.sizes.framework.expert_parallel

    def _experts(self, chunk: int, ranks: tuple[int, ...]) -> int:
        """Parameters that each rank owns of experts that stock spreads; 0 where it does not."""
        spread, degree = self.sizes.spread(ranks[0], chunk), self.sizes.framework.expert_parallel
        return spread // (degree - 1) // self._same_experts(ranks) if spread else 0

    def _experts_s(self, kind: Kind, chunk: int, ranks: tuple[int, ...], owned: int) -> float:
        """A REDUCE_GRAD or a UNSHARD of experts, of which each rank owns so many parameters, over
        the ranks with the same ones: all such sets of a stage at once."""
        degree = self.sizes.framework.expert_parallel
        if degree == len(ranks) or not owned:
            return 0.0
        rings = [ranks[first::degree] for first in range(degree)]
        shards = [(owned,) * len(rings[0])]
        alone_s = max(self._of_pieces(kind, chunk, ring, shards).alone_s for ring in rings)
        memory = self.sizes.memory_of(chunk)
        to_bytes = memory.gradient_bytes if kind is Kind.REDUCE_GRAD else memory.parameter_bytes
        return self.loads.rings_s(rings, to_bytes(owned) * len(rings[0]), alone_s)

    def _of_pieces(
        self,
        kind: Kind,
        chunk: int,
        ranks: tuple[int, ...],
        shards: Sequence[Sequence[int]],
    ) -> TaskWork:
        """Of pieces one after the other, of each of which the ranks own `shards`."""
        memory, comm = self.sizes.memory_of(chunk), self.loads.comm
        to_bytes, time_s = memory.parameter_bytes, comm.all_gather_s
        if kind is Kind.REDUCE_GRAD:
            to_bytes, time_s = memory.gradient_bytes, comm.reduce_scatter_s
            if self.sizes.reduces_in_low_precision(chunk):
                to_bytes, time_s = low_precision_bytes, comm.exchange_s
        pieces = [tuple(to_bytes(count) for count in counts) for counts in shards]
        alone_s = sum(time_s(ranks, parts) for parts in pieces)
        return self.loads.collective(ranks, sum(map(sum, pieces)), alone_s)

    def _replicated_collective(self, kind: Kind, chunk: int, ranks: tuple[int, ...]) -> TaskWork:
        """A REDUCE_GRAD is an all-reduce, as a ring does it: scatter, then gather. No UNSHARD."""
        if kind is Kind.UNSHARD or len(ranks) == 1:
            return TaskWork(seconds_s=0.0)
        experts = self._experts(chunk, ranks)
        held = self.sizes.held(ranks[0], chunk) - experts * self._same_experts(ranks)
        total = self.sizes.memory_of(chunk).gradient_bytes(held)
        parts = (-(-total // len(ranks)),) * len(ranks)
        comm = self.loads.comm
        alone_s = comm.reduce_scatter_s(ranks, parts) + comm.all_gather_s(ranks, parts)
        work = self.loads.collective(ranks, 2 * total, alone_s)
        experts_s = 2 * self._experts_s(kind, chunk, ranks, experts)
        return dataclasses.replace(work, seconds_s=work.seconds_s + experts_s)


class ActionCosts(CollectiveCosts):
    """Durations of computations, and what collectives and copies take."""

    def __init__(self, sizes: RankSizes, loads: NetworkLoads) -> None:
        costs, plan = sizes.costs, sizes.plan
        if len(costs.kinds) != plan.world_size:
            raise SimulationError(
                f"found {len(costs.kinds)} kinds of GPUs; expected {plan.world_size}, one per rank"
            )
        super().__init__(sizes, loads)
        self.computes = [self._compute_of(chunk) for chunk in range(len(plan.chunks))]
        """Of each chunk, of a layer between its own."""
        self.kinds = tuple(costs.kinds)
        self._inside: TpCollectives | None = None
        if sizes.tp_costs is not None:
            self._inside = TpCollectives(traits=sizes.tp_costs.traits, comm=loads.comm)
        self.between_experts = BetweenExperts(sizes, loads)
        self._phases: dict[tuple[object, ...], tuple[PassTimes, ...]] = {}
        self._passes: dict[tuple[object, ...], ExpertPass] = {}
        self._together: dict[tuple[tuple[int, ...], int, int, bool], PassTimes] = {}

    def _compute_of(self, chunk: int, count: int | None = None) -> ComputeCost:
        dtype = self.sizes.group_of(chunk).compute_dtype
        costs = self.sizes.mean(chunk, count)
        own = costs.by_dtype.get(dtype) if dtype else None
        if (degree := self.sizes.framework.expert_parallel) > 1:
            assert costs.tp_costs is not None
            own = costs.tp_costs.of_rank(TpShard(expert_parallel=degree), dtype)
        return costs.compute if own is None else own.compute

    def phases(self, rank: int, chunk: int, size: int) -> tuple[PassTimes, ...]:
        """`size` samples of the rank through the chunk: layers, embedding, head, recompute.

        Of a rank of a TP group: what lies between the TP group's collectives, alike ones together;
        without the collectives where these were not measured with it.
        """
        spreads = self.sizes.framework.expert_parallel > 1
        with_it = self.sizes.shares_experts(rank, chunk) if spreads else ()
        key = size, chunk, self.sizes.looks[rank], with_it
        if key not in self._phases:
            own = self._tp_compute(rank, chunk)
            if own is None:
                self._phases[key] = (self._pass_times(rank, chunk, size),)
            else:
                self._phases[key] = self._tp_phases(own, rank, chunk, size)
        return self._phases[key]

    def seconds(
        self, rank: int, chunk: int, kind: Kind, size: int, *, splits: bool
    ) -> Sequence[float]:
        """The phases of a forward, a backward, or a weight gradient, which has one.

        `size`: samples; `splits`: whether backwards leave weight gradients out; then both take as
        long as one whole backward, of which each phase gives what it has of the layers' time. Of
        ranks that share experts, layers have three: before, between and behind their exchanges.
        """
        phases_s = self._phases_s(rank, chunk, kind, size, splits=splits)
        if kind not in COMPUTE or self.sizes.part(rank).shared is None:
            return phases_s
        ranks = self.sizes.replica(rank).ranks
        together = self.expert_pass(ranks, chunk, kind, size, splits=splits)
        return [*together.of_rank(ranks.index(rank)), *phases_s[2:]]

    def _phases_s(
        self, rank: int, chunk: int, kind: Kind, size: int, *, splits: bool
    ) -> Sequence[float]:
        phases = self.phases(rank, chunk, size)
        if kind is Kind.FORWARD:
            return [float(each.forward_s) for each in phases]
        weights_s = self._weight_gradients_s(rank, chunk, size) if splits else 0.0
        if kind is Kind.WEIGHT_GRADIENT:
            return [weights_s]
        backward_s = [float(each.backward_s) for each in phases]
        of_layers = backward_s[:2]  # attention and MLP, or all in one
        share = weights_s / sum(of_layers) if weights_s else 0.0
        return [(1 - share) * each for each in of_layers] + backward_s[2:]

    def expert_pass(
        self, ranks: tuple[int, ...], chunk: int, kind: Kind, size: int, *, splits: bool
    ) -> ExpertPass:
        """A forward or backward of ranks that share experts, without embedding and head."""
        key = ranks, chunk, kind, size, splits
        if key not in self._passes:
            self._passes[key] = self.between_experts.of_pass(*key[:4], splits=splits)
        return self._passes[key]

    def forward_part_s(self, rank: int, chunk: int, size: int, part: GatherPart) -> Sequence[float]:
        """What one of `gather_parts` has of each phase of a forward."""
        phases_s = self.seconds(rank, chunk, Kind.FORWARD, size, splits=False)
        own = self._tp_compute(rank, chunk)
        compute = own or self.computes[chunk]
        kind = self.kinds[rank]
        ends: list[tuple[bool, float]] = []
        if chunk == 0:
            ends.append((part.embedding, compute.embedding(kind, size).forward_s))
        if self.sizes.is_last(chunk):
            ends.append((part.head, compute.head(kind, size).forward_s))
        ends_s = [end_s if is_there else 0.0 for is_there, end_s in ends]
        if own is not None:
            return [part.layers * each for each in phases_s[:2]] + ends_s
        layers_s = phases_s[0] - sum(end_s for _, end_s in ends)
        return [part.layers * layers_s + sum(ends_s)]

    def _weight_gradients_s(self, rank: int, chunk: int, size: int) -> float:
        compute = self._tp_compute(rank, chunk)
        own, parts = compute or self.computes[chunk], self.sizes.parts(rank)
        of_layer = parts * own.weight_gradients_s(self.kinds[rank], size // parts)
        return self.sizes.num_layers(chunk) * of_layer

    def tp_collectives(
        self, ranks: tuple[int, ...], chunk: int, size: int, *, gathers: bool
    ) -> PassTimes:
        """What a TP group communicates inside a computation of `size` samples of the chunk.

        `gathers`: whether its input arrives from another group, in parts.
        """
        key = ranks, chunk, size, gathers
        if key not in self._together:
            self._together[key] = self._tp_collectives(ranks, chunk, size, gathers=gathers)
        return self._together[key]

    def step_s(self, rank: int) -> float:
        """Optimizer step on all that the rank owns."""
        chunks = self.sizes.chunks(rank)
        owned = sum(self.sizes.shards[chunk][rank] for chunk in chunks)
        return self.computes[chunks[0]].step_s(self.kinds[rank], owned)

    def stepped_s(
        self, rank: int, units: Sequence[SteppedUnit], step_s: float
    ) -> Mapping[int, float]:
        """How long each chunk's part of an update takes whose units pass through the GPU.

        The update takes `step_s` in all where nothing has to.

        As `adapter.optimizer.host_state` does it. The unit after the one that is stepped is
        fetched meanwhile; the one before it must have left. Each direction of the link does one
        thing at a time.
        """
        whole = max(1, sum(unit.elements for unit in units))
        now_s = coming_s = left_s = 0.0
        there_s: list[float] = []
        ends_s: dict[int, float] = {}
        for number, unit in enumerate(units):
            now_s = max(now_s, left_s)
            for each in units[len(there_s) : number + 2]:
                coming_s = max(coming_s, now_s) + self.copy_s(rank, each.in_bytes)
                there_s.append(coming_s)
            now_s = max(now_s, there_s[number]) + step_s * unit.elements / whole
            left_s = max(left_s, now_s) + self.copy_s(rank, unit.out_bytes)
            ends_s[unit.chunk] = now_s
        ends_s[units[-1].chunk] = max(now_s, left_s)
        starts_s = [0.0, *ends_s.values()]
        return {
            chunk: end_s - start_s
            for (chunk, end_s), start_s in zip(ends_s.items(), starts_s, strict=False)
        }

    def copy_s(self, rank: int, num_bytes: int) -> float:
        """Bytes between the GPU and host memory, in one direction."""
        return num_bytes / self.loads.comm.host_link_bytes_per_s(rank)

    def _tp_collectives(
        self, ranks: tuple[int, ...], chunk: int, size: int, *, gathers: bool
    ) -> PassTimes:
        assert self._inside is not None
        sizes, inside = self.sizes, self._inside
        if sizes.replica(ranks[0]).expert_parallel is not None:
            return self._between_experts(ranks, chunk, size)
        num_bytes, tokens = sizes.boundary_bytes(size, chunk), size * sizes.costs.sequence_length

        def of(section: ModelSection) -> PassTimes:
            if all(self._is_measured_together(rank, chunk, section) for rank in ranks):
                return NO_TIME
            return inside.of(section, ranks, num_bytes, tokens)

        layer, layers = of("layer"), sizes.num_layers(chunk)
        mode, recomputed = sizes.recompute(
            ranks[0], chunk
        )  # if whole layers, as all of the TP group
        again = recomputed if mode == "full" else 0
        ends = [of("embedding")] if chunk == 0 else []
        ends += [of("head")] if sizes.is_last(chunk) else []
        gather_s = 0.0
        if gathers and sizes.splits_activations and not inside.traits.sequence_parallel:
            gather_s = inside.gather_s(ranks, num_bytes)
        return PassTimes(
            forward_s=gather_s + layers * layer.forward_s + sum(e.forward_s for e in ends),
            backward_s=gather_s
            + layers * layer.backward_s
            + again * layer.forward_s
            + sum(e.backward_s for e in ends),
        )

    def _between_experts(self, ranks: tuple[int, ...], chunk: int, size: int) -> PassTimes:
        """What exchanges of tokens add."""
        splits = bool(self.sizes.group_of(chunk).split_backward)
        forward, backward = (
            self.expert_pass(ranks, chunk, kind, size, splits=splits)
            for kind in (Kind.FORWARD, Kind.BACKWARD)
        )
        return PassTimes(forward_s=forward.exposed_s, backward_s=backward.exposed_s)

    def _is_measured_together(self, rank: int, chunk: int, section: ModelSection) -> bool:
        compute = self._tp_compute(rank, chunk)
        return compute is not None and compute.includes_collectives(self.kinds[rank], section)

    def _tp_compute(self, rank: int, chunk: int, count: int | None = None) -> TpComputeCost | None:
        """What a rank of a replica of several computes with; `count`: of so many layers alone."""
        part, tp_costs = self.sizes.part(rank), self.sizes.mean(chunk, count).tp_costs
        if tp_costs is None or (part.degree == 1 and part.shared is None):
            return None
        return tp_costs.of_rank(part, self.sizes.group_of(chunk).compute_dtype).compute

    def _tp_phases(
        self, compute: TpComputeCost, rank: int, chunk: int, size: int
    ) -> tuple[PassTimes, ...]:
        """Attentions, MLPs, and embedding and head."""
        kind, parts = self.kinds[rank], self.sizes.parts(rank)
        layer = compute.layer_in_two(kind, size // parts)
        layers = parts * self.sizes.num_layers(chunk)
        mode, _ = self.sizes.recompute(rank, chunk)
        again_s = self._again_s(rank, kind, chunk, size)
        whole_s = layer.attention.forward_s + layer.mlp.forward_s
        # What is recomputed selectively is attention, usually.
        share = layer.attention.forward_s / whole_s if mode == "full" and whole_s else 1.0
        of_each = ((layer.attention, share), (layer.mlp, 1.0 - share))
        ends = [compute.embedding(kind, size)] if chunk == 0 else []
        ends += [compute.head(kind, size)] if self.sizes.is_last(chunk) else []
        halves = (
            PassTimes(
                forward_s=layers * half.forward_s,
                backward_s=layers * half.backward_s + part * again_s,
            )
            for half, part in of_each
        )
        return (*halves, *ends)

    def _again_s(self, rank: int, kind: str, chunk: int, size: int) -> float:
        """What recomputing adds to a backward; the chunk's first layers are recomputed."""
        mode, recomputed = self.sizes.recompute(rank, chunk)
        if not recomputed:
            return 0.0
        own = self._tp_compute(rank, chunk, recomputed)
        compute = own or self._compute_of(chunk, recomputed)
        parts = self.sizes.parts(rank)
        return parts * recomputed * compute.recompute_s(kind, size // parts, mode)

    def _pass_times(self, rank: int, chunk: int, size: int) -> PassTimes:
        """Of a rank that is a TP group of its own."""
        if self.sizes.framework.expert_parallel == 1:
            return self._alone(rank, self.kinds[rank], chunk, size)
        # Those that share experts wait for the slowest of them in every layer.
        ranks = self.sizes.shares_experts(rank, chunk)
        kinds = dict.fromkeys(self.kinds[each] for each in ranks)
        alone = max(
            (self._alone(rank, each, chunk, size) for each in kinds), key=attrgetter("both_s")
        )
        return alone + self._exchanges(rank, chunk, size, alone.both_s)

    def _exchanges(self, rank: int, chunk: int, size: int, computed_s: float) -> PassTimes:
        """What tokens on their way to experts and back add to a micro-batch."""
        sizes, (mode, _) = self.sizes, self.sizes.recompute(rank, chunk)
        assert sizes.tp_costs is not None
        is_combined = len(sizes.plan.groups) == 1 or len(sizes.chunks(rank)) > 1
        forward_s, backward_s = exchanges_s(
            computed_s,
            sizes.once_s(rank, chunk, sizes.boundary_bytes(size, chunk)),
            *self.between_experts.exchanging(rank, chunk),
            hides=(is_combined and mode != "full") or sizes.tp_costs.traits.has_shared_expert,
        )
        return PassTimes(forward_s=forward_s, backward_s=backward_s)

    def _alone(self, rank: int, kind: str, chunk: int, size: int) -> PassTimes:
        compute = self.computes[chunk]
        layers, layer = self.sizes.num_layers(chunk), compute.layer(kind, size)
        again_s = self._again_s(rank, kind, chunk, size)
        first = compute.embedding(kind, size) if chunk == 0 else NO_TIME
        last = compute.head(kind, size) if self.sizes.is_last(chunk) else NO_TIME
        ends_s = first.forward_s + last.forward_s, first.backward_s + last.backward_s
        return PassTimes(
            forward_s=pass_s(layers, layer.forward_s, 0, ends_s[0]),
            backward_s=pass_s(layers, layer.backward_s, again_s, ends_s[1]),
        )
