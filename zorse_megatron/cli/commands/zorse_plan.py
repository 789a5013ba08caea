"""`zorse plan`: find the fastest plan for a model on a cluster, and explain it."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, cast, get_args

import typer

from zorse_megatron.cli.after_dashes import training_flags
from zorse_megatron.cli.console import (
    CommandError,
    failure_as_json,
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
from zorse_megatron.cli.plan_answer import answer_as_json, notes_on, print_answer
from zorse_megatron.cli.progress_display import progress_bar
from zorse_megatron.cli.workload import workload_of
from zorse_megatron.cli.workload_costs import (
    SetOptions,
    WorkloadCosts,
    costs_of_workload,
    needed_batch_size,
)
from zorse_megatron.errors import Problem
from zorse_megatron.extras import refuse_without
from zorse_megatron.files.writable import refuse_unwritable
from zorse_megatron.files.write import NotWritten, write_text
from zorse_megatron.schema.cluster.cluster_yaml import load_cluster
from zorse_megatron.schema.plan.plan import GradientCommDtype, Plan
from zorse_megatron.schema.plan.plan_json import dump_plan, save_plan
from zorse_megatron.schema.text.suggest import did_you_mean

if TYPE_CHECKING:
    from zorse_megatron.planner.outcome import Outcome, Strategy

# Beyond it, explaining takes as long as searching; `zorse explain` still does it.
_EXPLAIN_UP_TO_RANKS = 512
# Beyond it, looking for what would fit takes longer than the search that found nothing.
_SAY_WHAT_FITS_UP_TO_RANKS = 128


StrategyName = Annotated[
    str, typer.Option("--strategy", help="zorse, or a baseline: stock, zorse-paper or cephalo.")
]
GradientCommDtypeName = Annotated[
    str | None,
    typer.Option(
        "--wire",
        help="Communication dtype for gradients, bf16 or fp16, used by the groups it makes faster. "
        "Gradients are still summed in fp32, but sending rounds them. Default: none.",
    ),
]
MaxTensorParallel = Annotated[
    int | None,
    typer.Option(
        "--max-tp",
        min=1,
        help="Most ranks of a tensor-parallel set; 1: no sets. Default: a node's GPUs.",
    ),
]
SetsAcrossNodes = Annotated[
    bool,
    typer.Option("--sets-across-nodes", help="Let tensor-parallel sets have ranks on two nodes."),
]
EqualParts = Annotated[
    bool,
    typer.Option("--equal-parts", help="Give the ranks of a tensor-parallel set equal parts only."),
]
SplitBackward = Annotated[
    bool,
    typer.Option(
        "--split-backward",
        help="Let groups compute weight gradients apart from backwards where that is faster and "
        "fits. Needs --transformer-impl local in training.",
    ),
]
PlanToWrite = Annotated[
    Path | None, typer.Option("--out", metavar="PLAN", help="Write the plan to this file.")
]
PageToWrite = Annotated[
    Path | None,
    typer.Option(
        "--html",
        metavar="HTML",
        help="Write a report page: timeline, memory, the best stock layout, and what one more "
        "GPU would bring (one more search per kind of GPU).",
    ),
]


def plan(  # noqa: PLR0917
    context: typer.Context,
    cluster: ClusterFile,
    model: Model = None,
    profile: Profiles = None,
    global_batch_size: GlobalBatchSize = None,
    seq_length: SeqLength = None,
    dtype: DtypeOrAuto = None,
    strategy: StrategyName = "zorse",
    comm_dtype: GradientCommDtypeName = None,
    max_tensor_parallel: MaxTensorParallel = None,
    sets_across_nodes: SetsAcrossNodes = False,
    equal_parts: EqualParts = False,
    split_backward: SplitBackward = False,
    margin: Margin = DEFAULT_MARGIN,
    out: PlanToWrite = None,
    html: PageToWrite = None,
    as_json: AsJson = False,
) -> None:
    """Find the plan that trains a model fastest on a cluster."""
    with reported_errors(as_json=as_json):
        _refuse_outputs(out, html, inputs=[cluster, model, *(profile or ())])
        wanted = strategy_named(strategy)
        workload = workload_of(
            model=model,
            flags=training_flags(context),
            global_batch_size=global_batch_size,
            seq_length=seq_length,
            dtype=dtype,
            dtype_may_be_auto=True,
        )
        machines, batch = load_cluster(cluster), needed_batch_size(workload)
        sent_as, profiles = _communication_dtype_named(comm_dtype), profile or []
        costs = costs_of_workload(
            machines,
            workload,
            profiles,
            global_batch_size=batch,
            margin=margin,
            sets=SetOptions(
                most=max_tensor_parallel,
                across_nodes=sets_across_nodes,
                unequal_parts=not equal_parts,
            ),
            gradient_comm_dtype=sent_as,
            split_backward=split_backward,
        )
        outcome = _found(costs, wanted, shows_progress=not as_json)
        sentences = _reasons(costs, outcome.plan)
        lost = _not_saved(outcome.plan, out)
    _tell(costs, outcome, sentences, out=out, lost=lost, as_json=as_json)
    if html is not None:
        _write_page(costs, outcome, html, is_silent=as_json)


def _refuse_outputs(out: Path | None, html: Path | None, inputs: list[Path | str | None]) -> None:
    """Before the search, which takes a while."""
    refuse_unwritable({"--out": out, "--html": html}, inputs=inputs)
    if html is not None:
        refuse_without("plots", what="zorse plan --html")


def _tell(
    costs: WorkloadCosts,
    outcome: "Outcome",
    sentences: tuple[str, ...],
    *,
    out: Path | None,
    lost: NotWritten | None,
    as_json: bool,
) -> None:
    """Show the plan. Ends with status 1 where its file could not be written."""
    written = out if lost is None else lost.kept
    if as_json:
        print_json(answer_as_json(costs, outcome, sentences, written) | failure_as_json(lost))
    else:
        print_answer(costs, outcome, sentences, written)
    if lost is None:
        return
    if not as_json:
        print_plain(str(lost), to_stderr=True)
        if lost.kept is None:  # it took a search to find
            print_plain(dump_plan(outcome.plan).rstrip())
    raise typer.Exit(1)


def _write_page(costs: WorkloadCosts, outcome: "Outcome", path: Path, *, is_silent: bool) -> None:
    """After the plan, which is written and shown by then."""
    from zorse_megatron.cli.plan_report import plan_page

    with reported_errors():  # on stderr: the plan's JSON has been printed
        notes = notes_on(costs, outcome)
        write_text(path, plan_page(costs, outcome, notes, shows_progress=not is_silent))
    if not is_silent:
        print_plain(f"written: {path}")


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


def _communication_dtype_named(name: str | None) -> GradientCommDtype | None:
    if name is None:
        return None
    for known in get_args(GradientCommDtype):
        if name == known:
            return cast(GradientCommDtype, known)
    problem = Problem(
        where="--wire",
        found=f'"{name}"',
        expected="bf16 or fp16",
        remedy="Omit it to send gradients in the dtype they are accumulated in.",
    )
    raise CommandError("the command cannot be run", [problem])


def _found(costs: WorkloadCosts, strategy: "Strategy", *, shows_progress: bool) -> "Outcome":
    """Search. Raises NoPlanError that also says what would fit."""
    from zorse_megatron.planner.find_plan import find_plan
    from zorse_megatron.planner.planner_errors import NoPlanError

    with progress_bar(wanted=shows_progress) as on_progress:
        try:
            return find_plan(costs.inputs, strategy=strategy, on_progress=on_progress)
        except NoPlanError as error:
            raise error.with_problem(_what_fits(costs, strategy)) from None


def _what_fits(costs: WorkloadCosts, strategy: "Strategy") -> Problem:
    from zorse_megatron.planner.shortage.what_fits import fits_problem, not_looked_for, what_fits

    ranks, most = costs.inputs.world_size, _SAY_WHAT_FITS_UP_TO_RANKS
    if strategy != "zorse":
        return not_looked_for(f"the strategy {strategy}", "zorse, the only one it is looked for")
    if ranks > most:
        return not_looked_for(f"{ranks} GPUs", f"at most {most}: beyond, it takes too long")
    model, batch = costs.workload.model, costs.inputs.global_batch_size
    return fits_problem(what_fits(costs.inputs_for, model, batch), model, batch)


def _reasons(costs: WorkloadCosts, found: Plan) -> tuple[str, ...]:
    """Why the plan takes as long as it does, in plain words."""
    from zorse_megatron.planner.explain.analysis import explain

    if found.world_size > _EXPLAIN_UP_TO_RANKS:
        return ()
    return explain(costs.inputs, found).sentences
