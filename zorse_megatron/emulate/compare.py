"""Stock, baselines and ours on one emulated cluster: rows, pictures, a page. Without torch."""

import json
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.table import Table
from rich.text import Text

from zorse_megatron.emulate.emulator import EmulatedRun, System, flags_of_grid
from zorse_megatron.errors import PlanError, Problem
from zorse_megatron.files.read_write import write_text
from zorse_megatron.files.wording import number_of
from zorse_megatron.plan.plan import Group
from zorse_megatron.planner.baselines.stock_best import Stock, StockAtBest, stock_at_best
from zorse_megatron.planner.inputs.search_inputs import Inputs
from zorse_megatron.planner.outcome import NoPlanError, Outcome, Strategy
from zorse_megatron.schedule.lower import refuse_unsupported

if TYPE_CHECKING:
    from zorse_megatron.plots.figures import Bar, Panel


STOCK_EVEN = "stock, best even layout"
STOCK = "stock, best layout"
OURS = "zorse"
_PLANNERS: tuple[Strategy, ...] = ("zorse-paper", "cephalo", "zorse")


@dataclass(frozen=True, kw_only=True)
class Planned:
    """A strategy's plan, and the GPUs of the cluster that it is for."""

    ranks: tuple[int, ...]
    """Rank of the plan -> rank of the whole cluster."""
    outcome: Outcome
    stock: StockAtBest | None = None
    """What the search has found of stock on the way."""


@dataclass(frozen=True, kw_only=True)
class ComparedSystem:
    """One row of the comparison."""

    name: str
    layout: str
    """For people: GPUs, and how they are used."""
    system: System | None
    """None: it cannot be run, see `reason`."""
    predicted_s: float | None
    """Simulated iteration; None where nothing fits."""
    peak_memory_fraction: float | None = None
    """Highest simulated peak of a GPU over what it may hold; None where nothing fits."""
    reason: str = ""
    run: EmulatedRun | None = None
    """What came of it, if it was run."""
    is_emulated: bool = True
    """Whether it is to run; else the simulator's figure is its result."""

    @property
    def iteration_s(self) -> float | None:
        """The result; None where there is none."""
        if not self.is_emulated:
            return self.predicted_s
        if self.run is None or self.run.out_of_memory is not None:
            return None
        return self.run.iteration_s

    @property
    def outcome(self) -> str:
        """For people: why there is no number; empty where there is one."""
        if self.iteration_s is not None:
            return ""
        if self.run is not None:
            return "out of memory"
        return "does not fit" if self.predicted_s is None else "cannot be trained yet"


def compared_systems(
    inputs: Inputs, strategies: Collection[Strategy], planned: Callable[[Strategy], Planned]
) -> list[ComparedSystem]:
    """Find the layouts of these strategies, for some or all GPUs of `inputs`.

    `planned`: finds a strategy's plan, or raises NoPlanError; what it says of stock is not searched
    again. Raises NoPlanError where nothing fits at all, with the reason of each.
    """
    at_best: list[StockAtBest] = []

    def searched(strategy: Strategy) -> Planned:
        plan = planned(strategy)
        at_best.extend([plan.stock] if plan.stock else [])
        return plan

    found = [_by_strategy(each, inputs.kinds, searched) for each in _PLANNERS if each in strategies]
    if "stock" in strategies:
        stock = at_best[0] if at_best else stock_at_best(inputs)
        found = [*_of_stock(stock), *found]
    if all(each.predicted_s is None for each in found):
        raise NoPlanError("there is nothing to compare", list(map(_misfit, found)))
    return found


def _of_stock(found: StockAtBest) -> Iterator[ComparedSystem]:
    """Where no even layout fits, what comes closest is run, to see it run out of memory."""
    yield _stock(STOCK_EVEN, found.even)
    best = found.best
    yield _stock(STOCK, best) if best.fitting else _absent(STOCK, best.reason)


def _stock(name: str, stock: Stock) -> ComparedSystem:
    layout = stock.layout
    if layout is None:
        return _absent(name, stock.reason)
    system, reason = None, stock.reason
    is_emulated = layout.grid.expert_parallel == 1
    if is_emulated:
        flags = flags_of_grid(layout.inputs, layout.grid)
        system = System(name=name, gpus=layout.ranks, flags=flags, stock_layout=layout.plan)
    elif not reason:
        reason = (
            "at least, simulated: the emulation has no expert parallelism of unmodified Megatron"
        )
    return ComparedSystem(
        name=name,
        layout=layout.description,
        system=system,
        predicted_s=None if stock.reason else layout.iteration_s,
        peak_memory_fraction=None if stock.reason else layout.fullest,
        reason=reason,
        is_emulated=is_emulated,
    )


def _absent(name: str, reason: str) -> ComparedSystem:
    return ComparedSystem(name=name, layout="-", system=None, predicted_s=None, reason=reason)


