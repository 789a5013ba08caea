"""How many parameters and bytes of a plan each rank holds, asked of the memory model once."""

from collections.abc import Mapping, Sequence
from functools import cached_property
from itertools import pairwise

from zorse_megatron.costs.interface import MemoryCost, RecomputeMode
from zorse_megatron.schedules.actions import Action
from zorse_megatron.schedules.breadth_first import RESIDENT, parameters_setting
from zorse_megatron.schedules.shards import overlaps, shard_bounds
from zorse_megatron.schema.gpus.gpu import ComputeDtype
from zorse_megatron.schema.model.computing import JobRecompute
from zorse_megatron.schema.plan.plan import Group, Plan, Recompute, Replica
from zorse_megatron.simulate.framework import RUNTIME, Framework

_NARROW_BYTES = 2


def low_precision_bytes(num_parameters: int) -> int:
    """Gradients as a group with a `gradient_wire` sends them."""
    return _NARROW_BYTES * num_parameters


def _padded_shards(total: int, weights: Sequence[float]) -> tuple[int, ...]:
    """Elements of each shard of a buffer.

    Megatron pads buffers to a multiple of the number of ranks
    (`megatron.core.optimizer.param_layout`), so that equal weights make equal shards.
    """
    if len(set(weights)) == 1:
        total = len(weights) * -(-total // len(weights))
    return tuple(stop - start for start, stop in shard_bounds(total, weights))


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
    ) -> None:
        """`memories`: of groups with these compute types; of others `memory`.

        `recompute`: what is recomputed in groups that do not say; None: nothing. `kinds`: of the
        GPU of each global rank; None: all run the attention that the memory model has.
        """
        self._kinds = kinds
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
        self.parameters = tuple(map(self._parameters, range(len(plan.chunks))))
        """Chunk -> number of its parameters."""
        self.shards = tuple(map(self._shards, range(len(plan.chunks))))
        """Chunk -> first rank of each replica -> number of the parameters that it owns."""
        self._boundary: dict[tuple[int, ComputeDtype | None], int] = {}
        self._crossing: dict[tuple[int, int, int], int] = {}
        self._kept: dict[tuple[int, int, str | None], int] = {}
        self._working: dict[tuple[int, int, str | None], int] = {}

    def memory_of(self, chunk: int) -> MemoryCost:
        """The memory model of the chunk's compute type."""
        dtype = self.plan.groups[self.plan.chunks[chunk].group].compute_dtype
        return self.memory if dtype is None else self.memories.get(dtype, self.memory)

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

        The runtime cuts sharded chunks into buckets of a layer each
        (`adapter.data_parallel.ddp`), here taken as equally large.
        """
        if parameters_setting(self.plan) == RESIDENT:
            return (tuple(self.shards[chunk].values()),)
        total, layer = self.parameters[chunk], self.memory.layer_parameters()
        count = max(1, -(-total // max(1, layer)))
        weights = [replica.shard_weight for replica in self._replicas(chunk)]
        return tuple(
            _padded_shards(size, weights)
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

    def crossing_bytes(self, action: Action) -> int:
        """The whole of what a transfer's samples are, in the narrower of both chunks' types."""
        assert action.chunk is not None and action.samples is not None
        key = action.samples[1] - action.samples[0], action.chunk, action.other_chunk
        found = self._crossing.get(key)
        if found is None:
            ends = key[1:]
            found = min(self.boundary_bytes(key[0], chunk) for chunk in ends)
            self._crossing[key] = found
        return found

    def message_bytes(self, action: Action) -> int:
        """What each rank sends in a transfer."""
        ranks = len(self.plan.groups[0].replicas[0].ranks)
        return self.crossing_bytes(action) // (ranks if self.framework.split_transfers else 1)

    def reduces_in_low_precision(self, chunk: int) -> bool:
        """Whether the chunk's gradients are sent in 16 bits."""
        return self.plan.groups[self.plan.chunks[chunk].group].gradient_wire is not None

    def exchange_bytes(self, rank: int, chunk: int) -> int:
        """What the rank sends and receives of the chunk's gradients, 0 if they keep their dtype."""
        shards = self.shards[chunk]
        if not self.reduces_in_low_precision(chunk) or len(shards) == 1:
            return 0
        own = shards[rank]
        return low_precision_bytes(self.parameters[chunk] - own + (len(shards) - 1) * own)

    def kept_bytes(self, rank: int, chunk: int) -> int:
        """What the chunk's layers keep of one micro-batch from its forward to its backward."""
        size, kind = self.micro_batch_size(rank), self._kind(rank)
        key = chunk, size, kind
        if key not in self._kept:
            mode, recomputed = self.recompute(chunk)
            whole = self.num_layers(chunk) - recomputed
            memory = self.memory_of(chunk)
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
        size, memory, kind = self.micro_batch_size(rank), self.memory_of(chunk), self._kind(rank)
        if forward_only:
            return memory.activation_bytes(size, "none", kind)
        key = chunk, size, kind
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
        return self.memory_of(chunk).head_bytes(self.micro_batch_size(rank))

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
        bounds = [shard_bounds(total, [r.shard_weight for r in g.replicas]) for g in sides]
        swaps: dict[int, list[tuple[int, int]]] = {}
        for both in overlaps(*bounds):
            one = sides[0].replicas[both.first_member].ranks[0]
            other = sides[1].replicas[both.second_member].ranks[0]
            num_bytes = self.memory.gradient_bytes(both.stop - both.start)
            swaps.setdefault(one, []).append((other, num_bytes))
            swaps.setdefault(other, []).append((one, num_bytes))
        return {rank: tuple(found) for rank, found in swaps.items()}

    @cached_property
    def _chunks_of_group(self) -> tuple[tuple[int, ...], ...]:
        return tuple(map(self.plan.chunks_of_group, range(len(self.plan.groups))))

    @cached_property
    def _local(self) -> tuple[bool, ...]:
        groups = [chunk.group for chunk in self.plan.chunks]
        return (*(one == next_ for one, next_ in pairwise(groups)), False)

    def _parameters(self, chunk: int) -> int:
        total = self.num_layers(chunk) * self.memory.layer_parameters()
        if chunk == 0:
            total += self.memory.embedding_parameters()
        if self.is_last(chunk):
            # With several chunks the last one has a copy, as it may be whole without the first.
            total += self.memory.head_parameters(tied_on_same_rank=self.tied and chunk == 0)
        return total

    def _replicas(self, chunk: int) -> tuple[Replica, ...]:
        return self.plan.groups[self.plan.chunks[chunk].group].replicas

    def _shards(self, chunk: int) -> dict[int, int]:
        replicas = self._replicas(chunk)
        if self.framework.state == "replicated":
            return {replica.ranks[0]: self.parameters[chunk] for replica in replicas}
        sizes = _padded_shards(self.parameters[chunk], [r.shard_weight for r in replicas])
        return {replica.ranks[0]: size for replica, size in zip(replicas, sizes, strict=True)}
