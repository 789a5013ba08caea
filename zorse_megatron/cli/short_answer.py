"""What `zorse plan` prints by default, on twelve lines at most."""

import shlex
import textwrap
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from zorse_megatron.cli.gpu_selection import gpus_of, spares
from zorse_megatron.cli.next_command import shell_lines
from zorse_megatron.files.wording import NO_CHANGE, as_against, duration, figure, number_of, percent
from zorse_megatron.flags.torch_builds import short_build_note
from zorse_megatron.plan.plan import Plan

if TYPE_CHECKING:
    from zorse_megatron.cli.answer import Answer
    from zorse_megatron.planner.baselines.stock_best import StockLayout


MOST_LINES = 12
WIDTH = 100
_MOST_SIZES = 3
_MOST_HOSTS = 8


def short_lines(answer: "Answer", *, is_all: bool = False) -> list[str]:
    """The answer; groups are left out where they take too many lines.

    `is_all`: whether details follow.
    """
    command = [] if answer.next_command is None else answer.next_command.lines(WIDTH)
    head = _head(answer, is_all=is_all)
    if answer.recommends_stock and len(head) + len(command) > MOST_LINES:
        head = _head(answer, is_all=is_all, with_limit=False)
    if answer.is_stock:
        flags = flag_lines(answer)
        is_long = len(head) + len(flags) + len(command) > MOST_LINES
        head += flag_lines(answer, is_one=True) if is_long else flags
    warnings = _wrapped(list(_warnings(answer)))
    most = MOST_LINES - len(head) - 1
    if len(warnings) > most:
        warnings = [*warnings[: max(0, most - 1)], "more to see to: --verbose"]
    room = MOST_LINES - len(head) - len(warnings)
    if len(command) > room and answer.next_command is not None:
        command = [answer.next_command.line]  # a terminal wraps it, and a shell runs it
    groups = list(_groups(answer.outcome.plan, answer.costs.inputs.kinds))
    if len(groups) > room - len(command):
        groups = []
    stock, lines = answer.written.stock, [*groups, *warnings, *command]
    if stock and not answer.recommends_stock and len(head) + len(lines) < MOST_LINES:
        head += [f"Its best layout is written to {stock}, which zorse launch --stock starts"]
    return [*head, *lines]


def _head(answer: "Answer", *, is_all: bool, with_limit: bool = True) -> list[str]:
    """All but groups, warnings and command."""
    from zorse_megatron.planner.explanation import adapter_sentences

    return _wrapped(
        [
            *_iteration(answer),
            *adapter_sentences(answer.costs.inputs),
            *_stock(answer),
            *_tokens(answer),
            _gpus(answer),
            *([_limit(answer)] if with_limit and not answer.is_stock else []),
            _plan(answer, is_all=is_all),
        ]
    )


def _broken(line: str) -> list[str]:
    """On lines of the width; a word that is longer, such as a path, stays whole."""
    return textwrap.wrap(
        line, WIDTH, subsequent_indent="  ", break_on_hyphens=False, break_long_words=False
    )


def _wrapped(lines: Sequence[str]) -> list[str]:
    return [part for line in lines for part in _broken(line)]


def _iteration(answer: "Answer") -> Iterator[str]:
    bar = answer.error_bar
    who, how = (" on unmodified Megatron", "") if answer.is_stock else ("", "simulated, ")
    yield (
        f"{duration(answer.iteration_s)} per iteration{who}, {figure(answer.tokens_per_s)} "
        f"tokens/s, ± {percent(bar.share)} ({how}{bar.basis})"
    )
    if answer.is_stock:
        change = as_against(answer.outcome.iteration_s, answer.iteration_s)
        took = duration(answer.outcome.iteration_s)
        yield f"The same layout on this package's runtime: {took} ({change})"


def _stock(answer: "Answer") -> Iterator[str]:
    from zorse_megatron.planner.baselines.stock_best import MOST_GPUS

    if answer.stock is None and answer.costs.workload.computing.lora is not None:
        yield "Stock Megatron: it has no LoRA"
        return
    if answer.stock is None:
        why = "so many GPUs" if answer.num_gpus > MOST_GPUS else "a run that goes on"
        yield f"Stock Megatron: not computed for {why}"
        return
    best, even = answer.stock.best, answer.stock.even
    if best.fitting is None:
        none = "Stock Megatron has no layout that fits"
        yield _shortest(f"{none} ({best.reason})", f"{none}; zorse plan --strategy stock says why")
        return
    if answer.is_stock:
        if even.fitting is not None and even.fitting.iteration_s > best.fitting.iteration_s:
            longer = as_against(even.fitting.iteration_s, best.fitting.iteration_s)
            took = f"{duration(even.fitting.iteration_s)}{_on(answer, even.fitting)} ({longer})"
            yield f"Best even layout, without layers of each stage: {took}"
    else:
        yield from _best_stock(answer, best.fitting, even.fitting)


