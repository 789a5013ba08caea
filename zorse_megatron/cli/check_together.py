"""Validate files and training flags against each other: plan, cluster, model, memory."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from zorse_megatron.cli.check_files import CheckedFile
from zorse_megatron.cli.console import gib
from zorse_megatron.cli.plan_against_workload import workload_in_flags, workload_problems
from zorse_megatron.cli.simulated import (
    capacities_bytes,
    fullest_rank,
    memory_problems,
    simulated,
    types_of,
)
from zorse_megatron.cli.workload import Workload, at_seq_length
from zorse_megatron.cli.workload_costs import costs_on
from zorse_megatron.errors import FlagError, PlanError, Problem, ZorseError
from zorse_megatron.schema.cluster.cluster import Cluster
from zorse_megatron.schema.cluster.rank_placement import cluster_problems
from zorse_megatron.schema.gpus.gpu import Dtype, GpuKind
from zorse_megatron.schema.plan.plan import Plan
from zorse_megatron.schema.profile.profile import Profile


@dataclass(frozen=True, kw_only=True)
class Checked:
    """One comparison: what with what, and what came of it."""

    what: str
    found: str
    """For people; empty where there are problems."""
    error: ZorseError | None


@dataclass(frozen=True, kw_only=True)
class CheckOptions:
    """What the command line says beside files and flags; None: nothing."""

    dtype: Dtype | None = None
    global_batch_size: int | None = None
    seq_length: int | None = None
    margin: float = 0.0
    """Share of each GPU's memory that is to stay free."""


def checks_of(
    files: Sequence[CheckedFile], flags: Sequence[str] | None, options: CheckOptions
) -> list[Checked]:
    """Compare every plan with every cluster and model among the valid files, and with the flags."""
    plans = [(file.path, file.content) for file in files if isinstance(file.content, Plan)]
    if flags is not None and not plans:
        found = _flags_alone()
        return [found] if all(file.error is None for file in files) else []
    return [check for path, plan in plans for check in _of_plan(path, plan, files, flags, options)]


def _of_plan(
    path: Path,
    plan: Plan,
    files: Sequence[CheckedFile],
    flags: Sequence[str] | None,
    options: CheckOptions,
) -> list[Checked]:
    source = str(path)
    checks: list[Checked] = []
    clusters: list[tuple[Path, Cluster]] = []
    workloads: list[tuple[str, Workload]] = []
    for file in files:
        if isinstance(file.content, Cluster):
            problems = list(cluster_problems(plan, file.content, source))
            clusters += [] if problems else [(file.path, file.content)]
            checks.append(_checked(f"{path} on {file.path}", "every rank has its GPU", problems))
        elif isinstance(file.content, Workload):
            workload = _of_this_plan(file.content, plan, options)
            problems = list(workload_problems(plan, workload, source))
            workloads += [] if problems else [(str(file.path), workload)]
            checks.append(_checked(f"{path} for {file.path}", "the same model", problems))
    if flags is not None:
        kinds = {name: gpu for _, each in clusters for name, gpu in each.kinds.items()}
        check, in_flags = _flags(path, plan, flags, options, kinds)
        checks.append(check)
        workloads += [("the training command", in_flags)] if in_flags else []
    profiles = [file.path for file in files if isinstance(file.content, Profile)]
    for cluster_path, cluster in clusters:
        for name, workload in workloads:
            what = f"memory of {path} on {cluster_path} with {name}"
            check_memory = partial(
                _memory, plan, cluster, workload, profiles, source, options.margin
            )
            checks.append(_attempt(what, check_memory))
    return checks


def _of_this_plan(model: Workload, plan: Plan, options: CheckOptions) -> Workload:
    """What options and plan say of a model's training."""
    length = options.seq_length or (plan.model.seq_length if model.lacks_seq_length else None)
    workload = model if length is None else at_seq_length(model, length)
    batch = options.global_batch_size
    return replace(workload, dtype=options.dtype, global_batch_size=batch)


def _flags(
    path: Path,
    plan: Plan,
    flags: Sequence[str],
    options: CheckOptions,
    kinds: Mapping[str, GpuKind],
) -> tuple[Checked, Workload | None]:
    what = f"{path} with the training command"
    try:
        workload, has_vocabulary = workload_in_flags(
            flags,
            plan,
            kinds,
            dtype=options.dtype,
            global_batch_size=options.global_batch_size,
            seq_length=options.seq_length,
        )
    except ZorseError as error:
        return Checked(what=what, found="", error=error), None
    problems = list(workload_problems(plan, workload, str(path)))
    if problems:
        misfit = FlagError(f"the training command does not fit {path}", problems)
        return Checked(what=what, found="", error=misfit), None
    found = "the same model"
    if workload.global_batch_size is not None:
        found += " and global batch size"
    if not has_vocabulary:
        found += "; without --vocab-size its vocabulary was not compared"
    return Checked(what=what, found="; ".join((found, *workload.notes)), error=None), workload


def _flags_alone() -> Checked:
    problem = Problem(
        where="--",
        found="training flags without a plan",
        expected="a plan to compare them with",
        remedy="Name the plan's file before --.",
    )
    error = FlagError("the training command cannot be checked", [problem])
    return Checked(what="training command", found="", error=error)


def _memory(  # noqa: PLR0917
    plan: Plan,
    cluster: Cluster,
    workload: Workload,
    profiles: Sequence[Path],
    source: str,
    margin: float,
) -> str:
    """Say how full the fullest GPU gets. Raises PlanError where one overflows."""
    from zorse_megatron.planner.evaluate.node_host_memory import (
        host_needs,
        host_problems,
        host_sentences,
    )

    costs = costs_on(plan, cluster, workload, profiles)
    result = simulated(plan, costs, source=source)
    needs = host_needs(costs.inputs, result)
    problems = [
        *memory_problems(plan, result, cluster, source, margin=margin),
        *host_problems(needs, "as the plan's offload settings say"),
    ]
    if problems:
        raise PlanError(f"{source} does not fit into memory", problems)
    rank, share = fullest_rank(result, cluster)
    peak, capacity = result.peak_memory_bytes[rank], capacities_bytes(cluster)[rank]
    return (
        f"at most {100 * share:.0f} % of a GPU: rank {rank} ({cluster.gpu_kinds[rank]}) with "
        f"{gib(peak)} of {gib(capacity)}, computing in {types_of(plan, costs)}. "
        + " ".join([*host_sentences(needs), *(f"{each}." for each in costs.inputs.warnings)])
    )


def _checked(what: str, found: str, problems: Sequence[Problem]) -> Checked:
    if problems:
        return Checked(what=what, found="", error=PlanError(f"{what}: no match", problems))
    return Checked(what=what, found=found, error=None)


def _attempt(what: str, check: Callable[[], str]) -> Checked:
    try:
        return Checked(what=what, found=check(), error=None)
    except ZorseError as error:
        return Checked(what=what, found="", error=error)
