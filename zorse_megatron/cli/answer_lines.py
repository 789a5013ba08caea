"""What `zorse plan` prints of its answer: in short, and with `--verbose` all of it."""

import shlex
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

from rich.table import Table
from rich.text import Text

from zorse_megatron.cli.answer import Answer
from zorse_megatron.cli.console import progress_shown
from zorse_megatron.cli.gpu_selection import Found, gpus_of, spares
from zorse_megatron.cli.simulated import (
    capacities_bytes,
    plan_line,
    plan_table,
    rank_table,
    simulated,
    types_of,
)
from zorse_megatron.cli.workload_costs import WorkloadCosts
from zorse_megatron.files.wording import NO_CHANGE, as_against, duration, figure, number_of, percent
from zorse_megatron.flags.torch_builds import short_build_note
from zorse_megatron.plan.plan import Plan

if TYPE_CHECKING:
    from zorse_megatron.planner.baselines.stock_search import StockLayout
    from zorse_megatron.plots.figures import Picture
    from zorse_megatron.simulate.result import SimulationResult


_MOST_SIZES = 3
_MOST_HOSTS = 8
_MOST_GROUPS = 6
_MOST_WARNINGS = 4
_MAX_REJECTED = 5
_MAX_SELECTIONS = 12


def lines_of(answer: Answer, *, is_verbose: bool) -> Iterator[str | Table]:
    """Yield the answer for people; `is_verbose`: with the whole plan, reasons, rejected, notes."""
    from zorse_megatron.planner.explanation import adapter_sentences

    yield from _iteration(answer)
    yield from adapter_sentences(answer.costs.inputs)
    yield from _stock(answer)
    yield from _tokens(answer)
    yield _gpus(answer)
    if not answer.is_stock:
        yield _limit(answer)
    yield _plan(answer, is_verbose=is_verbose)
    is_rival = answer.recommends_stock and answer.has_expert_parallelism
    if is_verbose or answer.is_stock or is_rival:
        yield from _flags(answer)
    if not is_verbose and len(answer.outcome.plan.groups) <= _MOST_GROUPS:
        yield from _groups(answer)
    warnings = list(_warnings(answer))
    yield from warnings[:_MOST_WARNINGS]
    if len(warnings) > _MOST_WARNINGS:
        yield "more to see to: --verbose"
    if (command := answer.next_command) is not None:
        yield command.line
    if is_verbose:
        yield from _details(answer)
    if answer.task.run is not None and answer.move is not None:
        yield from answer.task.run.lines(answer.move)


def _iteration(answer: Answer) -> Iterator[str]:
    bar = answer.error_bar
    who, how = (" on unmodified Megatron", "") if answer.is_stock else ("", "simulated, ")
    if answer.is_stock and answer.has_expert_parallelism:
        who += " at least, with expert parallelism"
    yield (
        f"{duration(answer.iteration_s)} per iteration{who}, {figure(answer.tokens_per_s)} "
        f"tokens/s, ± {percent(bar.share)} ({how}{bar.basis})"
    )
    if answer.is_stock and not answer.has_expert_parallelism:
        change = as_against(answer.outcome.iteration_s, answer.iteration_s)
        took = duration(answer.outcome.iteration_s)
        yield f"The same layout on this package's runtime: {took} ({change})"


def _stock(answer: Answer) -> Iterator[str]:
    from zorse_megatron.planner.baselines.stock_best import MOST_GPUS

    if answer.found.stock is None:
        why = "not computed for a run that goes on"
        if answer.costs.workload.computing.lora is not None:
            why = "it has no LoRA"
        elif answer.found.num_gpus > MOST_GPUS:
            why = "not computed for so many GPUs"
        yield f"Stock Megatron: {why}"
        return
    best, even = answer.found.stock.best, answer.found.stock.even.fitting
    if best.fitting is None:
        yield f"Stock Megatron has no layout that fits ({best.reason})"
    elif not answer.is_stock:
        yield from _best_stock(answer, best.fitting, even)
    elif even is not None and even.iteration_s > best.fitting.iteration_s:
        longer = as_against(even.iteration_s, best.fitting.iteration_s)
        took = f"{duration(even.iteration_s)}{_on(answer, even)} ({longer})"
        yield f"Best even layout, without layers of each stage: {took}"


