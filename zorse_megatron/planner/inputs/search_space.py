"""Which plans a search may propose."""

from collections.abc import Iterator
from dataclasses import dataclass

from zorse_megatron.errors import Problem
from zorse_megatron.schema.cluster.cluster import Cluster
from zorse_megatron.schema.model.model_shape import ModelShape
from zorse_megatron.schema.plan.plan import GradientCommDtype


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
    max_tensor_parallel: int | None = None
    """Most ranks of a tensor-parallel set; 1: no sets. None: as many as a node has."""
    barring_sets: tuple[str, ...] = ()
    """Flags of the training command with which no plan may have sets."""
    wished_tensor_parallel: int = 1
    """Ranks that sets have in what is tried in any case: the training command asks for them."""
    sets_across_nodes: bool = False
    """Whether a set may have ranks on several nodes."""
    unequal_parts: bool = True
    """Whether ranks of a set may hold unequal parts."""
    max_groups: int | None = None
    """None: as many as there are layers."""
    split_backward: bool = False
    """Whether groups may compute weight gradients apart from backwards."""
    gradient_comm_dtype: GradientCommDtype | None = None
    """In which type gradients may be sent where that is faster; None: as they are kept."""
    hierarchical: bool = True
    """Whether groups in several regions may sum and gather in two levels, where that is faster."""


def space_problems(space: SearchSpace) -> Iterator[Problem]:
    """Yield every field with a value that no plan has."""
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


def wish_problems(space: SearchSpace, cluster: Cluster, model: ModelShape) -> Iterator[Problem]:
    """Yield why sets cannot have as many ranks as the training command asks for."""
    wished, most = space.wished_tensor_parallel, space.max_tensor_parallel
    if wished == 1:
        return
    where, found = "--tensor-model-parallel-size", f"{wished}"
    largest = max(len(node.gpu_kinds) for node in cluster.nodes)
    if wished > largest and not space.sets_across_nodes:
        yield Problem(
            where=where,
            found=f"{wished}, and nodes with {largest} GPUs at most",
            expected=f"at most {largest}, as every layer sums over a set",
            remedy="Ask for fewer; with --sets-across-nodes sets may have ranks on several nodes.",
        )
    if wished > model.num_query_groups:
        yield Problem(
            where=where,
            found=f"{wished}, and {model.num_query_groups} KV groups",
            expected=f"at most {model.num_query_groups}: each rank has a whole KV group",
            remedy="Ask for fewer.",
        )
    if most is not None and wished > most:
        yield Problem(
            where=where,
            found=f"{found}, and --max-tp {most}",
            expected=f"at most {most}",
            remedy="Leave one of the two out.",
        )
