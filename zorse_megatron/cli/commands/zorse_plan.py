"""`zorse plan`: find the fastest plan for a model on a cluster, and explain it."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from zorse_megatron.cli.after_dashes import training_flags
from zorse_megatron.cli.console import (
    Refusals,
    failure_as_json,
    print_json,
    print_plain,
    reported_errors,
)
from zorse_megatron.cli.from_status import FromStatus, ObservedRun, observed_run
from zorse_megatron.cli.gpu_selection import plan_for_all, select_gpus
from zorse_megatron.cli.next_command import next_command
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
from zorse_megatron.cli.plan_answer import (
    Answer,
    answer_as_json,
    answer_of,
    print_answer,
)
from zorse_megatron.cli.plan_options import (
    EqualParts,
    GradientCommDtypeName,
    HostActivations,
    MaxTensorParallel,
    PageToWrite,
    PlanToWrite,
    SetsAcrossNodes,
    SplitBackward,
    StrategyName,
    TokensToTrain,
    UseAll,
    Verbose,
    communication_dtype_named,
    strategy_named,
    tokens_named,
)
from zorse_megatron.cli.plan_outputs import PlanOutputs
from zorse_megatron.cli.progress_display import progress_bar
from zorse_megatron.cli.workload import workload_of
from zorse_megatron.cli.workload_costs import (
    SetOptions,
    WorkloadCosts,
    costs_of_workload,
    needed_batch_size,
)
from zorse_megatron.errors import Problem
from zorse_megatron.files.target import stream_of
from zorse_megatron.files.write import NotWritten
from zorse_megatron.schema.cluster.cluster_yaml import CLUSTER_FILE, parse_cluster
from zorse_megatron.schema.plan.plan_json import dump_plan
from zorse_megatron.schema.text.strict import read_file

if TYPE_CHECKING:
    from zorse_megatron.planner.outcome import Strategy

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
    strategy: StrategyName = "zorse",
    comm_dtype: GradientCommDtypeName = None,
    max_tensor_parallel: MaxTensorParallel = None,
    sets_across_nodes: SetsAcrossNodes = False,
    equal_parts: EqualParts = False,
    split_backward: SplitBackward = False,
    offload_activations: HostActivations = False,
    from_status: FromStatus = None,
    use_all: UseAll = False,
    margin: Margin = DEFAULT_MARGIN,
    out: PlanToWrite = None,
    html: PageToWrite = None,
    tokens: TokensToTrain = None,
    verbose: Verbose = False,
    as_json: AsJson = False,
) -> None:
    """Find the plan that trains a model fastest on a cluster."""
    use_all = use_all or from_status is not None  # a run goes on with the ranks that it has
    outputs = PlanOutputs(
        plan=out,
        page=html,
        may_leave_out=not use_all,
        with_stock=strategy == "zorse" and from_status is None,
    )
    with reported_errors(as_json=as_json):
        told = Refusals()
        to_train = told.gather(lambda: tokens_named(tokens))
        wanted = told.gather(lambda: strategy_named(strategy))
        wire = told.gather(lambda: communication_dtype_named(comm_dtype))
        told.gather(lambda: outputs.refuse([cluster, model, *(profile or ())]))
        workload = told.gather(
            lambda: workload_of(
                model=model,
                flags=training_flags(context),
                global_batch_size=global_batch_size,
                seq_length=seq_length,
                dtype=dtype,
                dtype_may_be_auto=True,
            )
        )
        data = told.gather(lambda: read_file(cluster, CLUSTER_FILE))
        told.raise_all()
        costs_of = partial(
            costs_of_workload,
            workload=workload,
            profiles=profile or [],
            global_batch_size=needed_batch_size(workload),
            margin=margin,
            sets=SetOptions(
                most=max_tensor_parallel,
                across_nodes=sets_across_nodes,
                unequal_parts=not equal_parts,
            ),
            gradient_comm_dtype=wire,
            split_backward=split_backward,
            offload_activations=offload_activations,
        )
        whole = costs = costs_of(parse_cluster(data, source=str(cluster)))
        selected, run = None, None
        if from_status is not None:
            run = observed_run(
                from_status, data, workload, profile or [], margin=margin, source=str(cluster)
            )
            whole = costs = costs_of(run.costs.cluster, profiles=run.profiles)
        from zorse_megatron.planner.find_plan import find_plan

        with progress_bar(wanted=not as_json) as on_progress, _says_what_fits(costs, wanted):
            if run is not None:  # which stock Megatron does not go on with
                outcome = find_plan(costs.inputs, strategy=wanted, on_progress=on_progress)
                stock = None
            elif use_all:
                outcome, stock = plan_for_all(costs, wanted, on_progress)
            else:
                selected = select_gpus(costs, costs_of, wanted, on_progress)
                costs, outcome, stock = selected.costs, selected.outcome, selected.stock
        outcome = outcome if run is None else run.named(outcome)
        written, lost = outputs.saved(outcome.plan, selected, stock, cluster=cluster)
        answer = answer_of(
            whole,
            costs,
            outcome,
            selected,
            None if stock is None else stock.at_best,
            tokens=to_train,
            written=written,
        )
        # What goes to a stream cannot be read again.
        is_stream = out is not None and stream_of(out) is not None
        if lost is None and run is None and not is_stream:
            answer = _with_next_command(answer, context, out, cluster, model)
        move = None if run is None else run.move_to(outcome, written.plan)
    _tell(answer, run, move, lost=lost, verbose=verbose, as_json=as_json)
    with reported_errors():  # on stderr: the plan's JSON has been printed
        outputs.draw(answer, is_silent=as_json)


def _with_next_command(
    answer: Answer, context: typer.Context, out: Path | None, cluster: Path, model: str | None
) -> Answer:
    """Where stock Megatron is recommended, the command that starts its layout."""
    written = answer.written
    plan, there, by_stock = out, written.used_cluster, answer.is_stock
    if answer.recommends_stock and written.stock is not None:
        plan, there, by_stock = written.stock, written.stock_cluster, True
    command = next_command(
        context,
        plan=plan,
        cluster=there or cluster,
        model=model,
        costs=answer.costs,
        can_be_trained=answer.cannot_train is None,
        is_stock=by_stock,
    )
    return replace(answer, next_command=command)


def _tell(
    answer: Answer,
    run: ObservedRun | None,
    move: dict[str, Any] | None,
    *,
    lost: NotWritten | None,
    verbose: bool,
    as_json: bool,
) -> None:
    """Show the plan. Ends with status 1 where its file could not be written."""
    if as_json:
        run_as_json = {} if move is None else {"run": move}
        print_json(answer_as_json(answer) | run_as_json | failure_as_json(lost))
    else:
        print_answer(answer, verbose=verbose)
        for line in run.told(move) if run is not None and move is not None else ():
            print_plain(line)
    if lost is None:
        return
    if not as_json:
        print_plain(str(lost), to_stderr=True)
        if answer.written.plan is None:  # it took a search to find
            print_plain(dump_plan(answer.outcome.plan).rstrip())
    raise typer.Exit(1)


@contextmanager
def _says_what_fits(costs: WorkloadCosts, strategy: "Strategy") -> Iterator[None]:
    """Raise the NoPlanError of a search with what would fit."""
    from zorse_megatron.planner.planner_errors import NoPlanError

    try:
        yield
    except NoPlanError as error:
        raise error.with_problem(_what_fits(costs, strategy)) from None


def _what_fits(costs: WorkloadCosts, strategy: "Strategy") -> Problem:
    from zorse_megatron.planner.shortage.what_fits import fits_problem, not_looked_for, what_fits

    ranks, most = costs.inputs.world_size, _SAY_WHAT_FITS_UP_TO_RANKS
    if strategy == "stock" and ranks <= most:
        from zorse_megatron.planner.shortage.gpu_memory import fitting

        fits = fitting(costs.inputs) is not None
        return Problem(
            where="what would fit",
            found="a plan of the strategy zorse"
            if fits
            else "no plan of the strategy zorse either",
            expected="a layout, or a plan",
            remedy=f"Leave out --strategy stock{'' if fits else ' to see what plans lack'}.",
        )
    if strategy != "zorse":
        return not_looked_for(f"the strategy {strategy}", "zorse, the only one it is looked for")
    if ranks > most:
        return not_looked_for(f"{ranks} GPUs", f"at most {most}: beyond, it takes too long")
    model, batch = costs.workload.model, costs.inputs.global_batch_size
    return fits_problem(what_fits(costs.inputs_for, model, batch), model, batch)
