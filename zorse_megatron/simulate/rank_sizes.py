"""How many parameters and bytes of a plan each rank holds, asked of the memory model once."""

from collections.abc import Mapping, Sequence
from functools import cached_property
from itertools import pairwise

from zorse_megatron.costs.interface import (
    WHOLE,
    MemoryCost,
    RankPart,
    RecomputeMode,
    SetCosts,
)
from zorse_megatron.costs.stage_formulas import kept_bytes, working_bytes
from zorse_megatron.schedules.actions import Action, Kind
from zorse_megatron.schema.gpus.gpu import ComputeDtype
from zorse_megatron.schema.model.computing import JobRecompute
from zorse_megatron.schema.plan.memory_settings import settings_by_rank
from zorse_megatron.schema.plan.plan import Plan, Recompute
from zorse_megatron.simulate.framework import RUNTIME, Framework
from zorse_megatron.simulate.rank_parameters import RankParameters

_NARROW_BYTES = 2


def low_precision_bytes(num_parameters: int) -> int:
    """Gradients as a group with a `gradient_wire` sends them."""
    return _NARROW_BYTES * num_parameters


class RankSizes(RankParameters):
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

        `recompute`: what is recomputed where the plan does not say; None: nothing. `kinds`: of the
        GPU of each global rank; None: all run the attention that the memory model has.
        """
        super().__init__(plan, memory, framework, memories, sets)
        self._kinds = kinds
        self.settings = settings_by_rank(plan)
        """Rank -> what it recomputes and offloads."""
        self._job_recompute = recompute
        found = {rank: each.recompute or recompute for rank, each in self.settings.items()}
        distinct = list(dict.fromkeys(found.values()))
        self.recompute_numbers = {rank: distinct.index(each) for rank, each in found.items()}
        """Rank -> a number that is equal for ranks that recompute the same."""
        self._boundary: dict[tuple[int, ComputeDtype | None], int] = {}
        self._crossing: dict[tuple[int, int, int], int] = {}
        self._kept: dict[tuple[int, RankPart, int, str | None, int], int] = {}
        self._working: dict[tuple[int, RankPart, int, str | None, int], int] = {}

    def has_own_input(self, action: Action) -> bool:
        """Whether no other rank sends what a forward or a backward consumes."""
        assert action.chunk is not None
        if action.kind is Kind.FORWARD:
            return action.chunk == 0 or self.is_local(action.chunk - 1)
        return self.is_last(action.chunk) or self.is_local(action.chunk)

    def micro_batch_size(self, rank: int) -> int:
        """Samples of each of the rank's micro-batches."""
        return self.replica(rank).micro_batch_size

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
        return self.settings[rank].recompute or self._job_recompute

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
        key = num_samples, self.plan.groups[self.plan.chunks[chunk].group].compute_dtype
        if key not in self._boundary:
            self._boundary[key] = self.memory_of(chunk).boundary_bytes(num_samples)
        return self._boundary[key]

    @property
    def splits_activations(self) -> bool:
        """Whether ranks of a set send parts of an activation."""
        in_parts = self._sets is not None and self._sets.sequence_parallel
        return in_parts or self.framework.split_transfers

    def held_bytes(self, rank: int, chunk: int) -> int:
        """What a rank has of one micro-batch's activation between two chunks."""
        size = self.micro_batch_size(rank)
        if self.part(rank) == WHOLE:
            return self.boundary_bytes(size, chunk)
        return self.memory_at(rank, chunk).boundary_bytes(size)

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
        if action.positions is not None and self.splits_activations:
            start, stop = action.positions.bounds(found)
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
        if self.is_hierarchical(chunk):
            return self._between_regions_bytes(kind, rank, chunk)
        if kind is not Kind.REDUCE:
            return 0
        count = len(self._replicas(chunk))
        if not self.reduces_in_low_precision(chunk) or count == 1:
            return 0
        own = self.shards[chunk][rank]
        return low_precision_bytes(self.held(rank, chunk) - own + (count - 1) * own)

    def _between_regions_bytes(self, kind: Kind, rank: int, chunk: int) -> int:
        """What messages between regions take beside the buffers that are summed or gathered."""
        memory, peers = self.memory_of(chunk), self.peers_of(rank, chunk)
        own, reduces = sorted(peers).index(rank), kind is Kind.REDUCE
        count = sum(
            shards.reduction_buffer(own) if reduces else shards.gather_buffer(own)
            for shards in self.region_shards(chunk, peers)
        )
        return (memory.gradient_bytes if reduces else memory.parameter_bytes)(count)

    def reduces_beside(self, chunk: int) -> bool:
        """Whether a reduction needs memory of its own, in a chunk that stays unsharded."""
        return self.reduces_in_low_precision(chunk) or self.is_hierarchical(chunk)

    def kept_bytes(self, rank: int, chunk: int) -> int:
        """What the chunk's layers keep of one micro-batch from its forward to its backward."""
        size, kind = self.micro_batch_size(rank), self._kind(rank)
        key = chunk, self.part(rank), size, kind, self.recompute_numbers[rank]
        if key not in self._kept:
            at_once = self._layers_at_once(rank, chunk)
            self._kept[key] = kept_bytes(*self._layers(rank, chunk), at_once=at_once)
        return self._kept[key]

    def _layers(self, rank: int, chunk: int) -> tuple[int, int, int, int]:
        """Layers of the chunk, how many are recomputed, and what one of each keeps."""
        size, kind = self.micro_batch_size(rank), self._kind(rank)
        memory, (mode, recomputed) = self.memory_at(rank, chunk), self.recompute(rank, chunk)
        whole, kept = (memory.activation_bytes(size, each, kind) for each in ("none", mode))
        return self.num_layers(chunk), recomputed, whole, kept

    def kept_tensors(self, rank: int, chunk: int) -> tuple[int, ...]:
        """The bytes of each tensor of `kept_bytes`."""
        size, kind = self.micro_batch_size(rank), self._kind(rank)
        mode, recomputed = self.recompute(rank, chunk)
        memory = self.memory_at(rank, chunk)
        whole = self.num_layers(chunk) - recomputed
        inputs = -(-recomputed // self._layers_at_once(rank, chunk))
        found = whole * memory.kept_tensor_bytes(size, "none", kind) if whole else ()
        if inputs:
            found += inputs * memory.kept_tensor_bytes(size, mode, kind)
        return found

    def delayed_bytes(self, rank: int, chunk: int) -> int:
        """What layers keep from a backward to weight gradients apart; 0 where there are none."""
        if not self.plan.groups[self.plan.chunks[chunk].group].split_backward:
            return 0
        of_layer = self.memory_at(rank, chunk).delayed_bytes(self.micro_batch_size(rank))
        return self.num_layers(chunk) * of_layer

    def working_beside_delayed_bytes(self, rank: int, chunk: int) -> int:
        """What a backward that leaves weight gradients needs beyond what is kept or left.

        That is the larger of what is kept before it and what is left behind it. Beside it there is
        the gradient that arrives.
        """
        left = self.delayed_bytes(rank, chunk) // max(1, self.num_layers(chunk))
        at_once = self._layers_at_once(rank, chunk)
        again = working_bytes(*self._layers(rank, chunk), at_once=at_once, left=left)
        return again + self.held_bytes(rank, chunk)

    def _kind(self, rank: int) -> str | None:
        return None if self._kinds is None else self._kinds[rank]

    def working_bytes(self, rank: int, chunk: int, *, forward_only: bool) -> int:
        """What is there for a moment beyond what is kept.

        In a backward: what is recomputed, so many layers at a time as have one input. In an
        evaluation, which keeps nothing: a whole layer, at most.
        """
        size, kind = self.micro_batch_size(rank), self._kind(rank)
        if forward_only:
            return self.memory_at(rank, chunk).activation_bytes(size, "none", kind)
        key = chunk, self.part(rank), size, kind, self.recompute_numbers[rank]
        if key not in self._working:
            at_once = self._layers_at_once(rank, chunk)
            self._working[key] = working_bytes(*self._layers(rank, chunk), at_once=at_once)
        return self._working[key]

    def head_bytes(self, rank: int, chunk: int) -> int:
        """Logits of one micro-batch; 0 where the chunk has no head."""
        if not self.is_last(chunk):
            return 0
        return self.memory_at(rank, chunk).head_bytes(self.micro_batch_size(rank))

    @cached_property
    def _local(self) -> tuple[bool, ...]:
        groups = [chunk.group for chunk in self.plan.chunks]
        return (*(one == next_ for one, next_ in pairwise(groups)), False)