def _by_strategy(
    strategy: Strategy, kinds: tuple[str, ...], planned: Callable[[Strategy], Planned]
) -> ComparedSystem:
    try:
        found = planned(strategy)
    except NoPlanError as error:
        return _absent(strategy, " ".join(map(str, error.problems)))
    plan, reason = found.outcome.plan, ""
    try:
        refuse_unsupported(plan)
    except PlanError as error:
        reason = "cannot be trained yet: " + ", ".join(each.where for each in error.problems)
    gpus = Counter(kinds[rank] for rank in found.ranks)
    groups = "|".join(map(_members, plan.groups))
    return ComparedSystem(
        name=strategy,
        layout=f"{', '.join(f'{count} {kind}' for kind, count in gpus.items())}: groups of "
        f"{groups}, {number_of(len(plan.chunks), 'chunk')}, {plan.schedule.name}",
        system=None if reason else System(name=strategy, gpus=found.ranks, plan=plan),
        predicted_s=found.outcome.iteration_s,
        peak_memory_fraction=found.outcome.peak_memory_fraction,
        reason=reason,
    )


def _misfit(compared: ComparedSystem) -> Problem:
    return Problem(
        where=compared.name,
        found=f"nothing that fits ({compared.reason.rstrip('.')})",
        expected="a layout or a plan that fits",
        remedy="See zorse plan, which says what would fit.",
    )


def _members(group: Group) -> str:
    """How many ranks a group has, those of replicas of several together."""
    sizes = Counter((len(each.ranks), each.expert_parallel is not None) for each in group.replicas)
    alone = sizes.pop((1, False), 0)
    sets = []
    for (ranks, share), count in sorted(sizes.items(), reverse=True):
        times = f"{count} times " if count > 1 else ""
        in_tp_groups = (f"{count} TP groups" if count > 1 else "a TP group") + f" of {ranks}"
        sets.append(f"{times}{ranks} that share experts" if share else in_tp_groups)
    return " + ".join([*sets, *([str(alone)] if alone else [])])


# The comparison's rows, and what they are measured against.


@dataclass(frozen=True, kw_only=True)
class ComparisonRow:
    """One system; None where it has no such value."""

    system: str
    layout: str
    reason: str
    """Why it does not fit or cannot be trained; empty where it can."""
    iteration_s: float | None
    """Emulated, the median; simulated where nothing is emulated."""
    tokens_per_s: float | None
    speedup_vs_stock: float | None
    """Against stock's best layout."""
    efficiency_of_aggregate: float | None
    """Tokens/s over the sum of what each GPU of the cluster would do alone."""
    peak_memory_fraction: float | None
    """Highest simulated peak of a GPU over what it may hold."""
    predicted_iteration_s: float | None
    prediction_error: float | None
    """(predicted - emulated) / emulated."""
    final_loss: float | None


def rows_of(systems: Sequence[ComparedSystem], inputs: Inputs) -> list[ComparisonRow]:
    """Compute the rows, in the order of the systems."""
    tokens = inputs.global_batch_size * inputs.sequence_length
    alone = aggregate_tokens_per_s(inputs)
    stock_s = {each.name: each.iteration_s for each in systems}.get(STOCK)
    return [_row(each, tokens=tokens, alone=alone, stock_s=stock_s) for each in systems]


def aggregate_tokens_per_s(inputs: Inputs) -> float:
    """Tokens/s of all GPUs together if each trained the whole model alone, memory aside.

    Each at its best micro-batch size, nothing recomputed, no communication.
    """
    return inputs.sequence_length * sum(_samples_per_s(inputs, kind) for kind in inputs.kinds)


def _samples_per_s(inputs: Inputs, kind: str) -> float:
    rates = []
    for size in inputs.best_sizes[kind]:
        layer = inputs.compute.layer(kind, size)
        ends = inputs.compute.embedding(kind, size), inputs.compute.head(kind, size)
        whole_s = inputs.num_layers * layer.both_s
        rates.append(size / (whole_s + sum(e.both_s for e in ends)))
    return max(rates)


def _row(
    compared: ComparedSystem, *, tokens: float, alone: float, stock_s: float | None
) -> ComparisonRow:
    run, seconds, predicted_s = compared.run, compared.iteration_s, compared.predicted_s
    is_measured = run is not None and seconds is not None
    rate = None if seconds is None else tokens / seconds
    return ComparisonRow(
        system=compared.name,
        layout=compared.layout,
        reason=compared.reason,
        iteration_s=seconds,
        tokens_per_s=rate,
        speedup_vs_stock=stock_s / seconds if stock_s and seconds else None,
        efficiency_of_aggregate=None if rate is None else rate / alone,
        peak_memory_fraction=compared.peak_memory_fraction,
        predicted_iteration_s=predicted_s,
        prediction_error=predicted_s / seconds - 1
        if is_measured and seconds and predicted_s
        else None,
        final_loss=run.losses[-1] if run is not None and is_measured else None,
    )


# The comparison as files: `compare.json`, pictures, and one page that needs no other file.


