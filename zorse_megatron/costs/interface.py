"""The cost models that simulator and planner ask. Times in seconds, sizes in bytes.

Implementations: `costs.profiled_compute` (from a profile, or analytic where nothing was measured),
`costs.model_memory` and `costs.communication` (over the topology graph).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal, Protocol

from zorse_megatron.gpus.gpu import ComputeDtype
from zorse_megatron.inputs.model import JobRecompute
from zorse_megatron.plan.plan import ExpertParallel, Replica, TpShards
from zorse_megatron.schedule.tensor_parallel_parts import UnitKind

RecomputeMode = Literal["none", "selective", "full"]
ModelSection = Literal["embedding", "layer", "head"]


@dataclass(frozen=True, kw_only=True)
class PassTimes:
    """Duration of one micro-batch through one part of the model, on one GPU."""

    forward_s: float
    backward_s: float

    @property
    def both_s(self) -> float:
        """Forward and backward."""
        return self.forward_s + self.backward_s

    def __add__(self, other: "PassTimes") -> "PassTimes":
        """One after the other."""
        return PassTimes(
            forward_s=self.forward_s + other.forward_s,
            backward_s=self.backward_s + other.backward_s,
        )


NO_TIME = PassTimes(forward_s=0, backward_s=0)


class ComputeCost(Protocol):
    """Time of computations by GPU kind; sequence length, dtype and model are fixed."""

    def layer(self, kind: str, micro_batch_size: int) -> PassTimes:
        """One transformer layer, nothing recomputed. Raises LookupError for an unknown kind."""

    def embedding(self, kind: str, micro_batch_size: int) -> PassTimes:
        """Token (and position) embedding."""

    def head(self, kind: str, micro_batch_size: int) -> PassTimes:
        """Final norm, output layer and loss."""

    def recompute_s(self, kind: str, micro_batch_size: int, mode: RecomputeMode) -> float:
        """What recomputing one layer adds to its backward."""

    def weight_gradients_s(self, kind: str, micro_batch_size: int) -> float:
        """What gradients of its matrices take of one layer's backward."""

    def step_s(self, kind: str, num_parameters: int) -> float:
        """Optimizer step on a shard of `num_parameters`."""


class MemoryCost(Protocol):
    """Bytes on a GPU; model, sequence length, dtype and optimizer are fixed."""

    def layer_parameters(self) -> int:
        """Number of parameters of one transformer layer that are trained."""

    def embedding_parameters(self) -> int:
        """Number of parameters of the embedding that are trained."""

    def head_parameters(self, *, tied_on_same_rank: bool) -> int:
        """Number of parameters of the final norm and the head that are trained."""

    def frozen_parameters(self, section: ModelSection, *, tied_on_same_rank: bool = False) -> int:
        """Number of parameters that stay as they are, whole on every GPU; 0 but with adapters."""

    def parameter_bytes(self, num_parameters: int) -> int:
        """Unsharded parameters as they are computed with."""

    def gradient_bytes(self, num_parameters: int) -> int:
        """Unsharded gradients as they are accumulated."""

    def state_bytes(self, num_parameters: int) -> int:
        """Main parameters and optimizer moments of a shard."""

    def activation_bytes(
        self, micro_batch_size: int, mode: RecomputeMode, kind: str | None = None
    ) -> int:
        """What one layer keeps from forward to backward.

        `kind`: of the GPU, as kinds run different attention; None: what the model's usual GPU does.
        """

    def saved_tensor_bytes(
        self, micro_batch_size: int, mode: RecomputeMode, kind: str | None = None
    ) -> tuple[int, ...]:
        """`activation_bytes`, tensor by tensor: what is a block each in host memory."""

    def delayed_bytes(self, micro_batch_size: int) -> int:
        """What one layer keeps from a backward to weight gradients that are computed apart."""

    def arriving_bytes(self, micro_batch_size: int) -> int:
        """Gradients of what a layer's last matrices return: of experts a row for each of a
        token's."""

    def boundary_bytes(self, micro_batch_size: int) -> int:
        """One activation between two layers, as it is sent."""

    def head_bytes(self, micro_batch_size: int) -> int:
        """Logits and what the loss keeps while the head runs."""


@dataclass(frozen=True, kw_only=True)
class DtypeCosts:
    """What computing in one type costs: of a group that does not compute in the job's."""

    compute: ComputeCost
    memory: MemoryCost


@dataclass(frozen=True, kw_only=True)
class LayerTimes:
    """One layer in two: a TP group's ranks meet after each, in a sum."""

    attention: PassTimes
    mlp: PassTimes


class TpComputeCost(ComputeCost, Protocol):
    """Time of computations of one rank of a tensor-parallel group."""

    def layer_in_two(self, kind: str, micro_batch_size: int) -> LayerTimes:
        """`layer`, as its attention and its MLP, which together take as long."""

    def includes_collectives(self, kind: str, section: ModelSection) -> bool:
        """Whether the times were measured in a TP group, so that its collectives are in them."""


