"""Checks that ranks are on the plan's GPUs and nodes: in files, and in a job."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from zorse_megatron.errors import PlanError, Problem
from zorse_megatron.gpus.known_gpus import GPU_KINDS
from zorse_megatron.inputs.cluster import Cluster
from zorse_megatron.plan.plan import Plan
from zorse_megatron.plan.rules import without_members

_MAX_LISTED = 4


@dataclass(frozen=True, kw_only=True)
class RankLocation:
    """Where a rank finds itself."""

    node: str
    gpu_kind: str | None
    """A well-known kind, or the driver's name; None: there is no GPU to compare."""
    is_declared: bool = False
    """Whether the kind was declared: then it may be any kind of the cluster's."""


def used_cluster_file(plan: Path) -> Path:
    """Return where `zorse plan` writes the cluster file of a plan for some of the GPUs.

    >>> str(used_cluster_file(Path("runs/plan.json")))
    'runs/plan.cluster.yaml'
    """
    return plan.parent / f"{plan.stem}.cluster.yaml"


def stock_plan_file(plan: Path) -> Path:
    """Return where `zorse plan` writes stock Megatron's best layout beside a plan.

    >>> str(stock_plan_file(Path("runs/plan.json")))
    'runs/plan.stock.json'
    """
    return plan.parent / f"{plan.stem}.stock.json"


def cluster_problems(plan: Plan, cluster: Cluster, source: str = "plan") -> Iterator[Problem]:
    """Yield where the plan's ranks are not the cluster's GPUs, or these lack units for a type."""
    if plan.world_size != cluster.world_size:
        yield Problem(
            where=source,
            found=f"{plan.world_size} ranks, while the cluster has {cluster.world_size} GPUs",
            expected="a plan for all GPUs of the cluster",
            remedy=_remedy(plan, cluster, source),
        )
        return
    for problem in without_members(plan, cluster.gpu_kinds, cluster.kinds):
        yield replace(problem, where=f"{source}: {problem.where}")
    kinds = plan.cluster.gpu_kinds if plan.cluster else None
    if kinds is None:
        return
    wrong = [
        (rank, planned, there)
        for rank, (planned, there) in enumerate(zip(kinds, cluster.gpu_kinds, strict=True))
        if planned != there
    ]
    if wrong:
        ranks = ", ".join(
            f"rank {rank} on {planned}, which is {there} in the cluster"
            for rank, planned, there in wrong[:_MAX_LISTED]
        )
        more = f" and {len(wrong) - _MAX_LISTED} more" if len(wrong) > _MAX_LISTED else ""
        yield Problem(
            where=f"{source}: cluster.gpu_kinds",
            found=ranks + more,
            expected="the same kind of GPU for every rank",
            remedy="Put the nodes of the cluster into the order that the plan was made for, or "
            "make a new plan.",
        )


def _remedy(plan: Plan, cluster: Cluster, source: str) -> str:
    """Name the cluster file that was written with a plan for fewer GPUs, if it is there."""
    remedy = "Make a plan for this cluster, or give the cluster that it was made for"
    if plan.world_size > cluster.world_size:
        return f"{remedy}."
    beside = used_cluster_file(Path(source))
    if beside.is_file():
        return f"Give {beside}: the cluster file of its GPUs, which zorse plan wrote beside it."
    return f"{remedy}: zorse plan writes that of fewer GPUs beside their plan."


def refuse_other_cluster(plan: Plan, cluster: Cluster, source: str) -> None:
    """Raise PlanError where the plan's ranks are not the cluster's GPUs."""
    problems = list(cluster_problems(plan, cluster, source))
    if problems:
        raise PlanError(f"{source} was made for another cluster", problems)


def placement_problems(
    found: Sequence[RankLocation],
    *,
    kinds: Sequence[str] | None,
    nodes: Sequence[str] | None,
) -> list[Problem]:
    """Every rank that is elsewhere; `found`, `kinds` and `nodes` are in the order of the ranks.

    `kinds`, `nodes`: what the plan or the cluster file has for each rank; None: it does not say.
    Kinds that are not well known cannot be compared with a driver's name and are left out.
    """
    problems = []
    for rank, here in enumerate(found):
        where = f"rank {rank} on node {here.node}"
        if nodes is not None and nodes[rank] != here.node:
            problems.append(
                Problem(
                    where=where,
                    found=f"node {here.node}",
                    expected=f"node {nodes[rank]}, as in the cluster file",
                    remedy="Start the nodes in the order of the cluster file: zorse launch "
                    "--torchrun prints each node's line.",
                )
            )
        if kinds is None or here.gpu_kind is None or kinds[rank] == here.gpu_kind:
            continue
        if kinds[rank] in GPU_KINDS or here.is_declared:
            problems.append(
                Problem(
                    where=where,
                    found=f"a GPU of kind {here.gpu_kind}",
                    expected=f"{kinds[rank]}, for which the plan was made",
                    remedy="Start the job with what zorse launch writes, with "
                    "CUDA_DEVICE_ORDER=PCI_BUS_ID where a node has several kinds; or make a plan "
                    "for these GPUs.",
                )
            )
    return problems


def unchecked_kinds(kinds: Sequence[str]) -> list[str]:
    """The kinds that no driver's name can be compared with."""
    return sorted(set(kinds) - set(GPU_KINDS))
