"""The inputs of a search: cluster, model and profile, joined and validated."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property

from zorse_megatron.costs.comm import GraphComm
from zorse_megatron.costs.interface import (
    CommCost,
    ComputeCost,
    DtypeCosts,
    MemoryCost,
    SetCosts,
)
from zorse_megatron.costs.process_memory import MemoryItem, fixed_bytes, most_bytes, process_items
from zorse_megatron.costs.provenance import Provenance
from zorse_megatron.errors import Problem
from zorse_megatron.planner.inputs.cost_models import CostModels
from zorse_megatron.planner.inputs.cost_problems import communication_dtype_problems, kind_problems
from zorse_megatron.planner.inputs.search_space import SearchSpace, space_problems, wish_problems
from zorse_megatron.planner.inputs.split_costs import SplitCosts
from zorse_megatron.planner.inputs.units import Units, in_rank_order
from zorse_megatron.planner.planner_errors import PlannerInputError
from zorse_megatron.schema.cluster.cluster import Cluster
from zorse_megatron.schema.gpus.gpu import (
    DTYPE_OF,
    ComputeDtype,
    DtypeChoice,
    GpuKind,
    common_dtype,
)
from zorse_megatron.schema.model.computing import USUAL, Computing, JobRecompute
from zorse_megatron.schema.model.model_shape import ModelShape
from zorse_megatron.schema.plan.plan import (
    ClusterFingerprint,
    ModelFingerprint,
    Plan,
)
from zorse_megatron.schema.profile.profile import Profile, Source
from zorse_megatron.schema.text.figures import memory as spelled
from zorse_megatron.topology.cluster_topology import Topology
from zorse_megatron.topology.from_cluster import topology_of

__all__ = ["DEFAULT_MARGIN", "Inputs", "SearchSpace", "make_inputs"]

DEFAULT_MARGIN = 0.05
_EMPTY = Profile(schema_version=1, sources=(Source(name="none", kind="analytic"),))


@dataclass(frozen=True, kw_only=True)
class Inputs:
    """Everything that the search and its estimates ask for.

    Layers are divided among units: GPUs, or tensor-parallel sets of them. What is called a rank
    here is a unit, and the global rank where no GPUs are joined; `units` knows the GPUs of each.
    """

    spec: Topology
    compute: ComputeCost
    memory: MemoryCost
    comm: CommCost
    by_dtype: Mapping[ComputeDtype, DtypeCosts]
    """Costs of groups that a plan lets compute in these types."""
    kinds: tuple[str, ...]
    """Rank -> kind of GPU."""
    capacities_bytes: tuple[int, ...]
    """Rank -> what a process may fill: the GPU's memory less the margin."""
    host_bytes: tuple[int | None, ...]
    """Rank -> its part of its node's host memory; None where the cluster does not say."""
    global_batch_size: int
    """Samples per iteration."""
    sequence_length: int
    """Tokens per sample."""
    num_layers: int
    tied_embeddings: bool
    model: ModelFingerprint
    cluster: ClusterFingerprint
    space: SearchSpace
    memory_margin: float
    best_sizes: dict[str, tuple[int, ...]]
    """Kind -> micro-batch sizes that the lower bound looks at: those measured, where any were."""
    recompute: JobRecompute | None = None
    """What is recomputed in groups of a given plan that do not say; None: nothing."""
    own_types: Mapping[str, GpuKind] | None = None
    """Kind -> what it can do, where each group computes in a type of its own; None: all in one.

    Then `compute` costs each kind in the best type that it has, and `memory` is that of the type
    that all kinds have; what a plan takes is simulated in the types that its groups have.
    """
    provenances: Mapping[str, Provenance] = field(default_factory=dict)
    """Kind -> what its layer times rest on."""
    notes: tuple[str, ...] = ()
    """For people: what the costs rest on."""
    warnings: tuple[str, ...] = ()
    """Of the notes those that many do not expect."""
    to_do: tuple[str, ...] = ()
    """Of the warnings those that ask for another command or measurement."""
    sets: SetCosts | None = None
    """Costs of tensor-parallel sets that a plan has; None: one rank stands for a set."""
    joined_units: Units | None = None
    """Units some of which are sets; None: all are GPUs."""
    gpus: Mapping[str, GpuKind] | None = None
    """Kind -> its figures; None: processes take no memory beside their tensors."""

    @property
    def world_size(self) -> int:
        """Number of GPUs."""
        return len(self.kinds)

    @cached_property
    def units(self) -> Units:
        """The units, and the inputs of single GPUs: these, if no GPUs are joined."""
        if self.joined_units is not None:
            return self.joined_units
        alone = in_rank_order((), self.world_size)
        return Units(base=self, sets=alone, kinds=self.kinds)

    @cached_property
    def tensor_capacities_bytes(self) -> tuple[int, ...]:
        """Rank -> what tensors may fill, before a plan says which communicators there are."""
        beside = {kind: most_bytes(gpu) for kind, gpu in (self.gpus or {}).items()}
        return tuple(
            capacity - beside.get(kind, 0)
            for capacity, kind in zip(self.capacities_bytes, self.kinds, strict=True)
        )

    def fixed_bytes(self, plan: Plan) -> tuple[int, ...] | None:
        """Rank -> what its process takes beside tensors under a plan of these GPUs."""
        if self.gpus is None:
            return None
        return fixed_bytes(plan, [self.gpus[kind] for kind in self.kinds])

    def dtype_of(self, ranks: Iterable[int]) -> ComputeDtype | None:
        """What a group of these ranks computes in; None: what the training command says."""
        gpus = self.units.base
        if gpus.own_types is None:
            return None
        kinds = {gpus.kinds[rank] for rank in self.units.ranks(ranks)}
        return common_dtype(gpus.own_types[kind] for kind in kinds)


