"""The plan: which rank holds which layers, and how much work and state each rank gets.

These classes fix the shape of a plan (names, types, ranges of single values). The rules that tie
values together are in `rules.py`; reading and writing the file is in `plan_file.py`. Lists in
the file are tuples here. Nothing is converted: `"8"`, `8.0` and `true` are not the integer 8.
"""

import dataclasses
from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property
from itertools import groupby, islice
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, ConfigDict, Field
from pydantic.dataclasses import dataclass
from pydantic_core import PydanticKnownError

from zorse_megatron.gpus.gpu import ComputeDtype

# The docstring under each field becomes its description in plan.schema.json.
_CONFIG = ConfigDict(extra="forbid", strict=True, use_attribute_docstrings=True)

Positive = Annotated[int, Field(ge=1)]
Count = Annotated[int, Field(ge=0)]
FiniteFloat = Annotated[float, Field(allow_inf_nan=False)]
Weight = Annotated[float, Field(ge=0, allow_inf_nan=False)]
PositiveFloat = Annotated[float, Field(gt=0, allow_inf_nan=False)]
GradReduceDtype = Literal["bf16", "fp16"]
ComputeTimes = tuple[PositiveFloat, PositiveFloat, Weight]
ScheduleName = Literal["1f1b", "interleaved", "breadth_first"]


def refuse_non_integer(value: Any) -> Any:
    """Let integers pass: Literal[1] compares with ==, so True and 1.0 would be accepted."""
    if type(value) is not int:
        raise PydanticKnownError("int_type")
    return value


@dataclass(frozen=True, kw_only=True, config=_CONFIG)
class TpShards:
    """What each rank of a tensor-parallel group holds of a layer; what is absent is cut equally."""

    kv_groups: tuple[Count, ...] | None = None
    """KV groups of attention, with their query heads."""
    mlp_columns: tuple[Count, ...] | None = None
    """Columns of the MLP."""
    vocabulary_rows: tuple[Count, ...] | None = None
    """Rows of the embedding table and of the output layer, padding included."""
    experts: tuple[Count, ...] | None = None
    """Whole experts of each layer of experts, in their order; never absent in such a model."""

    def unequal(self) -> "TpShards | None":
        """What is not cut as it would be if nothing were said; None: all of it is."""
        said = {
            name: counts
            for name, counts in vars(self).items()
            if len(set(counts or ())) > 1 or (name == "experts" and counts)
        }
        return TpShards(**said) if said else None


@dataclass(frozen=True, kw_only=True, config=_CONFIG)
class ExpertParallel:
    """What each rank of a replica has whose ranks share nothing but the experts of each layer."""

    experts: tuple[Count, ...]
    """Whole experts of each layer, in their order; all others go through messages."""
    samples: tuple[Count, ...]
    """Samples of each micro-batch; they add up to its size."""
    shard_weights: tuple[Weight, ...] | None = None
    """Relative shares of the replica's training state, of all but experts; absent: equal ones."""
    overlap: bool = False
    """Whether each micro-batch runs as two interleaved halves, so that tokens of one travel while
    the other is computed."""

    @property
    def parts(self) -> int:
        """In how many a micro-batch runs."""
        return 2 if self.overlap else 1

    def weight_of(self, index: int) -> float:
        """Which part of the replica's share rank `index` owns."""
        weights = self.shard_weights or (1.0,) * len(self.experts)
        return weights[index] / sum(weights)


@dataclass(frozen=True, kw_only=True, config=_CONFIG)
class Recompute:
    """Which activations are computed again in the backward pass instead of being kept."""

    mode: Literal["none", "selective", "full"]
    """none: keep all; selective: recompute core attention; full: recompute whole layers."""
    num_layers: Positive | None = None
    """With mode full: how many layers of each chunk are recomputed; absent: all of them."""


