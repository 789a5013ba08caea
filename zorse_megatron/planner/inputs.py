"""What a search starts from: cluster, model and profile, joined and checked."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace

from zorse_megatron.costs.by_kind import ByKind
from zorse_megatron.costs.comm import GraphComm
from zorse_megatron.costs.compute import ProfiledCompute
from zorse_megatron.costs.efficiency import is_sixteen_bit
from zorse_megatron.costs.interface import CommCost, ComputeCost, DtypeCosts, MemoryCost
from zorse_megatron.costs.memory import (
    TransformerMemory,
    memory_from_profile,
    precision_of,
)
from zorse_megatron.errors import Problem
from zorse_megatron.planner.errors import PlannerInputError
from zorse_megatron.planner.price_problems import kind_problems, wire_problems
from zorse_megatron.schema.cluster import Cluster
from zorse_megatron.schema.computing import USUAL, Attention, Computing, JobRecompute
from zorse_megatron.schema.gpu import (
    PRICED_IN,
    ComputeDtype,
    Dtype,
    DtypeChoice,
    GpuKind,
    common_dtype,
)
from zorse_megatron.schema.model import ModelShape
from zorse_megatron.schema.plan import ClusterFingerprint, GradientWire, ModelFingerprint
from zorse_megatron.schema.profile import Profile, Source
from zorse_megatron.topology.from_cluster import topology_of
from zorse_megatron.topology.spec import TopologySpec

DEFAULT_MARGIN = 0.05
_EMPTY = Profile(schema_version=1, sources=(Source(name="none", kind="analytic"),))


@dataclass(frozen=True, kw_only=True)
class SearchSpace:
    """Which plans may be proposed."""

    schedules: tuple[str, ...] = ("1f1b", "interleaved", "breadth_first")
    recompute: tuple[str, ...] = ("none", "selective", "full")
    """Modes that groups may have; with full, any number of layers."""
    offload: bool = True
    """Whether anything may wait in host memory."""
    max_micro_batch_size: int | None = None
    """None: whatever fits."""
    max_groups: int | None = None
    """None: as many as there are layers."""
    gradient_wire: GradientWire | None = None
    """In which type gradients may be sent where that is faster; None: as they are kept."""


@dataclass(frozen=True, kw_only=True)
class Inputs:
    """Everything that the search and its estimates ask for. Ranks are global ranks."""

    spec: TopologySpec
    compute: ComputeCost
    memory: MemoryCost
    comm: CommCost
    by_dtype: Mapping[ComputeDtype, DtypeCosts]
    """Costs of groups that a plan lets compute in these types."""
    kinds: tuple[str, ...]
    """Rank -> kind of GPU."""
    capacities_bytes: tuple[int, ...]
    """Rank -> what a plan may fill: the GPU's memory less the margin."""
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

    Then `compute` prices each kind in the best type that it has, and `memory` is that of the type
    that all kinds have; what a plan takes is simulated in the types that its groups have.
    """
    notes: tuple[str, ...] = ()
    """For people: what the prices rest on."""
    warnings: tuple[str, ...] = ()
    """Of the notes those that say what is not counted."""

    @property
    def world_size(self) -> int:
        """Number of GPUs."""
        return len(self.kinds)

    def dtype_of(self, ranks: Iterable[int]) -> ComputeDtype | None:
        """What a group of these ranks computes in; None: what the training command says."""
        if self.own_types is None:
            return None
        return common_dtype(self.own_types[kind] for kind in {self.kinds[rank] for rank in ranks})


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
    `memory_margin`: share of every GPU's memory that stays free for the CUDA context,
    communication buffers and fragmentation, which nothing prices.

    Raises PlannerInputError with every problem: kinds of GPU without units for the type or that can
    be priced neither by the profile nor by published figures, and numbers out of range.
    """
    space = space or SearchSpace()
    known = profile or _EMPTY
    computes = _computes(known, model, cluster, dtype, computing)
    common = PRICED_IN[common_dtype(cluster.kinds.values())] if dtype == "auto" else dtype
    problems = [
        *_number_problems(global_batch_size, memory_margin),
        *_space_problems(space),
        *wire_problems(space.gradient_wire, [each.dtype for each in computes.values()]),
        *kind_problems(computes),
    ]
    if problems:
        raise PlannerInputError("cluster, model and profile do not make a plan", problems)
    spec = topology_of(cluster, known if known.links else None)
    memory, memory_note = _memory(known, model, common, computing)
    warnings = _flash_notes(cluster, computing, memory)
    return Inputs(
        spec=spec,
        compute=ByKind(computes=computes) if dtype == "auto" else next(iter(computes.values())),
        memory=memory,
        comm=GraphComm(spec),
        by_dtype={
            name: _costs_in(each, known, model, cluster, computing)
            for name, each in PRICED_IN.items()
        },
        kinds=cluster.gpu_kinds,
        capacities_bytes=tuple(
            int(cluster.gpu_of_rank(rank).memory_bytes * (1 - memory_margin))
            for rank in range(cluster.world_size)
        ),
        host_bytes=tuple(
            None if node.host_memory_bytes is None else node.host_memory_bytes // len(node.ranks)
            for node in cluster.nodes
            for _ in node.ranks
        ),
        global_batch_size=global_batch_size,
        sequence_length=model.seq_length,
        num_layers=model.num_layers,
        tied_embeddings=model.tied_embeddings,
        model=model.fingerprint(),
        cluster=cluster.fingerprint(),
        space=space,
        memory_margin=memory_margin,
        best_sizes={kind: _measured_sizes(each, kind) for kind, each in computes.items()},
        recompute=computing.recompute,
        own_types=cluster.kinds if dtype == "auto" else None,
        notes=(
            *_price_notes(computes, says_types=dtype == "auto"),
            memory_note,
            *warnings,
        ),
        warnings=warnings,
    )


