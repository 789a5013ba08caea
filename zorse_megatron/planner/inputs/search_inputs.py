"""What a search starts from: cluster, model, profile, joined and checked; and on other GPUs."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Literal, TypeVar

from zorse_megatron.costs.communication import GraphComm
from zorse_megatron.costs.interface import (
    JobCosts,
    Provenance,
)
from zorse_megatron.costs.process_memory import MemoryItem, fixed_bytes, most_bytes, process_items
from zorse_megatron.costs.shared_experts import ExpertLoad
from zorse_megatron.costs.topology import Topology, topology_of
from zorse_megatron.errors import Problem
from zorse_megatron.files.wording import memory as spelled
from zorse_megatron.gpus.gpu import ComputeDtype, DtypeChoice, GpuKind, common_dtype
from zorse_megatron.inputs.cluster import Cluster
from zorse_megatron.inputs.model import (
    USUAL,
    Computing,
    ModelShape,
)
from zorse_megatron.inputs.model_rules import flags_barring_tp, tp_problems
from zorse_megatron.inputs.profile import Profile, Source
from zorse_megatron.plan.plan import ClusterFingerprint, GradReduceDtype, ModelFingerprint, Plan
from zorse_megatron.planner.inputs.cost_models import (
    CostModels,
    communication_dtype_problems,
    kind_problems,
)
from zorse_megatron.planner.inputs.tensor_parallel_members import Members, all_tp_groups
from zorse_megatron.planner.outcome import PlannerInputError

# Which plans a search may propose.


SearchEffort = Literal["normal", "high"]


@dataclass(frozen=True, kw_only=True)
class SearchSpace:
    """Which plans may be proposed."""

    schedules: tuple[str, ...] = ("1f1b", "interleaved", "breadth_first")
    recompute: tuple[str, ...] = ("none", "selective", "full")
    """Modes that groups may have; with full, any number of layers."""
    offload: bool = True
    """Whether anything may wait in host memory."""
    offload_activations: bool = False
    """Whether activations may without recomputation of all layers; searched beside all else."""
    max_micro_batch_size: int | None = None
    """None: whatever fits."""
    sample_block: int = 1
    """Micro-batch sizes are multiples of it."""
    needs_loads_in_order: bool = False
    """Whether backwards wait for the forwards of all earlier samples, which lists must allow."""
    may_overlap: bool = True
    """Whether ranks that share experts may run micro-batches in halves (`ExpertParallel`)."""
    max_tensor_parallel: int | None = None
    """Most ranks of a tensor-parallel group; 1: no TP groups. None: as many as a node has."""
    barring_tp: tuple[str, ...] = ()
    """Flags of the training command with which no plan may have TP groups."""
    requested_tensor_parallel: int = 1
    """Ranks that TP groups have in what is tried in any case: the training command asks for
    them."""
    tp_across_nodes: bool = False
    """Whether a TP group may have ranks on several nodes."""
    uneven_tp_shards: bool = True
    """Whether ranks of a TP group may hold uneven TP shards."""
    max_groups: int | None = None
    """None: as many as there are layers."""
    split_backward: bool = True
    """Whether groups may compute weight gradients apart from backwards."""
    grad_reduce_dtype: GradReduceDtype | None = None
    """In which type gradients may be sent where that is faster; None: as they are kept."""
    hierarchical: bool = True
    """Whether groups in several regions may sum and gather in two levels, where that is faster."""
    effort: SearchEffort = "normal"
    """How far the fastest plans are changed step by step."""

    def sizes(self, blocks: Iterable[int]) -> tuple[int, ...]:
        """Micro-batch sizes of so many blocks."""
        return tuple(number * self.sample_block for number in blocks)

    def sizes_to(self, most: int) -> range:
        """All micro-batch sizes up to one."""
        return range(self.sample_block, most + 1, self.sample_block)


def experts_problems(profile: Profile, model: ModelShape) -> Iterator[Problem]:
    """Yield why the model's layers with experts cannot be costed."""
    experts = {each.name: each.experts for each in profile.models}
    measured = {experts[times.model] for times in profile.times if times.part == "layer"}
    if model.experts is not None and measured and model.experts not in measured:
        yield Problem(
            where="profile",
            found=f"layer times of other models alone, and {model.experts.num_experts} experts "
            f"in each layer of {model.name}",
            expected="times of layers with the same experts, or no layer times",
            remedy="Leave out that profile: times are then those of data sheets.",
        )


