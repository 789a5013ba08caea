"""Which ranks a figure of a large plan shows: one of several that look the same."""

from collections.abc import Callable, Hashable
from dataclasses import dataclass

from zorse_megatron.schema.plan.plan import Plan
from zorse_megatron.schema.plan.spans import spans_of, spell

MAX_ROWS = 40
"""More rows than this are too many to read."""


@dataclass(frozen=True, kw_only=True)
class ShownRank:
    """One row of a figure: a rank, and the ranks of its group that look like it."""

    rank: int
    alike: tuple[int, ...]
    group: int

    @property
    def label(self) -> str:
        """`rank 3`, or `ranks 0 to 7, 16 (9 alike)`."""
        if len(self.alike) == 1:
            return f"rank {self.rank}"
        spans = spans_of(self.alike)
        more = " …" if len(spans) > 2 else ""
        return f"ranks {spell(spans[:2])}{more} ({len(self.alike)} alike)"


def rows_of(
    plan: Plan,
    look: Callable[[int], Hashable],
    weight: Callable[[int], float],
    *,
    most: int = MAX_ROWS,
) -> tuple[ShownRank, ...]:
    """One row per rank in model order if they fit; else one per group and look.

    `look`: what ranks that may share a row have in common; `weight`: if there are still too many
    rows, each group keeps those of the highest weight.
    """
    groups = list(dict.fromkeys(chunk.group for chunk in plan.chunks))
    rows = {number: _rows_of_group(plan, number, look, plan.world_size > most) for number in groups}
    kept = max(1, most // len(groups))
    shown = []
    for of_group in rows.values():
        heaviest = sorted(of_group, key=lambda row: (-weight(row.rank), row.rank))
        wanted = of_group if sum(map(len, rows.values())) <= most else heaviest[:kept]
        shown += [row for row in of_group if row in wanted]
    return tuple(shown)


def _rows_of_group(
    plan: Plan, number: int, look: Callable[[int], Hashable], merged: bool
) -> list[ShownRank]:
    ranks: dict[Hashable, list[int]] = {}
    for rank in plan.groups[number].ranks:
        ranks.setdefault(look(rank) if merged else rank, []).append(rank)
    return [ShownRank(rank=alike[0], alike=tuple(alike), group=number) for alike in ranks.values()]
