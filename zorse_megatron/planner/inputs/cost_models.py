"""The cost models of a search, and why some kinds of GPU have no cost.

Kinds of GPU may compute in different types and run different attention, so each has its costs.
"""

from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cached_property

from zorse_megatron.costs.analytic_compute import is_sixteen_bit
from zorse_megatron.costs.interface import (
    ByKind,
    LayerCosts,
    MemoryCost,
    ModelSection,
    TpComputeCost,
    TpRankCosts,
    TpShard,
    TpTraits,
)
from zorse_megatron.costs.layer_kinds import DenseAmongExperts
from zorse_megatron.costs.model_memory import (
    TransformerMemory,
    attention_by_kind,
    attention_on,
    attention_phrase,
    memory_from_profile,
    precision_of,
)
from zorse_megatron.costs.own_speeds import equal_kinds
from zorse_megatron.costs.profiled_compute import ProfiledCompute
from zorse_megatron.costs.shared_experts import (
    ExpertLoad,
    SharedExpertsCompute,
    SharedExpertsMemory,
    Sharing,
    parts_of,
)
from zorse_megatron.errors import Problem
from zorse_megatron.files.wording import memory as spelled
from zorse_megatron.gpus.gpu import (
    DTYPE_OF,
    Attention,
    ComputeDtype,
    Dtype,
    DtypeChoice,
    GpuKind,
    common_dtype,
)
from zorse_megatron.inputs.cluster import Cluster
from zorse_megatron.inputs.model import Computing, Experts, ExpertsOfRank, ModelShape
from zorse_megatron.inputs.profile import Profile
from zorse_megatron.plan.plan import GradReduceDtype
from zorse_megatron.schedule.tensor_parallel_parts import TpPartition, UnitKind


