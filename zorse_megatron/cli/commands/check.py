"""`zorse check`: validate files, alone and together."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from zorse_megatron.cli.checked_file import CheckedFile, check_file, check_model
from zorse_megatron.cli.console import Output, plain_problems, refusal
from zorse_megatron.cli.options import Margin, WorkloadOptions, answers, checked_share
from zorse_megatron.cli.simulated import (
    capacities_bytes,
    fullest_rank,
    memory_problems,
    simulated,
    types_of,
)
from zorse_megatron.cli.workload import (
    Workload,
    at_seq_length,
    dtype_named,
    model_or_flags,
    with_lora,
)
from zorse_megatron.cli.workload_costs import (
    WorkloadCosts,
    costs_on,
    workload_in_flags,
    workload_problems,
)
from zorse_megatron.errors import FlagError, PlanError, Problem, ZorseError
from zorse_megatron.files.wording import memory
from zorse_megatron.flags.check import fitting_no_plan
from zorse_megatron.flags.command import read_command
from zorse_megatron.gpus.gpu import GpuKind
from zorse_megatron.inputs.cluster import Cluster
from zorse_megatron.inputs.profile import Profile
from zorse_megatron.inputs.rank_placement import cluster_problems
from zorse_megatron.plan.plan import Plan
from zorse_megatron.schedule.lower import lower_plan


@dataclass(frozen=True, kw_only=True)
class Checked:
    """One comparison: what with what, and what came of it."""

    what: str
    found: str = ""
    """For people; empty where there are problems."""
    error: ZorseError | None = None


@dataclass(frozen=True, kw_only=True)
class Files:
    """Files beside those of a workload."""

    paths: Annotated[
        list[Path] | None,
        typer.Argument(
            metavar="[FILE]...", help="Plans, clusters, models, profiles, in any order."
        ),
    ] = None
    cluster: Annotated[
        Path | None, typer.Option("--cluster", metavar="YAML", help="A cluster file, as FILE.")
    ] = None
    actions: Annotated[
        bool,
        typer.Option(
            "--actions", help="Print what each rank of a plan executes in one iteration, in order."
        ),
    ] = False


@partial(answers, errors_to_stderr=False)
def check(*, files: Files, given: WorkloadOptions, margin: Margin = 0.0) -> Output:
    """Validate files, alone and together: summarize them, or list every problem (exit code 1).

    Flags after -- are compared with the plan. With a plan, a cluster and a model (or flags), memory
    is checked too.
    """
    name, flags = model_or_flags(given.model, given.flags)
    dtype_named(given.dtype)
    checked_share(margin, "--margin")
    paths = [*(files.paths or ()), *([files.cluster] if files.cluster else ()), *given.profiles]
    checked = [*map(check_file, paths), *map(check_model, [name] if name else ())]
    if not checked:
        raise refusal(
            "FILE",
            "no file",
            "a plan, cluster, model or profile, or --model",
            "Such as: zorse check plan.json cluster.yaml --model llama-7b",
        )
    together = _checks_of(checked, flags, given, margin)
    found = (*(each.error for each in checked), *(each.error for each in together))
    errors = [error for error in found if error is not None]
    plans = [file.content for file in checked if isinstance(file.content, Plan)]
    lists = [str(lower_plan(plan)) for plan in plans if files.actions]
    return Output(
        values={
            "problems": plain_problems([each for error in errors for each in error.problems]),
            "files": [file.values for file in checked],
            "together": [
                {"what": each.what, "ok": each.error is None, "found": each.found}
                for each in together
            ],
            "actions": [text.splitlines() for text in lists],
        },
        shown=[
            *(each for file in checked for each in file.shown),
            *(str(each.error or f"{each.what}: OK, {each.found}") for each in together),
            *lists,
        ],
        ok=not errors,
    )


def _checks_of(
    files: Sequence[CheckedFile],
    flags: Sequence[str] | None,
    given: WorkloadOptions,
    margin: float,
) -> list[Checked]:
    """Compare every plan with every cluster and model among the valid files, and with the flags."""
    plans = [(file.path, file.content) for file in files if isinstance(file.content, Plan)]
    if plans or flags is None:
        return [
            check
            for path, plan in plans
            for check in _of_plan(path, plan, files, flags, given, margin)
        ]
    what = "training command"
    if any(file.error for file in files):
        if misfits := fitting_no_plan(read_command(flags)):
            return [Checked(what=what, error=FlagError(f"the {what} fits no plan", misfits))]
        return []
    error = FlagError.of(
        f"the {what} cannot be checked",
        where="--",
        found="training flags without a plan",
        expected="a plan to compare them with",
        remedy="Name the plan's file before --.",
    )
    return [Checked(what=what, error=error)]


def _of_plan(  # noqa: PLR0917
    path: Path,
    plan: Plan,
    files: Sequence[CheckedFile],
    flags: Sequence[str] | None,
    given: WorkloadOptions,
    margin: float,
) -> list[Checked]:
    """Compare a plan with all else; its memory with each of what it goes with."""
    checks: list[Checked] = []
    clusters: list[tuple[Path, Cluster]] = []
    workloads: list[tuple[str, Workload]] = []
    for file in files:
        if isinstance(file.content, Cluster):
            problems = cluster_problems(plan, file.content, str(path))
            checks.append(_matched(f"{path} on {file.path}", problems, "every rank has its GPU"))
            clusters += [(file.path, file.content)] * (checks[-1].error is None)
        elif isinstance(file.content, Workload):
            workload = _trained(file.content, plan, given)
            problems = workload_problems(plan, workload, str(path))
            checks.append(_matched(f"{path} for {file.path}", problems, "the same model"))
            workloads += [(str(file.path), workload)] * (checks[-1].error is None)
    if flags is not None:
        what = f"{path} with the training command"
        kinds = {name: gpu for _, each in clusters for name, gpu in each.kinds.items()}
        try:
            found, workload = _fits_flags(plan, flags, given, path, kinds)
            checks.append(Checked(what=what, found=found))
            workloads.append(("the training command", workload))
        except ZorseError as error:
            checks.append(Checked(what=what, error=error))
    profiles = [file.path for file in files if isinstance(file.content, Profile)]
    for cluster_path, cluster in clusters:
        for name, workload in workloads:
            what = f"memory of {path} on {cluster_path} with {name}"
            try:
                costs = costs_on(plan, cluster, workload, profiles)
                checks.append(Checked(what=what, found=_fits_memory(plan, costs, path, margin)))
            except ZorseError as error:
                checks.append(Checked(what=what, error=error))
    return checks


def _trained(model: Workload, plan: Plan, given: WorkloadOptions) -> Workload:
    """What is trained of a model, with what the plan says of it."""
    length = given.seq_length or (plan.model.seq_length if model.lacks_seq_length else None)
    workload = with_lora(model if length is None else at_seq_length(model, length), given.lora)
    dtype = dtype_named(given.dtype)
    return replace(workload, dtype=dtype, global_batch_size=given.global_batch_size)


def _matched(what: str, problems: Iterator[Problem], found: str) -> Checked:
    if listed := list(problems):
        return Checked(what=what, error=PlanError(f"{what}: no match", listed))
    return Checked(what=what, found=found)


def _fits_flags(
    plan: Plan,
    flags: Sequence[str],
    given: WorkloadOptions,
    path: Path,
    kinds: Mapping[str, GpuKind],
) -> tuple[str, Workload]:
    workload, has_vocabulary = workload_in_flags(
        flags,
        plan,
        path,
        kinds,
        dtype=given.dtype,
        global_batch_size=given.global_batch_size,
        seq_length=given.seq_length,
    )
    found = "the same model"
    if workload.global_batch_size is not None:
        found += " and global batch size"
    if not has_vocabulary:
        found += "; without --vocab-size its vocabulary was not compared"
    return "; ".join((found, *workload.notes)), workload


def _fits_memory(plan: Plan, costs: WorkloadCosts, path: Path, margin: float) -> str:
    """Say how full the fullest GPU gets. Raises PlanError where one overflows."""
    from zorse_megatron.planner.simulate_plan import host_needs, host_problems, host_sentences

    source, cluster = str(path), costs.cluster
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
    found = (
        f"at most {100 * share:.0f} % of a GPU: rank {rank} ({cluster.gpu_kinds[rank]}) with "
        f"{memory(peak)} of {memory(capacity)}, computing in {types_of(plan, costs)}. "
    )
    more = [*host_sentences(needs), *(f"{each}." for each in costs.inputs.warnings)]
    return found + " ".join(more)
