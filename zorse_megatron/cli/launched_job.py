"""What `zorse launch` starts, from its files and the training command."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from zorse_megatron.cli.workload_costs import workload_in_flags
from zorse_megatron.flags.torch_builds import build_notes
from zorse_megatron.inputs.cluster import Cluster
from zorse_megatron.inputs.cluster_yaml import load_cluster
from zorse_megatron.inputs.rank_placement import refuse_other_cluster
from zorse_megatron.launch.batch_script import refuse_odd_names
from zorse_megatron.launch.stock_command import (
    in_order,
    refuse_other_dtype,
    replaced_sizes,
    stock_training_of,
    without_layout,
)
from zorse_megatron.launch.training_command import TrainingCommand, training_of
from zorse_megatron.plan.plan import Plan
from zorse_megatron.plan.plan_file import fingerprint, load_plan
from zorse_megatron.schedule.lower import refuse_unsupported


@dataclass(frozen=True, kw_only=True)
class LaunchedJob:
    """What is to be started, and where."""

    cluster: Cluster
    """Nodes, and the GPUs of each, in the order of ranks."""
    training: TrainingCommand
    title: str
    name: str
    """The same for the same plan."""
    notes: tuple[str, ...]
    """For the user, on the training command and the GPUs."""


def planned_job(
    path: Path, cluster: Path, given: Sequence[str], *, names_nodes: bool
) -> LaunchedJob:
    """Our runtime under a plan. Raises ZorseError if files and command do not go together."""
    plan, there = _files(path, cluster)
    refuse_unsupported(plan, str(path))
    training = training_of(given, plan=str(path), cluster=str(cluster) if names_nodes else None)
    workload, _ = workload_in_flags(given, plan, path, there.kinds)
    if names_nodes:
        refuse_odd_names(there)
    title = f"Trains under {path} (plan {fingerprint(plan)}) on the GPUs{_of(there)}."
    return _job(plan, there, training, title, workload.notes)


def stock_job(path: Path, cluster: Path, given: Sequence[str], *, names_nodes: bool) -> LaunchedJob:
    """Unmodified Megatron in a plan's layout. Raises ZorseError as `planned_job`, and for a plan
    that is no layout of stock's or a command that contradicts it."""
    from zorse_megatron.planner.baselines.stock_plans import grid_of_plan, layout_flags

    plan, there = _files(path, cluster)
    grid, order = grid_of_plan(plan, [node.ranks for node in there.nodes], str(path))
    refuse_unsupported(plan, str(path))
    layout = layout_flags(grid)
    rest = without_layout(given, layout)
    refuse_other_dtype(rest, plan.groups[0].compute_dtype)
    training = stock_training_of(rest, layout, grid.tensor)
    workload, _ = workload_in_flags(rest, plan, path, there.kinds, by_stock=True)
    if names_nodes:
        refuse_odd_names(there)
    title = f"Unmodified Megatron in the layout of {path} ({fingerprint(plan)}){_of(there)}."
    notes = (*replaced_sizes(given, layout), *workload.notes)
    return _job(plan, in_order(there, order), training, title, notes)


def _files(path: Path, cluster: Path) -> tuple[Plan, Cluster]:
    plan, there = load_plan(path), load_cluster(cluster)
    refuse_other_cluster(plan, there, str(path))
    return plan, there


def _job(
    plan: Plan, cluster: Cluster, training: TrainingCommand, title: str, notes: tuple[str, ...]
) -> LaunchedJob:
    return LaunchedJob(
        cluster=cluster,
        training=training,
        title=title,
        name=f"zorse-{fingerprint(plan)}",
        notes=(*notes, *build_notes(list(cluster.kinds))),
    )


def _of(cluster: Cluster) -> str:
    return f" of {cluster.name}" if cluster.name else ""