@dataclass(frozen=True, kw_only=True)
class CostModels:
    """A model on a cluster, and the costs that follow from both and from a profile.

    They are the `TpCosts` of its tensor-parallel groups, too.
    """

    cluster: Cluster
    model: ModelShape
    profile: Profile
    dtype: DtypeChoice
    computing: Computing
    tensor_parallel: int = 1
    """Costs are those of one of so many ranks."""
    whole: ModelShape | None = None
    """The model, where `model` says the sizes of a rank's part, times the number of ranks."""
    expert_load: ExpertLoad | None = None
    """What experts get of tokens, where ranks do not have all of them; None: routing is even."""
    _of_ranks: dict[tuple[TpShard, ComputeDtype | None], TpRankCosts] = field(
        init=False, default_factory=dict
    )

    @property
    def has_own_types(self) -> bool:
        """Whether each group computes in a type of its own."""
        return self.dtype == "auto"

    @property
    def gpus(self) -> dict[str, GpuKind]:
        """Kind -> its figures, with what the profile measured of processes there."""
        measured = {each.gpu_kind: each.context_bytes for each in self.profile.processes}
        return {
            name: replace(gpu, context_bytes=measured.get(name, gpu.context_bytes))
            for name, gpu in self.cluster.kinds.items()
        }

    @cached_property
    def computes(self) -> dict[str, ProfiledCompute]:
        """Kind -> its costs; the same for kinds with one type and one attention."""
        return _computes(self, self.dtype)

    @cached_property
    def compute(self) -> TpComputeCost:
        """Costs each kind in the type that it computes in, with the attention that it runs."""
        return _joined(self.computes)

    @cached_property
    def memory(self) -> tuple[TransformerMemory, str]:
        """In the type that all kinds have, and what it rests on."""
        kinds = self.cluster.kinds.values()
        common = DTYPE_OF[common_dtype(kinds)] if self.dtype == "auto" else self.dtype
        return _memory(self, common)

    def costs_in(self, dtype: Dtype) -> TpRankCosts:
        """Costs of a group that a plan lets compute in a type."""
        memory, _ = _memory(self, dtype, in_own_type=True)
        return TpRankCosts(compute=_joined(_computes(self, dtype)), memory=memory)

    @cached_property
    def traits(self) -> TpTraits:
        """What ranks exchange inside layers follows from it."""
        lora, experts = self.computing.lora, self.model.experts
        return TpTraits(
            sequence_parallel=self.computing.sequence_parallel,
            learns_positions=self.model.position_embedding == "learned",
            adapter_shares=((), ()) if lora is None else lora.crossing_shares(self.model),
            num_experts=experts.num_experts if experts else 0,
            experts_per_token=experts.per_token if experts else 0,
            has_shared_expert=bool(experts and experts.shared_ffn_hidden_size),
        )

    def of_rank(self, part: TpShard, dtype: ComputeDtype | None) -> TpRankCosts:
        """Costs of a rank of a TP group, each found once; None: in the type of the job."""
        key = part, dtype
        if key not in self._of_ranks and part.shared is not None:
            self._of_ranks[key] = self._sharing(part, dtype)
        if key not in self._of_ranks:
            rows = None if self._load is None else self._load.rows
            model = told_local_sizes(self.model, part, rows)
            split = replace(self, model=model, tensor_parallel=part.degree, whole=self.model)
            self._of_ranks[key] = split._in_type(dtype)
            if part.expert_parallel > 1:  # keeps what a rank with all experts keeps
                memory = replace(_formula(self._in_type(dtype).memory), model=model)
                self._of_ranks[key] = replace(self._of_ranks[key], memory=memory)
        return self._of_ranks[key]

    def layer_kinds(self) -> DenseAmongExperts | None:
        """Costs of layers with experts and of dense ones, of a model that has both."""
        if self.model.moe_layer_freq is None:
            return None
        dense = replace(self, model=self.model.dense)
        return DenseAmongExperts(
            dense=frozenset(self.model.dense_layers),
            experts=self._layer_costs(),
            without=dense._layer_costs(),
        )

    def layer_costs(self) -> LayerCosts:
        """Those of all layers, or of one between layers of two kinds."""
        kinds = self.layer_kinds()
        return self._layer_costs() if kinds is None else kinds.mean(0, self.model.num_layers)

    def _layer_costs(self) -> LayerCosts:
        return LayerCosts(
            compute=self.compute,
            memory=self.memory[0],
            by_dtype={name: self.costs_in(each) for name, each in DTYPE_OF.items()},
            tp_costs=self,
        )

    def _sharing(self, part: TpShard, dtype: ComputeDtype | None) -> TpRankCosts:
        """Of a rank that shares experts alone; in a dense layer, with its own samples alone."""
        assert part.shared is not None
        own = self.dtype if dtype is None else DTYPE_OF[dtype]
        if self.model.experts is None:
            names = ("whole", "dense", "routed", "bare")
            computed = dict.fromkeys(names, _computes(self, own))
            kept = dict.fromkeys(("held", "whole", "own"), _formula(self._in_type(dtype).memory))
            alone = Sharing.of(part, 0.0)
            return TpRankCosts(
                compute=SharedExpertsCompute(sharing=alone, **computed),
                memory=SharedExpertsMemory.of(alone, **kept),
            )
        model, experts = self.model, self._experts
        mine = parts_of(part.shared.experts)[part.index]
        held, total = len(mine), experts.num_experts
        sharing = Sharing.of(part, held / total if self._load is None else self._load.rows(mine))
        width = experts.shared_ffn_hidden_size
        routed = replace(experts, shared_ffn_hidden_size=0, has_shared_gate=False)
        computed_by = {
            "whole": model,
            "dense": replace(model, experts=None, ffn_hidden_size=width),
            "bare": replace(model, experts=None, ffn_hidden_size=0),
            "routed": _with_held(model, routed, held, are_sent_tokens=True),
        }
        kept_by = {
            "whole": model,
            "held": _with_held(model, experts, held),
            "own": _with_held(model, experts, 0, are_sent_tokens=True),
        }
        computes, memory = (
            {name: replace(self, model=each) for name, each in models.items()}
            for models in (computed_by, kept_by)
        )
        return TpRankCosts(
            compute=SharedExpertsCompute(
                sharing=sharing, **{name: _computes(each, own) for name, each in computes.items()}
            ),
            memory=SharedExpertsMemory.of(
                sharing,
                **{name: _formula(each._in_type(dtype).memory) for name, each in memory.items()},
            ),
        )

    def _in_type(self, dtype: ComputeDtype | None) -> TpRankCosts:
        if dtype is not None:
            return self.costs_in(DTYPE_OF[dtype])
        return TpRankCosts(compute=self.compute, memory=self.memory[0])

    def share_of_tokens(self, experts: range) -> float:
        """Of all tokens those that pass one of these experts of a layer at least."""
        if self._load is None:
            return self._experts.share_of_tokens(len(experts))
        return self._load.tokens(experts, self._experts.per_token)

    @property
    def _load(self) -> ExpertLoad | None:
        """None: routing is even."""
        return self.expert_load if self.expert_load and not self.expert_load.is_even else None

    @property
    def _experts(self) -> Experts:
        assert self.model.experts is not None, "asked of a model with experts"
        return self.model.experts

    def cut_parameters(self, section: ModelSection) -> Mapping[UnitKind, int]:
        """Parameters that TP groups cut by these members; of embedding and head their table."""
        model, lora = self.model, self.computing.lora
        if lora is not None:
            cut = Counter[UnitKind]()  # embedding and head are not trained
            for size in lora.sizes(model).values() if section == "layer" else ():
                kind: UnitKind = "kv_groups" if size.in_attention else "mlp_columns"
                cut[kind] += size.cut_parameters(lora.rank)
            return cut
        if section != "layer":
            return {"vocabulary_rows": model.table_parameters()}
        mlp: UnitKind = "mlp_columns" if model.experts is None else "experts"
        divided: dict[UnitKind, int] = {"kv_groups": model.attention_parameters}
        if self.traits.has_shared_expert:
            divided["mlp_columns"] = model.expert_parameters - model.mlp_parameters
        return {**divided, mlp: model.mlp_parameters}

    @property
    def notes(self) -> tuple[str, ...]:
        """What the costs of each kind rest on."""
        return _price_notes(self.computes, says_types=self.has_own_types)

    @property
    def warnings(self) -> tuple[str, ...]:
        """What many do not expect of them."""
        return (
            *_attention_notes(self.cluster, self.computing, self.memory[0]),
            *self.to_do,
        )

    @property
    def to_do(self) -> tuple[str, ...]:
        """What asks for another command or measurement."""
        return (
            *_refused_attention_notes(self.cluster, self.computing),
            *_measured_attention_notes(self.computes),
        )

    @property
    def best_sizes(self) -> dict[str, tuple[int, ...]]:
        """Kind -> the micro-batch sizes that were measured, the usual ones where none were."""
        return {kind: _measured_sizes(each, kind) for kind, each in self.computes.items()}


