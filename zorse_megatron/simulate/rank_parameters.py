"""How many parameters of a plan each rank holds and owns, and who exchanges them."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from itertools import accumulate, pairwise, product

from zorse_megatron.costs.interface import WHOLE, MemoryCost, ModelSection, RankPart, SetCosts
from zorse_megatron.costs.stage_formulas import section_parameters, stage_parameters
from zorse_megatron.schedules.breadth_first import RESIDENT, parameters_setting
from zorse_megatron.schedules.region_shards import RegionShards, regions_of
from zorse_megatron.schedules.set_parts import UnitKind
from zorse_megatron.schedules.shards import intersection
from zorse_megatron.schema.gpus.gpu import ComputeDtype
from zorse_megatron.schema.plan.plan import Group, Plan, Replica
from zorse_megatron.schema.plan.rank_axes import holds_equal_parts, ranks_by_region
from zorse_megatron.simulate.chunk_parts import (
    PartedChunk,
    PartedUnit,
    owned_intervals,
    padded_shards,
)
from zorse_megatron.simulate.framework import Framework


class RankParameters:
    """Parameters of the plan's chunks, and each rank's part of them."""

    def __init__(
        self,
        plan: Plan,
        memory: MemoryCost,
        framework: Framework,
        memories: Mapping[ComputeDtype, MemoryCost] | None,
        sets: SetCosts | None,
    ) -> None:
        """See `RankSizes`."""
        self._sets = sets
        self._parts: dict[int, RankPart] = {}
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
        self.parameters = tuple(self._parameters(chunk, WHOLE) for chunk in chunks)
        """Chunk -> number of its parameters, as a rank that is a set of its own has them."""
        self.parted = tuple(map(self._parted, chunks))
        """Chunk -> how its group's replicas exchange parts, where they cut layers differently."""
        self.shards = tuple(map(self._shards, chunks))
        """Chunk -> rank -> number of the parameters that it owns."""
        self._peers: dict[int, dict[int, tuple[int, ...]]] = {}
        self._region_shards: dict[tuple[int, tuple[int, ...]], tuple[RegionShards, ...]] = {}

    def memory_of(self, chunk: int) -> MemoryCost:
        """The memory model of the chunk's compute type, of a rank that is a set of its own."""
        dtype = self.plan.groups[self.plan.chunks[chunk].group].compute_dtype
        return self.memory if dtype is None else self.memories.get(dtype, self.memory)

    def memory_at(self, rank: int, chunk: int) -> MemoryCost:
        """The same of this rank of a set."""
        return self._memory(chunk, self.part(rank))

    def part(self, rank: int) -> RankPart:
        """Which part of each layer the rank has."""
        if self._sets is None:
            return WHOLE
        found = self._parts.get(rank)
        if found is None:
            found = self._parts[rank] = RankPart.of(self.replica(rank), rank)
        return found

    def _memory(self, chunk: int, part: RankPart) -> MemoryCost:
        if part == WHOLE or self._sets is None:
            return self.memory_of(chunk)
        dtype = self.plan.groups[self.plan.chunks[chunk].group].compute_dtype
        return self._sets.of_rank(part, dtype).memory

    def set_of(self, rank: int) -> tuple[int, ...]:
        """The rank's tensor-parallel set, as far as its ranks are simulated."""
        return self._simulated(self.replica(rank))

    def _simulated(self, replica: Replica) -> tuple[int, ...]:
        return replica.ranks if self._sets is not None else replica.ranks[:1]

    def held(self, rank: int, chunk: int) -> int:
        """Parameters that a rank computes with."""
        part = self.part(rank)
        return self.parameters[chunk] if part == WHOLE else self._parameters(chunk, part)

    def summed_in_sets(self, chunk: int) -> int:
        """With sequence parallelism: those that every rank of a set has, and sees a part of.

        Learned positions are added to the whole sequence, so their gradients are whole.
        """
        whole = sum(unit.count * unit.whole for unit in self._units(chunk))
        if chunk > 0:
            return whole
        assert self._sets is not None
        cut = sum(self._sets.cut_parameters("embedding").values())
        return whole - (self.memory.embedding_parameters() - cut)

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
        head (`adapter.data_parallel.uneven_buckets`).
        """
        if parameters_setting(self.plan) == RESIDENT:
            return (tuple(self.shards[chunk][rank] for rank in ranks),)
        embedding, layer, head = self.sections(chunk, self.part(ranks[0]))
        sizes = [embedding, *[layer] * self.num_layers(chunk), head]
        weights = [replica.shard_weight for replica in self._replicas(chunk)]
        shards = {size: padded_shards(size, weights) for size in set(sizes) if size}
        return tuple(shards[size] for size in sizes if size)

    def region_shards(self, chunk: int, peers: tuple[int, ...]) -> tuple[RegionShards, ...]:
        """Who sums and sends what of each of `pieces`, of a hierarchical group.

        Ranks are numbered in ascending order, which may not be that of `peers`.
        """
        key = chunk, peers
        if key not in self._region_shards:
            order = sorted(range(len(peers)), key=peers.__getitem__)
            group = self.plan.groups[self.plan.chunks[chunk].group]
            regions = regions_of(ranks_by_region(group, sorted(peers)))
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
        return bool(self.plan.groups[self.plan.chunks[chunk].group].hierarchical)

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
                [replace(each, ranks=self._simulated(each)) for each in group.replicas],
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

    def _parameters(self, chunk: int, part: RankPart) -> int:
        """What a rank with this part has."""
        found: int = stage_parameters(self.num_layers(chunk), *self.sections(chunk, part))
        return found

    def sections(self, chunk: int, part: RankPart) -> tuple[int, int, int]:
        """Parameters of the embedding, of one layer, and of the head, as a rank's part has them."""
        memory = self.memory if part == WHOLE else self._memory(chunk, part)
        ends = chunk == 0, self.is_last(chunk)
        # With several chunks the last one has a copy, as it may be whole without the first.
        return section_parameters(memory, *ends, tied_on_same_rank=self.tied and all(ends))

    def _units(self, chunk: int) -> tuple[PartedUnit, PartedUnit]:
        """A layer, and embedding and head together."""
        assert self._sets is not None
        embedding, layer, head = self.sections(chunk, WHOLE)
        in_layer, of_ends = self._sets.cut_parameters("layer"), Counter[UnitKind]()
        tables: list[ModelSection] = ["embedding"] if chunk == 0 else []
        if self.is_last(chunk) and not (self.tied and chunk == 0):
            tables.append("head")
        for table in tables:
            of_ends.update(self._sets.cut_parameters(table))
        return (
            PartedUnit(
                cut=in_layer, whole=layer - sum(in_layer.values()), count=self.num_layers(chunk)
            ),
            PartedUnit(cut=of_ends, whole=embedding + head - of_ends.total()),
        )

    def _parted(self, chunk: int) -> PartedChunk | None:
        group = self.plan.groups[self.plan.chunks[chunk].group]
        if self._sets is None or holds_equal_parts(group):
            return None
        units = [unit for unit in self._units(chunk) if unit.whole or any(unit.cut.values())]
        return PartedChunk.of(units, group.replicas)

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
