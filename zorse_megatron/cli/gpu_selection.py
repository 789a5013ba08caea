"""`zorse plan` on as many GPUs as are worth it: the search, and their cluster file."""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from zorse_megatron.cli.console import CommandError
from zorse_megatron.cli.workload_costs import WorkloadCosts
from zorse_megatron.errors import Problem
from zorse_megatron.schema.cluster.cluster import Cluster
from zorse_megatron.schema.cluster.cluster_yaml import parse_cluster
from zorse_megatron.schema.cluster.fewer_gpus import text_with_gpus

if TYPE_CHECKING:
    from zorse_megatron.planner.outcome import Outcome, Strategy
    from zorse_megatron.planner.selection.points import Objective, Point

_SEARCHED = 2  # selections that get the whole search, beside that of all GPUs
_MAX_LISTED = 8

CostsOf = Callable[[Cluster], WorkloadCosts]
OnProgress = Callable[[Any], None] | None
"""Takes a `SearchProgress`, whose module only the search imports."""


@dataclass(frozen=True, kw_only=True)
class Selected:
    """GPUs of a cluster, and the plan that was found for them."""

    costs: WorkloadCosts
    """On these GPUs."""
    outcome: "Outcome"
    point: "Point"
    points: tuple["Point", ...]
    """All selections that were searched, best first."""
    whole: Cluster
    cluster_text: str
    """The cluster file of these GPUs."""

    @property
    def left_out(self) -> tuple[int, ...]:
        """Ranks of the whole cluster."""
        return tuple(sorted(set(range(self.whole.world_size)) - set(self.point.ranks)))


def prices_per_hour(cluster: Cluster, objective: "Objective") -> tuple[float, ...] | None:
    """Return the price of each rank's GPU; None where not all are known and none is needed.

    Raises CommandError where the objective asks for prices and nodes have none.
    """
    without = [node.name for node in cluster.nodes if node.price_per_gpu_hour is None]
    if not without:
        return tuple(node.price_per_gpu_hour or 0.0 for node in cluster.nodes for _ in node.ranks)
    if objective.aim == "fastest" and objective.most_per_gtoken is None:
        return None
    more = f" and {len(without) - _MAX_LISTED} more" if len(without) > _MAX_LISTED else ""
    problem = Problem(
        where="--objective cheapest" if objective.aim == "cheapest" else "--budget",
        found=f"no price of node {', '.join(without[:_MAX_LISTED])}{more}",
        expected="price_per_gpu_hour of every node of the cluster file",
        remedy="Add it, such as price_per_gpu_hour: 1.25, in any one currency.",
    )
    raise CommandError("the command cannot be run", [problem])


def select_gpus(  # noqa: PLR0917
    data: bytes,
    costs: WorkloadCosts,
    costs_of: CostsOf,
    objective: "Objective",
    strategy: "Strategy",
    on_progress: OnProgress,
) -> Selected:
    """Search for the GPUs that meet the objective best. `data`: the cluster file.

    Raises NoPlanError where nothing fits, CommandError without prices that the objective needs,
    and where no plan is within the budget.
    """
    from zorse_megatron.planner.selection.explore import explore, short_search

    whole = costs.cluster
    points = explore(
        costs.inputs,
        short_search(strategy),
        objective=objective,
        prices_per_hour=prices_per_hour(whole, objective),
        on_progress=on_progress,
    )
    found = _searched(data, points, costs_of, objective, strategy, on_progress, whole)
    best = min(found, key=lambda each: objective.rank(each.point))
    if not objective.allows(best.point):
        raise _too_dear(best, objective)
    by_ranks = {each.point.ranks: each.point for each in found}
    known = [by_ranks.get(point.ranks, point) for point in points]
    return replace(best, points=tuple(sorted(known, key=objective.rank)))


def _searched(  # noqa: PLR0917
    data: bytes,
    points: Sequence["Point"],
    costs_of: CostsOf,
    objective: "Objective",
    strategy: "Strategy",
    on_progress: OnProgress,
    whole: Cluster,
) -> list[Selected]:
    """The whole search, on the best few and on all GPUs. Raises NoPlanError if nothing fits."""
    from zorse_megatron.planner.find_plan import find_plan
    from zorse_megatron.planner.planner_errors import NoPlanError

    everything = next(point for point in points if len(point.ranks) == whole.world_size)
    found, failure = [], None
    for point in dict.fromkeys([everything, *points[:_SEARCHED]]):
        text = text_with_gpus(data, point.ranks, header=_header(point))
        costs = costs_of(parse_cluster(text.encode()))
        try:
            outcome = find_plan(costs.inputs, strategy=strategy, on_progress=on_progress)
        except NoPlanError as error:
            failure = failure or error
            continue
        found.append(
            Selected(
                costs=costs,
                outcome=outcome,
                point=replace(point, iteration_s=outcome.iteration_s),
                points=(),
                whole=whole,
                cluster_text=text,
            )
        )
    if not found:
        assert failure is not None, "each search found a plan or failed"
        raise failure
    return found


def _header(point: "Point") -> str:
    ranks = ", ".join(map(str, point.ranks))
    return f"Written by `zorse plan`: the GPUs that its plan uses.\nRanks before: {ranks}"


def _too_dear(best: Selected, objective: "Objective") -> CommandError:
    price, most = best.point.price_per_gtoken, objective.most_per_gtoken
    problem = Problem(
        where=f"--budget {most:g}",
        found=f"{price:.4g} per 10^9 tokens at least, on {gpus_of(best.whole, best.point.ranks)}",
        expected="plans that cost no more than the budget",
        remedy="Raise the budget, or add cheaper GPUs.",
    )
    return CommandError("no plan is within the budget", [problem])


def gpus_of(cluster: Cluster, ranks: Sequence[int]) -> str:
    """For people: how many of which kind.

    >>> from zorse_megatron.schema.cluster.cluster_yaml import parse_cluster
    >>> gpus_of(parse_cluster(b"nodes: [{gpus: [2 x T4, 1 x L4]}]"), (0, 2))
    '1 T4, 1 L4'
    """
    counts = Counter(cluster.gpu_kinds[rank] for rank in ranks)
    return ", ".join(f"{number} {kind}" for kind, number in counts.items())