@dataclass(frozen=True, kw_only=True, config=_CONFIG)
class Offload:
    """What waits in host memory while it is not in use."""

    parameters: bool = False
    """Whether parameters wait in host memory."""
    optimizer_state: bool = False
    """Whether the optimizer state stays in host memory."""
    optimizer_state_fraction: Annotated[float, Field(gt=0, le=1)] | None = None
    """The part of it that does; absent: all of it."""
    gradients: bool = False
    """Whether reduced gradients wait in host memory for the optimizer step."""
    activations: bool = False
    """Whether saved activations wait in host memory."""

    @property
    def said(self) -> tuple[str, ...]:
        """What waits in host memory, for people."""
        names = ("parameters", "gradients", "optimizer_state", "activations")
        found = {name: name.replace("_", " ") for name in names if getattr(self, name)}
        fraction = self.optimizer_state_fraction
        if fraction is not None and "optimizer_state" in found:
            found["optimizer_state"] = f"{fraction:.0%} of the optimizer state"
        return tuple(found.values())


@dataclass(frozen=True, kw_only=True, config=_CONFIG)
class Halved:
    """Micro-batches that run in two halves, with which a pipeline fills and drains sooner."""

    first: Count = 0
    """How many at the start of a step."""
    last: Count = 0
    """How many at its end."""
    time_of_half: Annotated[float, Field(gt=0, le=1)] = 0.5
    """What a half takes of a whole micro-batch's time. Orders follow it."""

    @property
    def num_whole(self) -> int:
        """How many micro-batches are halved."""
        return self.first + self.last


