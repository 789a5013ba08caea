"""From ranks to shared links: what a transfer or a collective puts on the network."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from zorse_megatron.costs.interface import CommCost
from zorse_megatron.simulate.network import Flow
from zorse_megatron.simulate.simulation_errors import SimulationError, UnknownLinkError


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
    """Links that carry the same and stand for one another (see `copy_classes`)."""

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