def _best_stock(answer: Answer, best: "StockLayout", even: "StockLayout | None") -> Iterator[str]:
    if even is None:
        more = "none of the even ones fits"
    elif best.iteration_s >= even.iteration_s:
        more = "an even one"
    else:
        more = f"{duration(even.iteration_s)}{_on(answer, even)} in its best even one"
    change = as_against(best.iteration_s, answer.iteration_s)
    degree = best.grid.expert_parallel
    spread = f", with expert parallelism of {degree} (EP), at least" if degree > 1 else ""
    yield (
        f"Stock Megatron: {duration(best.iteration_s)} in its best layout{spread}"
        f"{_on(answer, best)} ({change}), {more}"
    )
    if answer.recommends_stock:
        faster = best.iteration_s / answer.iteration_s - 1
        gain = f"Only {percent(faster)} faster" if faster > NO_CHANGE else "No faster"
        if faster < -NO_CHANGE:
            gain = f"{percent(-faster / (1 + faster))} slower"
        where = f"{written}, see below" if (written := answer.written.stock) else "--strategy stock"
        yield f"{gain} than stock Megatron, which needs no plugin: {where}"


def _on(answer: Answer, layout: "StockLayout") -> str:
    return f" on {layout.gpus}" if len(layout.ranks) < answer.found.num_gpus else ""


def _flags(answer: Answer) -> Iterator[str]:
    """Megatron's flags of stock's best layout, and the hosts that its ranks are on."""
    from zorse_megatron.planner.baselines.stock_plans import hosts_of, layout_flags

    layout = answer.best_stock
    if layout is None:
        return
    hosts = hosts_of(answer.found.whole.inputs, layout.ranks)
    names = [f"{host.name} ({','.join(map(str, host.gpus))})" for host in hosts]
    if len(names) > _MOST_HOSTS:
        names[_MOST_HOSTS:] = [f"and {len(names) - _MOST_HOSTS} more nodes (--json)"]
    yield f"flags of stock Megatron: {shlex.join(layout_flags(layout.grid))}"
    yield f"GPUs in the order of its ranks: {', '.join(names)}"


def _tokens(answer: Answer) -> Iterator[str]:
    if answer.task.tokens is None:
        return
    low, high = (answer.days(each) for each in answer.error_bar.between(1.0))
    yield (
        f"{answer.task.tokens.said} tokens take {figure(answer.days())} days "
        f"({figure(low)} to {figure(high)}), without interruptions"
    )


def _gpus(answer: Answer) -> str:
    cluster, left = answer.costs.cluster, answer.task.left
    number = cluster.world_size
    used = f"GPUs used: {gpus_of(cluster, range(number))}"
    if left is not None:
        used = f"Without {', '.join(left.lost)}: {used}"
        used += f", {', '.join(left.cut_off)} cut off" * bool(left.cut_off)
    if not answer.found.left_out:
        return f"{used} (all{f' {number}' if number > 1 else ''}); none left out"
    return f"{used} ({number} of {answer.found.num_gpus}); {spares(answer.found)}"


def _limit(answer: Answer) -> str:
    from zorse_megatron.planner.explanation import limit_phrase

    if answer.explanation is None:
        return "Limited by: see zorse explain, which takes long for so many GPUs"
    limit = limit_phrase(answer.costs.inputs, answer.outcome.plan, answer.explanation)
    return f"Limited by {limit}"


def _plan(answer: Answer, *, is_verbose: bool) -> str:
    plan, written = answer.outcome.plan, answer.written
    where = "not written" if written.plan is None else f"written to {written.plan}"
    if written.used_cluster is not None:
        where += f", its cluster file to {written.used_cluster}"
    if written.stock is not None:
        where += f", stock's best layout to {written.stock}"
    groups = number_of(len(plan.groups), "group")
    more = "" if is_verbose else "; --verbose shows all of it, and why"
    return f"Plan: {groups}, schedule {plan.schedule.name}; {where}{more}"


def _groups(answer: Answer) -> Iterator[str]:
    """One line for each group: GPUs, layers, samples of their micro-batches."""
    plan, kinds, rows = answer.outcome.plan, answer.costs.inputs.kinds, []
    for number, group in enumerate(plan.groups):
        counts = Counter(kinds[rank] for rank in group.ranks)
        work = dict.fromkeys(each.work for each in group.replicas)
        shown = [*work][:_MOST_SIZES]
        rows.append(
            (
                f"group {number}",
                " + ".join(f"{count} {kind}" for kind, count in counts.items()),
                number_of(plan.num_layers_of_group(number), "layer"),
                f"micro-batches {', '.join(shown)}{', ...' * (len(work) > len(shown))}",
            )
        )
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        cells = [cell.ljust(width) for cell, width in zip(row, widths, strict=True)]
        yield f"  {'  '.join(cells)}".rstrip()


