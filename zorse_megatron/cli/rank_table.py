"""Each rank's time and memory: a table with equal ranks merged, and JSON."""

from collections import defaultdict
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rich.table import Table
from rich.text import Text

from zorse_megatron.cli.console import gib, part_of
from zorse_megatron.cli.simulated import capacities_bytes
from zorse_megatron.schema.cluster.cluster import Cluster
from zorse_megatron.schema.plan.plan import Plan
from zorse_megatron.schema.plan.spans import spans_of, spell

if TYPE_CHECKING:
    from zorse_megatron.simulate.result import SimulationResult

_PARTS = ("busy", "communication", "wait", "idle")
# A group with more kinds of rows than this shows the busiest and the least busy of its ranks.
_MAX_ROWS_PER_GROUP = 8


@dataclass(frozen=True, kw_only=True)
class _RankRow:
    """Ranks of a group that cannot be told apart in the table."""

    group: int
    ranks: tuple[int, ...]
    kind: str


def rank_table(plan: Plan, result: "SimulationResult", cluster: Cluster) -> Table:
    """One row for the ranks of a group that show the same numbers."""
    headings = ("Group", "Ranks", "GPU", "Busy", "Communication", "Waiting", "Idle", "Peak memory")
    table = Table(*headings)
    capacities = capacities_bytes(cluster)
    groups = dict.fromkeys(chunk.group for chunk in plan.chunks)
    by_group = {number: _rows(plan, number, result, cluster) for number in groups}
    has_long_groups = any(len(rows) > 1 for rows in by_group.values())
    for number, rows in by_group.items():
        head = f"{number} {plan.groups[number].name or ''}".strip()
        for row in rows[:_MAX_ROWS_PER_GROUP]:
            peak, capacity = result.peak_memory_bytes[row.ranks[0]], capacities[row.ranks[0]]
            memory = part_of(peak, capacity)
            cells = [head, spell(spans_of(row.ranks)), row.kind]
            cells += [f"{percent} %" for percent in _percents(result, row.ranks[0])]
            table.add_row(*map(Text, [*cells, memory]))
            head = ""
        if len(rows) > _MAX_ROWS_PER_GROUP:
            table.add_row("", f"and {len(rows) - _MAX_ROWS_PER_GROUP} more rows")
        if has_long_groups:
            table.add_section()
    return table


def ranks_as_json(plan: Plan, result: "SimulationResult", cluster: Cluster) -> list[dict[str, Any]]:
    """Every rank's numbers as plain values."""
    capacities = capacities_bytes(cluster)
    return [
        {
            "rank": rank,
            "group": plan.group_of_rank(rank),
            "gpu_kind": cluster.gpu_kinds[rank],
            **{f"{part}_s": getattr(usage, f"{part}_s") for part in _PARTS},
            "peak_memory_bytes": result.peak_memory_bytes[rank],
            "gpu_memory_bytes": capacities[rank],
            "at_peak_bytes": {
                category.label: num_bytes
                for category, num_bytes in result.memory[rank].at_peak_bytes.items()
            },
        }
        for rank, usage in enumerate(result.usage)
    ]


def _rows(plan: Plan, number: int, result: "SimulationResult", cluster: Cluster) -> list[_RankRow]:
    """Ranks of one group by what they show, busiest first."""
    alike: dict[tuple[Any, ...], list[int]] = defaultdict(list)
    for rank in plan.groups[number].ranks:
        peak = gib(result.peak_memory_bytes[rank])
        alike[cluster.gpu_kinds[rank], *_percents(result, rank), peak].append(rank)
    rows = [_RankRow(group=number, ranks=tuple(ranks), kind=key[0]) for key, ranks in alike.items()]
    return sorted(rows, key=lambda row: -result.usage[row.ranks[0]].busy_s)


def _percents(result: "SimulationResult", rank: int) -> tuple[int, ...]:
    """Whole percents of the iteration for each part of it."""
    whole_s = result.iteration_s or 1.0
    usage = result.usage[rank]
    return tuple(round(100 * getattr(usage, f"{part}_s") / whole_s) for part in _PARTS)
