"""Time and load of sums and gathers in two levels: rings within regions, messages between them.

As `runtime.hierarchical_collectives` makes them, buffer by buffer: of a reduction, the regions sum
what others own (f seconds), and then what they own themselves (o), while the messages of the first
are on their way (x); a gather is the same backwards. Regions' rings and messages are on two
streams, so with n equal buffers the whole takes

    max(n (f + o), f + n x):

one of the two is always busy, but for what comes before it, or behind it. (Where it is the regions,
the last messages may end a little later; that is left out.)
"""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
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
    flowing_s: float
    """Messages between regions."""
    latency_s: float
    """What they then take to arrive."""

    @property
    def between_s(self) -> float:
        """Messages, until they have arrived."""
        return self.flowing_s + self.latency_s

    def several_s(self, count: int) -> float:
        """Of so many buffers, one after the other.

        >>> LevelTimes(foreign_s=1.0, own_s=1.0, flowing_s=3.0, latency_s=1.0).several_s(10)
        41.0
        """
        in_regions_s = count * (self.foreign_s + self.own_s)
        return max(in_regions_s, self.foreign_s + count * self.between_s)


@dataclass(frozen=True, kw_only=True)
class StageWorks:
    """What the stages of a reduction or a gather take on idle links."""

    alone: TaskWork
    """In the regions, before there are messages to send, or after the last have arrived."""
    inside: TaskWork
    """The rest in the regions, beside the messages."""
    between: TaskWork
    """The messages."""


@dataclass(frozen=True, kw_only=True)
class Hierarchical:
    """Reductions, or gathers, over `ranks`, in whose order buffers have their shards."""

    ranks: Sequence[int]
    to_bytes: Callable[[int], int]
    """Elements -> bytes."""
    loads: NetworkLoads
    reduces: bool

    def stages(self, buffers: Sequence[RegionShards]) -> StageWorks:
        """Of buffers one after the other, on their streams."""
        times = {field.name: 0.0 for field in fields(LevelTimes)}
        inside: dict[int, float] = {}
        between: dict[int, float] = {}
        for buffer, count in Counter(buffers).items():
            of_one, *loads = self.of_buffer(buffer)
            for name, seconds_s in vars(of_one).items():
                times[name] += count * seconds_s
            for total, load in zip((inside, between), loads, strict=True):
                for link, num_bytes in load.items():
                    total[link] = total.get(link, 0.0) + count * num_bytes
        alone_s = times["foreign_s"] / len(buffers)
        in_regions_s = times["foreign_s"] + times["own_s"]
        part = alone_s / in_regions_s if in_regions_s else 0.0
        loaded = self.loads.loaded
        return StageWorks(
            alone=loaded(_times(inside, part), alone_s),
            inside=loaded(_times(inside, 1.0 - part), in_regions_s - alone_s),
            between=loaded(between, times["flowing_s"], times["latency_s"]),
        )

    def of_buffer(
        self, buffer: RegionShards
    ) -> tuple[LevelTimes, dict[int, float], dict[int, float]]:
        """Times of one buffer, and how many bytes cross each link: in regions, in messages."""
        messages = {
            (self.ranks[source], self.ranks[target]): self.to_bytes(count)
            for (source, target), count in buffer.messages(to_owners=self.reduces).items()
        }
        flowing_s, latency_s, between = self.loads.at_once(messages)
        inside: dict[int, float] = {}
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
                inside[link] = inside.get(link, 0.0) + around
        times = LevelTimes(
            foreign_s=foreign_s, own_s=own_s, flowing_s=flowing_s, latency_s=latency_s
        )
        return times, inside, between

    def _ring_s(self, members: tuple[int, ...], shards: Sequence[Interval]) -> float:
        """Around a region's ranks."""
        if len(members) == 1:
            return 0.0
        sizes = tuple(self.to_bytes(stop - start) for start, stop in shards)
        comm = self.loads.comm
        return (comm.reduce_scatter_s if self.reduces else comm.all_gather_s)(members, sizes)


def _times(load: Mapping[int, float], factor: float) -> dict[int, float]:
    return {link: factor * num_bytes for link, num_bytes in load.items()}
