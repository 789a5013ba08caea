"""What `zorse plan` prints by default: what one wants to know first, on at most 12 lines."""

import textwrap
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from zorse_megatron.cli.gpu_selection import gpus_of
from zorse_megatron.cli.selection_answer import spares
from zorse_megatron.schema.plan.plan import Plan
from zorse_megatron.schema.text.counted import number_of
from zorse_megatron.schema.text.figures import duration, figure, percent
from zorse_megatron.software.torch_builds import short_build_note

if TYPE_CHECKING:
    from zorse_megatron.cli.plan_answer import Answer

MOST_LINES = 12
WIDTH = 100
_MOST_SIZES = 3


def short_lines(answer: "Answer", *, is_all: bool = False) -> list[str]:
    """The answer; groups are left out where they take too many lines.

    `is_all`: whether details follow.
    """
    head = _wrapped(
        [
            _iteration(answer),
            _stock(answer),
            *_tokens(answer),
            _gpus(answer),
            _limit(answer),
            _plan(answer, is_all=is_all),
        ]
    )
    warnings = _wrapped(list(_warnings(answer)))
    most = MOST_LINES - len(head) - 1
    if len(warnings) > most:
        warnings = [*warnings[: max(0, most - 1)], "more to see to: --verbose"]
    command = [] if answer.next_command is None else answer.next_command.lines(WIDTH)
    room = MOST_LINES - len(head) - len(warnings)
    if len(command) > room and answer.next_command is not None:
        command = [answer.next_command.line]  # a terminal wraps it, and a shell runs it
    groups = list(_groups(answer.outcome.plan, answer.costs.inputs.kinds))
    if len(groups) > room - len(command):
        groups = []
    return [*head, *groups, *warnings, *command]


def _broken(line: str) -> list[str]:
    """On lines of the width; a word that is longer, such as a path, stays whole."""
    return textwrap.wrap(
        line, WIDTH, subsequent_indent="  ", break_on_hyphens=False, break_long_words=False
    )


def _wrapped(lines: Sequence[str]) -> list[str]:
    return [part for line in lines for part in _broken(line)]


def _iteration(answer: "Answer") -> str:
    outcome, bar = answer.outcome, answer.error_bar
    return (
        f"{duration(outcome.iteration_s)} per iteration, {figure(outcome.tokens_per_s)} tokens/s, "
        f"± {percent(bar.share)} (simulated, {bar.basis})"
    )


def _stock(answer: "Answer") -> str:
    stock = answer.stock
    if stock is None:
        return "Stock Megatron: not computed for so many GPUs; zorse compare-plans does it"
    layout = stock.fitting
    if layout is None:
        none = "Stock Megatron has no even layout that fits"
        return _shortest(f"{none} ({stock.reason})", f"{none}; zorse compare-plans says why")
    ratio = layout.iteration_s / answer.outcome.iteration_s
    gpus = f" on {layout.gpus}" if len(layout.ranks) < answer.num_gpus else ""
    said = (
        f"Stock Megatron, best even layout: {duration(layout.iteration_s)} ({figure(ratio)} x as "
        f"long), {figure(layout.tokens_per_s)} tokens/s{gpus}"
    )
    return _shortest(f"{said}: {layout.grid.parallelism}", said)


def _tokens(answer: "Answer") -> Iterator[str]:
    if answer.tokens is None:
        return
    low, high = (answer.days(each) for each in answer.error_bar.between(1.0))
    yield (
        f"{answer.tokens.said} tokens take {figure(answer.days())} days "
        f"({figure(low)} to {figure(high)}), without interruptions"
    )


def _gpus(answer: "Answer") -> str:
    cluster, selected = answer.costs.cluster, answer.selected
    number = cluster.world_size
    used = f"GPUs used: {gpus_of(cluster, range(number))}"
    if selected is None or not selected.left_out:
        return f"{used} (all{f' {number}' if number > 1 else ''}); none left out"
    return f"{used} ({number} of {answer.num_gpus}); {spares(selected)}"


def _limit(answer: "Answer") -> str:
    from zorse_megatron.planner.explain.sentences import limit_phrase

    explanation = answer.explanation
    if explanation is None:
        return "Limited by: see zorse explain, which takes long for so many GPUs"
    number = explanation.bottleneck_group
    plain = (
        f"Limited by {explanation.limited_by}: group {number} computes "
        f"{percent(explanation.loads[number].busy)} of the time"
    )
    inputs, plan = answer.costs.inputs, answer.outcome.plan
    return _shortest(f"Limited by {limit_phrase(inputs, plan, explanation)}", plain)


def _plan(answer: "Answer", *, is_all: bool) -> str:
    plan = answer.outcome.plan
    where = "not written" if answer.written is None else f"written to {answer.written}"
    if answer.used_cluster is not None:
        where += f", its cluster file to {answer.used_cluster}"
    groups = number_of(len(plan.groups), "group")
    said = f"Plan: {groups}, schedule {plan.schedule.name}; {where}"
    return said if is_all else _shortest(f"{said}; --verbose shows all of it, and why", said)


def _shortest(*texts: str) -> str:
    """The first that fits on a line, or the last one."""
    return next((text for text in texts if len(text) <= WIDTH), texts[-1])


def _warnings(answer: "Answer") -> Iterator[str]:
    if answer.cannot_train is not None:
        yield answer.cannot_train
    note = short_build_note(list(answer.costs.cluster.kinds))
    if note:
        yield note
    yield from answer.costs.to_do


def _groups(plan: Plan, kinds: Sequence[str]) -> Iterator[str]:
    """One line for each group: GPUs, layers, samples of their micro-batches."""
    rows = []
    for number, group in enumerate(plan.groups):
        counts = Counter(kinds[rank] for rank in group.ranks)
        layers = sum(
            chunk.layers[1] - chunk.layers[0] for chunk in plan.chunks if chunk.group == number
        )
        work = dict.fromkeys(
            f"{each.num_microbatches} x {each.micro_batch_size}" for each in group.replicas
        )
        shown = [*work][:_MOST_SIZES]
        rows.append(
            (
                f"group {number}",
                " + ".join(f"{count} {kind}" for kind, count in counts.items()),
                number_of(layers, "layer"),
                f"micro-batches {', '.join(shown)}{', ...' * (len(work) > len(shown))}",
            )
        )
    widths = [max(len(row[column]) for row in rows) for column in range(3)]
    for row in rows:
        cells = [cell.ljust(width) for cell, width in zip(row, (*widths, 0), strict=True)]
        yield f"  {'  '.join(cells)}".rstrip()[:WIDTH]
