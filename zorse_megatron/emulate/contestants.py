"""Who is compared: stock Megatron in its best even layouts, the strategies' plans, and ours."""

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from zorse_megatron.emulate.run import System
from zorse_megatron.emulate.stock_grids import PricedGrid, best_grid, flags_of_grid
from zorse_megatron.errors import PlanError
from zorse_megatron.planner.bound import best_layers_per_s
from zorse_megatron.planner.inputs import Inputs
from zorse_megatron.planner.outcome import Strategy
from zorse_megatron.planner.search import NoPlanError, find_plan
from zorse_megatron.planner.simulate_plan import simulate_plan
from zorse_megatron.schedules.refusals import refuse_unsupported
from zorse_megatron.schema.cluster import Cluster
from zorse_megatron.schema.plan import Plan

STOCK = "stock, all GPUs"
BEST_GPUS = "stock, best GPUs"
OURS = "zorse"


@dataclass(frozen=True, kw_only=True)
class Contestant:
    """One row of the comparison."""

    name: str
    layout: str
    """For people."""
    system: System | None
    """None: it cannot be run, see `reason`."""
    predicted_s: float | None
    """Simulated iteration; None where the plan does not fit or is not simulated."""
    reason: str = ""


MakeInputs = Callable[[Cluster], Inputs]
"""The same model, profile and batch on another cluster."""


def contestants(cluster: Cluster, make: MakeInputs, *, quick: bool) -> list[Contestant]:
    """Find everybody's layout. `quick`: stock on all GPUs, and ours.

    Raises NoPlanError where not even ours fits.
    """
    inputs = make(cluster)
    everybody = [stock_on_all(inputs)]
    if not quick:
        everybody += [best_subset(cluster, make)]
        everybody += [_by_strategy(inputs, strategy) for strategy in ("zorse-paper", "cephalo")]
    return [*everybody, _ours(inputs)]


def stock_on_all(inputs: Inputs) -> Contestant:
    """The best even grid over all GPUs; the one with the least memory where none fits."""
    priced = best_grid(inputs)
    if priced is None:
        return _absent(STOCK, "no even grid over all GPUs has a stage for each, and whole batches")
    return _stock(STOCK, inputs, priced, tuple(range(inputs.world_size)))


def best_subset(cluster: Cluster, make: MakeInputs) -> Contestant:
    """Stock on the fastest kinds of GPU only, as many kinds as serve it best by the simulator."""
    found: list[tuple[float, Contestant]] = []
    for nodes in faster_nodes(cluster, make(cluster)):
        gpus = tuple(rank for node in nodes for rank in cluster.nodes[node].ranks)
        inputs = make(part_of(cluster, nodes))
        priced = best_grid(inputs)
        if priced is not None and priced.fullest <= 1:
            found.append((priced.iteration_s, _stock(BEST_GPUS, inputs, priced, gpus)))
    if not found:
        return _absent(BEST_GPUS, "no even grid on fewer GPUs fits in their memory")
    return min(found, key=lambda each: each[0])[1]


def faster_nodes(cluster: Cluster, inputs: Inputs) -> Iterator[tuple[int, ...]]:
    """Yield the nodes with the fastest kind only, with the two fastest, and so on; not all."""
    rates = {kind: best_layers_per_s(inputs, kind) for kind in cluster.kinds}
    fastest_first = sorted(rates, key=lambda kind: -rates[kind])
    for count in range(1, len(fastest_first)):
        kinds = set(fastest_first[:count])
        nodes = [n for n, node in enumerate(cluster.nodes) if kinds.issuperset(node.gpu_kinds)]
        if nodes:
            yield tuple(nodes)


def part_of(cluster: Cluster, nodes: Sequence[int]) -> Cluster:
    """Return the cluster with these nodes only; ranks are counted anew."""
    kept, first = [], 0
    for number in nodes:
        kept.append(dataclasses.replace(cluster.nodes[number], first_rank=first))
        first += len(cluster.nodes[number].gpu_kinds)
    regions = {node.region for node in kept}
    kinds = dict.fromkeys(kind for node in kept for kind in node.gpu_kinds)
    return dataclasses.replace(
        cluster,
        nodes=tuple(kept),
        kinds={kind: cluster.kinds[kind] for kind in kinds},
        switches=tuple(switch for switch in cluster.switches if switch.region in regions),
        region_links=tuple(
            link for link in cluster.region_links if regions.issuperset(link.regions)
        ),
    )


def _stock(name: str, inputs: Inputs, priced: PricedGrid, gpus: tuple[int, ...]) -> Contestant:
    return Contestant(
        name=name,
        layout=f"{_kinds(inputs)}: {priced.grid.words}",
        system=System(name=name, gpus=gpus, flags=flags_of_grid(inputs, priced.grid)),
        predicted_s=priced.iteration_s if priced.fullest <= 1 else None,
    )


def _absent(name: str, reason: str) -> Contestant:
    return Contestant(name=name, layout="-", system=None, predicted_s=None, reason=reason)


def _ours(inputs: Inputs) -> Contestant:
    return _planned(OURS, inputs, find_plan(inputs, strategy="zorse").plan)


def _by_strategy(inputs: Inputs, strategy: Strategy) -> Contestant:
    try:
        return _planned(strategy, inputs, find_plan(inputs, strategy=strategy).plan)
    except NoPlanError as error:
        reason = error.title
    except PlanError as error:
        reason = "not executed yet: " + ", ".join(problem.where for problem in error.problems)
    return _absent(strategy, reason)


def _planned(name: str, inputs: Inputs, plan: Plan) -> Contestant:
    refuse_unsupported(plan)
    groups = "|".join(str(len(group.ranks)) for group in plan.groups)
    gpus = tuple(range(plan.world_size))
    return Contestant(
        name=name,
        layout=f"groups of {groups}, {len(plan.chunks)} chunks, {plan.schedule.name}",
        system=System(name=name, gpus=gpus, plan=plan),
        predicted_s=simulate_plan(inputs, plan).iteration_s,
    )


def _kinds(inputs: Inputs) -> str:
    counts = {kind: inputs.kinds.count(kind) for kind in dict.fromkeys(inputs.kinds)}
    return ", ".join(f"{count} {kind}" for kind, count in counts.items())
