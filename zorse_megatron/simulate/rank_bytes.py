"""Bytes of a plan on each rank: where a shard becomes bytes, asked of the memory model once.

The formulas are in `costs.stage_formulas`.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, pairwise, product

from zorse_megatron.costs.communication import once_s
from zorse_megatron.costs.interface import (
    WHOLE,
    JobCosts,
    LayerCosts,
    MemoryCost,
    ModelSection,
    RecomputeMode,
    TpCosts,
    TpShard,
)
from zorse_megatron.costs.stage_formulas import (
    frozen_bytes,
    saved_bytes,
    working_bytes,
    working_bytes_of_layers,
)
from zorse_megatron.costs.topology import numbered
from zorse_megatron.gpus.gpu import ComputeDtype
from zorse_megatron.inputs.model import JobRecompute
from zorse_megatron.plan.divided_replicas import replicas_of_several_ranks
from zorse_megatron.plan.memory_settings import settings_by_rank
from zorse_megatron.plan.plan import (
    Group,
    Plan,
    Recompute,
    Replica,
    has_equal_tp_shards,
    ranks_by_region,
)
from zorse_megatron.schedule.actions import Action, Kind
from zorse_megatron.schedule.pipeline_schedules import RESIDENT, parameters_setting
from zorse_megatron.schedule.shards import RegionShards, intersection, regions_of
from zorse_megatron.schedule.tensor_parallel_parts import UnitKind
from zorse_megatron.simulate.assumptions import RUNTIME, Framework, SimulationError
from zorse_megatron.simulate.rank_parameters import (
    MixedTpChunk,
    MixedTpUnit,
    padded_shards,
)

_NARROW_BYTES = 2


def low_precision_bytes(num_parameters: int) -> int:
    """Gradients as a group with a `grad_reduce_dtype` sends them."""
    return _NARROW_BYTES * num_parameters


@dataclass(frozen=True, kw_only=True, slots=True)
class MicroBatchBytes:
    """What a rank has of one micro-batch of a chunk."""

    held: int
    """An activation between chunks."""
    saved: int
    """From its forward to its backward."""
    head: int
    """Logits, where the chunk has the head."""
    working: int
    """In a backward beyond what is kept: what is recomputed, so many layers at a time as have one
    input."""
    delayed: int
    """From a backward to the weight gradients, where these are computed apart."""


def memory_in(costs: LayerCosts, part: TpShard, dtype: ComputeDtype | None) -> MemoryCost:
    """The memory model of a rank with this part, in a group that computes in this type."""
    if part != WHOLE and costs.tp_costs is not None:
        return costs.tp_costs.of_rank(part, dtype).memory
    own = costs.by_dtype.get(dtype) if dtype else None
    return costs.memory if own is None else own.memory


class RankSizes:
    """Sizes of the plan's chunks, and of each rank's part of them."""

    def __init__(self, plan: Plan, costs: JobCosts, framework: Framework = RUNTIME) -> None:
        self.plan = plan
        self.costs = costs
        self.framework = framework
        self.memory = costs.memory
        self.has_wide_replicas = any(replicas_of_several_ranks(plan))
        self.tp_costs = self._costs_of_parts()
        """Costs of ranks with a part of each layer; None: all have whole layers."""
        self._parts: dict[int, TpShard] = {}
        self.group_and_replica: dict[int, tuple[int, int]] = {}
        """Rank -> number of its group and of its replica there."""
        for number, index, replica in plan.numbered_replicas():
            self.group_and_replica.update(dict.fromkeys(replica.ranks, (number, index)))
        self.tied = bool(plan.model.tied_embeddings)
        chunks = range(len(plan.chunks))
        self.parameters = tuple(self._parameters(chunk, WHOLE) for chunk in chunks)
        """Chunk -> number of its parameters, as a rank that is a TP group of its own has them."""
        self.mixed_tp = tuple(map(self._mixed_tp, chunks))
        """Chunk -> how its group's replicas exchange parts, where they cut layers differently."""
        self.shards = tuple(map(self._shards, chunks))
        """Chunk -> rank -> number of the parameters that it owns."""
        self._peers: dict[int, dict[int, tuple[int, ...]]] = {}
        self._region_shards: dict[tuple[int, tuple[int, ...]], tuple[RegionShards, ...]] = {}
        self.settings = settings_by_rank(plan)
        """Rank -> what it recomputes and offloads."""
        self._boundary: dict[tuple[int, ComputeDtype | None], int] = {}
        self._crossing: dict[tuple[int, int, int], int] = {}
        self._of_micro_batch: dict[object, MicroBatchBytes] = {}
        self._sizes: dict[int, tuple[int, ...]] = {}

    def memory_of(self, chunk: int) -> MemoryCost:
        """The memory model of the chunk's compute type, of a rank that is a TP group of its own."""
        return memory_in(self.costs, WHOLE, self.group_of(chunk).compute_dtype)

    def memory_at(self, rank: int, chunk: int) -> MemoryCost:
        """The same of this rank of a TP group."""
        return self._memory(chunk, self.part(rank))

    def part(self, rank: int) -> TpShard:
        """Which part of each layer the rank has."""
        if self.tp_costs is None:
            return WHOLE
        if not self.has_wide_replicas:
            return TpShard(expert_parallel=self.framework.expert_parallel)
        found = self._parts.get(rank)
        if found is None:
            found = self._parts[rank] = TpShard.of(self.replica(rank), rank)
        return found

    def parts(self, rank: int) -> int:
        """In how many the rank's micro-batches run."""
        shared = self.part(rank).shared
        return 1 if shared is None else shared.parts

    def _memory(self, chunk: int, part: TpShard) -> MemoryCost:
        if part == WHOLE:
            return self.memory_of(chunk)
        return memory_in(self.costs, part, self.group_of(chunk).compute_dtype)

    def held(self, rank: int, chunk: int) -> int:
        """Parameters that a rank computes with and trains."""
        part = self.part(rank)
        return self.parameters[chunk] if part == WHOLE else self._parameters(chunk, part)

    def spread(self, rank: int, chunk: int) -> int:
        """Parameters of experts that ranks have that share them with this one, and it has not."""
        if self.framework.expert_parallel == 1:
            return 0
        return self.parameters[chunk] - self.held(rank, chunk)

    def shares_experts(self, rank: int, chunk: int) -> tuple[int, ...]:
        """Ranks that have the experts of a layer together with this one."""
        ranks, degree = self.peers_of(rank, chunk), self.framework.expert_parallel
        first = ranks.index(rank) // degree * degree
        return ranks[first : first + degree]

    def once_s(self, rank: int, chunk: int, num_bytes: int) -> float:
        """Tokens of a micro-batch on their way to their experts; 0 where the rank has all."""
        degree = self.framework.expert_parallel
        if degree == 1 or self.tp_costs is None:
            return 0.0
        ranks = self.shares_experts(rank, chunk)
        return once_s(self.costs.comm, self.tp_costs, ranks, degree, num_bytes)

    def mean(self, chunk: int, count: int | None = None) -> LayerCosts:
        """Costs of a layer between the chunk's, or between its first `count`."""
        first, stop = self.plan.chunks[chunk].layers
        return self.costs.mean(first, stop if count is None else first + count)

    def runs(self, chunk: int, part: TpShard) -> Sequence[tuple[MemoryCost, int]]:
        """Memory of the chunk's layers as a rank's part has them, and how many alike follow."""
        if self.costs.layer_kinds is None:
            return ((self._memory(chunk, part), self.num_layers(chunk)),)
        dtype = self.group_of(chunk).compute_dtype
        return [
            (memory_in(costs, part, dtype), count)
            for costs, count in self.costs.runs(*self.plan.chunks[chunk].layers)
        ]

    def frozen_bytes(self, rank: int, chunk: int) -> int:
        """What a rank has of the chunk beside that, as it is not trained: it never moves."""
        ends = chunk == 0, self.is_last(chunk)
        memory, tied = self.memory_at(rank, chunk), self.tied and all(ends)
        of_layers = sum(
            count * each.parameter_bytes(each.frozen_parameters("layer"))
            for each, count in self.runs(chunk, self.part(rank))
        )
        return of_layers + int(frozen_bytes(memory, 0, *ends, tied_on_same_rank=tied))

    def summed_in_tp_groups(self, chunk: int) -> int:
        """Those that every rank of a TP group has, and with sequence parallelism sees a part of.

        Learned positions are added to the whole sequence, so their gradients are whole.
        """
        assert self.tp_costs is not None
        if not self.tp_costs.traits.sequence_parallel:
            return 0
        whole = sum(unit.count * unit.whole for unit in self._units(chunk))
        if chunk > 0:
            return whole
        cut = sum(self.tp_costs.cut_parameters("embedding").values())
        return whole - (self.memory.embedding_parameters() - cut)

    def peers(self, chunk: int) -> tuple[tuple[int, ...], ...]:
        """Ranks of the chunk's group that sum gradients among each other, once for each part."""
        tp_groups = [replica.ranks for replica in self.group_of(chunk).replicas]
        if self.mixed_tp[chunk] is not None:
            return (tuple(rank for ranks in tp_groups for rank in ranks),)
        return tuple(zip(*tp_groups, strict=True))

    def peers_of(self, rank: int, chunk: int) -> tuple[int, ...]:
        """Those of `peers` that the rank is among."""
        if chunk not in self._peers:
            self._peers[chunk] = {each: ranks for ranks in self.peers(chunk) for each in ranks}
        return self._peers[chunk][rank]

    def group_of(self, chunk: int) -> Group:
        """The group that holds a chunk."""
        return self.plan.groups[self.plan.chunks[chunk].group]

    def replica(self, rank: int) -> Replica:
        """The rank's replica."""
        group, replica = self.group_and_replica[rank]
        return self.plan.groups[group].replicas[replica]

    def chunks(self, rank: int) -> tuple[int, ...]:
        """The chunks that the rank's group holds."""
        return self._chunks_of_group[self.group_and_replica[rank][0]]

    def num_layers(self, chunk: int) -> int:
        """Transformer layers of the chunk."""
        first, stop = self.plan.chunks[chunk].layers
        return stop - first

    def is_last(self, chunk: int) -> bool:
        """Whether the chunk ends in the head."""
        return chunk == len(self.plan.chunks) - 1

    def pieces(self, chunk: int, ranks: Sequence[int]) -> tuple[tuple[int, ...], ...]:
        """What each of `peers` owns of each part of the chunk that is gathered or reduced at once.

        The runtime cuts sharded chunks into buckets: of the embedding, of each layer and of the
        head (`adapter.data_parallel.buckets`).
        """
        if parameters_setting(self.plan) == RESIDENT:
            return (tuple(self.shards[chunk][rank] for rank in ranks),)
        embedding, layers, head = self.sections(chunk, self.part(ranks[0]))
        sizes = [embedding, *layers, head]
        weights = [replica.shard_weight for replica in self.group_of(chunk).replicas]
        shards = {size: padded_shards(size, weights) for size in set(sizes) if size}
        return tuple(shards[size] for size in sizes if size)

    def region_shards(self, chunk: int, peers: tuple[int, ...]) -> tuple[RegionShards, ...]:
        """Who sums and sends what of each of `pieces`, of a hierarchical group.

        Ranks are numbered in ascending order, which may not be that of `peers`.
        """
        key = chunk, peers
        if key not in self._region_shards:
            order = sorted(range(len(peers)), key=peers.__getitem__)
            regions = regions_of(ranks_by_region(self.group_of(chunk), sorted(peers)))
            self._region_shards[key] = tuple(
                RegionShards(
                    bounds=tuple(pairwise([0, *accumulate(counts[at] for at in order)])),
                    regions=regions,
                )
                for counts in self.pieces(chunk, peers)
            )
        return self._region_shards[key]

    def is_hierarchical(self, chunk: int) -> bool:
        """Whether sums and gathers of the chunk are made in regions first, then between them."""
        return bool(self.group_of(chunk).hierarchical)

    @cached_property
    def tied_swaps(self) -> dict[int, tuple[tuple[int, int], ...]]:
        """Rank -> (peer, bytes): the gradients of the tied embedding that the two swap.

        As `adapter.tied_embeddings`: whoever owns the same elements in the first and in
        the last chunk. Here the embedding is cut as if it were a buffer of its own.
        """
        first, last = self.plan.chunks[0].group, self.plan.chunks[-1].group
        if first == last:
            return {}  # either there is one copy, or both owners are the same ranks
        table = MixedTpUnit(cut={"vocabulary_rows": self.memory.embedding_parameters()}, whole=0)
        owners = [
            [
                (each.owner, (each.block.offset[0], each.block.offset[0] + each.block.size[0]))
                for each in table.blocks(self.plan.groups[number].replicas)
            ]
            for number in (first, last)
        ]
        swaps: dict[int, list[tuple[int, int]]] = {}
        for (one, ours), (other, theirs) in product(*owners):
            both = intersection(ours, theirs)
            if both is not None:
                num_bytes = self.memory.gradient_bytes(both[1] - both[0])
                swaps.setdefault(one, []).append((other, num_bytes))
                swaps.setdefault(other, []).append((one, num_bytes))
        return {rank: tuple(found) for rank, found in swaps.items()}

    @cached_property
    def looks(self) -> dict[int, int]:
        """Rank -> a number that is equal for ranks of one kind that have the same part of each
        layer and recompute the same."""
        looks = (
            (self.costs.kinds[rank], self.part(rank), self._recompute_setting(rank))
            for rank in self.settings
        )
        return dict(zip(self.settings, numbered(looks), strict=True))

    @cached_property
    def _chunks_of_group(self) -> tuple[tuple[int, ...], ...]:
        return tuple(map(self.plan.chunks_of_group, range(len(self.plan.groups))))

    def _parameters(self, chunk: int, part: TpShard) -> int:
        """What a rank with this part has."""
        embedding, layers, head = self.sections(chunk, part)
        return embedding + sum(layers) + head

    def sections(self, chunk: int, part: TpShard) -> tuple[int, tuple[int, ...], int]:
        """Parameters of the embedding, of each layer, and of the head, as a rank's part has
        them."""
        memory, is_last = self._memory(chunk, part), self.is_last(chunk)
        layers: tuple[int, ...] = ()
        for of_layers, count in self.runs(chunk, part):
            layers += (of_layers.layer_parameters(),) * count
        # With several chunks the last one has a copy, as it may be whole without the first.
        tied = self.tied and chunk == 0
        return (
            memory.embedding_parameters() if chunk == 0 else 0,
            layers,
            memory.head_parameters(tied_on_same_rank=tied) if is_last else 0,
        )

    def _units(self, chunk: int) -> tuple[MixedTpUnit, ...]:
        """Layers, alike ones together, and embedding and head together."""
        assert self.tp_costs is not None
        embedding, layers, head = self.sections(chunk, WHOLE)
        units, at, of_ends = [], 0, Counter[UnitKind]()
        for costs, count in self.costs.runs(*self.plan.chunks[chunk].layers):
            assert costs.tp_costs is not None
            cut = costs.tp_costs.cut_parameters("layer")
            whole = layers[at] - sum(cut.values())
            units.append(MixedTpUnit(cut=cut, whole=whole, count=count))
            at += count
        tables: list[ModelSection] = ["embedding"] if chunk == 0 else []
        if self.is_last(chunk) and not (self.tied and chunk == 0):
            tables.append("head")
        for table in tables:
            of_ends.update(self.tp_costs.cut_parameters(table))
        return (*units, MixedTpUnit(cut=of_ends, whole=embedding + head - of_ends.total()))

    def _mixed_tp(self, chunk: int) -> MixedTpChunk | None:
        group = self.group_of(chunk)
        if self.tp_costs is None or has_equal_tp_shards(group):
            return None
        units = [unit for unit in self._units(chunk) if unit.whole or any(unit.cut.values())]
        return MixedTpChunk.of(units, group.replicas)

    def _shards(self, chunk: int) -> dict[int, int]:
        group = self.group_of(chunk)
        held = {rank: self.held(rank, chunk) for rank in group.ranks}
        if self.framework.state == "replicated":
            return held
        mixed_tp = self.mixed_tp[chunk]
        if mixed_tp is not None:
            return dict(mixed_tp.owned)
        weights = [replica.shard_weight for replica in group.replicas]
        # Of what all have an equal part each, of experts those with the same ones.
        owned = {rank: number + self.spread(rank, chunk) for rank, number in held.items()}
        return {
            rank: size
            for ranks in self.peers(chunk)
            for rank, size in zip(ranks, padded_shards(owned[ranks[0]], weights), strict=True)
        }

    def has_own_input(self, action: Action) -> bool:
        """Whether no other rank sends what a forward or a backward consumes."""
        assert action.chunk is not None
        if action.kind is Kind.FORWARD:
            return action.chunk == 0 or self.is_local(action.chunk - 1)
        return self.is_last(action.chunk) or self.is_local(action.chunk)

    def micro_batch_size(self, rank: int) -> int:
        """Samples of the rank's micro-batches, as long as they are not halved."""
        return self.replica(rank).micro_batch_size

    def size_of(self, rank: int, micro_batch: int) -> int:
        """Samples of one of them, by its number: of halves, less."""
        own = self.replica(rank)
        if own.halved is None:
            return own.micro_batch_size
        if rank not in self._sizes:
            self._sizes[rank] = own.sizes
        return self._sizes[rank][micro_batch]

    def recompute(self, rank: int, chunk: int) -> tuple[RecomputeMode, int]:
        """How a rank recomputes the chunk's layers, and how many of them.

        Without a setting in the plan, as the job does.
        """
        layers = self.num_layers(chunk)
        setting = self._recompute_setting(rank)
        if setting is None or setting.mode == "none":
            return "none", 0
        return setting.mode, min(layers, setting.num_layers or layers)

    def _recompute_setting(self, rank: int) -> Recompute | JobRecompute | None:
        return self.settings[rank].recompute or self.costs.recompute

    def _layers_at_once(self, rank: int, chunk: int) -> int:
        """How many recomputed layers have one input between them."""
        setting = self._recompute_setting(rank)
        if not isinstance(setting, JobRecompute):
            return 1
        return min(setting.layers_at_once, self.num_layers(chunk))

    def is_local(self, chunk: int) -> bool:
        """Whether the next chunk is held by the same group, so that nothing is sent."""
        return self._local[chunk]

    def boundary_bytes(self, num_samples: int, chunk: int) -> int:
        """One activation between two chunks, in the type of `chunk`."""
        key = num_samples, self.group_of(chunk).compute_dtype
        if key not in self._boundary:
            self._boundary[key] = self.memory_of(chunk).boundary_bytes(num_samples)
        return self._boundary[key]

    @property
    def splits_activations(self) -> bool:
        """Whether ranks of a TP group send parts of an activation."""
        in_parts = self.tp_costs is not None and self.tp_costs.traits.sequence_parallel
        return in_parts or self.framework.split_transfers

    def crossing_bytes(self, action: Action) -> int:
        """What a transfer's samples are, in the narrower of both chunks' types.

        Of a part of their sequences, that part.
        """
        assert action.chunk is not None and action.samples is not None
        key = action.samples[1] - action.samples[0], action.chunk, action.other_chunk
        found = self._crossing.get(key)
        if found is None:
            found = min(self.boundary_bytes(key[0], chunk) for chunk in key[1:])
            self._crossing[key] = found
        if action.positions is not None and self.splits_activations:
            start, stop = action.positions.bounds(found)
            return stop - start
        return found

    def reduces_in_low_precision(self, chunk: int) -> bool:
        """Whether the chunk's gradients are sent in 16 bits."""
        return self.group_of(chunk).grad_reduce_dtype is not None

    def exchange_bytes(self, kind: Kind, rank: int, chunk: int) -> int:
        """What the rank has in messages at once in a REDUCE_GRAD or a UNSHARD.

        0 where they are made in place: where ranks with equal parts keep the dtype.
        """
        mixed_tp = self.mixed_tp[chunk]
        if mixed_tp is not None:
            reduces, memory = kind is Kind.REDUCE_GRAD, self.memory_of(chunk)
            to_bytes = memory.gradient_bytes if reduces else memory.parameter_bytes
            return max(
                to_bytes(sum(count for pair, count in messages.items() if rank in pair))
                for messages, _ in (mixed_tp.sums if reduces else mixed_tp.gathers)
            )
        if self.is_hierarchical(chunk):
            return self._between_regions_bytes(kind, rank, chunk)
        if kind is not Kind.REDUCE_GRAD:
            return 0
        count = len(self.group_of(chunk).replicas)
        if not self.reduces_in_low_precision(chunk) or count == 1:
            return 0
        own = self.shards[chunk][rank]
        return low_precision_bytes(self.held(rank, chunk) - own + (count - 1) * own)

    def _between_regions_bytes(self, kind: Kind, rank: int, chunk: int) -> int:
        """What messages between regions take beside the buffers that are summed or gathered."""
        memory, peers = self.memory_of(chunk), self.peers_of(rank, chunk)
        own, reduces = sorted(peers).index(rank), kind is Kind.REDUCE_GRAD
        count = sum(
            shards.reduction_buffer(own) if reduces else shards.gather_buffer(own)
            for shards in self.region_shards(chunk, peers)
        )
        return (memory.gradient_bytes if reduces else memory.parameter_bytes)(count)

    def reduces_beside(self, chunk: int) -> bool:
        """Whether a reduction needs memory of its own, in a chunk that stays unsharded."""
        return self.reduces_in_low_precision(chunk) or self.is_hierarchical(chunk)

    def micro_batch_bytes(self, rank: int, chunk: int, micro_batch: int) -> MicroBatchBytes:
        """What the rank has of one of its micro-batches in the chunk, by its number."""
        key = chunk, self.looks[rank], self.size_of(rank, micro_batch)
        found = self._of_micro_batch.get(key)
        if found is None:
            found = self._micro_batch_bytes(rank, chunk, key[2], self.costs.kinds[rank])
            self._of_micro_batch[key] = found
        return found

    def _micro_batch_bytes(self, rank: int, chunk: int, size: int, kind: str) -> MicroBatchBytes:
        memory, runs = self.memory_at(rank, chunk), self.runs(chunk, self.part(rank))
        (mode, recomputed), at_once = self.recompute(rank, chunk), self._layers_at_once(rank, chunk)
        splits, parts = self.group_of(chunk).split_backward, self.parts(rank)
        layers = [
            (
                each.activation_bytes(size, "none", kind),
                each.activation_bytes(size, mode, kind),
                each.delayed_bytes(size) if splits else 0,
                # Beside what it leaves for weight gradients.
                each.arriving_bytes(size) // parts if splits and each.delayed_bytes(size) else 0,
            )
            for each, _ in runs
        ]
        counts = [count for _, count in runs]
        delayed = sum(left * count for (_, _, left, _), count in zip(layers, counts, strict=True))
        if len(layers) == 1:
            (whole, kept, left, arriving), *_ = layers
            stage = counts[0], recomputed, whole, kept
            saved = saved_bytes(*stage, at_once=at_once)
            working = working_bytes(*stage, at_once=at_once, left=left) + arriving
        else:
            each_layer = [
                layer for layer, count in zip(layers, counts, strict=True) for _ in range(count)
            ]
            saved, working = working_bytes_of_layers(each_layer, recomputed, at_once=at_once)
        return MicroBatchBytes(
            held=memory.boundary_bytes(size),
            saved=saved,
            head=memory.head_bytes(size) if self.is_last(chunk) else 0,
            working=working,
            delayed=delayed,
        )

    def saved_tensors(self, rank: int, chunk: int) -> tuple[int, ...]:
        """The bytes of each tensor that layers keep of a micro-batch."""
        size, kind = self.micro_batch_size(rank), self.costs.kinds[rank]
        (mode, again), at_once = self.recompute(rank, chunk), self._layers_at_once(rank, chunk)
        found: tuple[int, ...] = ()
        at = 0
        for memory, count in self.runs(chunk, self.part(rank)):
            stop = at + count
            # Layers that are computed again at once may be of two kinds.
            inputs = len(range(at + -at % at_once, min(stop, again), at_once))
            if stop > again:
                found += (stop - max(at, again)) * memory.saved_tensor_bytes(size, "none", kind)
            if inputs:
                found += inputs * memory.saved_tensor_bytes(size, mode, kind)
            at = stop
        return found

    def _costs_of_parts(self) -> TpCosts | None:
        """Those of tensor-parallel groups, or of ranks that share experts."""
        if not self.has_wide_replicas and self.framework.expert_parallel == 1:
            return None
        if self.costs.tp_costs is None:
            raise SimulationError(
                "found a replica of several ranks; expected the costs of TP groups with it"
            )
        return self.costs.tp_costs

    @cached_property
    def _local(self) -> tuple[bool, ...]:
        groups = [chunk.group for chunk in self.plan.chunks]
        return (*(one == next_ for one, next_ in pairwise(groups)), False)
