"""The search for the fastest plan, and what other searches find: the entry to this package."""

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice

from zorse_megatron.costs.process_memory import deadlock_risk
from zorse_megatron.errors import Problem
from zorse_megatron.plan.divided_replicas import replicas_that_share_experts, tp_groups_of
from zorse_megatron.plan.memory_settings import offloads_anything, said_settings
from zorse_megatron.plan.plan import Plan, Predictions
from zorse_megatron.plan.rules import STOCK_EXPERT_PARALLEL
from zorse_megatron.planner.baselines.lower_bounds import link_bound, lower_bound_s
from zorse_megatron.planner.baselines.published_planners import (
    cephalo_inputs,
    cephalo_plans,
    zorse_paper_plans,
)
from zorse_megatron.planner.baselines.stock_best import (
    no_stock_layout,
    stock_layouts,
    stock_on_all,
    stock_plans,
    stock_runs,
)
from zorse_megatron.planner.baselines.stock_search import StockLayout
from zorse_megatron.planner.evaluate import Evaluation, Evaluator, best_first, gc_paused
from zorse_megatron.planner.inputs.search_inputs import Inputs, refuse_too_large, with_one_more
from zorse_megatron.planner.outcome import (
    CUT_SHORT,
    STRATEGIES,
    NoPlanError,
    OnProgress,
    Outcome,
    Rejected,
    SearchCutShort,
    SearchProgress,
    SearchStats,
    Strategy,
    describe_plan,
    structure,
)
from zorse_megatron.planner.search.climb import climbed_from, is_short_climb
from zorse_megatron.planner.search.effort import Effort
from zorse_megatron.planner.search.finish_plan import (
    with_best_levels,
    with_narrow_gradients,
    with_plans_of_shorter,
)
from zorse_megatron.planner.search.local_moves import with_changes
from zorse_megatron.planner.search.shared_experts import (
    with_shared_experts,
    with_state_kept_by_ranks_that_share,
)
from zorse_megatron.planner.search.tensor_parallel_search import search_with_tp
from zorse_megatron.planner.search.zorse_search import SearchResult
from zorse_megatron.planner.shortage import no_plan
from zorse_megatron.simulate.iteration import micro_batch_times

_REJECTED = 10
_HIGH = 24
"""How many times as far `--effort high` climbs."""
_MOST_BEHIND = 1.02
"""A large plan that is slower by more than that is not finished: it hardly ever gains so much."""


@gc_paused()
def find_plan(
    inputs: Inputs,
    *,
    strategy: Strategy = "zorse",
    stock: Sequence[StockLayout] | None = None,
    on_progress: OnProgress | None = None,
) -> Outcome:
    """Return the best plan that `strategy` finds; the simulator has checked that it fits.

    `stock`: its layouts on all GPUs, fastest first: the strategy stock takes the first one, and
    zorse finds no plan that is slower than one without expert parallelism; None: they are searched.
    The result depends on the inputs only, but for `plan_time_s`. Raises NoPlanError with the
    smallest missing amount where nothing fits, PlannerInputError for what is too large, ValueError
    for a strategy that does not exist; and where it is interrupted SearchCutShort if the strategy
    zorse has found a plan by then.
    """
    started_s = time.perf_counter()
    refuse_too_large(inputs)
    if stock is None and strategy in {"zorse", "stock"}:
        stock = stock_layouts(inputs)
    so_far = _SoFar(on_progress=on_progress)
    try:
        search = _searched(inputs, strategy, stock or (), so_far.report)
        if not search.evaluations:
            raise no_plan(inputs) if strategy == "zorse" else _no_baseline(inputs, strategy)
        best = _finished(search, strategy, so_far.report)
    except KeyboardInterrupt:
        if strategy != "zorse":
            raise
        search = so_far.searched(inputs, stock or ())
        if not search.evaluations:
            raise
        outcome = _outcome(inputs, strategy, search, search.evaluations[0], started_s)
        notes = (CUT_SHORT, *outcome.notes)
        raise SearchCutShort(replace(outcome, notes=notes, was_cut_short=True)) from None
    return _outcome(inputs, strategy, search, best, started_s)


