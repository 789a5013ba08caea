"""The systems compared: stock in its best even layout and its best of all, the baselines, ours."""

from collections import Counter
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass

from zorse_megatron.emulate.jobs.emulator import System
from zorse_megatron.emulate.jobs.stock_flags import flags_of_grid
from zorse_megatron.errors import PlanError, Problem
from zorse_megatron.planner.baselines.stock_best import Stock, StockAtBest, stock_at_best
from zorse_megatron.planner.find_plan import NoPlanError
from zorse_megatron.planner.inputs.search_inputs import Inputs
from zorse_megatron.planner.outcome import Outcome, Strategy
from zorse_megatron.schedules.refusals import refuse_unsupported
from zorse_megatron.schema.plan.plan import Group
from zorse_megatron.schema.text.counted import number_of

STOCK_EVEN = "stock, best even layout"
STOCK = "stock, best layout"
OURS = "zorse"
_PLANNERS: tuple[Strategy, ...] = ("zorse-paper", "cephalo", "zorse")


@dataclass(frozen=True, kw_only=True)
class Planned:
    """A strategy's plan, and the GPUs of the cluster that it is for."""

    ranks: tuple[int, ...]
    """Rank of the plan -> rank of the whole cluster."""
    outcome: Outcome
    stock: StockAtBest | None = None
    """What the search has found of stock on the way."""


@dataclass(frozen=True, kw_only=True)
class ComparedSystem:
    """One row of the comparison."""

    name: str
    layout: str
    """For people: GPUs, and how they are used."""
    system: System | None
    """None: it cannot be run, see `reason`."""
    predicted_s: float | None
    """Simulated iteration; None where nothing fits."""
    peak_memory_fraction: float | None = None
    """Highest simulated peak of a GPU over what it may hold; None where nothing fits."""
    reason: str = ""


def compared_systems(
    inputs: Inputs, strategies: Collection[Strategy], planned: Callable[[Strategy], Planned]
) -> list[ComparedSystem]:
    """Find the layouts of these strategies, for some or all GPUs of `inputs`.

    `planned`: finds a strategy's plan, or raises NoPlanError; what it says of stock is not searched
    again. Raises NoPlanError where nothing fits at all, with the reason of each.
    """
    at_best: list[StockAtBest] = []

    def searched(strategy: Strategy) -> Planned:
        plan = planned(strategy)
        at_best.extend([plan.stock] if plan.stock else [])
        return plan

    found = [_by_strategy(each, inputs.kinds, searched) for each in _PLANNERS if each in strategies]
    if "stock" in strategies:
        stock = at_best[0] if at_best else stock_at_best(inputs)
        found = [*_of_stock(stock), *found]
    if all(each.predicted_s is None for each in found):
        raise NoPlanError("there is nothing to compare", list(map(_misfit, found)))
    return found


def _of_stock(found: StockAtBest) -> Iterator[ComparedSystem]:
    """Where no even layout fits, what comes closest is run, to see it run out of memory."""
    yield _stock(STOCK_EVEN, found.even)
    best = found.best
    yield _stock(STOCK, best) if best.fitting else _absent(STOCK, best.reason)


def _stock(name: str, stock: Stock) -> ComparedSystem:
    layout = stock.layout
    if layout is None:
        return _absent(name, stock.reason)
    flags = flags_of_grid(layout.inputs, layout.grid)
    return ComparedSystem(
        name=name,
        layout=layout.description,
        system=System(name=name, gpus=layout.ranks, flags=flags, stock_layout=layout.plan),
        predicted_s=None if stock.reason else layout.iteration_s,
        peak_memory_fraction=None if stock.reason else layout.fullest,
        reason=stock.reason,
    )


def _absent(name: str, reason: str) -> ComparedSystem:
    return ComparedSystem(name=name, layout="-", system=None, predicted_s=None, reason=reason)


def _by_strategy(
    strategy: Strategy, kinds: tuple[str, ...], planned: Callable[[Strategy], Planned]
) -> ComparedSystem:
    try:
        found = planned(strategy)
    except NoPlanError as error:
        return _absent(strategy, " ".join(map(str, error.problems)))
    plan, reason = found.outcome.plan, ""
    try:
        refuse_unsupported(plan)
    except PlanError as error:
        reason = "cannot be trained yet: " + ", ".join(each.where for each in error.problems)
    gpus = Counter(kinds[rank] for rank in found.ranks)
    groups = "|".join(map(_members, plan.groups))
    return ComparedSystem(
        name=strategy,
        layout=f"{', '.join(f'{count} {kind}' for kind, count in gpus.items())}: groups of "
        f"{groups}, {number_of(len(plan.chunks), 'chunk')}, {plan.schedule.name}",
        system=None if reason else System(name=strategy, gpus=found.ranks, plan=plan),
        predicted_s=found.outcome.iteration_s,
        peak_memory_fraction=found.outcome.peak_memory_fraction,
        reason=reason,
    )


def _misfit(compared: ComparedSystem) -> Problem:
    return Problem(
        where=compared.name,
        found=f"nothing that fits ({compared.reason.rstrip('.')})",
        expected="a layout or a plan that fits",
        remedy="See zorse plan, which says what would fit.",
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
