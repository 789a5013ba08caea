"""Cost models in closed form, for tests and benchmarks of the simulator."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from zorse_megatron.costs.interface import ModelSection, PassTimes, RecomputeMode

Link = tuple[str, float]


@dataclass(kw_only=True)
class FakeCompute:
    """A layer takes `forward_s` + `backward_s` for each sample on kind "x"; other kinds a factor.

    With `by_micro_batch` the times are those of a micro-batch, whatever its size.
    """

    forward_s: float = 1.0
    backward_s: float = 2.0
    factors: Mapping[str, float] = field(default_factory=dict)
    embedding_s: float = 0.0
    head_s: float = 0.0
    recomputed_s: Mapping[str, float] = field(default_factory=dict)
    step_per_parameter_s: float = 0.0
    by_micro_batch: bool = False
    weights_s: float = 1.0

    def _times(self, forward_s: float, backward_s: float, kind: str, size: int) -> PassTimes:
        factor = self.factors.get(kind, 1.0) * (1 if self.by_micro_batch else size)
        return PassTimes(forward_s=factor * forward_s, backward_s=factor * backward_s)

    def layer(self, kind: str, micro_batch_size: int) -> PassTimes:
        return self._times(self.forward_s, self.backward_s, kind, micro_batch_size)

    def embedding(self, kind: str, micro_batch_size: int) -> PassTimes:
        return self._times(self.embedding_s, self.embedding_s, kind, micro_batch_size)

    def head(self, kind: str, micro_batch_size: int) -> PassTimes:
        return self._times(self.head_s, self.head_s, kind, micro_batch_size)

    def recompute_s(self, kind: str, micro_batch_size: int, mode: RecomputeMode) -> float:
        return self._times(self.recomputed_s.get(mode, 0.0), 0, kind, micro_batch_size).forward_s

    def weight_gradients_s(self, kind: str, micro_batch_size: int) -> float:
        return self._times(0, self.weights_s, kind, micro_batch_size).backward_s

    def step_s(self, kind: str, num_parameters: int) -> float:
        return self.factors.get(kind, 1.0) * self.step_per_parameter_s * num_parameters


@dataclass(kw_only=True)
class FakeMemory:
    """Round numbers of bytes."""

    layer_count: int = 640
    embedding_count: int = 0
    head_count: int = 0
    saved: Mapping[str, int] = field(
        default_factory=lambda: {"none": 1000, "selective": 700, "full": 100}
    )
    boundary: int = 0
    head: int = 0
    delayed: int = 0

    def layer_parameters(self) -> int:
        return self.layer_count

    def embedding_parameters(self) -> int:
        return self.embedding_count

    def head_parameters(self, *, tied_on_same_rank: bool) -> int:
        return 0 if tied_on_same_rank else self.head_count

    def frozen_parameters(self, section: ModelSection, *, tied_on_same_rank: bool = False) -> int:
        return 0

    def parameter_bytes(self, num_parameters: int) -> int:
        return 2 * num_parameters

    def gradient_bytes(self, num_parameters: int) -> int:
        return 4 * num_parameters

    def state_bytes(self, num_parameters: int) -> int:
        return 12 * num_parameters

    def activation_bytes(
        self, micro_batch_size: int, mode: RecomputeMode, kind: str | None = None
    ) -> int:
        return self.saved[mode] * micro_batch_size

    def saved_tensor_bytes(
        self, micro_batch_size: int, mode: RecomputeMode, kind: str | None = None
    ) -> tuple[int, ...]:
        return (self.activation_bytes(micro_batch_size, mode, kind),)

    def arriving_bytes(self, micro_batch_size: int) -> int:
        return self.boundary_bytes(micro_batch_size)

    def delayed_bytes(self, micro_batch_size: int) -> int:
        return self.delayed * micro_batch_size

    def boundary_bytes(self, micro_batch_size: int) -> int:
        return self.boundary * micro_batch_size

    def head_bytes(self, micro_batch_size: int) -> int:
        return self.head * micro_batch_size


def no_links(source: int, target: int) -> tuple[Link, ...]:
    """Every pair of ranks has a connection of its own."""
    return ()


def node_links(
    ranks_per_node: int, nic_bytes_per_s: float, *, spine_bytes_per_s: float | None = None
) -> Callable[[int, int], tuple[Link, ...]]:
    """Nodes whose ranks share a NIC, with one link in each direction; and a spine behind them."""

    def links(source: int, target: int) -> tuple[Link, ...]:
        here, there = source // ranks_per_node, target // ranks_per_node
        if here == there:
            return ()
        spine = () if spine_bytes_per_s is None else (("spine", spine_bytes_per_s),)
        return ((f"nic{here}>", nic_bytes_per_s), *spine, (f"nic{there}<", nic_bytes_per_s))

    return links


@dataclass(kw_only=True)
class FakeComm:
    """Latency and bandwidth, the same for all pairs; collectives like a ring."""

    latency_s: float = 0.0
    bytes_per_s: float = float("inf")
    collective_latency_s: float = 0.0
    statistic_s: float = 0.0
    host_bytes_per_s: float = 1.0
    links: Callable[[int, int], tuple[Link, ...]] = no_links

    def transfer_s(self, source: int, target: int, num_bytes: int) -> float:
        return self.latency_s + num_bytes / self.bytes_per_s

    def shared_links(self, source: int, target: int) -> tuple[Link, ...]:
        return self.links(source, target)

    def reduce_scatter_s(self, ranks: tuple[int, ...], shard_bytes: tuple[int, ...]) -> float:
        count = len(ranks)
        return self.collective_latency_s + (count - 1) / count * sum(shard_bytes) / self.bytes_per_s

    def all_gather_s(self, ranks: tuple[int, ...], shard_bytes: tuple[int, ...]) -> float:
        return self.reduce_scatter_s(ranks, shard_bytes)

    def exchange_s(self, ranks: tuple[int, ...], shard_bytes: tuple[int, ...]) -> float:
        busiest = (len(ranks) - 1) * max(shard_bytes)
        return self.collective_latency_s + busiest / self.bytes_per_s

    def all_reduce_s(self, ranks: tuple[int, ...], num_bytes: int) -> float:
        return self.statistic_s

    def host_link_bytes_per_s(self, rank: int) -> float:
        return self.host_bytes_per_s