def _computes(
    profile: Profile,
    model: ModelShape,
    cluster: Cluster,
    dtype: DtypeChoice,
    computing: Computing,
) -> dict[str, ProfiledCompute]:
    """Kind -> its costs; all the same but with auto."""
    types: dict[str, Dtype] = {
        kind: PRICED_IN[common_dtype([gpu])] if dtype == "auto" else dtype
        for kind, gpu in cluster.kinds.items()
    }
    of_type = {
        each: ProfiledCompute(
            profile, model, dtype=each, kinds=cluster.kinds, computing=_in_type(computing, each)
        )
        for each in dict.fromkeys(types.values())
    }
    return {kind: of_type[each] for kind, each in types.items()}


def _in_type(computing: Computing, dtype: Dtype) -> Computing:
    """With its attention named: Transformer Engine has none without scores in fp32."""
    if computing.attention is not None:
        return computing
    chosen: Attention = "flash" if is_sixteen_bit(dtype) else "unfused"
    return replace(computing, attention=chosen)


def _memory(
    profile: Profile,
    model: ModelShape,
    dtype: Dtype,
    computing: Computing,
    *,
    in_own_type: bool = False,
) -> tuple[TransformerMemory, str]:
    """What was measured of this very model, or the formula. `in_own_type`: of a plan's group."""
    # Where groups compute in types of their own, gradients are kept in fp32.
    is_narrow = computing.narrow_gradients and not in_own_type and is_sixteen_bit(dtype)
    precision = precision_of(dtype, gradient_bytes=2) if is_narrow else precision_of(dtype)
    known = _in_type(computing, dtype)
    assert known.attention is not None
    try:
        measured = memory_from_profile(
            profile, model, dtype=dtype, precision=precision, computing=known
        )
    except LookupError:
        formula = TransformerMemory(
            model=model,
            dtype=dtype,
            precision=precision,
            attention=known.attention,
            computing=known,
        )
        return formula, f"memory: by formula, with {known.attention} attention{_dropout(known)}"
    return measured, "memory: activations of layer and head as measured"


def _dropout(computing: Computing) -> str:
    return " and dropout" if computing.hidden_dropout or computing.attention_dropout else ""


def _costs_in(
    dtype: Dtype, profile: Profile, model: ModelShape, cluster: Cluster, computing: Computing
) -> DtypeCosts:
    return DtypeCosts(
        compute=ProfiledCompute(
            profile, model, dtype=dtype, kinds=cluster.kinds, computing=_in_type(computing, dtype)
        ),
        memory=_memory(profile, model, dtype, computing, in_own_type=True)[0],
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
            remedy="0.05 leaves one twentieth free.",
        )


def _space_problems(space: SearchSpace) -> Iterator[Problem]:
    known = {
        "schedules": ("1f1b", "breadth_first", "interleaved"),
        "recompute": ("none", "selective", "full"),
    }
    for name, values in known.items():
        found = getattr(space, name)
        if not found or not set(found) <= set(values):
            yield Problem(
                where=f"search space, {name}",
                found=f"{', '.join(map(repr, found)) or 'nothing'}",
                expected=f"some of {', '.join(values)}",
                remedy="Correct it.",
            )


def _price_notes(computes: Mapping[str, ProfiledCompute], *, says_types: bool) -> tuple[str, ...]:
    return tuple(
        f"{kind}{f' in {each.dtype}' if says_types else ''}: {each.provenance(kind)}"
        for kind, each in computes.items()
    )


def _flash_notes(
    cluster: Cluster, computing: Computing, memory: TransformerMemory
) -> tuple[str, ...]:
    """Kinds for which Transformer Engine has no attention that keeps no scores."""
    if computing.attention is not None or memory.attention != "flash":
        return ()
    without = [name for name, kind in cluster.kinds.items() if not kind.computes_in("bf16")]
    if not without:
        return ()
    return (
        f"{' and '.join(without)}: Transformer Engine has neither flash nor fused attention for "
        "GPUs before Ampere, so scores will take memory that is not counted; "
        "--attention-backend unfused counts it, for all GPUs",
    )


def _measured_sizes(compute: ProfiledCompute, kind: str) -> tuple[int, ...]:
    """Micro-batch sizes of the measurements of this model on a kind."""
    wanted = (compute.model.seq_length, compute.dtype)
    measured = {
        size
        for times in compute.profile.times
        if times.part == "layer"
        and times.gpu_kind == kind
        and (times.seq_length, times.dtype) == wanted
        and compute.provenance(kind).basis == "measured"
        for size in times.micro_batch_sizes
    }
    return tuple(sorted(measured)) or (1, 2, 4, 8, 16)
