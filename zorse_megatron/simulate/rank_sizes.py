"""How many parameters and bytes of a plan each rank holds, asked of the memory model once."""

from collections.abc import Mapping, Sequence
from functools import cached_property
from itertools import pairwise, product

from zorse_megatron.costs.interface import MemoryCost, RecomputeMode, SetCosts
from zorse_megatron.schedules.actions import Action, Kind
from zorse_megatron.schedules.breadth_first import RESIDENT, parameters_setting
from zorse_megatron.schedules.shards import intersection
from zorse_megatron.schema.gpus.gpu import ComputeDtype
from zorse_megatron.schema.model.computing import JobRecompute
from zorse_megatron.schema.plan.plan import Group, Plan, Recompute, Replica
from zorse_megatron.schema.plan.rank_axes import holds_equal_parts
from zorse_megatron.simulate.chunk_parts import (
    PartedChunk,
    PartedUnit,
    owned_intervals,
    padded_shards,
)
from zorse_megatron.simulate.framework import RUNTIME, Framework

_NARROW_BYTES = 2


def low_precision_bytes(num_parameters: int) -> int:
    """Gradients as a group with a `gradient_wire` sends them."""
    return _NARROW_BYTES * num_parameters


class RankSizes:
    """Sizes of the plan's chunks, and of each rank's part of them."""

    def __init__(
        self,
        plan: Plan,
        memory: MemoryCost,
        framework: Framework = RUNTIME,
        memories: Mapping[ComputeDtype, MemoryCost] | None = None,
        recompute: JobRecompute | None = None,
        *,
        kinds: Sequence[str] | None = None,
        sets: SetCosts | None = None,
    ) -> None:
        """`memories`: of groups with these compute types; of others `memory`.

        `sets`: costs of tensor-parallel sets. Without them the first rank of each set stands for
        all of it, and `memory` is that of one rank.

        `recompute`: what is recomputed in groups that do not say; None: nothing. `kinds`: of the
        GPU of each global rank; None: all run the attention that the memory model has.
        """
        self._kinds = kinds
        self._sets = sets
        self._job_recompute = recompute
        self.plan = plan
        self.framework = framework
        self.memory = memory
        self.memories = memories or {}
        self.group_and_replica: dict[int, tuple[int, int]] = {}
        """Rank -> number of its group and of its replica there."""
        for number, group in enumerate(plan.groups):
            for index, replica in enumerate(group.replicas):
                self.group_and_replica.update(dict.fromkeys(replica.ranks, (number, index)))
        self.tied = bool(plan.model.tied_embeddings)
        chunks = range(len(plan.chunks))
        self.parameters = tuple(self._parameters(chunk, 1) for chunk in chunks)
        """Chunk -> number of its parameters, those of a whole set together."""
        self.parted = tuple(map(self._parted, chunks))
        """Chunk -> how its group's replicas exchange parts, where they cut layers differently."""
        self.shards = tuple(map(self._shards, chunks))
        """Chunk -> rank -> number of the parameters that it owns."""
        self._peers: dict[int, dict[int, tuple[int, ...]]] = {}
        self._boundary: dict[tuple[int, ComputeDtype | None], int] = {}
        self._crossing: dict[tuple[int, int, int], int] = {}
        self._kept: dict[tuple[int, int, int, str | None], int] = {}
        self._working: dict[tuple[int, int, int, str | None], int] = {}

    def memory_of(self, chunk: int) -> MemoryCost:
        """The memory model of the chunk's compute type, of a rank that is a set of its own."""
        dtype = self.plan.groups[self.plan.chunks[chunk].group].compute_dtype
        return self.memory if dtype is None else self.memories.get(dtype, self.memory)

    def memory_at(self, rank: int, chunk: int) -> MemoryCost:
        """The same of this rank of a set."""
        return self._memory(chunk, len(self.set_of(rank)))

    def _memory(self, chunk: int, degree: int) -> MemoryCost:
        if degree == 1 or self._sets is None:
            return self.memory_of(chunk)
        dtype = self.plan.groups[self.plan.chunks[chunk].group].compute_dtype
        return self._sets.of_rank(degree, dtype).memory

    def set_of(self, rank: int) -> tuple[int, ...]:
        """The rank's tensor-parallel set, as far as its ranks are simulated."""
        return self._simulated(self.replica(rank))

    def _simulated(self, replica: Replica) -> tuple[int, ...]:
        return replica.ranks if self._sets is not None else replica.ranks[:1]

    def held(self, rank: int, chunk: int) -> int:
        """Parameters that a rank computes with."""
        return self._parameters(chunk, len(self.set_of(rank)))

    def peers(self, chunk: int) -> tuple[tuple[int, ...], ...]:
        """Ranks of the chunk's group that sum gradients among each other, once for each part."""
        sets = [self._simulated(replica) for replica in self._replicas(chunk)]
        if self.parted[chunk] is not None:
            return (tuple(rank for ranks in sets for rank in ranks),)
        return tuple(zip(*sets, strict=True))

    def peers_of(self, rank: int, chunk: int) -> tuple[int, ...]:
        """Those of `peers` that the rank is among."""
        if chunk not in self._peers:
            self._peers[chunk] = {each: ranks for ranks in self.peers(chunk) for each in ranks}
        return self._peers[chunk][rank]

    def has_own_input(self, action: Action) -> bool:
        """Whether no other rank sends what a forward or a backward consumes."""
        assert action.chunk is not None
        if action.kind is Kind.FORWARD:
            return action.chunk == 0 or self.is_local(action.chunk - 1)
        return self.is_last(action.chunk) or self.is_local(action.chunk)

    def group(self, rank: int) -> Group:
        """The rank's group."""
        return self.plan.groups[self.group_and_replica[rank][0]]

    def replica(self, rank: int) -> Replica:
        """The rank's replica."""
        group, replica = self.group_and_replica[rank]
        return self.plan.groups[group].replicas[replica]

    def chunks(self, rank: int) -> tuple[int, ...]:
        """The chunks that the rank's group holds."""
        return self._chunks_of_group[self.group_and_replica[rank][0]]

    def micro_batch_size(self, rank: int) -> int:
        """Samples of each of the rank's micro-batches."""
        return self.replica(rank).micro_batch_size

    def recompute(self, chunk: int) -> tuple[RecomputeMode, int]:
        """How the chunk's layers are recomputed, and how many of them.

        A group without a setting does as the job does.
        """
        layers = self.num_layers(chunk)
        setting = self._recompute_setting(chunk)
        if setting is None or setting.mode == "none":
            return "none", 0
        return setting.mode, min(layers, setting.num_layers or layers)

    def _recompute_setting(self, chunk: int) -> Recompute | JobRecompute | None:
        return self.plan.groups[self.plan.chunks[chunk].group].recompute or self._job_recompute

    def _layers_at_once(self, chunk: int) -> int:
        """How many recomputed layers have one input between them."""
        setting = self._recompute_setting(chunk)
        if not isinstance(setting, JobRecompute):
            return 1
        return min(setting.layers_at_once, self.num_layers(chunk))

    def pieces(self, chunk: int) -> tuple[tuple[int, ...], ...]:
        """What each replica owns of each part of the chunk that is gathered or reduced at once.

        Of replicas of several ranks it is one of theirs, which are alike.
        The runtime cuts sharded chunks into buckets of a layer each
        (`adapter.data_parallel.ddp`), here taken as equally large.
        """
        if parameters_setting(self.plan) == RESIDENT:
            return (tuple(self.shards[chunk][rank] for rank in self.peers(chunk)[0]),)
        degree = len(self._simulated(self._replicas(chunk)[0]))
        total, memory = self._parameters(chunk, degree), self._memory(chunk, degree)
        layer = memory.layer_parameters()
        count = max(1, -(-total // max(1, layer)))
        weights = [replica.shard_weight for replica in self._replicas(chunk)]
        return tuple(
            padded_shards(size, weights)
            for size in (total * (n + 1) // count - total * n // count for n in range(count))
        )

    def num_layers(self, chunk: int) -> int:
        """Transformer layers of the chunk."""
        first, stop = self.plan.chunks[chunk].layers
        return stop - first

    def is_last(self, chunk: int) -> bool:
        """Whether the chunk ends in the head."""
        return chunk == len(self.plan.chunks) - 1

    def is_local(self, chunk: int) -> bool:
        """Whether the next chunk is held by the same group, so that nothing is sent."""
        return self._local[chunk]

    def boundary_bytes(self, num_samples: int, chunk: int) -> int:
        """One activation between two chunks, in the type of `chunk`."""
        key = num_samples, self.plan.groups[self.plan.chunks[chunk].group].compute_dtype
        if key not in self._boundary:
            self._boundary[key] = self.memory_of(chunk).boundary_bytes(num_samples)
        return self._boundary[key]

    def held_bytes(self, rank: int, chunk: int) -> int:
        """What a rank has of one micro-batch's activation between two chunks."""
        return self.memory_at(rank, chunk).boundary_bytes(self.micro_batch_size(rank))

    def crossing_bytes(self, action: Action) -> int:
        """What a transfer's samples are, in the narrower of both chunks' types.

        Of a part of their sequences, that part.
        """
        assert action.chunk is not None and action.samples is not None
        key = action.samples[1] - action.samples[0], action.chunk, action.other_chunk
        found = self._crossing.get(key)
        if found is None:
            ends = key[1:]
            found = min(self.boundary_bytes(key[0], chunk) for chunk in ends)
            self._crossing[key] = found
        if action.part is not None:
            start, stop = action.part.bounds(found)
            return stop - start
        return found

    def message_bytes(self, action: Action) -> int:
        """What each rank sends in a transfer."""
        splits = self.framework.split_transfers and self._sets is None
        ranks = len(self.plan.groups[0].replicas[0].ranks) if splits else 1
        return self.crossing_bytes(action) // ranks

    def reduces_in_low_precision(self, chunk: int) -> bool:
        """Whether the chunk's gradients are sent in 16 bits."""
        return self.plan.groups[self.plan.chunks[chunk].group].gradient_wire is not None

    def exchange_bytes(self, kind: Kind, rank: int, chunk: int) -> int:
        """What the rank has in messages at once in a REDUCE or a GATHER.

        0 where they are made in place: where ranks with equal parts keep the dtype.
        """
        parted = self.parted[chunk]
        if parted is not None:
            reduces, memory = kind is Kind.REDUCE, self.memory_of(chunk)
            to_bytes = memory.gradient_bytes if reduces else memory.parameter_bytes
            return max(
                to_bytes(sum(count for pair, count in messages.items() if rank in pair))
                for messages, _ in (parted.sums if reduces else parted.gathers)
            )
        if kind is not Kind.REDUCE:
            return 0
        count = len(self._replicas(chunk))
        if not self.reduces_in_low_precision(chunk) or count == 1:
            return 0
        own = self.shards[chunk][rank]
        return low_precision_bytes(self.held(rank, chunk) - own + (count - 1) * own)

    def kept_bytes(self, rank: int, chunk: int) -> int:
        """What the chunk's layers keep of one micro-batch from its forward to its backward."""
        size, kind = self.micro_batch_size(rank), self._kind(rank)
        key = chunk, len(self.set_of(rank)), size, kind
        if key not in self._kept:
            mode, recomputed = self.recompute(chunk)
            whole = self.num_layers(chunk) - recomputed
            memory = self.memory_at(rank, chunk)
            self._kept[key] = whole * memory.activation_bytes(size, "none", kind)
            if recomputed:
                inputs = -(-recomputed // self._layers_at_once(chunk))
                self._kept[key] += inputs * memory.activation_bytes(size, mode, kind)
        return self._kept[key]

    def _kind(self, rank: int) -> str | None:
        return None if self._kinds is None else self._kinds[rank]

    def working_bytes(self, rank: int, chunk: int, *, forward_only: bool) -> int:
        """What one layer needs for a moment beyond what is kept.

        In a backward: what is recomputed, so many layers at a time as have one input. In an
        evaluation, which keeps nothing: a whole layer, at most.
        """
        size, kind = self.micro_batch_size(rank), self._kind(rank)
        memory = self.memory_at(rank, chunk)
        if forward_only:
            return memory.activation_bytes(size, "none", kind)
        key = chunk, len(self.set_of(rank)), size, kind
        if key not in self._working:
            mode, recomputed = self.recompute(chunk)
            whole, kept = (memory.activation_bytes(size, m, kind) for m in ("none", mode))
            again = self._layers_at_once(chunk) * whole
            self._working[key] = max(0, again - kept) if recomputed else 0
        return self._working[key]

    def head_bytes(self, rank: int, chunk: int) -> int:
        """Logits of one micro-batch; 0 where the chunk has no head."""
        if not self.is_last(chunk):
            return 0
        return self.memory_at(rank, chunk).head_bytes(self.micro_batch_size(rank))

    @cached_property
    def tied_swaps(self) -> dict[int, tuple[tuple[int, int], ...]]:
        """Rank -> (peer, bytes): the gradients of the tied embedding that the two swap.

        As `adapter.parameters.tied_embeddings`: whoever owns the same elements in the first and in
        the last chunk. Here the embedding is cut as if it were a buffer of its own.
        """
        first, last = self.plan.chunks[0].group, self.plan.chunks[-1].group
        if first == last:
            return {}  # either there is one copy, or both owners are the same ranks
        total = self.memory.embedding_parameters()
        sides = [self.plan.groups[number] for number in (first, last)]
        owners = [
            owned_intervals(
                total,
                [self._simulated(replica) for replica in group.replicas],
                [replica.shard_weight for replica in group.replicas],
            )
            for group in sides
        ]
        swaps: dict[int, list[tuple[int, int]]] = {}
        for one, other in product(*owners):
            both = intersection((one.start, one.stop), (other.start, other.stop))
            if both is not None:
                num_bytes = self.memory.gradient_bytes(both[1] - both[0])
                swaps.setdefault(one.rank, []).append((other.rank, num_bytes))
                swaps.setdefault(other.rank, []).append((one.rank, num_bytes))
        return {rank: tuple(found) for rank, found in swaps.items()}

    @cached_property
    def _chunks_of_group(self) -> tuple[tuple[int, ...], ...]:
        return tuple(map(self.plan.chunks_of_group, range(len(self.plan.groups))))

    @cached_property
    def _local(self) -> tuple[bool, ...]:
        groups = [chunk.group for chunk in self.plan.chunks]
        return (*(one == next_ for one, next_ in pairwise(groups)), False)

    def _parameters(self, chunk: int, degree: int) -> int:
        """What a rank of a set of `degree` has."""
        layer, ends = self._parameters_of_parts(chunk, degree)
        return self.num_layers(chunk) * layer + ends

    def _parameters_of_parts(self, chunk: int, degree: int) -> tuple[int, int]:
        """Of one layer, and of embedding and head."""
        memory = self.memory if degree == 1 else self._memory(chunk, degree)
        ends = 0
        if chunk == 0:
            ends += memory.embedding_parameters()
        if self.is_last(chunk):
            # With several chunks the last one has a copy, as it may be whole without the first.
            ends += memory.head_parameters(tied_on_same_rank=self.tied and chunk == 0)
        return memory.layer_parameters(), ends

    def whole_parameters(self, rank: int, chunk: int) -> int:
        """Those that every rank of its set has."""
        degree = len(self.set_of(rank))
        return PartedUnit.of(self.parameters[chunk], self.held(rank, chunk), degree).whole

    def _parted(self, chunk: int) -> PartedChunk | None:
        group = self.plan.groups[self.plan.chunks[chunk].group]
        if self._sets is None or holds_equal_parts(group):
            return None
        degree = max(len(replica.ranks) for replica in group.replicas)
        together = self._parameters_of_parts(chunk, 1)
        layer, ends = (
            PartedUnit.of(whole, part, degree, count)
            for whole, part, count in zip(
                together,
                self._parameters_of_parts(chunk, degree),
                (self.num_layers(chunk), 1),
                strict=True,
            )
        )
        return PartedChunk.of(
            [layer, ends] if together[1] else [layer],
            [replica.ranks for replica in group.replicas],
            [replica.shard_weight for replica in group.replicas],
        )

    def _replicas(self, chunk: int) -> tuple[Replica, ...]:
        return self.plan.groups[self.plan.chunks[chunk].group].replicas

    def _shards(self, chunk: int) -> dict[int, int]:
        replicas = self._replicas(chunk)
        held = {
            rank: self.held(rank, chunk)
            for replica in replicas
            for rank in self._simulated(replica)
        }
        if self.framework.state == "replicated":
            return held
        parted = self.parted[chunk]
        if parted is not None:
            return dict(parted.owned)
        weights = [replica.shard_weight for replica in replicas]
        return {
            rank: size
            for ranks in self.peers(chunk)
            for rank, size in zip(ranks, padded_shards(held[ranks[0]], weights), strict=True)
        }
