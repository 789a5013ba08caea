"""Bytes on shared links: what transfers and collectives put there, and how flows share a link.

Why fair sharing and not a queue for each link: NCCL and gloo put each pair of ranks on connections
of its own, and the flows of several connections through one NIC or switch port progress together,
at rates that congestion control makes about equal. Max-min fairness is the steady state of that and
the usual flow-level model of it (Bertsekas and Gallager, Data Networks, 6.5.2; validated for TCP by
Velho and Legrand, SIMUTools 2009). A first-in-first-out link would let the first of two transfers
pass as if it were alone.

A flow has a limit, the rate that it reaches alone. Rates are found by progressive filling: all
rates rise together until a flow meets its limit or a link is full; what is stopped by that keeps
its rate and the rest rises on. When flows start or end, only those that are tied to them by a chain
of full links are computed anew, so an uncongested network costs O(links of the flow).

Flows over the same links with the same limit have the same rate at all times. They are a bundle,
whose service is the number of bytes that a member has been given since the bundle began: a member
ends when the service has grown by its size, so a change of rate costs O(1) for all members.
"""

import heapq
import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from zorse_megatron.costs.interface import CommCost
from zorse_megatron.schedule.shards import RegionShards
from zorse_megatron.simulate.assumptions import SimulationError, UnknownLinkError

# Rounding must not make a link look full that its flows fill exactly.
_SLACK = 1 + 1e-9
# Members that end at the same moment must end together, whatever rounding did to their services.
_SLACK_OF_SERVICE = 1 + 1e-12


@dataclass(frozen=True, kw_only=True, slots=True)
class Flow:
    """Bytes that cross links.

    `links`: (number of the link, usage): how much of the link's rate the flow takes at one byte
    per second. The usage is 1, less where the flow alone is faster than the link is said to be
    (so that alone it keeps its limit), and n for a flow that stands for n equal ones.
    """

    num_bytes: float
    limit_bytes_per_s: float
    links: tuple[tuple[int, float], ...]


class _Bundle:
    """Flows under way that have the same links and the same limit."""

    __slots__ = ("ends", "limit", "links", "rate", "service_bytes", "since_s", "version")

    def __init__(self, flow: Flow) -> None:
        self.links = flow.links
        self.limit = flow.limit_bytes_per_s
        self.rate = 0.0
        self.service_bytes = 0.0
        self.since_s = 0.0
        self.version = 0
        self.ends: list[tuple[float, int]] = []
        """(service at which it ends, number) of each member, as a heap."""

    def serve_until(self, now_s: float) -> None:
        self.service_bytes += self.rate * (now_s - self.since_s)
        self.since_s = now_s


