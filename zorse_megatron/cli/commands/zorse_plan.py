"""`zorse plan`: find the fastest plan for a model on a cluster, and explain it."""

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from zorse_megatron.cli.after_dashes import training_flags
from zorse_megatron.cli.console import (
    Refusals,
    failure_as_json,
    print_json,
    print_plain,
    reported_errors,
)
from zorse_megatron.cli.from_status import FromStatus, ObservedRun, observed_run, refuse_selection
from zorse_megatron.cli.gpu_selection import Selected, select_gpus
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
from zorse_megatron.cli.plan_answer import answer_as_json, print_answer
from zorse_megatron.cli.plan_options import (
    Budget,
    EqualParts,
    FrontierToWrite,
    GradientCommDtypeName,
    HostActivations,
    MaxTensorParallel,
    MayLeaveOut,
    ObjectiveName,
    PageToWrite,
    PlanToWrite,
    SetsAcrossNodes,
    SplitBackward,
    StrategyName,
    UsedCluster,
    communication_dtype_named,
    objective_named,
    strategy_named,
)
from zorse_megatron.cli.plan_outputs import PlanOutputs
from zorse_megatron.cli.progress_display import progress_bar
from zorse_megatron.cli.selection_answer import print_selection, selection_as_json
from zorse_megatron.cli.workload import workload_of
from zorse_megatron.cli.workload_costs import (
    SetOptions,
    WorkloadCosts,
    costs_of_workload,
    needed_batch_size,
)
from zorse_megatron.errors import Problem
from zorse_megatron.files.write import NotWritten
from zorse_megatron.schema.cluster.cluster_yaml import CLUSTER_FILE, parse_cluster
from zorse_megatron.schema.plan.plan import Plan
from zorse_megatron.schema.plan.plan_json import dump_plan
from zorse_megatron.schema.text.strict import read_file

if TYPE_CHECKING:
    from zorse_megatron.planner.outcome import Outcome, Strategy

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
    strategy: StrategyName = "zorse",
    comm_dtype: GradientCommDtypeName = None,
    max_tensor_parallel: MaxTensorParallel = None,
    sets_across_nodes: SetsAcrossNodes = False,
    equal_parts: EqualParts = False,
    split_backward: SplitBackward = False,
    offload_activations: HostActivations = False,
    may_leave_out: MayLeaveOut = False,
    objective: ObjectiveName = None,
    budget: Budget = None,
    from_status: FromStatus = None,
    margin: Margin = DEFAULT_MARGIN,
    out: PlanToWrite = None,
    used_cluster: UsedCluster = None,
    frontier: FrontierToWrite = None,
    html: PageToWrite = None,
    as_json: AsJson = False,
) -> None:
    """Find the plan that trains a model fastest on a cluster."""
    outputs = PlanOutputs(plan=out, used_cluster=used_cluster, frontier=frontier, page=html)
    with reported_errors(as_json=as_json):
        told = Refusals()
        wanted = told.gather(lambda: strategy_named(strategy))
        best = told.gather(lambda: objective_named(objective, budget, may_leave_out))
        wire = told.gather(lambda: communication_dtype_named(comm_dtype))
        selects = may_leave_out or objective is not None or budget is not None
        inputs = [cluster, model, *(profile or ())]
        told.gather(lambda: outputs.refuse(selects=selects, inputs=inputs))
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
        told.gather(lambda: refuse_selection(from_status, selects=selects))
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
        costs, selected, run = costs_of(parse_cluster(data, source=str(cluster))), None, None
        if from_status is not None:
            run = observed_run(
                from_status, data, workload, profile or [], margin=margin, source=str(cluster)
            )
            costs = costs_of(run.costs.cluster, profiles=run.profiles)
        if best is None:
            outcome = _found(costs, wanted, shows_progress=not as_json)
        else:
            with progress_bar(wanted=not as_json) as on_progress:
                selected = select_gpus(data, costs, costs_of, best, wanted, on_progress)
            costs, outcome = selected.costs, selected.outcome
        outcome = outcome if run is None else run.named(outcome)
        sentences = _reasons(costs, outcome.plan)
        lost = outputs.not_saved(outcome.plan, selected)
        _tell(costs, outcome, sentences, selected, run, out=out, lost=lost, as_json=as_json)
    with reported_errors():  # on stderr: the plan's JSON has been printed
        outputs.draw(costs, outcome, selected, is_silent=as_json)


def _tell(
    costs: WorkloadCosts,
    outcome: "Outcome",
    sentences: tuple[str, ...],
    selected: Selected | None,
    run: ObservedRun | None,
    *,
    out: Path | None,
    lost: NotWritten | None,
    as_json: bool,
) -> None:
    """Show the plan. Ends with status 1 where its file could not be written."""
    written = out if lost is None else lost.kept
    move = {} if run is None else {"run": run.move_to(outcome, written)}
    if as_json:
        answer = answer_as_json(costs, outcome, sentences, written) | move | failure_as_json(lost)
        print_json(answer if selected is None else answer | selection_as_json(selected))
    else:
        if selected is not None:
            print_selection(selected)
        print_answer(costs, outcome, sentences, written)
        for line in run.told(move["run"]) if run is not None else ():
            print_plain(line)
    if lost is None:
        return
    if not as_json:
        print_plain(str(lost), to_stderr=True)
        if lost.kept is None:  # it took a search to find
            print_plain(dump_plan(outcome.plan).rstrip())
    raise typer.Exit(1)


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
