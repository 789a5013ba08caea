"""`zorse explain`: what a plan takes, why it takes as long, and what would help."""

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table

from zorse_megatron.cli.console import (
    Output,
    Tell,
    conflicts,
    progress_shown,
    refuse,
)
from zorse_megatron.cli.options import (
    DEFAULT_MARGIN,
    ClusterFile,
    Margin,
    PlanFile,
    WorkloadOptions,
    answers,
)
from zorse_megatron.cli.perturbed import ExpertLoadText, SlowMachines, with_expert_load
from zorse_megatron.cli.simulated import (
    Pictures,
    memory_problems,
    rank_table,
    ranks_as_json,
    simulated,
    types_of,
)
from zorse_megatron.cli.workload_costs import WorkloadCosts, costs_for_plan
from zorse_megatron.errors import Problem
from zorse_megatron.files.strict import plain
from zorse_megatron.files.wording import duration, figure, memory, number_of
from zorse_megatron.plan.plan import Plan
from zorse_megatron.plan.plan_file import load_plan

if TYPE_CHECKING:
    from zorse_megatron.planner.baselines.stock_best import StockAtBest
    from zorse_megatron.planner.explanation import Explanation
    from zorse_megatron.planner.find_plan import Replans
    from zorse_megatron.simulate.result import SimulationResult


Search = Annotated[
    bool,
    typer.Option(
        "--search",
        help="Search, too: for a better plan, for plans with one more GPU of each kind, and for "
        "stock Megatron's best layout.",
    ),
]


@answers
def explain(
    *,
    path: PlanFile,
    cluster: ClusterFile,
    given: WorkloadOptions,
    margin: Margin = DEFAULT_MARGIN,
    search: Search = False,
    pictures: Pictures,
    slow: SlowMachines,
    expert_load: ExpertLoadText = None,
    as_json: bool,
) -> Output:
    """Explain a plan: times and memory of its ranks, bottleneck, alternatives, what would help."""
    from zorse_megatron.planner.explain import explain as explained

    pictures.refuse(inputs=[path, cluster, *given.inputs])
    plan, source = load_plan(path), str(path)
    costs = costs_for_plan(
        plan, cluster, given.workload(plan), given.profiles, source=source, margin=margin
    )
    perturbation, uneven = slow.perturbation(costs, may_end=False), None
    uneven_costs = None if expert_load is None else with_expert_load(costs, expert_load)
    if search and slow.is_slow:
        why = "plans are searched for GPUs and links as they are"
        refuse(conflicts(["--search"], "--slow or --jitter", why=why))
    with progress_shown("simulating", wanted=not as_json) as tell:
        result = simulated(plan, costs, source=source, perturbation=perturbation)
        if uneven_costs is not None:
            uneven = simulated(plan, uneven_costs, source=source, perturbation=perturbation)
        tell("drawing")
        speed = f"{duration(result.iteration_s)}, {figure(result.tokens_per_s)} tokens/s"
        written = pictures.save(plan, result, title=f"{path.name}: {speed}")
        found = _Simulated(path=path, plan=plan, costs=costs, result=result, margin=margin)
        loaded = None if uneven is None else replace(found, result=uneven)
        reasons, notes = None, list(costs.notes)
        if not slow.is_slow:
            replans, stock = _searched(found, notes, tell) if search else (None, None)
            reasons = explained(costs.inputs, plan, replans, stock, result)
    values, shown = found.values(reasons), found.lines(reasons)
    if loaded is not None:
        values["expert_load"] = {"given": expert_load, **loaded.numbers()}
        shown = chain(shown, loaded.lines_of_load(f"--expert-load {expert_load}", result))
    return Output(values=values, shown=shown, notes=notes, written=written)


def _searched(
    found: "_Simulated", notes: list[str], tell: Tell
) -> "tuple[Replans | None, StockAtBest | None]":
    """Search again, and for what stock takes; None where there is none, or it takes too long."""
    from zorse_megatron.planner.baselines.stock_best import MOST_GPUS, stock_at_best
    from zorse_megatron.planner.find_plan import replan
    from zorse_megatron.planner.outcome import NoPlanError

    inputs, replans = found.costs.inputs, None
    with suppress(NoPlanError):  # a plan that does not fit is explained
        replans = replan(inputs, on_progress=tell)
    if found.costs.workload.computing.lora is not None:
        notes.append("stock Megatron: it has no LoRA")
        return replans, None
    if found.plan.world_size > MOST_GPUS:
        notes.append(f"stock Megatron: not computed for more than {MOST_GPUS} GPUs")
        return replans, None
    tell("stock's layouts")
    return replans, stock_at_best(inputs)


@dataclass(frozen=True, kw_only=True)
class _Simulated:
    """A plan, and what one iteration of it takes."""

    path: Path
    plan: Plan
    costs: WorkloadCosts
    result: "SimulationResult"
    margin: float

    @property
    def problems(self) -> list[Problem]:
        """Ranks whose memory does not suffice."""
        margin, source = self.margin, str(self.path)
        cluster = self.costs.cluster
        return list(memory_problems(self.plan, self.result, cluster, source, margin=margin))

    def numbers(self) -> dict[str, Any]:
        """Times and memory, for programs."""
        from zorse_megatron.planner.explanation import critical_shares

        result = self.result
        return {
            "iteration_s": result.iteration_s,
            "tokens_per_s": result.tokens_per_s,
            "critical_path": plain(critical_shares(self.plan, result)),
            "ranks": ranks_as_json(self.plan, result, self.costs.cluster),
            "fits_in_memory": not self.problems,
        }

    def values(self, reasons: "Explanation | None") -> dict[str, Any]:
        """For programs."""
        said = {} if reasons is None else plain(reasons)
        return {**self.numbers(), **said, "dtype": self.costs.dtype}

    def lines_of_load(self, option: str, even: "SimulationResult") -> Iterator[str | Table]:
        """What this takes where routing is uneven, after what it takes where it is even."""
        found, more = self.result, self.result.iteration_s / even.iteration_s - 1
        peaks = zip(found.peak_memory_bytes, even.peak_memory_bytes, strict=True)
        yield (
            f"With {option} one iteration takes {duration(found.iteration_s)}, "
            f"{figure(100 * more)} % longer: {figure(found.tokens_per_s)} tokens/s; peak memory "
            f"grows by up to {memory(max(0, *(mine - its for mine, its in peaks)))}:"
        )
        yield rank_table(self.plan, found, self.costs.cluster)
        yield from (f"does not fit: {problem}" for problem in self.problems)

    def lines(self, reasons: "Explanation | None") -> Iterator[str | Table]:
        """For people."""
        from zorse_megatron.planner.explanation import critical_sentences, critical_shares

        plan, result = self.plan, self.result
        samples = number_of(plan.global_batch_size, "sample")
        yield (
            f"{self.path}: one iteration takes {duration(result.iteration_s)}: "
            f"{figure(result.tokens_per_s)} tokens/s ({samples} of "
            f"{self.costs.inputs.sequence_length} tokens, {types_of(plan, self.costs)})"
        )
        if reasons is None:
            yield from critical_sentences(plan, critical_shares(plan, result), result.iteration_s)
        else:
            yield from reasons.sentences[1:]  # the first one says the same
        yield rank_table(plan, result, self.costs.cluster)
        yield from (f"does not fit: {problem}" for problem in self.problems)