class Network:
    """All flows under way, and the rates that they have."""

    def __init__(self, capacities_bytes_per_s: Sequence[float]) -> None:
        self.capacity = tuple(capacities_bytes_per_s)
        self._full_bytes_per_s = tuple(each * _SLACK for each in self.capacity)
        """Link -> demand from which on it is full."""
        self.crossing: list[dict[int, float]] = [{} for _ in self.capacity]
        """Link -> the bundles on it, and the usage of one member."""
        self.demand = [0.0] * len(self.capacity)
        """Link -> rate of the flows on it if each had its limit."""
        self.bundles: list[_Bundle] = []
        self._numbers: dict[object, int] = {}
        self._of_flow: dict[int, tuple[Flow, int]] = {}
        """Identity of a flow -> itself and its bundle: many tasks have the very same flow."""
        self._changed_links: dict[int, None] = {}
        self._changed_bundles: dict[int, None] = {}

    def start(self, number: int, flow: Flow, now_s: float) -> None:
        """Let a flow begin; it has a rate after the next `rebalance`."""
        bundle_number = self._bundle_of(flow)
        bundle = self.bundles[bundle_number]
        bundle.serve_until(now_s)
        heapq.heappush(bundle.ends, (bundle.service_bytes + flow.num_bytes, number))
        self._changed_bundles[bundle_number] = None
        for link, usage in bundle.links:
            self.crossing[link][bundle_number] = usage
            self.demand[link] += usage * bundle.limit
            if self.demand[link] > self._full_bytes_per_s[link]:
                self._changed_links[link] = None

    def finish(self, bundle_number: int, version: int, now_s: float) -> list[int]:
        """Take the flows of a bundle that end now off their links.

        `bundle_number` and `version` are what `rebalance` told; nothing ends if the bundle has
        changed since.
        """
        bundle = self.bundles[bundle_number]
        if bundle.version != version:
            return []
        # The end that was told of is reached, whatever rounding says.
        bundle.service_bytes, bundle.since_s = bundle.ends[0][0], now_s
        done_bytes = bundle.service_bytes * _SLACK_OF_SERVICE
        ended = []
        while bundle.ends and bundle.ends[0][0] <= done_bytes:
            ended.append(heapq.heappop(bundle.ends)[1])
        self._changed_bundles[bundle_number] = None
        for link, usage in bundle.links:
            if self.demand[link] > self._full_bytes_per_s[link]:
                self._changed_links[link] = None
            self.demand[link] -= usage * bundle.limit * len(ended)
            if not bundle.ends:
                del self.crossing[link][bundle_number]
            if not self.crossing[link]:
                self.demand[link] = 0.0  # forget what rounding left
        if not bundle.ends:
            bundle.service_bytes = bundle.rate = 0.0
            bundle.version += 1
            self._changed_bundles.pop(bundle_number)
        return ended

    @property
    def has_changed(self) -> bool:
        """Whether `rebalance` has anything to do."""
        return bool(self._changed_bundles or self._changed_links)

    def rebalance(self, now_s: float) -> list[tuple[float, int, int]]:
        """Share the links anew; returns (time, bundle, version) of the next end in each bundle.

        Only of bundles where it has changed.
        """
        if not self.has_changed:
            return []
        changed, links = self._changed_bundles, self._changed_links
        self._changed_bundles = {}
        if not links:
            return [self._served_at(self.bundles[each].limit, each, now_s) for each in changed]
        self._changed_links = {}
        rates = self._fill(*self._tied_together(changed, links))
        return [
            self._served_at(rate, number, now_s)
            for number, rate in rates.items()
            if rate != self.bundles[number].rate or number in changed
        ]

    def rates(self) -> dict[int, float]:
        """The rate of each flow under way."""
        return {number: bundle.rate for bundle in self.bundles for _, number in bundle.ends}

    def _bundle_of(self, flow: Flow) -> int:
        known = self._of_flow.get(id(flow))
        if known is not None:
            return known[1]
        key = flow.links, flow.limit_bytes_per_s
        number = self._numbers.setdefault(key, len(self.bundles))
        if number == len(self.bundles):
            self.bundles.append(_Bundle(flow))
        self._of_flow[id(flow)] = flow, number
        return number

    def _tied_together(
        self, changed: Iterable[int], changed_links: Iterable[int]
    ) -> tuple[list[int], list[int]]:
        """Changed bundles, those on changed links, and all that share full links with them."""
        bundles, crossing = self.bundles, self.crossing
        demand, full = self.demand, self._full_bytes_per_s
        numbers = dict.fromkeys(changed)
        for link in changed_links:
            for number in crossing[link]:
                numbers[number] = None
        links: dict[int, None] = {}
        frontier = list(numbers)
        while frontier:
            for link, _ in bundles[frontier.pop()].links:
                if link in links or demand[link] <= full[link]:
                    continue
                links[link] = None
                for number in crossing[link]:
                    if number not in numbers:
                        numbers[number] = None
                        frontier.append(number)
        return list(numbers), list(links)

    def _fill(self, numbers: Sequence[int], links: Sequence[int]) -> dict[int, float]:
        """Progressive filling of `links`, which are crossed by bundles of `numbers` only.

        O(n log n) in the crossings of links by bundles: a link's share only grows while others
        are settled at less, so a heap of shares is brought up to date where it is looked at.
        """
        bundles = self.bundles
        free = {link: self.capacity[link] for link in links}
        weight = dict.fromkeys(links, 0.0)
        usages: dict[int, list[tuple[int, float]]] = {}
        for number in numbers:
            count = len(bundles[number].ends)
            usages[number] = [(at, use * count) for at, use in bundles[number].links if at in free]
            for link, usage in usages[number]:
                weight[link] += usage
        unsettled = {link: len(self.crossing[link]) for link in links}
        rates: dict[int, float] = {}

        def settle(number: int, rate: float) -> None:
            rates[number] = rate
            for link, usage in usages[number]:
                left = free[link] - usage * rate
                free[link] = left if left > 0.0 else 0.0
                weight[link] -= usage
                unsettled[link] -= 1

        shares = [(free[link] / weight[link], link) for link in links]
        limits = [(bundles[number].limit, number) for number in numbers]
        heapq.heapify(shares)
        heapq.heapify(limits)
        while limits:
            limit, slowest = limits[0]
            if slowest in rates:
                heapq.heappop(limits)
                continue
            while shares and not unsettled[shares[0][1]]:
                heapq.heappop(shares)
            level, link = shares[0] if shares else (math.inf, -1)
            # A flow whose limit is below the level leaves more to the others, never less.
            if limit <= level * _SLACK:
                settle(slowest, limit)
                continue
            share = free[link] / weight[link]
            if share > level * _SLACK:
                heapq.heapreplace(shares, (share, link))
                continue
            for number in self.crossing[link]:
                if number not in rates:
                    settle(number, share)
        return rates

    def _served_at(self, rate: float, number: int, now_s: float) -> tuple[float, int, int]:
        """Give a bundle a rate; returns its next end."""
        bundle = self.bundles[number]
        bundle.serve_until(now_s)
        bundle.rate = rate
        bundle.version += 1
        left_bytes = max(0.0, bundle.ends[0][0] - bundle.service_bytes)
        return now_s + left_bytes / rate, number, bundle.version


