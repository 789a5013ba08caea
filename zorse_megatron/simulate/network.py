"""Bytes on shared links: flows that cross a link at the same time share it max-min fairly.

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
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

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