@dataclass(frozen=True, kw_only=True, config=_CONFIG)
class Replica:
    """One data-parallel member of a group, and its share of the work and of the state."""

    ranks: Annotated[tuple[int, ...], Field(min_length=1)]
    """Global ranks of this replica: one rank, or those of a tensor-parallel group or of ranks that
    share experts (`expert_parallel`), in order."""
    micro_batch_size: Positive
    """Samples that the replica runs at once."""
    num_microbatches: Count
    """Micro-batches per iteration; 0 for a replica that only holds state."""
    shard_weight: Weight
    """Relative share of the group's training state; 0 for a replica that owns none."""
    region: str | None = None
    """Where the ranks are; samples stay in a region where counts allow. Absent: nowhere special."""
    compute_s: tuple[ComputeTimes, ...] | None = None
    """Seconds that a micro-batch takes in each chunk of the group, in model order: its forward, its
    backward, and its weight gradients where these are apart. Orders follow them; absent: work is
    taken to be balanced."""
    halved: Halved | None = None
    """Micro-batches that run in two halves each; absent: none."""
    max_in_flight: Positive | None = None
    """Most samples times layers between forward and backward; absent: as the schedule has it."""
    max_delayed_wgrad: Count | None = None
    """Most samples times layers whose weight gradients wait; absent: as the schedule has it."""
    tp_shards: TpShards | None = None
    """Uneven TP shards of the ranks of a tensor-parallel group, in their order; absent: equal
    parts."""
    expert_parallel: ExpertParallel | None = None
    """What each rank has, in their order, if they are no tensor-parallel group but share experts
    alone."""
    recompute: Recompute | None = None
    """Activation recomputation of this replica; absent: as its group."""
    offload: Offload | None = None
    """Offloading of this replica to host memory; absent: as its group."""

    @property
    def num_samples(self) -> int:
        """Samples that the replica runs in one iteration."""
        return self.micro_batch_size * self.num_microbatches

    @property
    def sizes(self) -> tuple[int, ...]:
        """Samples of each micro-batch as it runs, halves apart, in order."""
        halved = self.halved or Halved()
        halves = (-(-self.micro_batch_size // 2), self.micro_batch_size // 2)
        whole = (self.num_microbatches - halved.num_whole) * (self.micro_batch_size,)
        return (*halved.first * halves, *whole, *halved.last * halves)

    @property
    def num_times(self) -> float:
        """For how many whole micro-batches' time the replica computes in one iteration."""
        halved = self.halved or Halved()
        return self.num_microbatches + halved.num_whole * (2 * halved.time_of_half - 1)

    @property
    def work(self) -> str:
        """The micro-batches of one iteration for people: number x samples, and halves."""
        halves = f", {self.halved.num_whole} in halves" if self.halved else ""
        return f"{self.num_microbatches} x {self.micro_batch_size}{halves}"

    def with_count(self, num_microbatches: int) -> "Replica":
        """It with so many micro-batches, of which as many are halved as there are."""
        halved = self.halved
        if halved is not None and halved.num_whole > num_microbatches:
            first = min(halved.first, num_microbatches)
            last = min(halved.last, num_microbatches - first)
            fewer = dataclasses.replace(halved, first=first, last=last)
            halved = fewer if fewer.num_whole else None
        return dataclasses.replace(self, num_microbatches=num_microbatches, halved=halved)

    @property
    def tp_degree(self) -> int:
        """Among how many ranks a layer is cut; 1 where they share experts alone."""
        return 1 if self.expert_parallel else len(self.ranks)

    @property
    def uneven_tp_shards(self) -> TpShards | None:
        """The parts, as far as they are not those of a plan that says none."""
        if self.tp_shards is None or self.tp_degree == 1:
            return None
        return self.tp_shards.unequal()


@dataclass(frozen=True, kw_only=True, config=_CONFIG)
class Group:
    """Ranks that hold the same layers and share their data."""

    name: str | None = None
    """A name for people; the group's number is its place in the list, counted from 0."""
    replicas: Annotated[tuple[Replica, ...], Field(min_length=1)]
    """The data-parallel members; each runs a part of every global batch."""
    recompute: Recompute | None = None
    """Activation recomputation of replicas that do not say; absent: as the training command."""
    offload: Offload | None = None
    """Offloading to host memory of replicas that do not say; absent: none."""
    split_backward: bool | None = None
    """Whether gradients of weights are a computation of their own; absent: part of the backward."""
    compute_dtype: ComputeDtype | None = None
    """In which type the group computes; absent: as the training command says."""
    grad_reduce_dtype: GradReduceDtype | None = None
    """In which type gradients are sent and then summed in fp32; absent: as they are kept."""
    hierarchical: bool | None = None
    """Whether sums are made in each region first, then between regions; absent: over all ranks."""

    @cached_property
    def ranks(self) -> tuple[int, ...]:
        """All ranks of the group, in replica order."""
        return tuple(rank for replica in self.replicas for rank in replica.ranks)


@dataclass(frozen=True, kw_only=True, config=_CONFIG)
class TransferTime:
    """How long messages are on their way to the next chunk, and gradients back."""

    latency_s: Weight
    """What any message takes."""
    s_per_sample: Weight
    """What each of its samples adds."""


@dataclass(frozen=True, kw_only=True, config=_CONFIG)
class Chunk:
    """Consecutive layers held by one group."""

    group: int
    """Number of the group that holds the layers."""
    layers: tuple[int, int]
    """[first, stop): the first transformer layer and the one after the last, counted from 0."""
    transfer: TransferTime | None = None
    """How long the way to the next chunk is; absent: it takes no time."""

    @property
    def num_layers(self) -> int:
        """How many layers it has."""
        return self.layers[1] - self.layers[0]


@dataclass(frozen=True, kw_only=True, config=_CONFIG)
class Schedule:
    """The order in which micro-batches run through the chunks."""

    name: ScheduleName
    """Which schedule."""
    # Left out of the hash because a dict has none; equality still compares it.
    parameters: dict[str, str] = dataclasses.field(default_factory=dict, hash=False)
    """Settings of that schedule; only breadth_first takes any."""


@dataclass(frozen=True, kw_only=True, config=_CONFIG)
class ModelFingerprint:
    """The model that the plan was made for. What is absent is not checked."""

    num_layers: Positive
    """Transformer layers; embedding and output layer are not counted."""
    hidden_size: Positive | None = None
    """Width of the residual stream."""
    ffn_hidden_size: Positive | None = None
    """Width of the feed-forward block."""
    num_attention_heads: Positive | None = None
    """Query heads."""
    num_query_groups: Positive | None = None
    """Key and value heads."""
    seq_length: Positive | None = None
    """Tokens per sample."""
    vocab_size: Positive | None = None
    """Rows of the embedding table, padding included."""
    tied_embeddings: bool | None = None
    """Whether embedding and output layer share one table."""
    lora: str | None = None
    """The adapters that alone are trained, as --zorse-lora has them."""
    num_experts: Positive | None = None
    """Experts of each layer; absent beside a width of the feed-forward block: none."""
    moe_router_topk: Positive | None = None
    """Experts that a token passes."""
    moe_ffn_hidden_size: Positive | None = None
    """Width of one expert."""
    moe_layer_freq: Annotated[tuple[Literal[0, 1], ...], Field(min_length=1)] | None = None
    """Layer -> whether it has experts, as in Megatron's list; absent: all have, or none."""

    @property
    def layers_with_experts(self) -> tuple[int, ...]:
        """The same of a model with experts, in full."""
        return self.moe_layer_freq or (1,) * self.num_layers


@dataclass(frozen=True, kw_only=True, config=_CONFIG)
class ClusterFingerprint:
    """The cluster that the plan was made for. What is absent is not checked."""

    name: str | None = None
    """A name for people."""
    gpu_kinds: tuple[str, ...] | None = None
    """The kind of GPU of each global rank, in rank order."""


@dataclass(frozen=True, kw_only=True, config=_CONFIG)
class Predictions:
    """What the planner expects. Compared with measurements, never needed to train."""

    iteration_s: PositiveFloat | None = None
    """Duration of one iteration, in seconds."""
    tokens_per_s: PositiveFloat | None = None
    """Throughput of the whole cluster, in tokens per second."""
    peak_memory_bytes: tuple[Count, ...] | None = None
    """Peak GPU memory of each global rank, in bytes, in rank order."""
    micro_batch_s: tuple[Weight, ...] | None = None
    """How long each global rank computes for one micro-batch, forward and backward, in seconds."""


@dataclass(frozen=True, kw_only=True, config=_CONFIG)
class Plan:
    """How to train one model on one cluster."""

    schema_version: Annotated[Literal[2], BeforeValidator(refuse_non_integer)]
    """Version of the plan file format."""
    global_batch_size: Positive
    """Samples per iteration; the replicas of every group add up to it."""
    model: ModelFingerprint
    """The model that the plan was made for."""
    groups: Annotated[tuple[Group, ...], Field(min_length=1)]
    """The groups, in any order; chunks refer to them by their place in this list."""
    chunks: Annotated[tuple[Chunk, ...], Field(min_length=1)]
    """The chunks, in model order: the first holds layer 0."""
    schedule: Schedule
    """Which schedule, and its settings."""
    cluster: ClusterFingerprint | None = None
    """The cluster that the plan was made for."""
    predictions: Predictions | None = None
    """What the planner expects."""

    @cached_property
    def world_size(self) -> int:
        """Number of ranks."""
        return sum(len(group.ranks) for group in self.groups)

    def group_name(self, number: int) -> str:
        """What people read of the group."""
        return self.groups[number].name or f"group {number}"

    @property
    def groups_in_order(self) -> tuple[int, ...]:
        """Numbers of groups, in the order of their first layers."""
        return tuple(dict.fromkeys(chunk.group for chunk in self.chunks))

    def numbered_replicas(self) -> Iterator[tuple[int, int, Replica]]:
        """Yield (number of its group, its own number there, replica), in order."""
        for number, group in enumerate(self.groups):
            for index, replica in enumerate(group.replicas):
                yield number, index, replica

    def with_group(self, number: int, **changes: Any) -> "Plan":
        """It with other values in one group's fields."""
        groups = [*self.groups]
        groups[number] = dataclasses.replace(groups[number], **changes)
        return dataclasses.replace(self, groups=tuple(groups))

    def with_replicas(self, replicas: Iterable[Replica]) -> "Plan":
        """It with these in place of its own: as many, in the order of `numbered_replicas`."""
        left = iter(replicas)
        groups = (
            dataclasses.replace(group, replicas=tuple(islice(left, len(group.replicas))))
            for group in self.groups
        )
        return dataclasses.replace(self, groups=tuple(groups))

    def group_of_rank(self, rank: int) -> int:
        """Return the number of the group that `rank` is in."""
        return self.replica_of_rank(rank)[0]

    def replica_of_rank(self, rank: int) -> tuple[int, int]:
        """Return the number of the group that `rank` is in and that of its replica there."""
        found = self._replica_by_rank.get(rank)
        if found is None:
            raise ValueError(
                f"rank {rank} is in no group; the plan has ranks 0 to {self.world_size - 1}"
            )
        return found

    @cached_property
    def _replica_by_rank(self) -> dict[int, tuple[int, int]]:
        """A file that is being checked may have a rank twice: the first place counts."""
        found: dict[int, tuple[int, int]] = {}
        for number, index, replica in self.numbered_replicas():
            for rank in replica.ranks:
                found.setdefault(rank, (number, index))
        return found

    def num_layers_of_group(self, group: int) -> int:
        """How many layers the group holds."""
        return sum(self.chunks[chunk].num_layers for chunk in self.chunks_of_group(group))

    def chunks_of_group(self, group: int) -> tuple[int, ...]:
        """Return the numbers of the chunks that `group` holds, in model order."""
        if not 0 <= group < len(self.groups):
            raise ValueError(f"no group {group}; the plan has groups 0 to {len(self.groups) - 1}")
        return tuple(index for index, chunk in enumerate(self.chunks) if chunk.group == group)


# The ranks that communicate along each axis of parallelism, of a plan's unequal groups.


def tp_group_of_rank(plan: Plan, rank: int) -> tuple[int, ...]:
    """The tensor-parallel group of `rank`: the ranks of its replica, in order of their parts."""
    group, index = plan.replica_of_rank(rank)
    replica = plan.groups[group].replicas[index]
    return (rank,) if replica.expert_parallel else replica.ranks


def has_equal_tp_shards(group: Group) -> bool:
    """Whether all replicas cut layers into the same parts, so that each rank has twins."""
    if any(replica.expert_parallel for replica in group.replicas):
        return False
    return len({(len(replica.ranks), replica.uneven_tp_shards) for replica in group.replicas}) == 1


def data_parallel_ranks(group: Group) -> tuple[tuple[int, ...], ...]:
    """Ranks among which gradients are summed and shards are cut, in ascending order each.

    Where replicas hold equal parts: those with the same part, one of each replica. Otherwise all
    ranks of the group.
    """
    if not has_equal_tp_shards(group):
        return (tuple(sorted(group.ranks)),)
    parts = zip(*(replica.ranks for replica in group.replicas), strict=True)
    return tuple(tuple(sorted(part)) for part in parts)


def ranks_by_region(group: Group, ranks: Sequence[int]) -> tuple[tuple[int, ...], ...]:
    """Ranks of the group, in their order, cut where the region changes."""
    regions = {rank: replica.region for replica in group.replicas for rank in replica.ranks}
    return tuple(tuple(run) for _, run in groupby(ranks, key=regions.__getitem__))


def communicating_ranks(
    group: Group,
) -> tuple[tuple[Literal["group", "region", "across"], tuple[int, ...]], ...]:
    """What each communicator for sums and gathers of the group is for, and its ranks.

    group: over all of `data_parallel_ranks`; of a hierarchical group also one in each region, and
    one across them for messages.
    """
    found: list[tuple[Literal["group", "region", "across"], tuple[int, ...]]] = []
    for ranks in data_parallel_ranks(group):
        found.append(("group", ranks))
        if group.hierarchical:
            found += [("region", run) for run in ranks_by_region(group, ranks)]
            found.append(("across", ranks))
    return tuple(found)
