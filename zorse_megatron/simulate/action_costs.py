"""Costs of all actions of a plan: durations and flows, evaluated once."""

import dataclasses
from collections.abc import Mapping, Sequence

from zorse_megatron.costs.interface import (
    WHOLE,
    ComputeCost,
    ModelSection,
    PassTimes,
    RankPart,
    SetComputeCost,
    SetCosts,
)
from zorse_megatron.costs.set_collectives import SetCollectives
from zorse_megatron.schedules.actions import Kind
from zorse_megatron.schema.gpus.gpu import ComputeDtype
from zorse_megatron.simulate.hierarchical_work import Hierarchical
from zorse_megatron.simulate.network_loads import NetworkLoads, TaskWork
from zorse_megatron.simulate.rank_sizes import RankSizes, low_precision_bytes
from zorse_megatron.simulate.residency import SteppedUnit
from zorse_megatron.simulate.simulation_errors import SimulationError

_STATISTIC_BYTES = 4  # a number of tokens (int32) or the square of a norm (fp32)


class ActionCosts:
    """Durations of computations, and what collectives and copies take."""

    def __init__(
        self,
        sizes: RankSizes,
        compute: ComputeCost,
        loads: NetworkLoads,
        kinds: Sequence[str],
        computes: Mapping[ComputeDtype, ComputeCost],
        *,
        sets: SetCosts | None = None,
        sequence_length: int = 1,
    ) -> None:
        """`kinds`: the kind of GPU of each global rank; `computes`, `sets`: see `simulate`."""
        if len(kinds) != sizes.plan.world_size:
            raise SimulationError(
                f"found {len(kinds)} kinds of GPUs; expected {sizes.plan.world_size}, one per rank"
            )
        self.sizes = sizes
        self.computes = [
            computes.get(group.compute_dtype, compute) if group.compute_dtype else compute
            for group in sizes.plan.groups
        ]
        """Of each group."""
        self.loads = loads
        self.kinds = tuple(kinds)
        self.sequence_length = sequence_length
        self._sets = sets
        self._inside = (
            None
            if sets is None
            else SetCollectives(
                comm=loads.comm,
                sequence_parallel=sets.sequence_parallel,
                learns_positions=sets.learns_positions,
            )
        )
        self._phases: dict[tuple[str, int, RankPart, int, int], tuple[PassTimes, ...]] = {}
        self._collectives: dict[tuple[Kind, int, tuple[int, ...]], TaskWork] = {}
        self._together: dict[tuple[tuple[int, ...], int, bool], PassTimes] = {}
        self._statistic_s: float | None = None

    def phases(self, rank: int, chunk: int) -> tuple[PassTimes, ...]:
        """One micro-batch of the rank through the chunk: layers, embedding, head, recompute.

        Of a rank of a set: what lies between the set's collectives, alike ones together; without
        the collectives where these were not measured with it.
        """
        kind, size = self.kinds[rank], self.sizes.micro_batch_size(rank)
        key = kind, size, self.sizes.part(rank), chunk, self.sizes.recompute_numbers[rank]
        if key not in self._phases:
            own = self._set_compute(rank, chunk)
            if own is None:
                self._phases[key] = (self._pass_times(rank, chunk),)
            else:
                self._phases[key] = self._set_phases(own, rank, chunk)
        return self._phases[key]

    def seconds(self, rank: int, chunk: int, kind: Kind, *, splits: bool) -> Sequence[float]:
        """The phases of a forward, a backward, or a weight gradient, which has one.

        `splits`: whether backwards leave weight gradients out; then both take as long as one whole
        backward, of which each phase gives what it has of the layers' time.
        """
        phases = self.phases(rank, chunk)
        if kind is Kind.FORWARD:
            return [float(each.forward_s) for each in phases]
        weights_s = self._weight_gradients_s(rank, chunk) if splits else 0.0
        if kind is Kind.WEIGHT_GRADIENT:
            return [weights_s]
        backward_s = [float(each.backward_s) for each in phases]
        of_layers = backward_s[:2]  # attention and MLP, or all in one
        share = weights_s / sum(of_layers) if weights_s else 0.0
        return [(1 - share) * each for each in of_layers] + backward_s[2:]

    def _weight_gradients_s(self, rank: int, chunk: int) -> float:
        compute = self._set_compute(rank, chunk)
        own = compute or self.computes[self.sizes.plan.chunks[chunk].group]
        of_layer = own.weight_gradients_s(self.kinds[rank], self.sizes.micro_batch_size(rank))
        return self.sizes.num_layers(chunk) * of_layer

    def set_collectives(self, ranks: tuple[int, ...], chunk: int, *, gathers: bool) -> PassTimes:
        """What a set communicates inside a computation of the chunk.

        `gathers`: whether its input arrives from another group, in parts.
        """
        key = ranks, chunk, gathers
        if key not in self._together:
            self._together[key] = self._set_collectives(ranks, chunk, gathers=gathers)
        return self._together[key]

    def step_s(self, rank: int) -> float:
        """Optimizer step on all that the rank owns."""
        owned = sum(self.sizes.shards[chunk][rank] for chunk in self.sizes.chunks(rank))
        group, _ = self.sizes.group_and_replica[rank]
        return self.computes[group].step_s(self.kinds[rank], owned)

    def collective(self, kind: Kind, chunk: int, ranks: tuple[int, ...]) -> TaskWork:
        """A REDUCE or a GATHER of the chunk over `ranks`, which are among its `peers`."""
        key = kind, chunk, ranks
        if key not in self._collectives:
            if self.sizes.framework.state == "replicated":
                work = self._replicated_collective(kind, chunk, ranks)
            elif self.sizes.parted[chunk] is not None:
                work = self._parted_collective(kind, chunk)
            else:
                work = self._sharded_collective(kind, chunk, ranks)
            if kind is Kind.REDUCE:
                sums_s = self._sums_in_sets_s(chunk)
                work = dataclasses.replace(work, seconds_s=work.seconds_s + sums_s)
            self._collectives[key] = work
        return self._collectives[key]

    def statistics(self, count: int = 1) -> TaskWork:
        """Sums of one number over all ranks, one after the other."""
        if self._statistic_s is None:
            self._statistic_s = self._all_reduce_s(range(self.sizes.plan.world_size))
        return TaskWork(seconds_s=count * self._statistic_s)

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

    def _parted_collective(self, kind: Kind, chunk: int) -> TaskWork:
        """Overlaps of what unlike replicas hold and own; units one after the other."""
        parted, memory = self.sizes.parted[chunk], self.sizes.memory_of(chunk)
        assert parted is not None
        reduces = kind is Kind.REDUCE
        to_bytes = memory.gradient_bytes if reduces else memory.parameter_bytes
        return self.loads.exchanges(
            ({pair: to_bytes(count) for pair, count in messages.items()}, times)
            for messages, times in (parted.sums if reduces else parted.gathers)
        )

    def _sums_in_sets_s(self, chunk: int) -> float:
        """With sequence parallelism, sums of gradients that have seen a part on every rank."""
        if self._sets is None or not self._sets.sequence_parallel:
            return 0.0
        sizes, comm = self.sizes, self.loads.comm
        group = sizes.plan.groups[sizes.plan.chunks[chunk].group]
        gradient_bytes = sizes.memory_of(chunk).gradient_bytes
        return max(
            comm.all_reduce_s(replica.ranks, gradient_bytes(sizes.summed_in_sets(chunk)))
            if len(replica.ranks) > 1
            else 0.0
            for replica in group.replicas
        )

    def _set_collectives(self, ranks: tuple[int, ...], chunk: int, *, gathers: bool) -> PassTimes:
        assert self._inside is not None
        sizes, inside, size = self.sizes, self._inside, self.sizes.micro_batch_size(ranks[0])
        num_bytes, tokens = sizes.boundary_bytes(size, chunk), size * self.sequence_length

        def of(section: ModelSection) -> PassTimes:
            if all(self._is_measured_together(rank, chunk, section) for rank in ranks):
                return PassTimes(forward_s=0.0, backward_s=0.0)
            return inside.of(section, ranks, num_bytes, tokens)

        layer, layers = of("layer"), sizes.num_layers(chunk)
        mode, recomputed = sizes.recompute(ranks[0], chunk)  # if whole layers, as all of the set
        again = recomputed if mode == "full" else 0
        ends = [of("embedding")] if chunk == 0 else []
        ends += [of("head")] if sizes.is_last(chunk) else []
        gather_s = 0.0
        if gathers and not inside.sequence_parallel:
            gather_s = inside.gather_s(ranks, num_bytes)
        return PassTimes(
            forward_s=gather_s + layers * layer.forward_s + sum(e.forward_s for e in ends),
            backward_s=gather_s
            + layers * layer.backward_s
            + again * layer.forward_s
            + sum(e.backward_s for e in ends),
        )

    def _is_measured_together(self, rank: int, chunk: int, section: ModelSection) -> bool:
        compute = self._set_compute(rank, chunk)
        return compute is not None and compute.includes_collectives(self.kinds[rank], section)

    def _set_compute(self, rank: int, chunk: int) -> SetComputeCost | None:
        """What a rank of a set of several computes with."""
        part = self.sizes.part(rank)
        if self._sets is None or part == WHOLE:
            return None
        dtype = self.sizes.plan.groups[self.sizes.plan.chunks[chunk].group].compute_dtype
        return self._sets.of_rank(part, dtype).compute

    def _sharded_collective(self, kind: Kind, chunk: int, ranks: tuple[int, ...]) -> TaskWork:
        memory, comm = self.sizes.memory_of(chunk), self.loads.comm
        to_bytes, time_s = memory.parameter_bytes, comm.all_gather_s
        if kind is Kind.REDUCE:
            to_bytes, time_s = memory.gradient_bytes, comm.reduce_scatter_s
            if self.sizes.reduces_in_low_precision(chunk):
                to_bytes, time_s = low_precision_bytes, comm.exchange_s
        if len(ranks) == 1:
            return TaskWork(seconds_s=0.0)
        if self.sizes.is_hierarchical(chunk):
            operation = Hierarchical(
                ranks=sorted(ranks),
                to_bytes=to_bytes,
                loads=self.loads,
                reduces=kind is Kind.REDUCE,
            )
            return operation.work(self.sizes.region_shards(chunk, ranks))
        pieces = [
            tuple(to_bytes(count) for count in counts) for counts in self.sizes.pieces(chunk, ranks)
        ]
        alone_s = sum(time_s(ranks, parts) for parts in pieces)
        return self.loads.collective(ranks, sum(map(sum, pieces)), alone_s)

    def _replicated_collective(self, kind: Kind, chunk: int, ranks: tuple[int, ...]) -> TaskWork:
        """A REDUCE is an all-reduce, as a ring does it: scatter, then gather. No GATHER."""
        if kind is Kind.GATHER or len(ranks) == 1:
            return TaskWork(seconds_s=0.0)
        total = self.sizes.memory_of(chunk).gradient_bytes(self.sizes.held(ranks[0], chunk))
        parts = (-(-total // len(ranks)),) * len(ranks)
        comm = self.loads.comm
        alone_s = comm.reduce_scatter_s(ranks, parts) + comm.all_gather_s(ranks, parts)
        return self.loads.collective(ranks, 2 * total, alone_s)

    def _set_phases(self, compute: SetComputeCost, rank: int, chunk: int) -> tuple[PassTimes, ...]:
        """Attentions, MLPs, and embedding and head."""
        kind, size = self.kinds[rank], self.sizes.micro_batch_size(rank)
        layers, layer = self.sizes.num_layers(chunk), compute.layer_in_two(kind, size)
        mode, recomputed = self.sizes.recompute(rank, chunk)
        again_s = recomputed * compute.recompute_s(kind, size, mode) if recomputed else 0.0
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

    def _pass_times(self, rank: int, chunk: int) -> PassTimes:
        """Of a rank that is a set of its own."""
        compute = self.computes[self.sizes.plan.chunks[chunk].group]
        kind, size = self.kinds[rank], self.sizes.micro_batch_size(rank)
        layers = self.sizes.num_layers(chunk)
        layer = compute.layer(kind, size)
        forward_s, backward_s = layers * layer.forward_s, layers * layer.backward_s
        mode, recomputed = self.sizes.recompute(rank, chunk)
        if recomputed:
            backward_s += recomputed * compute.recompute_s(kind, size, mode)
        ends = [compute.embedding(kind, size)] if chunk == 0 else []
        if self.sizes.is_last(chunk):
            ends.append(compute.head(kind, size))
        return PassTimes(
            forward_s=forward_s + sum(end.forward_s for end in ends),
            backward_s=backward_s + sum(end.backward_s for end in ends),
        )
