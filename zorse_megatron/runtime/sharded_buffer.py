"""A flat buffer that is unsharded on demand; otherwise a rank keeps its own shard.

Tensors that are views of the buffer (parameters, their gradients) stay what they are: only the
memory behind them comes and goes, as in torch's first FSDP and in Megatron's
`_ParamAndGradBuffer.offload_to_cpu`. They must not be used while the memory is gone.
"""

from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate

import torch

from zorse_megatron.runtime.host_link import HostBacked, HostLink
from zorse_megatron.schedule.shards import Interval


class ShardedBuffer:
    """`full`, a 1-D tensor with a storage of its own, and the elements of it that this rank owns.

    The owned elements live in `full` until `keep_shard` is called, from then on in `shard`, in the
    order in which they are in `full`, and after `restore` in `full` again: never in both.
    """

    def __init__(
        self,
        full: torch.Tensor,
        owned: Sequence[Interval],
        link: HostLink | None = None,
        category: str = "parameters",
    ) -> None:
        """`owned`: disjoint intervals of `full`, ascending; empty ones count as none.

        `link`: for shards that may wait in the host, where they count as `category`. Raises
        ValueError if the intervals are not that or others share the memory of `full`.
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
        self.link = link
        self.category = category
        self.owned = tuple((start, stop) for start, stop in owned if start < stop)
        self.shard: torch.Tensor | None = None
        """There once it has been kept; its memory may be gone."""
        self.in_shard = False
        """Whether the owned elements are in `shard` (or with it in the host)."""
        self.memory: HostBacked | None = None
        self.changed = False
        """Whether the shard is not what the host has."""
        self._starts = [start for start, _ in self.owned]
        sizes = [stop - start for start, stop in self.owned]
        self._offsets = [0, *accumulate(sizes)]

    @property
    def num_owned(self) -> int:
        """Elements that this rank owns."""
        return self._offsets[-1]

    @property
    def is_unsharded(self) -> bool:
        """Whether the memory of `full` is there."""
        return self.full.numel() == 0 or self.full.untyped_storage().nbytes() > 0

    @property
    def held_bytes(self) -> int:
        """What the buffer and the shard take of the device now."""
        shard_bytes = 0 if self.shard is None else self.shard.untyped_storage().nbytes()
        return self.full.untyped_storage().nbytes() + shard_bytes

    # The full buffer.

    def allocate(self) -> None:
        """Bring the memory of `full` back; what is in it is undefined."""
        if not self.is_unsharded:
            self.full.untyped_storage().resize_(self.full.numel() * self.full.element_size())

    def free(self) -> None:
        """Let the memory of `full` go."""
        self.full.untyped_storage().resize_(0)

    # From one to the other.

    @torch.no_grad()
    def keep_shard(self) -> None:
        """Take the owned elements from `full` into `shard`."""
        if self.shard is None or self.memory is None:
            self.shard = self.full.new_empty(self.num_owned)
            self.memory = HostBacked(self.shard, self.link, self.category)
            self.changed = True
        elif self.memory.is_away:
            self.memory.allocate()
        for ours, theirs in self._pairs():
            ours.copy_(theirs)
        self.in_shard = True

    @torch.no_grad()
    def restore(self) -> None:
        """Take the owned elements back to their places in `full`, whose memory comes back."""
        assert self.memory is not None, "keep_shard comes first"
        self.memory.wait_until_back()
        self.allocate()
        for ours, theirs in self._pairs():
            theirs.copy_(ours)
        self.memory.drop()
        self.in_shard = False

    def drop_shard(self) -> None:
        """Forget the shard and what is in it; memory in the host is kept for the next one."""
        if self.memory is not None and self.memory.is_in_host:
            self.memory.drop()
        else:
            self.shard, self.memory = None, None
        self.in_shard = False

    # The host.

    def fetch(self) -> None:
        """Start to bring the shard back from the host."""
        if self.memory is not None and self.in_shard:
            self.memory.start_back()

    def bring(self) -> None:
        """Have the shard back from the host."""
        if self.memory is not None and self.in_shard:
            self.memory.wait_until_back()

    def offload(self) -> None:
        """Let the shard wait in the host; it is copied if the host does not have it yet."""
        assert self.memory is not None and self.in_shard, "there is no shard to offload"
        if self.changed or not self.memory.is_in_host:
            self.memory.send()
            self.memory.let_go()
            self.changed = False
        else:
            self.memory.wait_until_back()
            self.memory.drop()

    def piece(self, start: int, stop: int) -> torch.Tensor:
        """Return a view of elements [start, stop) of `full`, which this rank must own.

        It shows them where they are now, in the shard or in `full`. Raises IndexError for elements
        that this rank does not own in one piece.
        """
        home, first, last = self._place_of(start, stop)
        return home[first:last]

    def read(self, start: int, stop: int) -> torch.Tensor:
        """Elements as in `piece`; as a CPU tensor of the host's bytes if they wait there."""
        if self.memory is None or not self._is_waiting:
            return self.piece(start, stop)
        _, first, last = self._place_of(start, stop)
        return self.memory.read_in_host(self.full.dtype, first, last)

    @torch.no_grad()
    def write(self, start: int, stop: int, values: torch.Tensor) -> None:
        """Set elements as in `piece` to values of any device and type, wherever they are now."""
        if self.memory is None or not self._is_waiting:
            self.piece(start, stop).copy_(values.reshape(-1))
            self.changed = True
            return
        _, first, last = self._place_of(start, stop)
        self.memory.in_host(self.full.dtype, first, last).copy_(values.reshape(-1))

    @property
    def _is_waiting(self) -> bool:
        return self.in_shard and self.memory is not None and self.memory.is_away

    def _place_of(self, start: int, stop: int) -> tuple[torch.Tensor, int, int]:
        """What holds elements [start, stop) now, and from where to where in it."""
        home = self.shard if self.in_shard and self.shard is not None else None
        if start == stop:
            return (self.full if home is None else home), 0, 0
        number = bisect_right(self._starts, start) - 1
        if number < 0 or stop > self.owned[number][1]:
            raise IndexError(
                f"found elements [{start}, {stop}); expected some within one of {self.owned}"
            )
        if home is None:
            return self.full, start, stop
        shift = self._offsets[number] - self.owned[number][0]
        return home, start + shift, stop + shift

    def _pairs(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Each owned interval's place in the shard and in `full`."""
        assert self.shard is not None
        if not self.owned:
            return []
        ours = self.shard.split([stop - start for start, stop in self.owned])
        return [(part, self.full[a:b]) for part, (a, b) in zip(ours, self.owned, strict=True)]