def told_local_sizes(
    model: ModelShape, part: TpShard, share_of_rows: Callable[[range], float] | None = None
) -> ModelShape:
    """The model whose even TP shards are as large as this rank's: its own sizes times the degree.

    As Megatron's layers are told (`adapter.model.uneven_tp_shards`). `share_of_rows`: what some
    experts get of all rows; None: as much as they are of all experts.
    """
    experts = model.experts
    if part.expert_parallel > 1 and experts is not None:
        total, held = experts.num_experts, experts.num_experts // part.expert_parallel
        computed = None
        if share_of_rows is not None:  # the rows of as many micro-batches as there are ranks
            computed = share_of_rows(range(held)) * part.expert_parallel * total
        return _with_held(model, experts, held, are_sent_tokens=True, computed=computed)
    if part.tp_shards is None:
        return model
    tp_groups = TpPartition(degree=part.degree, tp_shards=part.tp_shards)

    def told(kind: UnitKind, length: int) -> int:
        proportions = tp_groups.proportions(kind)
        return length * proportions[part.index] * part.degree // sum(proportions)

    if experts is not None:
        mine = tp_groups.experts_of(part.index)
        computed = share_of_rows(mine) * experts.num_experts if share_of_rows else None
        experts = ExpertsOfRank(**vars(experts), held=len(mine), computed=computed)
    return replace(
        model,
        num_attention_heads=told("kv_groups", model.num_attention_heads),
        num_query_groups=told("kv_groups", model.num_query_groups),
        ffn_hidden_size=told("mlp_columns", model.ffn_hidden_size),
        vocab_size=told("vocabulary_rows", model.vocab_size),
        experts=experts,
    )


