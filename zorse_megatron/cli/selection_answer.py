"""What `zorse plan` says of GPUs that it leaves out."""

from itertools import groupby
from typing import Any

from rich.table import Table
from rich.text import Text

from zorse_megatron.cli.console import print_plain, print_table
from zorse_megatron.cli.gpu_selection import Selected, gpus_of
from zorse_megatron.schema.text.figures import duration, figure

_MAX_ROWS = 12
_MAX_NODES = 3


def print_selection(selected: Selected) -> None:
    """Print which GPUs are left out, and the other selections that were searched."""
    print_plain(_sentence(selected))
    if not selected.left_out:
        return
    table = Table("GPUs", "Iteration", "Tokens/s", "")
    for point in [point for point in selected.points if point.fits][:_MAX_ROWS]:
        table.add_row(
            Text(gpus_of(selected.whole, point.ranks)),
            duration(point.iteration_s),
            figure(point.tokens_per_s),
            "chosen" if point.ranks == selected.point.ranks else "",
        )
    print_table(table)


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
            }
            for point in selected.points
            if point.fits
        ],
    }


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
