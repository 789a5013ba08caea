"""`zorse plan`: the plan that trains a model fastest on a cluster, and why."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, cast, get_args

import typer

from zorse_megatron.cli.after_dashes import training_flags
from zorse_megatron.cli.console import (
    CommandError,
    failure_as_json,
    gib,
    print_json,
    print_plain,
    reported_errors,
)
from zorse_megatron.cli.options import (
    DEFAULT_MARGIN,
    AsJson,
    ClusterFile,
    DtypeOrAuto,
    GlobalBatchSize,
    Margin,
    Model,
    Profiles,
    SeqLength,
)
from zorse_megatron.cli.plan_table import plan_line, print_plan
from zorse_megatron.cli.priced import Priced, needed_batch_size, priced
from zorse_megatron.cli.progress import progress_bar
from zorse_megatron.cli.workload import workload_of
from zorse_megatron.errors import PlanError, Problem
from zorse_megatron.extras import refuse_without
from zorse_megatron.files.check import refuse_unwritable
from zorse_megatron.files.write import NotWritten, write_text
from zorse_megatron.schedules.refusals import refuse_unsupported
from zorse_megatron.schema.cluster_yaml import load_cluster
from zorse_megatron.schema.counted import number_of
from zorse_megatron.schema.load import dump_plan, save_plan
from zorse_megatron.schema.plan import GradientWire, Plan
from zorse_megatron.schema.strict import plain
from zorse_megatron.schema.suggest import did_you_mean

if TYPE_CHECKING:
    from zorse_megatron.planner.outcome import Outcome, Strategy

_MAX_REJECTED = 5
_MAX_REASONS = 3
# Beyond it, explaining takes as long as searching; `zorse explain` still does it.
_EXPLAIN_UP_TO_RANKS = 512
# Beyond it, looking for what would fit takes longer than the search that found nothing.
_SAY_WHAT_FITS_UP_TO_RANKS = 128


def plan(  # noqa: PLR0917
    context: typer.Context,
    cluster: ClusterFile,
    model: Model = None,
    profile: Profiles = None,
    global_batch_size: GlobalBatchSize = None,
    seq_length: SeqLength = None,
    dtype: DtypeOrAuto = None,
    strategy: Annotated[
        str, typer.Option(help="zorse, or a baseline: stock, zorse-paper, cephalo.")
    ] = "zorse",
    wire: Annotated[
        str | None,
        typer.Option(
            help="bf16 or fp16: let groups send gradients in it where that is faster. Sums are "
            "made in fp32, but are not those of fp32 messages to the bit. Left out: none do."
        ),
    ] = None,
    margin: Margin = DEFAULT_MARGIN,
    out: Annotated[
        Path | None, typer.Option(metavar="PLAN", help="The plan file to write.")
    ] = None,
    html: Annotated[
        Path | None,
        typer.Option(
            metavar="HTML",
            help="A page to write about the plan: timeline, memory, stock at its best, what one "
            "more GPU brings. Searches again for each kind of GPU.",
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Find the plan that trains a model fastest on a cluster."""
    with reported_errors(as_json=as_json):
        refuse_unwritable({"--out": out, "--html": html}, inputs=[cluster, model, *(profile or ())])
        if html is not None:
            refuse_without("plots", what="zorse plan --html")
        wanted = strategy_named(strategy)
        workload = workload_of(
            model=model,
            flags=training_flags(context),
            global_batch_size=global_batch_size,
            seq_length=seq_length,
            dtype=dtype,
            dtype_may_be_auto=True,
        )
        prices = priced(
            load_cluster(cluster),
            workload,
            profile or [],
            global_batch_size=needed_batch_size(workload),
            margin=margin,
            wire=_wire_named(wire),
        )
        outcome = _found(prices, wanted, shows_progress=not as_json)
        sentences = _reasons(prices, outcome.plan)
        lost = _not_saved(outcome.plan, out)
    written = out if lost is None else lost.kept
    if as_json:
        print_json(_as_json(prices, outcome, sentences, written) | failure_as_json(lost))
    else:
        _print(prices, outcome, sentences, written)
    if lost is not None:
        if not as_json:
            print_plain(str(lost), to_stderr=True)
            if lost.kept is None:  # it took a search to find
                print_plain(dump_plan(outcome.plan).rstrip())
        raise typer.Exit(1)
    if html is not None:
        with reported_errors():  # on stderr: the plan's JSON has been printed
            _write_page(prices, outcome, html, shows_progress=not as_json)
        if not as_json:
            print_plain(f"written: {html}")


def _write_page(prices: Priced, outcome: "Outcome", path: Path, *, shows_progress: bool) -> None:
    """Behind the plan, which is written and shown by then."""
    from zorse_megatron.cli.plan_page import plan_page

    notes = _notes(prices, outcome)
    write_text(path, plan_page(prices, outcome, notes, shows_progress=shows_progress))


def _not_saved(found: Plan, out: Path | None) -> NotWritten | None:
    """Write the plan; return why it could not be, for it is shown in any case."""
    try:
        if out is not None:
            save_plan(found, out)
    except NotWritten as error:
        return error
    return None


def strategy_named(name: str) -> "Strategy":
    """Return the strategy of that name. Raises CommandError for another text."""
    from zorse_megatron.planner.outcome import STRATEGIES

    for known in STRATEGIES:
        if name == known:
            return known
    problem = Problem(
        where="--strategy",
        found=f'"{name}"',
        expected=f"one of {', '.join(STRATEGIES)}",
        remedy=did_you_mean(name, STRATEGIES),
    )
    raise CommandError("the command cannot be run", [problem])


