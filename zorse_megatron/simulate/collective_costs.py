"""Costs of what ranks sum and gather, and of what all of them are told."""

import dataclasses
import itertools
from collections.abc import Sequence

from zorse_megatron.costs.interface import SetCosts
from zorse_megatron.schedules.actions import Kind
from zorse_megatron.schedules.shards import Interval
from zorse_megatron.simulate.hierarchical_work import BufferWork, Hierarchical
from zorse_megatron.simulate.layer_gathers import GatherPart
from zorse_megatron.simulate.network_loads import NetworkLoads, TaskWork
from zorse_megatron.simulate.rank_sizes import RankSizes, low_precision_bytes

_STATISTIC_BYTES = 4  # a number of tokens (int32) or the square of a norm (fp32)


class CollectiveCosts:
    """Durations and flows of collectives, each evaluated once."""

    def __init__(self, sizes: RankSizes, loads: NetworkLoads, sets: SetCosts | None) -> None:
        """`sets`: see `simulate`."""
        self.sizes = sizes
        self.loads = loads
        self._sets = sets
        self._collectives: dict[tuple[Kind, int, tuple[int, ...]], TaskWork] = {}
        self._gathers: dict[tuple[int, tuple[int, ...]], tuple[TaskWork, ...]] = {}
        self._buffers: dict[
            tuple[Kind, int, tuple[int, ...]], tuple[tuple[BufferWork, ...], tuple[Interval, ...]]
        ] = {}
        self._statistic_s: float | None = None

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

    def gather_in_parts(
        self, chunk: int, ranks: tuple[int, ...], parts: Sequence[GatherPart]
    ) -> tuple[TaskWork, ...]:
        """A GATHER of the chunk over `ranks`, as `gather_parts` splits it up."""
        if len(parts) == 1:
            return (self.collective(Kind.GATHER, chunk, ranks),)
        key = chunk, ranks
        if key not in self._gathers:
            pieces = iter(self.sizes.pieces(chunk, ranks))
            self._gathers[key] = tuple(
                self._of_pieces(
                    Kind.GATHER, chunk, ranks, list(itertools.islice(pieces, part.buckets))
                )
                for part in parts
            )
        return self._gathers[key]

    def buffers(
        self, kind: Kind, chunk: int, ranks: tuple[int, ...]
    ) -> tuple[tuple[BufferWork, ...], tuple[Interval, ...]]:
        """A REDUCE or a GATHER of a chunk of a hierarchical group over its `peers`.

        Also [first, stop) of each region's ranks among the ascending ones.
        """
        key = kind, chunk, ranks
        if key not in self._buffers:
            memory, reduces = self.sizes.memory_of(chunk), kind is Kind.REDUCE
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

    def sums_in_sets(self, chunk: int) -> TaskWork:
        """What comes before a REDUCE's messages; see `collective`."""
        return TaskWork(seconds_s=self._sums_in_sets_s(chunk))

    def statistics(self, count: int = 1) -> TaskWork:
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

    def _sharded_collective(self, kind: Kind, chunk: int, ranks: tuple[int, ...]) -> TaskWork:
        if len(ranks) == 1:
            return TaskWork(seconds_s=0.0)
        return self._of_pieces(kind, chunk, ranks, self.sizes.pieces(chunk, ranks))

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
        if kind is Kind.REDUCE:
            to_bytes, time_s = memory.gradient_bytes, comm.reduce_scatter_s
            if self.sizes.reduces_in_low_precision(chunk):
                to_bytes, time_s = low_precision_bytes, comm.exchange_s
        pieces = [tuple(to_bytes(count) for count in counts) for counts in shards]
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
