"""Time and load of sums and gathers in two levels: rings within regions, messages between them.

As `runtime.hierarchical_collectives` makes them, buffer by buffer: of a reduction, each region sums
what others own, and then what it owns itself, while the messages of the first are on their way; a
gather is the same backwards. Regions' rings and messages are on two streams.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from zorse_megatron.schedules.region_shards import RegionShards
from zorse_megatron.simulate.network_loads import NetworkLoads, TaskWork


@dataclass(frozen=True, kw_only=True)
class BufferWork:
    """The stages of one buffer."""

    foreign: tuple[TaskWork, ...]
    """Region -> in it, of what others own."""
    own: tuple[TaskWork, ...]
    """Region -> in it, of what it owns itself."""
    between: TaskWork
    """Messages between the regions."""


@dataclass(frozen=True, kw_only=True)
class LevelTimes:
    """The stages of one buffer on idle links, in the slowest of the regions."""

    foreign_s: float
    own_s: float
    between_s: float

    def several_s(self, count: int) -> float:
        """Of so many buffers, one after the other: one of the two streams is always busy.

        But for what comes before it, or behind it. Where the regions are slower, the last messages
        may end a little later; that is left out, and so are links that both streams use.

        >>> LevelTimes(foreign_s=1.0, own_s=1.0, between_s=4.0).several_s(10)
        41.0
        """
        in_regions_s = count * (self.foreign_s + self.own_s)
        return max(in_regions_s, self.foreign_s + count * self.between_s)


@dataclass(frozen=True, kw_only=True)
class Hierarchical:
    """Reductions, or gathers, over `ranks`, in whose order buffers have their shards."""

    ranks: Sequence[int]
    to_bytes: Callable[[int], int]
    """Elements -> bytes."""
    loads: NetworkLoads
    reduces: bool

    def work(self, buffer: RegionShards) -> BufferWork:
        """Of one buffer."""
        regions = range(len(buffer.regions))
        messages = {
            (self.ranks[source], self.ranks[target]): self.to_bytes(count)
            for (source, target), count in buffer.messages(to_owners=self.reduces).items()
        }
        return BufferWork(
            foreign=tuple(
                self._in_region(buffer, region, [each for each in regions if each != region])
                for region in regions
            ),
            own=tuple(self._in_region(buffer, region, [region]) for region in regions),
            between=self.loads.exchanges([(messages, 1)]),
        )

    def times(self, buffer: RegionShards) -> LevelTimes:
        """Of one buffer, on idle links."""
        work = self.work(buffer)
        return LevelTimes(
            foreign_s=max(each.alone_s for each in work.foreign),
            own_s=max(each.alone_s for each in work.own),
            between_s=work.between.alone_s,
        )

    def _in_region(self, buffer: RegionShards, region: int, blocks: Sequence[int]) -> TaskWork:
        """Rings over a region's ranks, of what the ranks of other regions or its own own."""
        members = tuple(self.ranks[slice(*buffer.regions[region])])
        if len(members) == 1:
            return TaskWork(seconds_s=0.0)
        comm = self.loads.comm
        ring_s = comm.reduce_scatter_s if self.reduces else comm.all_gather_s
        total, alone_s = 0, 0.0
        for block in blocks:
            slices = buffer.slices(region, block)
            sizes = tuple(self.to_bytes(stop - start) for start, stop in slices)
            total += sum(sizes)
            alone_s += ring_s(members, sizes)
        return self.loads.collective(members, total, alone_s)