def _wire_named(name: str | None) -> GradientWire | None:
    if name is None:
        return None
    for known in get_args(GradientWire):
        if name == known:
            return cast(GradientWire, known)
    problem = Problem(
        where="--wire",
        found=f'"{name}"',
        expected="bf16 or fp16",
        remedy="Leave it out to send gradients as they are kept.",
    )
    raise CommandError("the command cannot be run", [problem])


def not_trainable_yet(found: Plan) -> str | None:
    """Say why this version cannot train a plan; None where it can."""
    try:
        refuse_unsupported(found)
    except PlanError as error:
        reasons = [f"{each.where} has {each.found}" for each in error.problems]
        more = f" and {len(reasons) - _MAX_REASONS} more" if len(reasons) > _MAX_REASONS else ""
        listed = ", ".join(dict.fromkeys(reasons[:_MAX_REASONS]))
        return f"this version cannot train this plan yet: {listed}{more}"
    return None


def _found(prices: Priced, strategy: "Strategy", *, shows_progress: bool) -> "Outcome":
    """Search. Raises NoPlanError that also says what would fit."""
    from zorse_megatron.planner.errors import NoPlanError
    from zorse_megatron.planner.search import find_plan

    with progress_bar(wanted=shows_progress) as on_progress:
        try:
            return find_plan(prices.inputs, strategy=strategy, on_progress=on_progress)
        except NoPlanError as error:
            if strategy != "zorse" or prices.inputs.world_size > _SAY_WHAT_FITS_UP_TO_RANKS:
                raise
            raise error.with_problem(_what_fits(prices)) from None


def _what_fits(prices: Priced) -> Problem:
    from zorse_megatron.planner.what_fits import fits_problem, what_fits

    model, batch = prices.workload.model, prices.inputs.global_batch_size
    return fits_problem(what_fits(prices.inputs_for, model, batch), model, batch)


def _reasons(prices: Priced, found: Plan) -> tuple[str, ...]:
    """Why the plan takes as long as it does, in plain words."""
    from zorse_megatron.planner.explain import explain

    if found.world_size > _EXPLAIN_UP_TO_RANKS:
        return ()
    return explain(prices.inputs, found).sentences


def _print(
    prices: Priced, outcome: "Outcome", sentences: tuple[str, ...], out: Path | None
) -> None:
    print_plain(plan_line(outcome.plan))
    print_plan(outcome.plan)
    for sentence in sentences or _prediction(prices, outcome):
        print_plain(sentence)
    counts = outcome.considered
    print_plain(
        f"considered in {outcome.plan_time_s:.1f} s: {number_of(counts.groupings, 'grouping')}, "
        f"{number_of(counts.estimated, 'plan')} estimated, {counts.simulated} simulated"
    )
    for each in outcome.rejected[:_MAX_REJECTED]:
        print_plain(f"not taken: {each.what}: {each.why}")
    for note in _notes(prices, outcome):
        print_plain(f"note: {note}")
    if out is not None:
        print_plain(f"written: {out}")


def _prediction(prices: Priced, outcome: "Outcome") -> tuple[str, ...]:
    """Time and memory of a plan that is too large to be explained beside the search."""
    from zorse_megatron.planner.explain import bound_sentence

    peaks, capacities = _peaks(outcome), prices.inputs.capacities_bytes
    rank = max(range(len(peaks)), key=lambda each: peaks[each] / capacities[each])
    return (
        f"An iteration takes {outcome.iteration_s:.4g} s, {outcome.tokens_per_s:,.0f} tokens/s, "
        f"{100 * outcome.efficiency:.0f} % of a rate that no plan exceeds.",
        bound_sentence(outcome.bound_s, outcome.recomputing_bound_s),
        f"The fullest GPU is rank {rank} ({prices.inputs.kinds[rank]}): {gib(peaks[rank])} of "
        f"{gib(capacities[rank])} that may be filled.",
    )


def _peaks(outcome: "Outcome") -> tuple[int, ...]:
    predictions = outcome.plan.predictions
    if predictions is not None and predictions.peak_memory_bytes is not None:
        return predictions.peak_memory_bytes
    return outcome.simulation.peak_memory_bytes


def _notes(prices: Priced, outcome: "Outcome") -> list[str]:
    """What was chosen and assumed, each thing once."""
    cannot = not_trainable_yet(outcome.plan)
    extrapolated = "the time was extrapolated from a simulation of fewer samples"
    notes = [
        *([cannot] if cannot else []),
        *([extrapolated] if outcome.extrapolated else []),
        *prices.notes,
        *outcome.notes,
    ]
    return list(dict.fromkeys(notes))


def _as_json(
    prices: Priced, outcome: "Outcome", sentences: tuple[str, ...], out: Path | None
) -> dict[str, Any]:
    return {
        "ok": True,
        "strategy": outcome.strategy,
        "iteration_s": outcome.iteration_s,
        "tokens_per_s": outcome.tokens_per_s,
        "bound_s": outcome.bound_s,
        "recomputing_bound_s": outcome.recomputing_bound_s,
        "efficiency": outcome.efficiency,
        "peak_memory_fraction": outcome.peak_memory_fraction,
        "memory_margin": outcome.margin,
        "dtype": prices.dtype,
        "plan_time_s": outcome.plan_time_s,
        "can_be_trained": not_trainable_yet(outcome.plan) is None,
        "considered": plain(outcome.considered),
        "rejected": plain(outcome.rejected),
        "reasons": list(sentences),
        "notes": _notes(prices, outcome),
        "plan": plain(outcome.plan),
        "written": None if out is None else str(out),
    }