def _warnings(answer: Answer) -> Iterator[str]:
    if answer.outcome.was_cut_short:
        yield answer.outcome.notes[0]
    if answer.cannot_train is not None:
        yield answer.cannot_train
    if note := short_build_note(list(answer.costs.cluster.kinds)):
        yield note
    yield from answer.costs.to_do


# What `--verbose` adds.


def _details(answer: Answer) -> Iterator[str | Table]:
    outcome, counts = answer.outcome, answer.outcome.considered
    yield plan_line(outcome.plan)
    yield plan_table(outcome.plan)
    yield from _selection(answer.found)
    yield from answer.sentences
    yield (
        f"Searched in {duration(outcome.plan_time_s)}: {number_of(counts.groupings, 'grouping')}, "
        f"{number_of(counts.estimated, 'candidate')} estimated, {counts.simulated} simulated"
    )
    yield from (f"rejected: {each.what}: {each.why}" for each in outcome.rejected[:_MAX_REJECTED])
    yield from (f"note: {note}" for note in answer.notes)


def _selection(found: Found) -> Iterator[str | Table]:
    """The selections of GPUs that were searched, where some are left out."""
    if not found.points or not found.left_out:
        return
    everything = next(each for each in found.points if len(each.ranks) == found.num_gpus)
    takes = duration(everything.iteration_s) if everything.fits else "more memory than there is"
    yield f"with all GPUs: {takes}"
    table = Table("GPUs", "Iteration", "Tokens/s", "")
    for point in [point for point in found.points if point.fits][:_MAX_SELECTIONS]:
        table.add_row(
            Text(gpus_of(found.whole.cluster, point.ranks)),
            duration(point.iteration_s),
            figure(point.tokens_per_s),
            "chosen" if point.ranks == found.ranks else "",
        )
    yield table


# The page of `--html`.


def page_of(answer: Answer, *, shows_progress: bool) -> str:
    """The answer, what each GPU does and holds, and what one more would bring, as HTML.

    Searches once more for each kind of GPU, below 256 of them.
    """
    from zorse_megatron.planner.explanation import one_more_sentences
    from zorse_megatron.planner.find_plan import MOST_TO_REPLAN, replan
    from zorse_megatron.plots.figures import html_page

    costs, plan = answer.costs, answer.outcome.plan
    with progress_shown("searching", wanted=shows_progress, title="page") as tell:
        more = replan(costs.inputs, found_s=answer.outcome.iteration_s, on_progress=tell)
    result = answer.outcome.simulation  # what has expert parallelism is stock's alone
    if answer.explanation is not None or not answer.is_stock:
        result = simulated(plan, costs, source="the plan")
    return html_page(
        f"{costs.workload.model.name} on {costs.cluster.name or 'the cluster'}",
        [
            f"{costs.inputs.global_batch_size} samples of {costs.inputs.sequence_length:,} tokens "
            f"an iteration, {types_of(plan, costs)}",
            *lines_of(answer, is_verbose=True),
            rank_table(plan, result, costs.cluster),
            *(
                one_more_sentences(more)
                if more is not None
                else [
                    f"One more GPU: not searched for {MOST_TO_REPLAN} GPUs or more, "
                    "it takes too long"
                ]
            ),
            *_pictures(costs, plan, result),
            "Predicted by zorse-megatron's simulator, which executes the ranks' own lists of "
            "actions. Not measured.",
        ],
    )


def _pictures(costs: WorkloadCosts, plan: Plan, result: "SimulationResult") -> Iterator["Picture"]:
    from zorse_megatron.plots.figures import Picture, draw_memory
    from zorse_megatron.plots.gantt import draw_timeline

    with TemporaryDirectory(prefix="zorse-page-") as directory:
        path = Path(directory) / "picture.png"
        draw_timeline(path, plan=plan, result=result, title="")
        yield Picture(title="One iteration: each GPU's timeline", png=path.read_bytes())
        capacities = capacities_bytes(costs.cluster)
        draw_memory(path, plan=plan, result=result, capacity_bytes=capacities, title="")
        title = "Peak memory of each GPU, against its capacity"
        yield Picture(title=title, png=path.read_bytes())
