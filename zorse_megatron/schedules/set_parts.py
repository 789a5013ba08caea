"""How many units of each layer the ranks of a tensor-parallel set hold.

Units are what cannot be cut: KV groups of attention, columns of the MLP, rows of the vocabulary. A
plan gives a number for each rank, or nothing, where all hold as much.
"""

from dataclasses import dataclass, field
from itertools import accumulate
from typing import Literal

from zorse_megatron.schedules.shards import Interval
from zorse_megatron.schema.plan.plan import Group, Parts, Replica

UnitKind = Literal["kv_groups", "mlp_columns", "vocabulary_rows"]


@dataclass(frozen=True, kw_only=True)
class SetParts:
    """The parts of one set of `degree` ranks."""

    degree: int
    parts: Parts = field(default_factory=Parts)

    @classmethod
    def of(cls, replica: Replica) -> "SetParts":
        """Those of a plan's replica; equal ones that it names are as if it named none."""
        return cls(degree=len(replica.ranks), parts=replica.unequal_parts or Parts())

    @property
    def are_equal(self) -> bool:
        """Whether all ranks hold as much of everything."""
        return self.parts.unequal() is None

    def units(self, kind: UnitKind) -> tuple[int, ...] | None:
        """How many of them each rank holds; None: equally many, which only the model knows."""
        units: tuple[int, ...] | None = getattr(self.parts, kind)
        return units

    def proportions(self, kind: UnitKind) -> tuple[int, ...]:
        """How much each rank holds beside the others, in any unit."""
        return self.units(kind) or (1,) * self.degree

    def has_any(self, kind: UnitKind, index: int) -> bool:
        """Whether rank `index` holds any of them."""
        return self.proportions(kind)[index] > 0

    def interval(self, kind: UnitKind, index: int, length: int) -> Interval:
        """What rank `index` holds of an axis of `length` elements.

        >>> SetParts(degree=2, parts=Parts(kv_groups=(3, 1))).interval("kv_groups", 1, 80)
        (60, 80)
        """
        ends = (0, *accumulate(self.proportions(kind)))
        total = ends[-1]
        return length * ends[index] // total, length * ends[index + 1] // total

    def whole_length(self, kind: UnitKind, index: int, length: int) -> int:
        """Elements of an axis of which rank `index` holds `length`, which are not none."""
        proportions = self.proportions(kind)
        return length * sum(proportions) // proportions[index]


def has_uneven_parts(group: Group) -> bool:
    """Whether ranks of a set of the group hold other parts than each other."""
    return any(not SetParts.of(replica).are_equal for replica in group.replicas)
