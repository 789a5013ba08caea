"""`zorse plan` on as many GPUs as are worth it: the search, and their cluster file."""

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from zorse_megatron.cli.workload_costs import WorkloadCosts
from zorse_megatron.schema.cluster.cluster import Cluster
from zorse_megatron.schema.cluster.cluster_yaml import parse_cluster
from zorse_megatron.schema.cluster.fewer_gpus import USED_GPUS, text_with_gpus
from zorse_megatron.schema.gpus.gpu import DTYPE_OF, common_dtype

if TYPE_CHECKING:
    from zorse_megatron.planner.inputs.search_inputs import Inputs
    from zorse_megatron.planner.outcome import Outcome, Strategy
    from zorse_megatron.planner.planner_errors import NoPlanError
    from zorse_megatron.planner.selection.explore import Point

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
    """All selections that got a whole search, best first; that of all GPUs is one of them."""
    whole: Cluster
    cluster_text: str | None
    """The cluster file of these GPUs; None where they are all."""

    @property
    def left_out(self) -> tuple[int, ...]:
        """Ranks of the whole cluster."""
        return tuple(sorted(set(range(self.whole.world_size)) - set(self.point.ranks)))


def select_gpus(
    data: bytes,
    costs: WorkloadCosts,
    costs_of: CostsOf,
    strategy: "Strategy",
    on_progress: OnProgress,
) -> Selected:
    """Search for the GPUs that train fastest, and for their plan. `data`: the cluster file.

    Raises NoPlanError where nothing fits, that of all GPUs.
    """
    from zorse_megatron.planner.selection.explore import explore

    searches = _Searches(data, costs, costs_of, strategy, on_progress)
    points = explore(
        costs.inputs,
        searches.iteration_s,
        part_of=searches.part_of,
        short=None if strategy == "zorse" else searches.iteration_s,
        on_progress=on_progress,
    )
    best = points[0]
    if not best.fits:
        assert searches.failure is not None, "each search found a plan or failed"
        raise searches.failure
    found, outcome = searches.found[best.ranks]
    return Selected(
        costs=found,
        outcome=outcome,
        point=best,
        points=points,
        whole=costs.cluster,
        cluster_text=None if found is costs else searches.text_of(best.ranks),
    )


class _Searches:
    """Whole searches on some of the GPUs, each of them once."""

    def __init__(
        self,
        data: bytes,
        costs: WorkloadCosts,
        costs_of: CostsOf,
        strategy: "Strategy",
        on_progress: OnProgress,
    ) -> None:
        self.data, self.costs, self.costs_of = data, costs, costs_of
        self.strategy, self.on_progress = strategy, on_progress
        self.found: dict[tuple[int, ...], tuple[WorkloadCosts, Outcome]] = {}
        self.failure: NoPlanError | None = None
        """The first one."""

    def iteration_s(self, ranks: tuple[int, ...]) -> float:
        """Infinite where nothing fits."""
        from zorse_megatron.planner.find_plan import find_plan
        from zorse_megatron.planner.planner_errors import NoPlanError

        if ranks not in self.found:
            costs = self._costs_on(ranks)
            try:
                outcome = find_plan(
                    costs.inputs, strategy=self.strategy, on_progress=self.on_progress
                )
            except NoPlanError as error:
                self.failure = self.failure or error
                return math.inf
            self.found[ranks] = costs, outcome
        return self.found[ranks][1].iteration_s

    def part_of(self, ranks: tuple[int, ...]) -> "Inputs":
        """What a lower bound and a short search need."""
        from zorse_megatron.planner.inputs.other_gpus import on_ranks

        kinds = {self.costs.cluster.gpu_kinds[rank] for rank in ranks}
        dtype = DTYPE_OF[common_dtype(self.costs.cluster.kinds[kind] for kind in kinds)]
        if self.costs.workload.dtype is None and dtype != self.costs.dtype:
            return self._costs_on(ranks).inputs  # without the kinds that lack a better type
        return on_ranks(self.costs.inputs, ranks)

    def text_of(self, ranks: tuple[int, ...]) -> str:
        """The cluster file of these GPUs."""
        header = f"{USED_GPUS}\nRanks before: {', '.join(map(str, ranks))}"
        return text_with_gpus(self.data, ranks, header=header)

    def _costs_on(self, ranks: tuple[int, ...]) -> WorkloadCosts:
        if len(ranks) == self.costs.cluster.world_size:
            return self.costs
        return self.costs_of(parse_cluster(self.text_of(ranks).encode()))


def gpus_of(cluster: Cluster, ranks: Sequence[int]) -> str:
    """For people: how many of which kind.

    >>> from zorse_megatron.schema.cluster.cluster_yaml import parse_cluster
    >>> gpus_of(parse_cluster(b"nodes: [{gpus: [2 x T4, 1 x L4]}]"), (0, 2))
    '1 T4, 1 L4'
    """
    counts = Counter(cluster.gpu_kinds[rank] for rank in ranks)
    return ", ".join(f"{number} {kind}" for kind, number in counts.items())
