"""What `zorse plan` says of GPUs that it leaves out, and of what other selections cost."""

from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.table import Table
from rich.text import Text

from zorse_megatron.cli.console import print_plain, print_table
from zorse_megatron.cli.gpu_selection import Selected, gpus_of
from zorse_megatron.schema.text.figures import duration, figure

if TYPE_CHECKING:
    from zorse_megatron.planner.selection.points import Point

_MAX_ROWS = 12
_MAX_NODES = 3


def print_selection(selected: Selected) -> None:
    """Print which GPUs are left out, and the best other selections."""
    print_plain(_sentence(selected))
    rows = shown(selected)
    priced = rows[0].price_per_hour is not None
    prices = ("Price per hour", "Per 10^9 tokens") if priced else ()
    table = Table("GPUs", "Iteration", "Tokens/s", *prices, "")
    for point in rows:
        cells = [
            gpus_of(selected.whole, point.ranks),
            duration(point.iteration_s),
            figure(point.tokens_per_s),
        ]
        if priced:
            assert point.price_per_hour is not None and point.price_per_gtoken is not None
            cells += [figure(point.price_per_hour), figure(point.price_per_gtoken)]
        cells.append("chosen" if point.ranks == selected.point.ranks else "")
        table.add_row(*map(Text, cells))
    print_table(table)
    if len(selected.points) > 1:
        print_plain(
            f"{len(selected.points)} selections searched, most of them quickly: their figures may "
            "be up to a tenth too slow"
        )


def shown(selected: Selected) -> list["Point"]:
    """The selections that nothing beats, and that of all GPUs; without prices the fastest few."""
    from zorse_megatron.planner.selection.points import frontier

    fitting = [point for point in selected.points if point.fits]
    if selected.point.price_per_hour is None:
        return fitting[:_MAX_ROWS]
    rows = {*frontier(fitting)[:_MAX_ROWS], selected.point}
    rows |= {point for point in fitting if len(point.ranks) == selected.whole.world_size}
    return sorted(rows, key=lambda point: point.iteration_s)


def selection_as_json(selected: Selected) -> dict[str, Any]:
    """The same as JSON values."""
    return {
        "used_ranks": list(selected.point.ranks),
        "left_out_ranks": list(selected.left_out),
        "selections": [
            {
                "ranks": list(point.ranks),
                "iteration_s": point.iteration_s,
                "tokens_per_s": point.tokens_per_s,
                "price_per_hour": point.price_per_hour,
                "price_per_gtoken": point.price_per_gtoken,
            }
            for point in selected.points
            if point.fits
        ],
    }


def draw_selections(selected: Selected, path: Path) -> Path:
    """Draw the selections that fit and return the path."""
    from zorse_megatron.planner.selection.points import frontier
    from zorse_megatron.plots.frontier import Dot, draw_frontier

    fitting = [point for point in selected.points if point.fits]
    best = set(frontier(fitting))
    dots = [
        Dot(
            label=gpus_of(selected.whole, point.ranks),
            tokens_per_s=point.tokens_per_s,
            price_per_gtoken=point.price_per_gtoken,
            num_gpus=len(point.ranks),
            is_best=point in best,
            is_chosen=point.ranks == selected.point.ranks,
        )
        for point in fitting
    ]
    name = selected.whole.name or "the cluster"
    return draw_frontier(path, dots, title=f"Selections of the GPUs of {name}, simulated")


def spares(selected: Selected) -> str:
    """Say which GPUs are left out, of a few nodes."""
    whole = selected.whole
    parts = [
        f"{gpus_of(whole, tuple(ranks))} of node {node}"
        for node, ranks in groupby(
            selected.left_out, key=lambda rank: whole.node_of_rank(rank).name
        )
    ]
    more = f" and of {len(parts) - _MAX_NODES} more nodes" if len(parts) > _MAX_NODES else ""
    return f"left out as spares: {', '.join(parts[:_MAX_NODES])}{more}"


def _sentence(selected: Selected) -> str:
    """Which GPUs are spares, and what all of them would bring."""
    if not selected.left_out:
        return "uses all GPUs of the cluster"
    whole = next(
        point for point in selected.points if len(point.ranks) == selected.whole.world_size
    )
    all_take = duration(whole.iteration_s) if whole.fits else "more memory than there is"
    return f"{spares(selected)} (with all GPUs: {all_take})"