def _outcome(
    inputs: Inputs, strategy: Strategy, search: "_Searched", best: Evaluation, started_s: float
) -> Outcome:
    result = best.result or search.evaluator.simulated(best.plan)
    assert result is not None, "the plan has been simulated before"
    tokens_per_s = inputs.global_batch_size * inputs.sequence_length / best.iteration_s
    return Outcome(
        strategy=strategy,
        plan=replace(best.plan, predictions=_predictions(inputs, best, tokens_per_s)),
        simulation=result,
        iteration_s=best.iteration_s,
        tokens_per_s=tokens_per_s,
        bound_s=lower_bound_s(inputs),
        recomputing_bound_s=lower_bound_s(inputs, recomputing=True),
        link_bound=link_bound(inputs),
        peak_memory_fraction=max(
            peak / capacity
            for peak, capacity in zip(best.peaks_bytes, inputs.capacities_bytes, strict=True)
        ),
        extrapolated=best.is_extrapolated,
        rejected=tuple(islice(_rejected(inputs, search, best), _REJECTED)),
        considered=search.considered,
        plan_time_s=time.perf_counter() - started_s,
        margin=inputs.memory_margin,
        notes=(*inputs.notes, *_notes(inputs, best, search.evaluations[0])),
    )


def _predictions(inputs: Inputs, best: Evaluation, tokens_per_s: float) -> Predictions:
    by_stock = STOCK_EXPERT_PARALLEL in best.plan.schedule.parameters
    return Predictions(
        iteration_s=best.iteration_s,
        tokens_per_s=tokens_per_s,
        peak_memory_bytes=best.peaks_bytes,
        # With expert parallelism only stock knows: the runtime compares none of it.
        micro_batch_s=None if by_stock else micro_batch_times(best.plan, inputs),
    )


@dataclass(frozen=True, kw_only=True)
class _Searched:
    evaluator: Evaluator
    evaluations: list[Evaluation]
    """Those that fit, fastest first."""
    before: SearchStats
    """What was considered without `evaluator`."""

    @property
    def considered(self) -> SearchStats:
        """Counts of the whole search so far."""
        return self.before + SearchStats(
            estimated=self.evaluator.estimator.num_estimated,
            simulated=self.evaluator.num_simulated,
        )


@dataclass(kw_only=True)
class _SoFar:
    """What a search has found, in case it is interrupted."""

    on_progress: OnProgress | None
    best: Evaluation | None = None

    def report(self, progress: SearchProgress) -> None:
        """Take what a search tells, and pass it on."""
        found = progress.best
        if isinstance(found, Evaluation) and (
            self.best is None or found.iteration_s < self.best.iteration_s
        ):
            self.best = found
        if self.on_progress is not None:
            self.on_progress(progress)

    def searched(self, inputs: Inputs, stock: Sequence[StockLayout]) -> _Searched:
        """The fastest plan, and that of stock's best layout: they are simulated again."""
        evaluator = Evaluator(inputs)
        found = [*stock_plans(evaluator, stock[:1]), *([self.best] if self.best else [])]
        return _Searched(evaluator=evaluator, evaluations=best_first(found), before=SearchStats())


def _searched(
    inputs: Inputs,
    strategy: Strategy,
    stock: Sequence[StockLayout],
    on_progress: OnProgress,
) -> _Searched:
    if strategy == "zorse":
        evaluator = Evaluator(inputs)
        found = with_plans_of_shorter(
            _searched_in_all(inputs, on_progress),
            evaluator,
            # Its plans are for a part of the batch.
            lambda part: _searched_in_all(part, lambda told: on_progress(replace(told, best=None))),
        )
        # Stock's layouts are plans: ours is never slower than one without expert parallelism.
        evaluations = best_first([*found.evaluations, *stock_plans(evaluator, stock)])
        return _Searched(evaluator=evaluator, evaluations=evaluations, before=found.considered)
    inputs = _of_baselines(inputs)
    if strategy not in STRATEGIES:
        raise ValueError(f"found strategy {strategy!r}; expected one of {', '.join(STRATEGIES)}")
    if strategy == "cephalo":
        inputs = cephalo_inputs(inputs)
    on_progress(SearchProgress(phase=strategy, done=0, total=1))
    evaluator = Evaluator(inputs)
    if strategy == "stock":
        evaluations = stock_runs(evaluator, stock)
    else:
        baseline = cephalo_plans if strategy == "cephalo" else zorse_paper_plans
        evaluations = baseline(evaluator)
    on_progress(SearchProgress(phase=strategy, done=1, total=1))
    before = SearchStats(groupings=len(evaluations))
    return _Searched(evaluator=evaluator, evaluations=evaluations, before=before)


