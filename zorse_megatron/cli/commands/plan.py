"""`zorse plan`: find the fastest plan for a model on a cluster, and explain it."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from zorse_megatron.cli.answer import Answer, Task, answer_as_json
from zorse_megatron.cli.answer_lines import lines_of, page_of
from zorse_megatron.cli.console import (
    Errors,
    Output,
    Tell,
    conflicts,
    print_plain,
    progress_shown,
    refusal,
    refuse,
    reported_errors,
)
from zorse_megatron.cli.gpu_selection import Found, GpuSearches
from zorse_megatron.cli.observed_run import observed_run
from zorse_megatron.cli.options import ClusterFile, WorkloadOptions, answers
from zorse_megatron.cli.plan_options import (
    AnswerOptions,
    PlanOutputs,
    SearchOptions,
    grad_reduce_dtype_named,
    strategy_named,
    tokens_named,
)
from zorse_megatron.cli.workload import Workload
from zorse_megatron.cli.workload_costs import WorkloadCosts
from zorse_megatron.errors import Problem
from zorse_megatron.files.read_write import write_text
from zorse_megatron.files.strict import read_file
from zorse_megatron.inputs.cluster import Cluster
from zorse_megatron.inputs.cluster_yaml import (
    CLUSTER_FILE,
    nodes_without,
    parse_cluster,
    with_gpus,
)
from zorse_megatron.launch.replan import NodesLeft, nodes_left
from zorse_megatron.plan.plan_file import dump_plan

if TYPE_CHECKING:
    from zorse_megatron.planner.outcome import Strategy


# Beyond it, looking for what would fit takes longer than the search that found nothing.
_SAY_WHAT_FITS_UP_TO_RANKS = 128


@answers
def plan(
    *,
    cluster: ClusterFile,
    given: WorkloadOptions,
    search: SearchOptions,
    shown: AnswerOptions,
    as_json: bool,
) -> None:
    """Find the plan that trains a model fastest on a cluster."""
    outputs = PlanOutputs(
        plan=shown.out,
        page=shown.html,
        may_leave_out=search.may_leave_out,
        is_part=bool(search.without),
        with_stock=search.strategy == "zorse" and search.from_status is None,
    )
    task = _task(cluster, given, search, outputs, tokens=shown.tokens)
    with (
        progress_shown("searching", wanted=not as_json) as tell,
        _says_what_fits(task.costs, task.strategy),
    ):
        found = _found(task, search, tell)
    if task.run is not None:
        found = replace(found, outcome=task.run.named(found.outcome))
    written = task.save(found)
    answer = Answer(task=task, found=found, written=written)
    is_gone = written.error is not None and written.plan is None
    plan_text = [dump_plan(answer.outcome.plan).rstrip()] if is_gone else []  # it took a search
    lines = (*lines_of(answer, is_verbose=shown.verbose), *plan_text)
    Output(values=answer_as_json(answer), shown=lines, error=written.error).print(as_json=as_json)
    with reported_errors():  # on stderr: the plan's JSON has been printed
        if outputs.page is not None:
            write_text(outputs.page, page_of(answer, shows_progress=not as_json))
            if not as_json:
                print_plain(f"written: {outputs.page}")


def _found(task: Task, search: SearchOptions, tell: Tell) -> Found:
    """Search; an interrupt ends that, and what was found by then is the answer."""
    searches = GpuSearches(
        costs=task.costs,
        costs_of=task.costs_of,
        strategy=task.strategy,
        on_progress=tell,
        may_leave_out=search.may_leave_out,
        # Stock Megatron does not go on with a run, and has no LoRA.
        with_stock=task.run is None and task.costs.workload.computing.lora is None,
    )
    try:
        return searches.find()
    except KeyboardInterrupt:
        if not searches.outcomes:
            raise
        return searches.found_so_far()


def _task(
    cluster: Path,
    given: WorkloadOptions,
    search: SearchOptions,
    outputs: PlanOutputs,
    *,
    tokens: str | None,
) -> Task:
    """Read options and files. Raises a ZorseError with all that is wrong with them."""
    errors = Errors()
    with errors.collect():
        to_train = tokens_named(tokens)
    with errors.collect():
        strategy = strategy_named(search.strategy)
    with errors.collect():
        grad_reduce_dtype_named(search.grad_reduce_dtype)
    with errors.collect():
        outputs.refuse([cluster, *given.inputs])
    with errors.collect():
        workload = given.workload(dtype_may_be_auto=True)
        _refuse_stock_for_adapters(search.strategy, workload)
    with errors.collect():
        data = read_file(cluster, CLUSTER_FILE)
    errors.raise_all()
    costs_of = partial(search.costs, workload=workload, profiles=given.profiles)
    source, profiles, margin = str(cluster), given.profiles, search.margin
    whole, left, run = parse_cluster(data, source=source), None, None
    if search.without:
        left = _left(whole, search, source)
        whole = with_gpus(whole, left.ranks, source=source)
    costs = costs_of(whole)
    if (status := search.from_status) is not None:
        run = observed_run(status, data, workload, profiles, margin=margin, source=source)
        costs = costs_of(run.costs.cluster, profiles=run.profiles)
    return Task(
        cluster=cluster,
        given=given,
        outputs=outputs,
        strategy=strategy,
        tokens=to_train,
        costs=costs,
        costs_of=costs_of,
        left=left,
        run=run,
    )


def _refuse_stock_for_adapters(strategy: str, workload: Workload) -> None:
    if strategy == "stock" and workload.computing.lora is not None:
        raise refusal(
            "--strategy",
            "stock, for adapters",
            "another strategy",
            "Unmodified Megatron has no LoRA; zorse compare --simulated says what it would take.",
        )


def _left(cluster: Cluster, search: SearchOptions, source: str) -> NodesLeft:
    """Return the nodes that are not lost. Raises a ZorseError where there are none such."""
    lost = search.without or []
    if search.from_status is not None:
        why = "a run goes on with the ranks that it has"
        refuse(conflicts(["--without"], "--from-status", why=why))
    nodes_without(cluster, lost, source=source)
    return nodes_left(cluster, {node.name for node in cluster.nodes} - set(lost))


@contextmanager
def _says_what_fits(costs: WorkloadCosts, strategy: "Strategy") -> Iterator[None]:
    """Raise the NoPlanError of a search with what would fit."""
    from zorse_megatron.planner.outcome import NoPlanError

    try:
        yield
    except NoPlanError as error:
        raise error.with_problem(_what_fits(costs, strategy)) from None


def _what_fits(costs: WorkloadCosts, strategy: "Strategy") -> Problem:
    from zorse_megatron.planner.shortage import fits_problem, fitting, not_looked_for, what_fits

    ranks, most = costs.inputs.world_size, _SAY_WHAT_FITS_UP_TO_RANKS
    if strategy == "stock" and ranks <= most:
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