def request_problems(space: SearchSpace, cluster: Cluster, model: ModelShape) -> Iterator[Problem]:
    """Yield why TP groups cannot have as many ranks as the training command asks for."""
    requested, most = space.requested_tensor_parallel, space.max_tensor_parallel
    if requested == 1:
        return
    where, found = "--tensor-model-parallel-size", f"{requested}"
    if barred := list(tp_problems(model, where, requested)):
        yield from barred
        return
    largest = max(len(node.gpu_kinds) for node in cluster.nodes)
    if requested > largest and not space.tp_across_nodes:
        yield Problem(
            where=where,
            found=f"{requested}, and nodes with {largest} GPUs at most",
            expected=f"at most {largest}, as every layer sums over a TP group",
            remedy="Ask for fewer; with --tp-across-nodes TP groups may have ranks "
            "on several nodes.",
        )
    if requested > model.num_query_groups:
        yield Problem(
            where=where,
            found=f"{requested}, and {model.num_query_groups} KV groups",
            expected=f"at most {model.num_query_groups}: each rank has a whole KV group",
            remedy="Ask for fewer.",
        )
    if most is not None and requested > most:
        yield Problem(
            where=where,
            found=f"{found}, and --max-tp {most}",
            expected=f"at most {most}",
            remedy="Leave one of the two out.",
        )


__all__ = ["DEFAULT_MARGIN", "Inputs", "SearchSpace", "make_inputs"]

DEFAULT_MARGIN = 0.05
_EMPTY = Profile(schema_version=1, sources=(Source(name="none", kind="analytic"),))


Found = TypeVar("Found")


class Kept(dict[tuple[object, ...], tuple["Inputs", Any]]):
    """What searches have found out; it is quicker found again than sent to another process."""

    def __reduce__(self) -> tuple[type["Kept"], tuple[()]]:
        return Kept, ()