@dataclass(frozen=True, kw_only=True)
class TpRankCosts(DtypeCosts):
    """Costs of one rank of a TP group."""

    compute: TpComputeCost


@dataclass(frozen=True, kw_only=True)
class TpShard:
    """Which part of each layer a rank has: of a TP group of `degree` ranks, whose parts may be
    unequal.

    Ranks with even TP shards are all the same: `parts` is None and `index` 0.
    """

    degree: int = 1
    tp_shards: TpShards | None = None
    index: int = 0
    expert_parallel: int = 1
    """Over how many ranks stock spreads the experts of each layer, without TP groups."""
    shared: ExpertParallel | None = None
    """What ranks have that share experts alone; then `degree` is 1."""

    @classmethod
    def of(cls, replica: Replica, rank: int) -> "TpShard":
        """That of a plan's rank."""
        if replica.expert_parallel is not None:
            # Costs do not depend on who owns what.
            shared = replace(replica.expert_parallel, shard_weights=None)
            return cls(shared=shared, index=replica.ranks.index(rank))
        degree, tp_shards = len(replica.ranks), replica.uneven_tp_shards
        if tp_shards is None or degree == 1:
            return cls(degree=degree)
        return cls(degree=degree, tp_shards=tp_shards, index=replica.ranks.index(rank))


WHOLE = TpShard()


@dataclass(frozen=True, kw_only=True)
class TpTraits:
    """What of a model and its command says what ranks exchange inside layers."""

    sequence_parallel: bool = False
    """Whether ranks of a TP group have a part of the sequence each, between layers."""
    learns_positions: bool = False
    """Whether the embedding has a table of positions, which every rank has whole."""
    adapter_shares: tuple[tuple[float, ...], tuple[float, ...]] = ((), ())
    """Of what crosses a TP group between A and B, per token as a share of an activation.

    Of each matrix of a layer whose outputs are cut, and of each whose inputs are.
    """
    num_experts: int = 0
    """Of each layer that has some."""
    experts_per_token: int = 0
    """Those that a token passes."""
    has_shared_expert: bool = False
    """Whether there is something to compute while tokens are on their way to experts."""


class TpCosts(Protocol):
    """Costs of tensor-parallel groups; see `costs.communication` for what is
    inside.
    """

    @property
    def traits(self) -> TpTraits:
        """What they exchange follows from it."""

    def of_rank(self, part: TpShard, dtype: ComputeDtype | None) -> TpRankCosts:
        """Costs of a rank with this part; None: in the type of the job."""

    def share_of_tokens(self, experts: range) -> float:
        """Of all tokens those that pass one of these experts of a layer at least."""

    def cut_parameters(self, section: ModelSection) -> Mapping[UnitKind, int]:
        """Parameters that TP groups cut by these units; of embedding and head their table."""


class CommCost(Protocol):
    """Time of communication between global ranks, on an otherwise idle network."""

    def transfer_s(self, source: int, target: int, num_bytes: int) -> float:
        """Point to point."""

    def shared_links(self, source: int, target: int) -> tuple[tuple[str, float], ...]:
        """(link name, bytes per second) of the path, for contention; names are global."""

    def reduce_scatter_s(self, ranks: tuple[int, ...], shard_bytes: tuple[int, ...]) -> float:
        """Sum of a buffer into shards of these sizes, best of the forms that the rule allows."""

    def all_gather_s(self, ranks: tuple[int, ...], shard_bytes: tuple[int, ...]) -> float:
        """Time of an all-gather, the reverse of a reduce-scatter."""

    def exchange_s(self, ranks: tuple[int, ...], shard_bytes: tuple[int, ...]) -> float:
        """The same sum where every rank sends each owner its part directly."""

    def all_reduce_s(self, ranks: tuple[int, ...], num_bytes: int) -> float:
        """Small statistics: latency of the group."""

    def host_link_bytes_per_s(self, rank: int) -> float:
        """PCIe to pinned host memory."""


@dataclass(frozen=True, kw_only=True)
class LayerCosts(DtypeCosts):
    """What layers of one kind cost, or one between several, and the ends of the model."""

    by_dtype: Mapping[ComputeDtype, DtypeCosts] = field(default_factory=dict)
    """Costs of groups with a `compute_dtype`; those of other types count as the job's."""
    tp_costs: TpCosts | None = None
    """Costs of tensor-parallel groups; None: plans have none."""


class LayerKinds(Protocol):
    """Layers of several kinds (`costs.layer_kinds`)."""

    def runs(self, first: int, stop: int) -> Sequence[tuple[LayerCosts, int]]:
        """Costs of layers [first, stop) in order, and how many alike follow each other."""

    def mean(self, first: int, stop: int) -> LayerCosts:
        """Costs of a layer between those, so many of which cost as much together."""

    def num_with_experts(self, first: int, stop: int) -> int:
        """Of the layers those with experts."""

    @property
    def experts(self) -> LayerCosts:
        """Costs of those."""


