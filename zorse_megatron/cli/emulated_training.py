"""What `zorse emulate` trains: a plan on our runtime, or its layout on unmodified Megatron."""

from dataclasses import dataclass, replace
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING

from zorse_megatron.cli.simulated import simulated
from zorse_megatron.cli.workload_costs import WorkloadCosts
from zorse_megatron.launch.stock_command import without_layout
from zorse_megatron.schema.cluster.cluster_yaml import load_cluster
from zorse_megatron.schema.cluster.rank_placement import refuse_other_cluster
from zorse_megatron.schema.plan.plan import Plan

if TYPE_CHECKING:
    from zorse_megatron.emulate.jobs.emulator import System
    from zorse_megatron.emulate.jobs.tiny_model import TinyTraining
    from zorse_megatron.planner.baselines.stock_grids import Grid
    from zorse_megatron.simulate.framework import Framework
    from zorse_megatron.simulate.result import SimulationResult


@dataclass(frozen=True, kw_only=True)
class EmulatedTraining:
    """One job, and what is simulated beside it."""

    costs: WorkloadCosts
    system: "System"
    plan: Plan
    """What is simulated, on GPUs in the order of `simulated_on`."""
    simulated_on: WorkloadCosts
    framework: "Framework | None" = None

    def simulated(self, source: str) -> "SimulationResult":
        """One iteration as the simulator has it."""
        costs, framework = self.simulated_on, self.framework
        return simulated(self.plan, costs, source=source, framework=framework)

    def training(self, iterations: int) -> "TinyTraining":
        """Of the tiny model."""
        from zorse_megatron.emulate.jobs.tiny_model import TinyTraining
        from zorse_megatron.emulate.jobs.tiny_shape import TinyShape

        model, computing = self.costs.workload.model, self.costs.workload.computing
        return TinyTraining(
            model=model,
            global_batch_size=self.plan.global_batch_size,
            iterations=iterations,
            recompute=None if self.system.plan is None else computing.recompute,
            shape=TinyShape.of(model, [self.plan]),
            sequence_parallel=computing.sequence_parallel,
        )


def ours(
    plan: Plan, costs: WorkloadCosts, *, rebalance: bool, status: Path | None
) -> EmulatedTraining:
    """Our runtime under the plan."""
    from zorse_megatron.emulate.jobs.emulator import System

    flags = (
        *(("--zorse-rebalance", "on") if rebalance else ()),
        *(("--zorse-status", str(status.absolute())) if status is not None else ()),
    )
    system = System(name="plan", gpus=tuple(range(plan.world_size)), plan=plan, flags=flags)
    return EmulatedTraining(costs=costs, system=system, plan=plan, simulated_on=costs)


@dataclass(frozen=True, kw_only=True)
class OfStock:
    """A plan read as stock's layout."""

    grid: "Grid"
    order: tuple[int, ...]
    """Rank of stock's job -> rank of the cluster."""

    def job(self, plan: Plan, costs: WorkloadCosts) -> EmulatedTraining:
        """Unmodified Megatron with the layout's flags, on these GPUs."""
        from zorse_megatron.emulate.jobs.emulator import System
        from zorse_megatron.emulate.jobs.stock_flags import flags_of_grid
        from zorse_megatron.planner.baselines.stock_grids import plan_of_grid
        from zorse_megatron.planner.baselines.stock_placements import Placement
        from zorse_megatron.planner.baselines.stock_search import framework_of

        node_of = costs.inputs.spec.node_of
        nodes = tuple(tuple(some) for _, some in groupby(self.order, key=node_of))
        placed = Placement(nodes=nodes).inputs(costs.inputs)
        made = plan_of_grid(placed, self.grid)
        dtype = plan.groups[0].compute_dtype
        layout = replace(
            made, groups=tuple(replace(group, compute_dtype=dtype) for group in made.groups)
        )
        system = System(
            name="stock Megatron",
            gpus=self.order,
            flags=flags_of_grid(placed, self.grid),
            stock_layout=layout,
        )
        return EmulatedTraining(
            costs=costs,
            system=system,
            plan=layout,
            simulated_on=replace(costs, inputs=placed),
            framework=framework_of(self.grid),
        )


def stock_layout(
    plan: Plan, cluster: Path, flags: tuple[str, ...] | None, *, source: str
) -> tuple[OfStock, tuple[str, ...] | None]:
    """Read a plan as stock's layout, and take what that decides from the training command.

    Raises ZorseError where the plan is no such layout, or the command contradicts it.
    """
    from zorse_megatron.planner.baselines.stock_flags import layout_flags
    from zorse_megatron.planner.baselines.stock_plans import grid_of_plan

    there = load_cluster(cluster)
    refuse_other_cluster(plan, there, source)
    grid, order = grid_of_plan(plan, [node.ranks for node in there.nodes], source)
    if flags is not None:
        flags = without_layout(flags, layout_flags(grid), is_started=False)
    return OfStock(grid=grid, order=order), flags