# From ranks to shared links: what a transfer or a collective puts on the network.


@dataclass(frozen=True, kw_only=True)
class TaskWork:
    """What one task does: `seconds_s`, after `flow` where there is one."""

    seconds_s: float
    flow: Flow | None = None

    @property
    def alone_s(self) -> float:
        """How long it takes on idle links."""
        flow = self.flow
        return self.seconds_s + (flow.num_bytes / flow.limit_bytes_per_s if flow else 0.0)


@dataclass(frozen=True, kw_only=True)
class EqualLinks:
    """Links that carry the same and stand for one another (see `equal_ranks`)."""

    same_as: Mapping[str, str] = field(default_factory=dict)
    """Name of a link -> name of the one that stands for it."""
    copies: Mapping[tuple[int, int], Mapping[str, int]] = field(default_factory=dict)
    """(source, target) -> link -> how many equal transfers cross it at the same time."""


class NetworkLoads:
    """Asks a `CommCost` once for each route, and numbers the links.

    A transfer takes exactly `CommCost.transfer_s` on idle links: its bytes occupy the links for
    that time less the latency (`transfer_s` of 0 bytes), then the latency passes.

    A collective takes exactly its time on idle links too. It counts as one flow over all links
    that a ring through its ranks crosses, each once, as a ring that knows the topology does.
    """

    def __init__(
        self,
        comm: CommCost,
        *,
        link_factors: Mapping[str, float] | None = None,
        equal: EqualLinks | None = None,
    ) -> None:
        self.comm = comm
        self.link_factors = dict(link_factors or {})
        self.equal = equal or EqualLinks()
        self.names: list[str] = []
        self.capacity_bytes_per_s: list[float] = []
        """As the cost model has it; see `capacities` for what there is."""
        self._numbers: dict[str, int] = {}
        self._paths: dict[tuple[int, int], dict[int, int]] = {}
        self._transfers: dict[tuple[int, int, int], TaskWork] = {}

    @property
    def capacities(self) -> tuple[float, ...]:
        """Bytes per second of each link, slowed down where a perturbation says so.

        Raises UnknownLinkError for a link to be slowed down that is on no route.
        """
        unknown = sorted(self.link_factors.keys() - self._numbers.keys())
        if unknown:
            raise UnknownLinkError(unknown, sorted(self._numbers))
        return tuple(
            capacity * self.link_factors.get(name, 1.0)
            for name, capacity in zip(self.names, self.capacity_bytes_per_s, strict=True)
        )

    def transfer(self, source: int, target: int, num_bytes: int) -> TaskWork:
        """Point to point."""
        key = source, target, num_bytes
        if key not in self._transfers:
            whole_s = self.comm.transfer_s(source, target, num_bytes)
            latency_s = min(whole_s, self.comm.transfer_s(source, target, 0))
            path = self._path(source, target)
            self._transfers[key] = self._work(num_bytes, whole_s - latency_s, latency_s, path)
        return self._transfers[key]

    def collective(self, ranks: Sequence[int], num_bytes: float, alone_s: float) -> TaskWork:
        """A reduce-scatter or an all-gather of a buffer of `num_bytes` over `ranks`."""
        if len(ranks) == 1:
            return TaskWork(seconds_s=0.0)
        links: dict[int, int] = {}
        for source, target in zip(ranks, [*ranks[1:], ranks[0]], strict=True):
            links.update(dict.fromkeys(self._path(source, target), 1))
        crossing_bytes = num_bytes * (len(ranks) - 1) / len(ranks)
        return self._work(crossing_bytes, alone_s, 0.0, links)

    def rings_s(self, rings: Sequence[Sequence[int]], num_bytes: float, alone_s: float) -> float:
        """Several such collectives at once, of as many ranks each: on the busiest link that they
        share, or as long as one of them alone."""
        load: Counter[int] = Counter()
        for ring in rings:
            pairs = zip(ring, [*ring[1:], ring[0]], strict=True)
            load.update({link for source, target in pairs for link in self._path(source, target)})
        crossing_bytes = num_bytes * (len(rings[0]) - 1) / len(rings[0])
        rates = self.capacity_bytes_per_s
        shared_s = (count * crossing_bytes / rates[link] for link, count in load.items())
        return max(alone_s, *shared_s)

    def exchanges(self, rounds: Iterable[tuple[Mapping[tuple[int, int], int], int]]) -> TaskWork:
        """Rounds of messages, all of a round at once and one round after the other.

        `rounds`: (source, target) -> bytes, and how often. A rank sends its messages, and receives
        them, one after the other; a link that several take carries all of them. On shared links all
        rounds count as one flow.
        """
        load: dict[int, float] = {}
        total, flowing_s, latency_s = 0.0, 0.0, 0.0
        for messages, times in rounds:
            alone_s, least_s, crossing = self._round(messages)
            flowing_s += times * alone_s
            latency_s += times * least_s
            total += times * sum(messages.values())
            for link, num_bytes in crossing.items():
                load[link] = load.get(link, 0.0) + times * num_bytes
        if not load or flowing_s <= 0:
            return TaskWork(seconds_s=flowing_s + latency_s)
        flow = Flow(
            num_bytes=total,
            limit_bytes_per_s=total / flowing_s,
            links=tuple((link, num_bytes / total) for link, num_bytes in load.items()),
        )
        return TaskWork(seconds_s=latency_s, flow=flow)

    def _round(
        self, messages: Mapping[tuple[int, int], int]
    ) -> tuple[float, float, dict[int, float]]:
        """Seconds that bytes flow, latency (s), and bytes on each link."""
        load: dict[int, float] = {}
        ports_s: dict[tuple[int, bool], float] = {}
        latency_s = 0.0
        for (source, target), num_bytes in messages.items():
            least_s = self.comm.transfer_s(source, target, 0)
            latency_s = max(latency_s, least_s)
            flowing_s = self.comm.transfer_s(source, target, num_bytes) - least_s
            for port in ((source, True), (target, False)):
                ports_s[port] = ports_s.get(port, 0.0) + flowing_s
            for link in self._path(source, target):
                load[link] = load.get(link, 0.0) + num_bytes
        links_s = (count / self.capacity_bytes_per_s[link] for link, count in load.items())
        return max([0.0, *ports_s.values(), *links_s]), latency_s, load

    def _work(
        self, num_bytes: float, flowing_s: float, latency_s: float, path: Mapping[int, int]
    ) -> TaskWork:
        if not path or flowing_s <= 0 or num_bytes <= 0:
            return TaskWork(seconds_s=flowing_s + latency_s)
        limit = num_bytes / flowing_s
        links = tuple(
            (link, copies * min(1.0, self.capacity_bytes_per_s[link] / limit))
            for link, copies in path.items()
        )
        flow = Flow(num_bytes=num_bytes, limit_bytes_per_s=limit, links=links)
        return TaskWork(seconds_s=latency_s, flow=flow)

    def _path(self, source: int, target: int) -> dict[int, int]:
        """Number of each link on the way -> how many equal transfers cross it."""
        if (source, target) not in self._paths:
            found = self.comm.shared_links(source, target)
            copies = self.equal.copies.get((source, target), {})
            self._paths[source, target] = {
                number: copies.get(name, 1) for name, number in self._numbered(found)
            }
        return self._paths[source, target]

    def _numbered(self, links: Iterable[tuple[str, float]]) -> Iterable[tuple[str, int]]:
        for name, capacity in links:
            if not capacity > 0:
                raise SimulationError(f"found link {name!r} with {capacity} bytes/s; expected > 0")
            stands = self.equal.same_as.get(name, name)
            number = self._numbers.setdefault(stands, len(self.names))
            if number == len(self.names):
                self.names.append(stands)
                self.capacity_bytes_per_s.append(capacity)
            if self.capacity_bytes_per_s[number] != capacity:
                raise SimulationError(
                    f"found link {name!r} with {capacity} and with "
                    f"{self.capacity_bytes_per_s[number]} bytes/s; expected one rate for each link"
                )
            yield name, number


# Time and load of sums and gathers in two levels: rings within regions, messages between them.
#
# As `runtime.hierarchical_collectives` makes them, buffer by buffer: of a reduction, each region
# sums what others own, and then what it owns itself, while the messages of the first are on their
# way; a gather is the same backwards. Regions' rings and messages are on two streams.


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
