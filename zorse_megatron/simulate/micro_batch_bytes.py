"""What a rank has of one micro-batch of each of its chunks, asked for once."""

from dataclasses import dataclass

from zorse_megatron.simulate.rank_sizes import RankSizes


@dataclass(kw_only=True, slots=True)
class MicroBatchBytes:
    """Of one chunk; see the functions of `RankSizes`."""

    held: int
    """An activation between chunks."""
    kept: int
    """0 in an evaluation."""
    head: int
    working: int
    delayed: int
    """From a backward to the weight gradients, where these are computed apart."""


class MicroBatchSizes:
    """Of all chunks of a rank."""

    def __init__(self, sizes: RankSizes, rank: int, *, forward_only: bool) -> None:
        self.sizes = sizes
        self.rank = rank
        self.forward_only = forward_only
        self._found: dict[int, MicroBatchBytes] = {}

    def of(self, chunk: int) -> MicroBatchBytes:
        """Those of a chunk."""
        found = self._found.get(chunk)
        if found is None:
            sizes, rank, forward_only = self.sizes, self.rank, self.forward_only
            delayed = 0 if forward_only else sizes.delayed_bytes(rank, chunk)
            found = self._found[chunk] = MicroBatchBytes(
                held=sizes.held_bytes(rank, chunk),
                kept=0 if forward_only else sizes.kept_bytes(rank, chunk),
                head=sizes.head_bytes(rank, chunk),
                working=sizes.working_beside_delayed_bytes(rank, chunk)
                if delayed
                else sizes.working_bytes(rank, chunk, forward_only=forward_only),
                delayed=delayed,
            )
        return found
