"""A simulated iteration as a chart: what each rank did, and when."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.patches import Patch, PathPatch
from matplotlib.path import Path as Outline

from zorse_megatron.plan.plan import Plan
from zorse_megatron.plan.spans import spell
from zorse_megatron.plots.figures import MAX_ROWS, TEXT, name_rows, new_chart, rows_of, save_figure
from zorse_megatron.schedule.actions import COMPUTE, TRANSFERS, Kind, parse_action
from zorse_megatron.simulate.result import SimulationResult
from zorse_megatron.trace import Span

_MS = 1e3
_BAR_HEIGHT = 0.72
_EDGE = "#BBBBBB"
# A micro-batch's number is written into bars at least this wide, as a part of the whole chart.
_WIDE_ENOUGH_FOR_NUMBER = 0.012


@dataclass(frozen=True, kw_only=True)
class _BarStyle:
    """How one class of actions is drawn."""

    label: str
    colour: str
    hatch: str | None = None


_FORWARD = _BarStyle(label="forward", colour="#56B4E9")
_BACKWARD = _BarStyle(label="backward", colour="#E69F00")
_WEIGHT_GRADIENT = _BarStyle(label="weight gradients", colour="#F0E442")
_WAIT = _BarStyle(label="wait for another rank", colour="#E8E8E8", hatch="////")
_TRANSFER = _BarStyle(label="start a send or receive", colour="#009E73")
_REDUCE = _BarStyle(label="sum gradients*", colour="#CC79A7")
_STEP = _BarStyle(label="optimizer step*", colour="#8C2D04")
_GATHER = _BarStyle(label="gather parameters*", colour="#B3A100")
_OTHER = _BarStyle(label="move state", colour="#7F7F7F")

_LOOKS = {
    Kind.FORWARD: _FORWARD,
    Kind.BACKWARD: _BACKWARD,
    Kind.WEIGHT_GRADIENT: _WEIGHT_GRADIENT,
    **dict.fromkeys(TRANSFERS, _TRANSFER),
    **dict.fromkeys((Kind.REDUCE_GRAD, Kind.TIE, Kind.SCALE, Kind.NORM), _REDUCE),
    Kind.STEP: _STEP,
    Kind.UNSHARD: _GATHER,
    **dict.fromkeys((Kind.RESHARD, Kind.OFFLOAD, Kind.FETCH, Kind.OFFLOAD_GRAD), _OTHER),
}


def draw_timeline(
    path: Path, *, plan: Plan, result: SimulationResult, title: str, max_rows: int = MAX_ROWS
) -> Path:
    """Draw what each rank did, and when. Time 0 is the start of the earliest span.

    Of ranks of one group that did the same amount of work and waiting, and were simulated, one is
    drawn where there are more than `max_rows`.
    """
    simulated = set(result.simulated_ranks)
    shown = rows_of(
        plan,
        # Times that differ by rounding only look the same.
        look=lambda rank: (rank in simulated, f"{result.usage[rank].busy_s:.6g}"),
        weight=lambda rank: result.usage[rank].busy_s if rank in simulated else -1.0,
        most=max_rows,
    )
    rows = [row.rank for row in shown if row.rank in simulated]
    if len(rows) < plan.world_size:
        title += f" ({len(rows)} of {plan.world_size} ranks)"
    figure, axes = new_chart(title, width_inches=12, height_inches=1.9 + 0.62 * len(rows))
    bars = _Bars(axes, [result.spans(rank) for rank in rows])
    _draw_groups(axes, plan, rows)
    axes.set_xlim(0, bars.whole_ms)
    what = "time since the start of the iteration (ms). Numbers: micro-batches. *: with waiting"
    name_rows(axes, [_rank_label(plan, rank) for rank in rows], what)
    figure.legend(
        handles=bars.legend(), loc="outside lower center", ncols=4, frameon=False, fontsize=9
    )
    return save_figure(figure, path)


class _Bars:
    """Collects spans as bars, and draws those of one row and look at once.

    Each call of `broken_barh` makes an artist, and matplotlib lays out and draws each by itself:
    one for each bar takes minutes where there are thousands.
    """

    def __init__(self, axes: Axes, spans: Sequence[Sequence[Span]]) -> None:
        self.axes = axes
        self.bars: dict[tuple[int, _BarStyle], list[tuple[float, float]]] = {}
        self.origin_s = min(span.start_s for of_rank in spans for span in of_rank)
        end_s = max(span.end_s for of_rank in spans for span in of_rank)
        self.whole_ms = (end_s - self.origin_s) * _MS
        for row, of_rank in enumerate(spans):
            for span in of_rank:
                self._add_span(row, span)
        self._draw()

    def _add_span(self, row: int, span: Span) -> None:
        """Add the wait of a span and then its work."""
        action = parse_action(span.action)
        start_ms = (span.start_s - self.origin_s) * _MS
        waited_ms = span.waited_s * _MS
        work_ms = (span.end_s - span.start_s) * _MS - waited_ms
        if waited_ms > 0:
            self._add(row, _WAIT, start_ms, waited_ms)
        self._add(row, _LOOKS[action.kind], start_ms + waited_ms, work_ms)
        is_wide = work_ms > self.whole_ms * _WIDE_ENOUGH_FOR_NUMBER
        if action.kind in COMPUTE and is_wide:
            middle_ms = start_ms + waited_ms + work_ms / 2
            number = str(action.micro_batch)
            self.axes.text(middle_ms, row, number, ha="center", va="center", fontsize=7, color=TEXT)

    def _draw(self) -> None:
        for (row, look), bars in self.bars.items():
            outline = Outline.make_compound_path(*(_rectangle(row, *bar) for bar in bars))
            self.axes.add_patch(
                PathPatch(
                    outline,
                    facecolor=look.colour,
                    hatch=look.hatch,
                    edgecolor=_EDGE if look.hatch else "white",
                    # An edge would hide the narrow bars of transfers.
                    linewidth=0 if look is _TRANSFER else 0.3,
                )
            )

    def legend(self) -> list[Patch]:
        """One entry for each look in use."""
        used = {look for _, look in self.bars}
        looks = [look for look in dict.fromkeys([*_LOOKS.values(), _WAIT]) if look in used]
        return [
            Patch(facecolor=look.colour, hatch=look.hatch, edgecolor=_EDGE, label=look.label)
            for look in looks
        ]

    def _add(self, row: int, look: _BarStyle, start_ms: float, width_ms: float) -> None:
        self.bars.setdefault((row, look), []).append((start_ms, width_ms))


def _rectangle(row: int, start_ms: float, width_ms: float) -> Outline:
    low, high = row - _BAR_HEIGHT / 2, row + _BAR_HEIGHT / 2
    end_ms = start_ms + width_ms
    corners = [(start_ms, low), (start_ms, high), (end_ms, high), (end_ms, low), (start_ms, low)]
    return Outline(corners, closed=True)


def _draw_groups(axes: Axes, plan: Plan, rows: Sequence[int]) -> None:
    """Name each group on the right; a line between groups."""
    first = 0
    shown = set(rows)
    for number in plan.groups_in_order:
        count = len(shown.intersection(plan.groups[number].ranks))
        if not count:
            continue
        middle = first + (count - 1) / 2
        layers = _layers([plan.chunks[c].layers for c in plan.chunks_of_group(number)])
        axes.text(
            1.01,
            middle,
            f"{plan.group_name(number)}\n{layers}",
            transform=axes.get_yaxis_transform(),
            va="center",
            fontsize=10,
            color=TEXT,
        )
        first += count
        if first < len(rows):
            axes.axhline(first - 0.5, color=TEXT, linewidth=0.8)


def _layers(held: Sequence[tuple[int, int]]) -> str:
    count = sum(stop - first for first, stop in held)
    return f"layer{'s'[: count > 1]} {spell(held)}"


def _rank_label(plan: Plan, rank: int) -> str:
    group, replica = plan.replica_of_rank(rank)
    work = plan.groups[group].replicas[replica]
    kinds = plan.cluster.gpu_kinds if plan.cluster else None
    name = f"rank {rank}" if kinds is None else f"rank {rank}: {kinds[rank]}"
    return f"{name}\n{work.num_microbatches} x {work.micro_batch_size} samples"