@dataclass(frozen=True, kw_only=True)
class JobCosts(LayerCosts):
    """What a model costs on a cluster: all that a simulation of any plan asks."""

    comm: CommCost
    kinds: Sequence[str]
    """Global rank -> kind of GPU."""
    sequence_length: int
    """Tokens per sample."""
    recompute: JobRecompute | None = None
    """What is recomputed in groups that do not say; None: nothing."""
    layer_kinds: LayerKinds | None = None
    """Of a model whose layers are not all alike: then the costs here are of one between them."""

    def runs(self, first: int, stop: int) -> Sequence[tuple[LayerCosts, int]]:
        """See `LayerKinds`."""
        kinds = self.layer_kinds
        return ((self, stop - first),) if kinds is None else kinds.runs(first, stop)

    def mean(self, first: int, stop: int) -> LayerCosts:
        """See `LayerKinds`."""
        return self if self.layer_kinds is None else self.layer_kinds.mean(first, stop)

    def num_with_experts(self, first: int, stop: int) -> int:
        """Of the layers those with experts, of a model that has some."""
        kinds = self.layer_kinds
        return stop - first if kinds is None else kinds.num_with_experts(first, stop)

    @property
    def of_experts(self) -> LayerCosts:
        """Costs of layers with experts, of a model that has some."""
        return self if self.layer_kinds is None else self.layer_kinds.experts


# Times when kinds compute in different dtypes: one cost model per kind.


@dataclass(frozen=True, kw_only=True)
class ByKind:
    """`ComputeCost` of several, one for each kind. Raises LookupError for an unknown kind."""

    computes: Mapping[str, TpComputeCost]
    """Kind -> its costs."""

    def layer(self, kind: str, micro_batch_size: int) -> PassTimes:
        """One transformer layer, nothing recomputed."""
        return self.computes[kind].layer(kind, micro_batch_size)

    def layer_in_two(self, kind: str, micro_batch_size: int) -> LayerTimes:
        """The same as its attention and its MLP."""
        return self.computes[kind].layer_in_two(kind, micro_batch_size)

    def embedding(self, kind: str, micro_batch_size: int) -> PassTimes:
        """Token (and position) embedding."""
        return self.computes[kind].embedding(kind, micro_batch_size)

    def head(self, kind: str, micro_batch_size: int) -> PassTimes:
        """Final norm, output layer and loss."""
        return self.computes[kind].head(kind, micro_batch_size)

    def recompute_s(self, kind: str, micro_batch_size: int, mode: RecomputeMode) -> float:
        """What recomputing one layer adds to its backward."""
        return self.computes[kind].recompute_s(kind, micro_batch_size, mode)

    def weight_gradients_s(self, kind: str, micro_batch_size: int) -> float:
        """What gradients of its matrices take of one layer's backward."""
        return self.computes[kind].weight_gradients_s(kind, micro_batch_size)

    def step_s(self, kind: str, num_parameters: int) -> float:
        """Optimizer step on a shard of `num_parameters`."""
        return self.computes[kind].step_s(kind, num_parameters)

    def includes_collectives(self, kind: str, section: ModelSection) -> bool:
        """Whether the times were measured in a TP group, so that its collectives are in them."""
        return self.computes[kind].includes_collectives(kind, section)


# Where a cost comes from, and how far such costs are off.


Basis = Literal["measured", "scaled", "analytic"]
_WORDS = {"measured": "measured", "scaled": "scaled", "analytic": "estimated"}
# (basis, whether 16 bits) -> share that nine of ten of the public layer times (forward and
# backward together) are off by at most: docs/simulator.md, from
# tests/unit/test_measured.py.
_OFF = {
    ("scaled", True): 0.10,
    ("scaled", False): 0.28,
    ("analytic", True): 0.14,
    ("analytic", False): 0.34,
}
_OFF_UNCALIBRATED = {True: 0.36, False: 0.44}


@dataclass(frozen=True, kw_only=True)
class Provenance:
    """measured: on this kind with this model; scaled: from others; analytic: from data sheets."""

    basis: Basis
    detail: str
    off_by: float
    """Share that nine of ten such layer times are off by at most; 0 where they were measured."""
    is_calibrated: bool = True
    """Whether anybody measured this chip; analytic costs know of some that nobody did."""
    has_weight_gradients: bool = False
    """Whether their share of a backward was measured."""

    def __str__(self) -> str:
        return f"{_WORDS[self.basis]}: {self.detail}"


def off_by(basis: Basis, *, sixteen_bit: bool, is_calibrated: bool = True) -> float:
    """Return how far such layer times are off, see `Provenance.off_by`."""
    if not is_calibrated:
        return _OFF_UNCALIBRATED[sixteen_bit]
    return _OFF.get((basis, sixteen_bit), 0.0)