def _with_held(
    model: ModelShape,
    experts: Experts,
    held: int,
    *,
    are_sent_tokens: bool = False,
    computed: float | None = None,
) -> ModelShape:
    own = ExpertsOfRank(
        **vars(experts), held=held, are_sent_tokens=are_sent_tokens, computed=computed
    )
    return replace(model, experts=own)


def _formula(memory: MemoryCost) -> TransformerMemory:
    assert isinstance(memory, TransformerMemory)
    return memory


def _computes(models: CostModels, dtype: DtypeChoice) -> dict[str, ProfiledCompute]:
    """Kind -> its costs; the same for kinds with one type and one attention."""
    cluster, computing = models.cluster, models.computing
    made: dict[tuple[Dtype, Attention], ProfiledCompute] = {}
    result = {}
    for kind, gpu in cluster.kinds.items():
        own: Dtype = DTYPE_OF[common_dtype([gpu])] if dtype == "auto" else dtype
        attention = attention_on(gpu, computing, own)
        if (own, attention) not in made:
            made[own, attention] = ProfiledCompute(
                models.profile,
                models.model,
                dtype=own,
                kinds=cluster.kinds,
                tensor_parallel=models.tensor_parallel,
                computing=replace(computing, attention=attention),
                whole=models.whole,
            )
        result[kind] = made[own, attention]
    return result


def _joined(computes: Mapping[str, ProfiledCompute]) -> TpComputeCost:
    """Costs of all kinds in one."""
    first, *others = dict.fromkeys(computes.values())
    return ByKind(computes=computes) if others else first


def _memory(
    models: CostModels, dtype: Dtype, *, in_own_type: bool = False
) -> tuple[TransformerMemory, str]:
    """What was measured of this very model, or the formula. `in_own_type`: of a plan's group."""
    computing, ranks = models.computing, models.tensor_parallel
    splits_sequence = computing.sequence_parallel and ranks > 1
    # Where groups compute in types of their own, gradients are kept in fp32.
    is_narrow = computing.narrow_gradients and not in_own_type and is_sixteen_bit(dtype)
    precision = precision_of(dtype, gradient_bytes=2) if is_narrow else precision_of(dtype)
    by_kind = attention_by_kind(models.cluster.kinds, computing, dtype)
    usual: Attention = "flash" if "flash" in by_kind.values() else "unfused"
    formula = TransformerMemory(
        model=models.model,
        tensor_parallel=ranks,
        sequence_parallel=splits_sequence,
        dtype=dtype,
        precision=precision,
        attention=usual,
        attention_by_kind=by_kind,
        computing=computing,
    )
    # Profiles do not say what is kept of parts of sequences.
    if not splits_sequence:
        with suppress(LookupError):
            measured = memory_from_profile(models.profile, formula)
            return measured, "memory: measured activations of layers and head"
    said = attention_phrase(by_kind)
    return formula, f"memory: computed tensor by tensor, with {said}{_dropout(computing)}"


def _dropout(computing: Computing) -> str:
    return " and dropout" if computing.hidden_dropout or computing.attention_dropout else ""


def _price_notes(computes: Mapping[str, ProfiledCompute], *, says_types: bool) -> tuple[str, ...]:
    return tuple(
        f"{kind}{f' in {each.dtype}' if says_types else ''}: {each.provenance(kind)}"
        for kind, each in computes.items()
    )


def _attention_notes(
    cluster: Cluster, computing: Computing, memory: TransformerMemory
) -> tuple[str, ...]:
    """Kinds that keep all scores because Transformer Engine has no other attention for them."""
    if computing.attention == "unfused":
        return ()
    without = [name for name, kind in cluster.kinds.items() if not kind.runs_flash_attention]
    if not without:
        return ()
    kept = memory.activation_bytes(1, "none", without[0])
    flash = replace(memory, attention="flash", attention_by_kind={}).activation_bytes(1, "none")
    names = " and ".join(without)
    return (
        f"{names}: unfused attention, because Transformer Engine has no flash or fused attention "
        f"below compute capability 8.0: a layer keeps {spelled(kept)} per sample instead of "
        f"{spelled(flash)}, and its scores go through memory. If your build has one, set attention "
        "under gpu_kinds",
    )


