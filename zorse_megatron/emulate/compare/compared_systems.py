"""The systems compared: stock in its best even layouts, the baselines, and ours."""

from collections import Counter
from dataclasses import dataclass

from zorse_megatron.emulate.jobs.emulator import System
from zorse_megatron.emulate.jobs.stock_flags import flags_of_grid
from zorse_megatron.errors import PlanError
from zorse_megatron.planner.baselines.stock_best import Stock, stock_on_all, stock_on_best
from zorse_megatron.planner.evaluate.simulate_plan import simulate_plan
from zorse_megatron.planner.find_plan import NoPlanError, find_plan
from zorse_megatron.planner.inputs.search_inputs import Inputs
from zorse_megatron.planner.outcome import Strategy
from zorse_megatron.schedules.refusals import refuse_unsupported
from zorse_megatron.schema.plan.plan import Group, Plan
from zorse_megatron.schema.text.counted import number_of

STOCK = "stock, all GPUs"
BEST_GPUS = "stock, best GPUs"
OURS = "zorse"


@dataclass(frozen=True, kw_only=True)
class ComparedSystem:
    """One row of the comparison."""

    name: str
    layout: str
    """For people."""
    system: System | None
    """None: it cannot be run, see `reason`."""
    predicted_s: float | None
    """Simulated iteration; None where the plan does not fit or is not simulated."""
    reason: str = ""


def compared_systems(inputs: Inputs, *, quick: bool) -> list[ComparedSystem]:
    """Find every system's layout. `quick`: stock on all GPUs, and ours.

    Raises NoPlanError where not even ours fits.
    """
    systems = [_stock(STOCK, stock_on_all(inputs))]
    if not quick:
        systems += [_best_gpus(stock_on_best(inputs))]
        systems += [_by_strategy(inputs, strategy) for strategy in ("zorse-paper", "cephalo")]
    return [*systems, _ours(inputs)]


def _best_gpus(stock: Stock) -> ComparedSystem:
    """What does not fit on fewer GPUs either is not run."""
    return _stock(BEST_GPUS, stock) if stock.fitting else _absent(BEST_GPUS, stock.reason)


def _stock(name: str, stock: Stock) -> ComparedSystem:
    """On all GPUs what comes closest is run where nothing fits, to see it run out of memory."""
    layout = stock.layout
    if layout is None:
        return _absent(name, stock.reason)
    flags = flags_of_grid(layout.inputs, layout.grid)
    return ComparedSystem(
        name=name,
        layout=layout.description,
        system=System(name=name, gpus=layout.ranks, flags=flags, stock_layout=layout.plan),
        predicted_s=None if stock.reason else layout.iteration_s,
    )


def _absent(name: str, reason: str) -> ComparedSystem:
    return ComparedSystem(name=name, layout="-", system=None, predicted_s=None, reason=reason)


def _ours(inputs: Inputs) -> ComparedSystem:
    return _planned(OURS, inputs, find_plan(inputs, strategy="zorse").plan)


def _by_strategy(inputs: Inputs, strategy: Strategy) -> ComparedSystem:
    try:
        return _planned(strategy, inputs, find_plan(inputs, strategy=strategy).plan)
    except NoPlanError as error:
        reason = error.title
    except PlanError as error:
        reason = "not executed yet: " + ", ".join(problem.where for problem in error.problems)
    return _absent(strategy, reason)


def _planned(name: str, inputs: Inputs, plan: Plan) -> ComparedSystem:
    refuse_unsupported(plan)
    groups = "|".join(map(_members, plan.groups))
    gpus = tuple(range(plan.world_size))
    return ComparedSystem(
        name=name,
        layout=f"groups of {groups}, {number_of(len(plan.chunks), 'chunk')}, {plan.schedule.name}",
        system=System(name=name, gpus=gpus, plan=plan),
        predicted_s=simulate_plan(inputs, plan).iteration_s,
    )


def _members(group: Group) -> str:
    """How many ranks a group has, those of tensor-parallel sets together."""
    degrees = Counter(len(replica.ranks) for replica in group.replicas)
    alone = degrees.pop(1, 0)
    sets = [
        (f"{count} sets" if count > 1 else "a set") + f" of {degree}"
        for degree, count in sorted(degrees.items(), reverse=True)
    ]
    return " + ".join([*sets, *([str(alone)] if alone else [])])