FILES = ("compare.json", "bars.png", "timeline.png", "compare.html")
"""What `ComparisonReport.save` writes; no timeline where nothing ran."""
HEADINGS = (
    "System",
    "Layout",
    "Iteration",
    "Tokens/s",
    "Against stock",
    "Of aggregate",
    "Memory",
    "Simulated",
    "Loss",
)


@dataclass(frozen=True, kw_only=True)
class ComparisonReport:
    """Everything that is written and printed."""

    title: str
    systems: tuple[ComparedSystem, ...]
    rows: tuple[ComparisonRow, ...]
    notes: tuple[str, ...]
    kinds: tuple[str, ...]
    """GPU -> its kind."""

    @classmethod
    def of(
        cls, systems: Sequence[ComparedSystem], inputs: Inputs, *, title: str, notes: Sequence[str]
    ) -> "ComparisonReport":
        """Compute the rows; who has no number and why becomes a note."""
        full = {each.name: each.run.out_of_memory for each in systems if each.run}
        why = {each.name: full.get(each.name) or each.reason for each in systems}
        return cls(
            title=title,
            systems=tuple(systems),
            rows=tuple(rows_of(systems, inputs)),
            notes=(*(f"{name}: {reason}" for name, reason in why.items() if reason), *notes),
            kinds=inputs.kinds,
        )

    @property
    def headings(self) -> tuple[str, ...]:
        """Of `table`; of what is simulated only nothing else can be said."""
        return HEADINGS if any(each.is_emulated for each in self.systems) else HEADINGS[:-2]

    def table(self) -> list[tuple[str, ...]]:
        """Cells for people, in the order of `headings`."""
        number = len(self.headings)
        pairs = zip(self.rows, self.systems, strict=True)
        return [_cells(row, compared.outcome)[:number] for row, compared in pairs]

    def shown(self) -> Iterator[str | Table]:
        """For people: figures in a table, layouts and notes below it."""
        table, rows = Table(*(each for each in self.headings if each != "Layout")), self.table()
        for name, _, *cells in rows:
            table.add_row(*map(Text, (name, *cells)))
        yield table
        yield from (f"{name}: {layout}" for name, layout, *_ in rows if layout != "-")
        yield from (f"note: {note}" for note in self.notes)

    def as_json(self) -> list[dict[str, Any]]:
        """Rows as plain values."""
        return [asdict(row) for row in self.rows]

    def save(self, directory: Path) -> list[Path]:
        """Write all files; returns their paths."""
        from zorse_megatron.plots.figures import Picture, draw_bars, draw_panels, html_page

        values, bars, timeline, page = (directory / name for name in FILES)
        write_text(values, json.dumps(self.as_json(), indent=2) + "\n", parents=True)
        pictures = [draw_bars(bars, self._bars(), title=self.title)]
        if panels := self._panels():
            title = "One iteration of an emulated cluster, on one scale"
            pictures.append(draw_panels(timeline, panels, title=title))
        drawn = [Picture(title=each.stem, png=each.read_bytes()) for each in pictures]
        write_text(page, html_page(self.title, [*self.shown(), *drawn]))
        return [values, *pictures, page]

    def _bars(self) -> "list[Bar]":
        from zorse_megatron.plots.figures import Bar

        return [
            Bar(
                label=row.system,
                tokens_per_s=row.tokens_per_s,
                note=compared.outcome,
                is_ours=row.system == OURS,
            )
            for row, compared in zip(self.rows, self.systems, strict=True)
        ]

    def _panels(self) -> "list[Panel]":
        """Stock's best layout if it ran, and ours below it."""
        by_name = {each.name: each for each in self.systems}
        shown = [by_name[name] for name in (STOCK, OURS) if name in by_name]
        return [
            _panel(f"{each.name}: {each.layout}", each.run, self.kinds)
            for each in shown
            if each.run and not each.outcome
        ]


def _panel(title: str, run: EmulatedRun, kinds: Sequence[str]) -> "Panel":
    from zorse_megatron.plots.figures import Panel

    return Panel(
        title=title,
        rows=[f"{kinds[gpu]}, GPU {gpu}" for gpu in run.system.gpus],
        spans=run.spans,
        start_s=sum(run.iterations_s[:-1]),
    )


def _cells(row: ComparisonRow, outcome: str) -> tuple[str, ...]:
    if row.iteration_s is None:
        return (row.system, row.layout, outcome, *["-"] * (len(HEADINGS) - 3))
    simulated = _said(row.predicted_iteration_s, "{:.4g} s")
    if row.prediction_error is not None:
        simulated += f" ({100 * row.prediction_error:+.1f} %)"
    return (
        row.system,
        row.layout,
        f"{row.iteration_s:.4g} s",
        _said(row.tokens_per_s, "{:,.0f}"),
        _said(row.speedup_vs_stock, "{:.2f} x"),
        _said(row.efficiency_of_aggregate, "{:.2f}"),
        _said(row.peak_memory_fraction, "{:.0%}").replace("%", " %"),
        simulated,
        _said(row.final_loss, "{:.5f}"),
    )


def _said(value: float | None, form: str) -> str:
    return "-" if value is None else form.format(value)