def _refused_attention_notes(cluster: Cluster, computing: Computing) -> Iterator[str]:
    """Kinds for which the command asks for an attention that Transformer Engine lacks."""
    without = [name for name, kind in cluster.kinds.items() if not kind.runs_flash_attention]
    if computing.names_attention and computing.attention != "unfused" and without:
        yield (
            f"{' and '.join(without)} cannot run what --attention-backend asks for, and "
            "Transformer Engine would stop there: leave it out"
        )


def _measured_attention_notes(computes: Mapping[str, ProfiledCompute]) -> Iterator[str]:
    """Kinds whose layers were measured with another attention than the run would use."""
    kinds_of: dict[tuple[Attention, Attention], list[str]] = {}
    for kind, compute in computes.items():
        measured, used = compute.measured_attention(kind), compute.computing.attention
        if measured is not None and used is not None and measured != used:
            kinds_of.setdefault((measured, used), []).append(kind)
    for (measured, used), kinds in kinds_of.items():
        yield (
            f"{' and '.join(kinds)}: layer times were measured with {measured} attention, but this "
            f"run uses {used} attention there: measure again with its flags (zorse profile measure "
            "--again), or train with those of the measurement"
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


# Why some kinds of GPU have no cost in the requested dtypes.


def communication_dtype_problems(
    wanted: GradReduceDtype | None, dtypes: Collection[Dtype]
) -> Iterator[Problem]:
    """Yield where no loss scale would notice an overflow. `dtypes`: of the kinds of GPU.

    A kind whose best type is float16 is in a group that computes in it, if no kind has float32
    alone; so the job then has a loss scale, whatever its groups are.
    """
    if wanted == "fp16" and ("float16" not in dtypes or "float32" in dtypes):
        yield Problem(
            where="communication dtype",
            found=f"fp16 for a job in {' and '.join(sorted(set(dtypes)))}",
            expected="fp16 only in a job in float16, whose loss scale notices an overflow",
            remedy="Use bf16, whose range is that of float32.",
        )


def kind_problems(computes: Mapping[str, ProfiledCompute]) -> Iterator[Problem]:
    """Yield every kind without units for its type, or without costs. `computes`: by kind."""
    for kind, compute in computes.items():
        gpu = compute.kinds[kind]
        lacking = {DTYPE_OF[dtype] for dtype in DTYPE_OF if not gpu.computes_in(dtype)}
        if compute.dtype in lacking and not _is_measured(kind, compute):
            yield _no_units(kind, compute)
            continue
        try:
            compute.layer(kind, 1)
            compute.embedding(kind, 1)
            compute.head(kind, 1)
            compute.step_s(kind, 1)
        except LookupError as error:
            yield Problem(
                where=f"GPU kind {kind}",
                found=f"no cost for it ({error})",
                expected="measured times in a profile, or published figures for the kind",
                remedy="Profile it, or describe it under gpu_kinds of the cluster file.",
            )


def _is_measured(kind: str, compute: ProfiledCompute) -> bool:
    """Whether this very dtype was measured on it; another one does not count."""
    same = set(equal_kinds(kind, compute.kinds))
    return any(
        times.gpu_kind in same and times.dtype == compute.dtype for times in compute.profile.times
    )


def _no_units(kind: str, compute: ProfiledCompute) -> Problem:
    own = common_dtype([compute.kinds[kind]])
    return Problem(
        where=f"GPU kind {kind}",
        found=f"no hardware support for {compute.dtype}",
        expected="a supported dtype, or measured times in this one",
        remedy="With zorse plan --dtype auto, every group computes in a dtype its GPUs support, "
        f"{own} with a {kind}. Or use --dtype {DTYPE_OF[own]} for all groups, if all kinds "
        "support it. Profile it in this dtype if it does support it.",
    )
