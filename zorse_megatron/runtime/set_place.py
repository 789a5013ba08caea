"""Where a rank is in its tensor-parallel set, and what of an activation it has."""

from dataclasses import dataclass

import torch.distributed as dist

from zorse_megatron.schedules.sequence_slices import SequenceSlice, slice_of_rank
from zorse_megatron.schedules.set_parts import SetParts


@dataclass(frozen=True, kw_only=True)
class SetPlace:
    """One rank of a set; a rank that is a set of its own has none."""

    index: int
    degree: int
    group: dist.ProcessGroup
    """The set's ranks, in order."""
    is_split: bool
    """Whether activations between layers are split over the set (sequence parallelism)."""
    parts: SetParts
    """What its ranks hold of each layer."""

    @property
    def positions(self) -> SequenceSlice:
        """Positions that this rank sends and receives."""
        return slice_of_rank(self.index, self.degree)

    def held(self, length: int) -> tuple[int, int]:
        """Positions of an activation that this rank has: all, or its part."""
        return self.positions.bounds(length) if self.is_split else (0, length)