def make_inputs(
    cluster: Cluster,
    model: ModelShape,
    profile: Profile | None,
    *,
    global_batch_size: int,
    dtype: DtypeChoice,
    memory_margin: float = DEFAULT_MARGIN,
    space: SearchSpace | None = None,
    computing: Computing = USUAL,
) -> Inputs:
    """Join cluster, model and profile.

    `dtype`: what all groups compute in; auto: each in the first of bf16, fp16 and fp32 that all of
    its GPUs have units for.
    `computing`: what the training command says of how layers are computed.
    `memory_margin`: share of every GPU's memory reserved for fragmentation and what is not counted.

    Raises PlannerInputError with every problem: kinds of GPU without units for the type or that can
    be costed neither by the profile nor by published figures, and numbers out of range.
    """
    space = space or SearchSpace()
    known = profile or _EMPTY
    models = CostModels(
        cluster=cluster, model=model, profile=known, dtype=dtype, computing=computing
    )
    problems = [
        *_number_problems(global_batch_size, memory_margin),
        *space_problems(space),
        *wish_problems(space, cluster, model),
        *communication_dtype_problems(
            space.gradient_comm_dtype, [each.dtype for each in models.computes.values()]
        ),
        *kind_problems(models.computes),
    ]
    if problems:
        raise PlannerInputError("cluster, model and profile do not make a plan", problems)
    return _joined(models, global_batch_size, memory_margin, space)


def _joined(models: CostModels, batch: int, memory_margin: float, space: SearchSpace) -> Inputs:
    cluster, model = models.cluster, models.model
    spec = topology_of(cluster, models.profile)
    memory, memory_note = models.memory
    return Inputs(
        spec=spec,
        compute=models.compute,
        memory=memory,
        comm=GraphComm(spec),
        by_dtype={name: models.costs_in(each) for name, each in DTYPE_OF.items()},
        kinds=cluster.gpu_kinds,
        capacities_bytes=_capacities(cluster, memory_margin),
        host_bytes=_host_parts(cluster),
        global_batch_size=batch,
        sequence_length=model.seq_length,
        num_layers=model.num_layers,
        tied_embeddings=model.tied_embeddings,
        model=model.fingerprint(),
        cluster=cluster.fingerprint(),
        space=space,
        memory_margin=memory_margin,
        best_sizes=models.best_sizes,
        recompute=models.computing.recompute,
        own_types=cluster.kinds if models.has_own_types else None,
        sets=SplitCosts(models=models),
        gpus=models.gpus,
        provenances={kind: each.provenance(kind) for kind, each in models.computes.items()},
        notes=(*models.notes, memory_note, *models.warnings, *_process_notes(models.gpus)),
        warnings=models.warnings,
        to_do=models.to_do,
    )


def _capacities(cluster: Cluster, memory_margin: float) -> tuple[int, ...]:
    ranks = range(cluster.world_size)
    return tuple(int(cluster.gpu_of_rank(r).memory_bytes * (1 - memory_margin)) for r in ranks)


def _process_notes(gpus: Mapping[str, GpuKind]) -> Iterator[str]:
    """What is there beside tensors, alike for many kinds."""
    alike: dict[tuple[MemoryItem, ...], list[str]] = {}
    for name, gpu in gpus.items():
        alike.setdefault(process_items(gpu), []).append(name)
    for items, names in alike.items():
        said = ", ".join(f"{item.name} {spelled(item.num_bytes)}" for item in items)
        yield f"memory besides tensors on {' and '.join(names)}: {said}, and NCCL's buffers"


def _host_parts(cluster: Cluster) -> tuple[int | None, ...]:
    """Rank -> an equal part of its node's host memory."""
    return tuple(
        None if node.host_memory_bytes is None else node.host_memory_bytes // len(node.ranks)
        for node in cluster.nodes
        for _ in node.ranks
    )


def _number_problems(global_batch_size: int, memory_margin: float) -> Iterator[Problem]:
    if global_batch_size < 1:
        yield Problem(
            where="global batch size",
            found=f"{global_batch_size}",
            expected="1 sample or more",
            remedy="Give the number of samples of one iteration.",
        )
    if not 0 <= memory_margin < 1:
        yield Problem(
            where="memory margin",
            found=f"{memory_margin}",
            expected="a share of the memory, at least 0 and below 1",
            remedy="0.05 reserves one twentieth.",
        )