def _best_stock(answer: "Answer", best: "StockLayout", even: "StockLayout | None") -> Iterator[str]:
    is_even = even is not None and best.iteration_s >= even.iteration_s
    change = as_against(best.iteration_s, answer.iteration_s)
    texts = []
    for on_best, on_even in ((True, True), (False, True), (False, False)):
        more = ", an even one" if is_even else ", none of the even ones fits"
        if even is not None and not is_even:
            more = (
                f", {duration(even.iteration_s)}{_on(answer, even) * on_even} in its best even one"
            )
        start = f"{duration(best.iteration_s)} in its best layout{_on(answer, best) * on_best}"
        texts.append(f"Stock Megatron: {start} ({change}){more}")
    yield _shortest(*texts)
    if answer.recommends_stock:
        faster = best.iteration_s / answer.iteration_s - 1
        gain = f"Only {percent(faster)} faster" if faster > NO_CHANGE else "No faster"
        where = f"{written}, see below" if (written := answer.written.stock) else "--strategy stock"
        yield f"{gain} than stock Megatron, which needs no plugin: {where}"


def flag_lines(answer: "Answer", *, is_one: bool = False) -> list[str]:
    """Megatron's flags of stock's best layout, and the hosts that its ranks are on.

    `is_one`: whether the flags are on one line, however long.
    """
    from zorse_megatron.planner.baselines.stock_plans import hosts_of, layout_flags

    layout = answer.best_stock
    if layout is None:
        return []
    hosts = hosts_of(answer.found.whole.inputs, layout.ranks)
    names = [f"{host.name} ({','.join(map(str, host.gpus))})" for host in hosts]
    if len(names) > _MOST_HOSTS:
        names[_MOST_HOSTS:] = [f"and {len(names) - _MOST_HOSTS} more nodes (--json)"]
    flags = layout_flags(layout.grid)
    start = "flags of stock Megatron: "
    lines = [start + shlex.join(flags)] if is_one else shell_lines(start, flags, WIDTH)
    return [*lines, *_broken(f"GPUs in the order of its ranks: {', '.join(names)}")]


def _on(answer: "Answer", layout: "StockLayout") -> str:
    return f" on {layout.gpus}" if len(layout.ranks) < answer.num_gpus else ""


def _tokens(answer: "Answer") -> Iterator[str]:
    if answer.tokens is None:
        return
    low, high = (answer.days(each) for each in answer.error_bar.between(1.0))
    yield (
        f"{answer.tokens.said} tokens take {figure(answer.days())} days "
        f"({figure(low)} to {figure(high)}), without interruptions"
    )


def _gpus(answer: "Answer") -> str:
    cluster, left = answer.costs.cluster, answer.left
    number = cluster.world_size
    used = f"GPUs used: {gpus_of(cluster, range(number))}"
    if left is not None:
        used = f"Without {', '.join(left.lost)}: {used}"
        used += f", {', '.join(left.cut_off)} cut off" * bool(left.cut_off)
    if not answer.found.left_out:
        return f"{used} (all{f' {number}' if number > 1 else ''}); none left out"
    return f"{used} ({number} of {answer.num_gpus}); {spares(answer.found)}"


def _limit(answer: "Answer") -> str:
    from zorse_megatron.planner.explanation import limit_phrase

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
    written = answer.written
    where = "not written" if written.plan is None else f"written to {written.plan}"
    if written.used_cluster is not None:
        where += f", its cluster file to {written.used_cluster}"
    groups = number_of(len(plan.groups), "group")
    said = f"Plan: {groups}, schedule {plan.schedule.name}; {where}"
    return said if is_all else _shortest(f"{said}; --verbose shows all of it, and why", said)


def _shortest(*texts: str) -> str:
    """The first that fits on a line, or the last one."""
    return next((text for text in texts if len(text) <= WIDTH), texts[-1])


def _warnings(answer: "Answer") -> Iterator[str]:
    if answer.outcome.was_cut_short:
        yield answer.outcome.notes[0]
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
        layers = plan.num_layers_of_group(number)
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