def _finished(search: _Searched, strategy: Strategy, on_progress: OnProgress) -> Evaluation:
    """The fastest plan with what makes it faster still.

    What may keep activations in the host, or have TP groups, is never slower than what may not: of
    all kinds of plans the fastest one is finished.
    """
    evaluator, found = search.evaluator, search.evaluations
    if strategy == "stock":  # unmodified Megatron has nothing of this
        return found[0]
    space = evaluator.inputs.space
    # Those whose ranks share experts are climbed from at the end.
    found = [each for each in found if not any(replicas_that_share_experts(each.plan))] or found[:1]
    ways = [found]
    if space.offload_activations:
        ways.append([each for each in found if not _keeps_in_host(each.plan)])
    if any(tp_groups_of(found[0].plan)):
        ways.append([each for each in found if not any(tp_groups_of(each.plan))])
    finished: list[Evaluation] = []
    for some in filter(None, ways):
        best, most = some[0], _climb(evaluator.inputs)
        is_behind = finished and best.iteration_s > _MOST_BEHIND * finished[0].iteration_s
        # Sharing experts may gain more.
        has_experts = evaluator.inputs.model.num_experts is not None
        if is_behind and is_short_climb(best.plan, most) and not has_experts:
            continue
        if strategy == "zorse":
            best = climbed_from(evaluator, some, most, on_progress)
        best = with_best_levels(evaluator, best)
        best = with_narrow_gradients(evaluator, best)
        finished.append(with_changes(evaluator, best) if strategy == "zorse" else best)
    if strategy == "zorse":
        finished = [_sharing_experts(search, each, on_progress) for each in finished]
        finished = [
            with_state_kept_by_ranks_that_share(search.evaluator, each, on_progress)
            for each in finished
        ]
    return min(finished, key=lambda each: each.iteration_s)


def _sharing_experts(search: _Searched, best: Evaluation, on_progress: OnProgress) -> Evaluation:
    """The plan, or a faster one whose ranks share experts."""
    evaluator = search.evaluator
    if evaluator.inputs.model.num_experts is None or best.is_extrapolated:
        return best
    others = search.evaluations
    if not any(tp_groups_of(best.plan)):  # as if it had been asked for no TP groups
        others = [each for each in others if not any(tp_groups_of(each.plan))]
    while (found := with_shared_experts(evaluator, best, others, on_progress)) is not None:
        best = climbed_from(evaluator, [found], _climb(evaluator.inputs), on_progress)
        others = []
    return best


def _climb(inputs: Inputs) -> int:
    """Computations that may be ordered to make the plan faster."""
    return Effort.of(inputs).climb * (_HIGH if inputs.space.effort == "high" else 1)


def _keeps_in_host(plan: Plan) -> bool:
    """Whether activations wait in the host's memory."""
    return any(each.settings.offload.activations for each in said_settings(plan))


def _searched_in_all(inputs: Inputs, on_progress: OnProgress) -> SearchResult:
    """Search; where it simulated sums in two levels, search once more for plans with rings only.

    Closed forms of one group over regions are closer than those of pipelines between them, so the
    first search may leave out the pipeline that the simulator prefers.
    """
    found = _searched_in_hosts(inputs, on_progress)
    if not any(group.hierarchical for each in found.evaluations for group in each.plan.groups):
        return found
    return found + _searched_in_hosts(_with_rings(inputs), on_progress)


def _searched_in_hosts(inputs: Inputs, on_progress: OnProgress) -> SearchResult:
    """Search without activations in the host, and with them where that is asked for.

    In closed form all copies that have time seem to be free, so that one search of both may lose
    the plan that the simulator prefers.
    """
    found = search_with_tp(_without_activations(inputs), on_progress)
    if not inputs.space.offload_activations:
        return found
    return found + search_with_tp(inputs, on_progress)


def _without_activations(inputs: Inputs) -> Inputs:
    return replace(inputs, space=replace(inputs.space, offload_activations=False))


def _of_baselines(inputs: Inputs) -> Inputs:
    """None has what this runtime adds for links between regions."""
    return _with_rings(_without_activations(inputs))


def _with_rings(inputs: Inputs) -> Inputs:
    return replace(inputs, space=replace(inputs.space, hierarchical=False))


_LIMITS = {
    "zorse-paper": "groups, equal shards and one micro-batch size",
    "cephalo": "one group of all GPUs that gathers layer by layer",
}


def _no_baseline(inputs: Inputs, strategy: Strategy) -> NoPlanError:
    if strategy == "stock":
        return no_stock_layout(stock_on_all(inputs))
    problem = Problem(
        where=f"strategy {strategy}",
        found="no plan that fits",
        expected=_LIMITS[strategy],
        remedy="The strategy zorse has no such restriction.",
    )
    return NoPlanError(f"the strategy {strategy} has no plan", [problem])


