"""Time and load of sums and gathers in two levels: rings within regions, messages between them.

As `runtime.hierarchical_collectives` makes them, buffer by buffer: of a reduction, the regions sum
what others own (f seconds), and then what they own themselves (o), while the messages of the first
are on their way (x); a gather is the same backwards. Regions' rings and messages are on two
streams, so with n equal buffers the whole takes

    max(n (f + o), f + n x, n f + (n - 1) o + x):

one of the two is always busy, but for what comes before or behind it.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields

from zorse_megatron.schedules.region_shards import RegionShards
from zorse_megatron.schedules.shards import Interval
from zorse_megatron.simulate.network_loads import NetworkLoads, TaskWork


@dataclass(frozen=True, kw_only=True)
class LevelTimes:
    """Of one buffer, on idle links."""

    foreign_s: float
    """In the regions, of what others own."""
    own_s: float
    """In the regions, of what they own themselves."""
    between_s: float
    """Messages, with their latency."""

    def several_s(self, count: int) -> float:
        """Of so many buffers, one after the other.

        >>> LevelTimes(foreign_s=1.0, own_s=1.0, between_s=4.0).several_s(10)
        41.0
        """
        foreign_s, own_s, between_s = self.foreign_s, self.own_s, self.between_s
        return max(
            count * (foreign_s + own_s),
            foreign_s + count * between_s,
            count * foreign_s + (count - 1) * own_s + between_s,
        )


@dataclass(frozen=True, kw_only=True)
class Hierarchical:
    """Reductions, or gathers, over `ranks`, in whose order buffers have their shards."""

    ranks: Sequence[int]
    to_bytes: Callable[[int], int]
    """Elements -> bytes."""
    loads: NetworkLoads
    reduces: bool

    def work(self, buffers: Sequence[RegionShards]) -> TaskWork:
        """Of buffers one after the other."""
        totals = {field.name: 0.0 for field in fields(LevelTimes)}
        load: dict[int, float] = {}
        for buffer, count in Counter(buffers).items():
            times, crossing = self.of_buffer(buffer)
            for name, seconds_s in vars(times).items():
                totals[name] += count * seconds_s
            for link, num_bytes in crossing.items():
                load[link] = load.get(link, 0.0) + count * num_bytes
        number = len(buffers)
        mean = LevelTimes(**{name: total / number for name, total in totals.items()})
        return self.loads.loaded(load, mean.several_s(number))

    def of_buffer(self, buffer: RegionShards) -> tuple[LevelTimes, dict[int, float]]:
        """Times of one buffer, and how many bytes cross each link."""
        messages = {
            (self.ranks[source], self.ranks[target]): self.to_bytes(count)
            for (source, target), count in buffer.messages(to_owners=self.reduces).items()
        }
        flowing_s, latency_s, load = self.loads.at_once(messages) if messages else (0.0, 0.0, {})
        foreign_s = own_s = 0.0
        for region, (first, stop) in enumerate(buffer.regions):
            members = tuple(self.ranks[first:stop])
            by_block = [
                self._ring_s(members, buffer.slices(region, block))
                for block in range(len(buffer.regions))
            ]
            own_s = max(own_s, by_block[region])
            foreign_s = max(foreign_s, sum(by_block) - by_block[region])
            around = self.to_bytes(buffer.bounds[-1][1]) * (len(members) - 1) / len(members)
            for link in self.loads.ring_links(members) if len(members) > 1 else ():
                load[link] = load.get(link, 0.0) + around
        times = LevelTimes(foreign_s=foreign_s, own_s=own_s, between_s=flowing_s + latency_s)
        return times, load

    def _ring_s(self, members: tuple[int, ...], shards: Sequence[Interval]) -> float:
        """Around a region's ranks."""
        if len(members) == 1:
            return 0.0
        sizes = tuple(self.to_bytes(stop - start) for start, stop in shards)
        comm = self.loads.comm
        return (comm.reduce_scatter_s if self.reduces else comm.all_gather_s)(members, sizes)
