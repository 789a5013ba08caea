"""A flat buffer that is whole only while it is needed; in between, a rank keeps its own part.

Tensors that are views of the buffer (parameters, their gradients) stay what they are: only the
memory behind them comes and goes, as in torch's first FSDP and in Megatron's
`_ParamAndGradBuffer.offload_to_cpu`. They must not be used while the memory is gone.
"""

from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate

import torch

from zorse_megatron.schedules.shards import Interval


class ShardedBuffer:
    """`full`, a 1-D tensor with a storage of its own, and the elements of it that this rank owns.

    The owned elements live in `full` until `keep_shard` is called for the first time, and from
    then on in `shard`, in the order in which they are in `full`.
    """

    def __init__(self, full: torch.Tensor, owned: Sequence[Interval]) -> None:
        """`owned`: disjoint intervals of `full`, ascending; empty ones count as none.

        Raises ValueError if the intervals are not that or others share the memory of `full`.
        """
        ends = [0, *(end for interval in owned for end in interval), full.numel()]
        if ends != sorted(ends):
            raise ValueError(
                f"found owned intervals {tuple(owned)} of {full.numel()} elements; expected "
                "ascending ones within them"
            )
        if full.ndim != 1 or full.untyped_storage().nbytes() != full.nbytes:
            raise ValueError(
                f"found a buffer of shape {tuple(full.shape)} in a storage of "
                f"{full.untyped_storage().nbytes()} bytes; expected a 1-D one that fills its "
                "storage"
            )
        self.full = full
        self.owned = tuple((start, stop) for start, stop in owned if start < stop)
        self.shard: torch.Tensor | None = None
        self._starts = [start for start, _ in self.owned]
        sizes = [stop - start for start, stop in self.owned]
        self._offsets = [0, *accumulate(sizes)]

    @property
    def num_owned(self) -> int:
        """Elements that this rank owns."""
        return self._offsets[-1]

    @property
    def is_whole(self) -> bool:
        """Whether the memory of `full` is there."""
        return self.full.numel() == 0 or self.full.untyped_storage().nbytes() > 0

    @property
    def held_bytes(self) -> int:
        """What the buffer and the shard take now."""
        shard_bytes = 0 if self.shard is None else self.shard.nbytes
        return self.full.untyped_storage().nbytes() + shard_bytes

    @torch.no_grad()
    def allocate(self) -> None:
        """Bring the memory of `full` back; what is in it is undefined."""
        if not self.is_whole:
            self.full.untyped_storage().resize_(self.full.numel() * self.full.element_size())

    def free(self) -> None:
        """Let the memory of `full` go."""
        self.full.untyped_storage().resize_(0)

    @torch.no_grad()
    def keep_shard(self) -> None:
        """Copy the owned elements from `full` to `shard`."""
        if self.shard is None:
            self.shard = self.full.new_empty(self.num_owned)
        for ours, whole in self._pairs():
            ours.copy_(whole)

    @torch.no_grad()
    def restore(self) -> None:
        """Bring the memory of `full` back with the owned elements in their places."""
        self.allocate()
        for ours, whole in self._pairs():
            whole.copy_(ours)

    def drop_shard(self) -> None:
        """Forget the shard: the owned elements live in `full` again, once that is there."""
        self.shard = None

    def piece(self, start: int, stop: int) -> torch.Tensor:
        """Return a view of elements [start, stop) of `full`, which this rank must own.

        It shows the shard if there is one, else `full`. Raises IndexError for elements that this
        rank does not own in one piece.
        """
        if start == stop:
            return (self.full if self.shard is None else self.shard)[:0]
        number = bisect_right(self._starts, start) - 1
        if number < 0 or stop > self.owned[number][1]:
            raise IndexError(
                f"found elements [{start}, {stop}); expected some within one of {self.owned}"
            )
        if self.shard is None:
            return self.full[start:stop]
        shift = self._offsets[number] - self.owned[number][0]
        return self.shard[start + shift : stop + shift]

    def _pairs(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Each owned interval's place in the shard and in the whole."""
        assert self.shard is not None, "keep_shard comes first"
        ours = self.shard.split([stop - start for start, stop in self.owned]) if self.owned else ()
        return [(part, self.full[a:b]) for part, (a, b) in zip(ours, self.owned, strict=True)]