@dataclass(frozen=True, kw_only=True)
class Inputs(JobCosts):
    """Everything that the search and its estimates ask for, beside what simulations do.

    Layers are divided among members: GPUs, or tensor-parallel groups of them. What is called a rank
    here is a member, and the global rank where no GPUs are joined; `members` knows the GPUs of
    each.
    """

    spec: Topology
    kinds: tuple[str, ...]
    capacities_bytes: tuple[int, ...]
    """Rank -> what a process may fill: the GPU's memory less the margin."""
    host_bytes: tuple[int | None, ...]
    """Rank -> its part of its node's host memory; None where the cluster does not say."""
    global_batch_size: int
    """Samples per iteration."""
    num_layers: int
    tied_embeddings: bool
    model: ModelFingerprint
    cluster: ClusterFingerprint
    space: SearchSpace
    memory_margin: float
    best_sizes: dict[str, tuple[int, ...]]
    """Kind -> micro-batch sizes that the lower bound looks at: those measured, where any were."""
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
    tp_members: Members | None = None
    """Members some of which are TP groups; None: all are GPUs."""
    gpus: Mapping[str, GpuKind] | None = None
    """Kind -> its figures; None: processes take no memory beside their tensors."""
    kept: Kept = field(default_factory=Kept, compare=False, repr=False)
    """See `shared`."""

    def shared(self, what: str, make: Callable[[], Found]) -> Found:
        """What all inputs have in common that differ from these in GPUs alone.

        Made where there is none, and of inputs with TP groups always: their costs are their own.
        """
        if self.tp_members is not None:
            return make()
        key = (
            *(what, id(self.compute), id(self.memory), self.space),
            *(self.global_batch_size, self.num_layers, self.tied_embeddings),
        )
        if key not in self.kept:  # with the inputs, so that identities stay what they are
            self.kept[key] = self, make()
        found: Found = self.kept[key][1]
        return found

    @property
    def world_size(self) -> int:
        """Number of GPUs."""
        return len(self.kinds)

    def host_bytes_on(self, ranks: Sequence[int]) -> int | None:
        """Host memory of the ranks together; None where the cluster does not say that of all."""
        known = [part for rank in ranks if (part := self.host_bytes[rank]) is not None]
        return sum(known) if len(known) == len(ranks) else None

    @cached_property
    def members(self) -> Members:
        """The members, and the inputs of single GPUs: these, if no GPUs are joined."""
        if self.tp_members is not None:
            return self.tp_members
        alone = all_tp_groups((), self.world_size)
        return Members(base=self, tp_groups=alone, kinds=self.kinds)

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
        gpus = self.members.base
        if gpus.own_types is None:
            return None
        kinds = {gpus.kinds[rank] for rank in self.members.ranks(ranks)}
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
    its GPUs have members for.
    `computing`: what the training command says of how layers are computed.
    `memory_margin`: share of every GPU's memory reserved for fragmentation and what is not counted.

    Raises PlannerInputError with every problem: kinds of GPU without members for the type or that
    can be costed neither by the profile nor by published figures, and numbers out of range.
    """
    space = _space_for(model, computing, space or SearchSpace())
    known = profile or _EMPTY
    models = CostModels(
        cluster=cluster, model=model, profile=known, dtype=dtype, computing=computing
    )
    problems = [
        *_number_problems(global_batch_size, memory_margin),
        *_block_problems(global_batch_size, space.sample_block),
        *request_problems(space, cluster, model),
        *experts_problems(known, model),
        *communication_dtype_problems(
            space.grad_reduce_dtype, [each.dtype for each in models.computes.values()]
        ),
        *kind_problems(models.computes),
    ]
    if problems:
        raise PlannerInputError("cluster, model and profile do not make a plan", problems)
    return _joined(models, global_batch_size, memory_margin, space)


def with_load(inputs: Inputs, load: ExpertLoad) -> Inputs:
    """Return the same where experts get these loads."""
    models = inputs.of_experts.tp_costs
    assert isinstance(models, CostModels), "of a model with experts"
    models = replace(models, expert_load=load)
    tp_costs = models.layer_costs().tp_costs
    return replace(inputs, tp_costs=tp_costs, layer_kinds=models.layer_kinds())


def _space_for(model: ModelShape, computing: Computing, space: SearchSpace) -> SearchSpace:
    """Of plans that train the model as the command does."""
    if model.experts is not None:
        recomputes = computing.recompute is not None and computing.recompute.mode == "full"
        whole = computing.needs_loads_in_order or computing.are_packed or recomputes
        space = replace(
            space,
            sample_block=computing.sample_block,
            needs_loads_in_order=computing.needs_loads_in_order,
            may_overlap=space.may_overlap and not whole,
        )
    barring = flags_barring_tp(model)
    return replace(space, max_tensor_parallel=1, barring_tp=barring) if barring else space


def _joined(models: CostModels, batch: int, memory_margin: float, space: SearchSpace) -> Inputs:
    cluster, model = models.cluster, models.model
    spec = topology_of(cluster, models.profile)
    layers = models.layer_costs()
    return Inputs(
        **vars(layers),
        layer_kinds=models.layer_kinds(),
        spec=spec,
        comm=GraphComm(spec),
        kinds=cluster.gpu_kinds,
        capacities_bytes=_capacities(cluster, memory_margin),
        host_bytes=_host_parts(cluster),
        global_batch_size=batch,
        sequence_length=model.seq_length,
        num_layers=model.num_layers,
        tied_embeddings=model.tied_embeddings,
        model=model.fingerprint(models.computing.lora),
        cluster=cluster.fingerprint(),
        space=space,
        memory_margin=memory_margin,
        best_sizes=models.best_sizes,
        recompute=models.computing.recompute,
        own_types=cluster.kinds if models.has_own_types else None,
        gpus=models.gpus,
        provenances={kind: each.provenance(kind) for kind, each in models.computes.items()},
        notes=(*models.notes, models.memory[1], *models.warnings, *_process_notes(models.gpus)),
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


def _block_problems(global_batch_size: int, block: int) -> Iterator[Problem]:
    if global_batch_size % block:
        yield Problem(
            where="--micro-batch-size",
            found=f"{block}, over which experts are balanced, with a batch of {global_batch_size}",
            expected="a divisor of the global batch size",
            remedy="The auxiliary loss is one of so many samples under every plan. Correct one of "
            "the two, or balance by --moe-router-load-balancing-type seq_aux_loss.",
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


# Refuse, before the search, what cannot be planned in ten minutes.


MAX_GPUS = 10_000
"""As many took 369 s on two cores with other work beside it (docs/planner.md)."""
MAX_LAYERS = 512
"""Partitioning a device order grows with the square of the layers; 200 on 8 GPUs take 25 s."""


def refuse_too_large(inputs: Inputs) -> None:
    """Raise PlannerInputError with everything that is beyond the limits."""
    problems = list(_problems(inputs))
    if problems:
        raise PlannerInputError("This is too large to be planned", problems)


def _problems(inputs: Inputs) -> Iterator[Problem]:
    if inputs.world_size > MAX_GPUS:
        yield Problem(
            where="the cluster",
            found=f"{inputs.world_size:,} GPUs",
            expected=f"at most {MAX_GPUS:,}, which take about ten minutes to plan for",
            remedy="Plan for a part of the cluster, one region or one kind of node, and train one "
            "job there; or write the plan by hand, and try it with zorse explain.",
        )
    if inputs.num_layers > MAX_LAYERS:
        yield Problem(
            where="the model",
            found=f"{inputs.num_layers:,} layers",
            expected=f"at most {MAX_LAYERS:,}",
            remedy="Check num_layers; for such a model write the plan by hand, and try it with "
            "zorse explain.",
        )


# Which tensor-parallel groups a model can be cut for.


def allows_tp_degree(inputs: Inputs, degree: int) -> bool:
    """Whether TP groups of so many ranks can hold parts of the model at all."""
    groups, length = inputs.model.num_query_groups, inputs.model.seq_length
    most = inputs.space.max_tensor_parallel
    if inputs.tp_costs is None or groups is None or groups < degree:
        return False
    if most is not None and degree > most:
        return False
    return not (inputs.tp_costs.traits.sequence_parallel and (length is None or length % degree))


def tp_shards_are_even(inputs: Inputs, degree: int) -> bool:
    """Whether so many ranks can hold even TP shards of everything."""
    model = inputs.model
    sizes = [model.num_query_groups, model.vocab_size]
    if model.num_experts is not None:  # of which a plan always says who has which
        sizes.append(model.num_experts)
    if model.num_experts is None or model.moe_layer_freq:
        sizes.append(model.ffn_hidden_size)
    return all(size is not None and size % degree == 0 for size in sizes)


# The same search on other GPUs: a subset of the cluster's, or one more of a kind.


# Machines rarely hold more; where each of a kind's has as many, the new GPU gets a node of its own.
_MOST_GPUS_OF_A_NODE = 8


@dataclass(frozen=True, kw_only=True)
class NodeLike:
    """A node of the new cluster."""

    node: int
    """The node of `inputs` whose links, NICs and host memory it has."""
    ranks: tuple[int, ...]
    """Ranks of that node that its GPUs are like, in the order of local ranks."""
    name: str | None = None
    """None: that of the other one."""


def on_nodes(inputs: Inputs, nodes: Sequence[NodeLike]) -> Inputs:
    """Return the inputs on a cluster of these nodes; ranks are counted anew."""
    spec = inputs.spec
    made = tuple(
        replace(
            spec.nodes[each.node],
            name=each.name or spec.nodes[each.node].name,
            gpu_kinds=tuple(inputs.kinds[rank] for rank in each.ranks),
        )
        for each in nodes
    )
    above = {s.name for node in made for s in spec.switches_above(node.switch)}
    switches = tuple(switch for switch in spec.switches if switch.name in above)
    new = Topology.of(made, switches, spec.region_links, spec.unequal_shards)
    origin = [rank for each in nodes for rank in each.ranks]
    kinds = tuple(inputs.kinds[rank] for rank in origin)
    return replace(
        inputs,
        spec=new,
        comm=GraphComm(new),
        kinds=kinds,
        capacities_bytes=tuple(inputs.capacities_bytes[rank] for rank in origin),
        host_bytes=tuple(_host_bytes(inputs, nodes)),
        cluster=ClusterFingerprint(name=inputs.cluster.name, gpu_kinds=kinds),
    )


def on_ranks(inputs: Inputs, ranks: Sequence[int]) -> Inputs:
    """Return the inputs on these GPUs of the cluster alone."""
    wanted = set(ranks)
    parts = [
        NodeLike(node=node, ranks=part)
        for node in range(len(inputs.spec.nodes))
        if (part := tuple(rank for rank in inputs.spec.ranks_of(node) if rank in wanted))
    ]
    return on_nodes(inputs, parts)


def with_one_more(inputs: Inputs, kind: str) -> tuple[Inputs, str]:
    """Return the inputs with one more GPU of a kind, and the name of the node that it is in.

    It goes into the smallest node that has the kind, or into a new one like that where all are
    full.
    """
    spec = inputs.spec
    homes = [at for at, node in enumerate(spec.nodes) if kind in node.gpu_kinds]
    home = min(homes, key=lambda at: (spec.nodes[at].num_gpus, len(set(spec.nodes[at].gpu_kinds))))
    like = next(rank for rank in spec.ranks_of(home) if inputs.kinds[rank] == kind)
    nodes = [NodeLike(node=at, ranks=tuple(spec.ranks_of(at))) for at in range(len(spec.nodes))]
    if spec.nodes[home].num_gpus < _MOST_GPUS_OF_A_NODE:
        nodes[home] = replace(nodes[home], ranks=(*nodes[home].ranks, like))
        return on_nodes(inputs, nodes), spec.nodes[home].name
    name = f"one more like {spec.nodes[home].name}"
    nodes.append(NodeLike(node=home, ranks=(like,), name=name))
    return on_nodes(inputs, nodes), name


def _host_bytes(inputs: Inputs, nodes: Sequence[NodeLike]) -> Iterator[int | None]:
    """What the node has is shared out anew."""
    for each in nodes:
        whole = inputs.host_bytes_on(inputs.spec.ranks_of(each.node))
        part = None if whole is None else whole // len(each.ranks)
        yield from [part] * len(each.ranks)
