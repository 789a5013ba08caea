"""The cost models of a search: computation, memory, and notes on their sources."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property

from zorse_megatron.costs.by_kind import ByKind
from zorse_megatron.costs.efficiency import is_sixteen_bit
from zorse_megatron.costs.interface import ComputeCost, DtypeCosts
from zorse_megatron.costs.profiled_compute import ProfiledCompute
from zorse_megatron.costs.transformer_memory import (
    TransformerMemory,
    memory_from_profile,
    precision_of,
)
from zorse_megatron.schema.cluster.cluster import Cluster
from zorse_megatron.schema.gpus.gpu import DTYPE_OF, Attention, Dtype, DtypeChoice, common_dtype
from zorse_megatron.schema.model.computing import Computing
from zorse_megatron.schema.model.model_shape import ModelShape
from zorse_megatron.schema.profile.profile import Profile


@dataclass(frozen=True, kw_only=True)
class CostModels:
    """A model on a cluster, and the costs that follow from both and from a profile."""

    cluster: Cluster
    model: ModelShape
    profile: Profile
    dtype: DtypeChoice
    computing: Computing

    @property
    def has_own_types(self) -> bool:
        """Whether each group computes in a type of its own."""
        return self.dtype == "auto"

    @cached_property
    def computes(self) -> dict[str, ProfiledCompute]:
        """Kind -> its costs; all the same but with types of their own."""
        return _computes(self.profile, self.model, self.cluster, self.dtype, self.computing)

    @property
    def compute(self) -> ComputeCost:
        """Costs each kind in the type that it computes in."""
        if self.has_own_types:
            return ByKind(computes=self.computes)
        return next(iter(self.computes.values()))

    @cached_property
    def memory(self) -> tuple[TransformerMemory, str]:
        """In the type that all kinds have, and what it rests on."""
        kinds = self.cluster.kinds.values()
        common = DTYPE_OF[common_dtype(kinds)] if self.dtype == "auto" else self.dtype
        return _memory(self.profile, self.model, common, self.computing)

    def costs_in(self, dtype: Dtype) -> DtypeCosts:
        """Costs of a group that a plan lets compute in a type."""
        return _costs_in(dtype, self.profile, self.model, self.cluster, self.computing)

    @property
    def notes(self) -> tuple[str, ...]:
        """What the costs of each kind rest on."""
        return _price_notes(self.computes, says_types=self.has_own_types)

    @property
    def warnings(self) -> tuple[str, ...]:
        """What they leave out."""
        return _flash_notes(self.cluster, self.computing, self.memory[0])

    @property
    def best_sizes(self) -> dict[str, tuple[int, ...]]:
        """Kind -> the micro-batch sizes that were measured, the usual ones where none were."""
        return {kind: _measured_sizes(each, kind) for kind, each in self.computes.items()}


def _computes(
    profile: Profile,
    model: ModelShape,
    cluster: Cluster,
    dtype: DtypeChoice,
    computing: Computing,
) -> dict[str, ProfiledCompute]:
    """Kind -> its costs; all the same but with auto."""
    types: dict[str, Dtype] = {
        kind: DTYPE_OF[common_dtype([gpu])] if dtype == "auto" else dtype
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
