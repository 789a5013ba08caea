"""From the options of a command to cluster, model and prices."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from zorse_megatron.cli.console import CommandError
from zorse_megatron.cli.options import DEFAULT_MARGIN, checked_share
from zorse_megatron.cli.workload import Workload
from zorse_megatron.errors import Problem
from zorse_megatron.schema.cluster import Cluster
from zorse_megatron.schema.cluster_yaml import load_cluster
from zorse_megatron.schema.gpu import Dtype
from zorse_megatron.schema.plan import GradientWire, Plan
from zorse_megatron.schema.profile_load import joined, load_profile

if TYPE_CHECKING:
    from zorse_megatron.planner.inputs import Inputs

_BY_PREFERENCE: tuple[Dtype, ...] = ("bfloat16", "float16", "float32")


@dataclass(frozen=True, kw_only=True)
class Priced:
    """A cluster and a model, with prices for what they do together."""

    cluster: Cluster
    workload: Workload
    dtype: Dtype
    inputs: "Inputs"
    notes: tuple[str, ...]
    """For people: what was chosen for them, and what the prices rest on."""


def priced(
    cluster: Cluster,
    workload: Workload,
    profiles: Sequence[Path],
    *,
    global_batch_size: int,
    margin: float = DEFAULT_MARGIN,
    wire: GradientWire | None = None,
) -> Priced:
    """Price a workload on a cluster. Raises a ZorseError with every problem."""
    # Here and not above: other commands start faster without these imports.
    from zorse_megatron.planner.inputs import SearchSpace, make_inputs

    margin = checked_share(margin, "--margin")
    profile = joined([load_profile(path) for path in profiles]) if profiles else None
    dtype = workload.dtype or usual_dtype(cluster)
    inputs = make_inputs(
        cluster,
        workload.model,
        profile,
        global_batch_size=global_batch_size,
        dtype=dtype,
        memory_margin=margin,
        space=SearchSpace(gradient_wire=wire),
    )
    notes = list(inputs.notes)
    if workload.dtype is None:
        notes.insert(0, f"computed in {dtype}, as every kind of GPU can; --dtype changes it")
    return Priced(
        cluster=cluster, workload=workload, dtype=dtype, inputs=inputs, notes=tuple(notes)
    )


def priced_for_plan(
    plan: Plan,
    cluster_file: Path,
    workload: Workload,
    profiles: Sequence[Path],
    *,
    source: str,
    margin: float = DEFAULT_MARGIN,
) -> Priced:
    """Price what an existing plan does. Raises where it is for another cluster or model."""
    from zorse_megatron.cli.fits import model_problems
    from zorse_megatron.schema.placement import cluster_problems

    cluster = load_cluster(cluster_file)
    problems = [
        *cluster_problems(plan, cluster, source),
        *model_problems(plan, workload, source),
    ]
    if problems:
        raise CommandError(f"{source} was made for something else", problems)
    return priced(
        cluster, workload, profiles, global_batch_size=plan.global_batch_size, margin=margin
    )


def usual_dtype(cluster: Cluster) -> Dtype:
    """Return the first of bfloat16, float16 and float32 that every kind of GPU computes in.

    Without one, the kinds and what they lack are reported by whoever prices them.
    """
    for dtype in _BY_PREFERENCE:
        rates = (getattr(gpu.peak, f"{dtype}_flops_per_s") for gpu in cluster.kinds.values())
        if all(rate is not None for rate in rates):
            return dtype
    return "float32"


def needed_batch_size(workload: Workload) -> int:
    """Return the global batch size. Raises CommandError where nobody said one."""
    if workload.global_batch_size is not None:
        return workload.global_batch_size
    problem = Problem(
        where="--global-batch-size",
        found="no such option",
        expected="the number of samples per iteration",
        remedy="Add it here, or to the training command's flags.",
    )
    raise CommandError("the command cannot be run", [problem])