def _rejected(inputs: Inputs, search: _Searched, best: Evaluation) -> Iterator[Rejected]:
    """The fastest of each structure; what differs from it in layers or sizes alone says no more."""
    told = {structure(each.plan, inputs.kinds) for each in (best, search.evaluations[0])}
    for evaluation in search.evaluations[1:]:
        looks = structure(evaluation.plan, inputs.kinds)
        if looks in told:
            continue
        told.add(looks)
        slower = 100 * (evaluation.iteration_s / best.iteration_s - 1)
        yield Rejected(
            what=describe_plan(evaluation.plan, inputs.kinds),
            why=f"{slower:.1f} % slower in the simulator",
            iteration_s=evaluation.iteration_s,
        )


def _notes(inputs: Inputs, best: Evaluation, found: Evaluation) -> Iterator[str]:
    """`found`: what the search had found before it was finished."""
    if inputs.space.effort == "high":
        saved = 100 * (1 - best.iteration_s / found.iteration_s)
        yield (
            f"--effort high took {saved:.1f} % off the fastest plan's iteration "
            f"({found.iteration_s:.4g} s before)"
        )
    if any(group.grad_reduce_dtype for group in best.plan.groups):
        yield (
            "some groups send gradients in 16 bits, as --grad-reduce-dtype allows: each part is "
            "rounded once "
            "before the fp32 sum"
        )
    if any(group.hierarchical for group in best.plan.groups):
        yield (
            "groups in several regions sum and gather in two levels (hierarchical): within each "
            "region, then between regions"
        )
    yield f"{100 * inputs.memory_margin:.3g} % of every GPU's memory is reserved (--margin)"
    at_risk = inputs.gpus and deadlock_risk(best.plan, [inputs.gpus[kind] for kind in inputs.kinds])
    if at_risk:
        yield at_risk
    if best.is_extrapolated:
        yield "the iteration was extrapolated from two shorter batches"
    if offloads_anything(best.plan) and any(host is None for host in inputs.host_bytes):
        yield "the cluster file does not give host memory: it is assumed to suffice"


# What another search finds: on the same GPUs, and on one more of a kind.


MOST_TO_REPLAN = 256
"""GPUs. Beyond, a search for each kind takes minutes."""


@dataclass(frozen=True, kw_only=True)
class OneMore:
    """The plan that is found with one more GPU of a kind."""

    kind: str
    node: str
    """Where the new GPU is: the smallest node of the kind, or a new one like it."""
    iteration_s: float
    speedup: float
    """Iterations per second over those of the best plan without it."""


@dataclass(frozen=True, kw_only=True)
class Replans:
    """Other searches beside a plan."""

    again_s: float
    """Iteration of the best plan that is known for the same GPUs."""
    one_more: tuple[OneMore, ...]
    """By gain, largest first; those that fit."""


def replan(
    inputs: Inputs,
    *,
    found_s: float | None = None,
    on_progress: OnProgress | None = None,
) -> Replans | None:
    """Search with one more GPU of each kind.

    None where the cluster is too large for that. `found_s`: iteration of the best plan for
    `inputs`; if it is left out, that is searched first.
    """
    if inputs.world_size >= MOST_TO_REPLAN:
        return None
    if found_s is None:
        found_s = find_plan(inputs, on_progress=_titled("again", on_progress)).iteration_s
    return Replans(again_s=found_s, one_more=_one_more(inputs, found_s, on_progress))


def _one_more(
    inputs: Inputs, found_s: float, on_progress: OnProgress | None
) -> tuple[OneMore, ...]:
    rows = []
    for kind in dict.fromkeys(inputs.kinds):
        larger, node = with_one_more(inputs, kind)
        try:
            report = _titled(f"one more {kind}", on_progress)
            iteration_s = find_plan(larger, on_progress=report).iteration_s
        except NoPlanError:  # a GPU that is too small for one layer, once more
            continue
        speedup = found_s / iteration_s
        rows.append(OneMore(kind=kind, node=node, iteration_s=iteration_s, speedup=speedup))
    rows.sort(key=lambda each: (each.iteration_s, each.kind))
    return tuple(rows)


def _titled(title: str, on_progress: OnProgress | None) -> OnProgress | None:
    if on_progress is None:
        return None
    return lambda progress: on_progress(replace(progress, phase=f"{title}: {progress.phase}"))
