"""Communication of tensor-parallel sets, whose ranks all communicate at once."""

from zorse_megatron.costs.comm import GraphComm
from zorse_megatron.topology.cluster_topology import Topology
from zorse_megatron.topology.device_sets import as_devices


class SetComm:
    """`CommCost` of sets of `tensor_parallel` neighbouring ranks; see `costs.interface`.

    Ranks are global, any one of a set stands for it, and sizes are those of one rank. All ranks of
    the set send as much at the same time, each to its counterpart, so a set counts as one device
    with the links of all its GPUs and as many times the bytes. Of a shared link each rank gets its
    part.
    """

    def __init__(self, spec: Topology, tensor_parallel: int) -> None:
        self.size = tensor_parallel
        self.comm = GraphComm(as_devices(spec, tensor_parallel))

    def transfer_s(self, source: int, target: int, num_bytes: int) -> float:
        """Point to point."""
        return self.comm.transfer_s(self._set(source), self._set(target), self.size * num_bytes)

    def shared_links(self, source: int, target: int) -> tuple[tuple[str, float], ...]:
        """Links on the way with what each carries for every rank of the set."""
        links = self.comm.shared_links(self._set(source), self._set(target))
        return tuple((name, bytes_per_s / self.size) for name, bytes_per_s in links)

    def reduce_scatter_s(self, ranks: tuple[int, ...], shard_bytes: tuple[int, ...]) -> float:
        """As many reductions at once as a set has ranks."""
        sizes = tuple(self.size * size for size in shard_bytes)
        return self.comm.reduce_scatter_s(tuple(map(self._set, ranks)), sizes)

    def all_gather_s(self, ranks: tuple[int, ...], shard_bytes: tuple[int, ...]) -> float:
        """As many gathers at once as a set has ranks, each over one rank of each set."""
        sizes = tuple(self.size * size for size in shard_bytes)
        return self.comm.all_gather_s(tuple(map(self._set, ranks)), sizes)

    def exchange_s(self, ranks: tuple[int, ...], shard_bytes: tuple[int, ...]) -> float:
        """As many exchanges at once as a set has ranks."""
        sizes = tuple(self.size * size for size in shard_bytes)
        return self.comm.exchange_s(tuple(map(self._set, ranks)), sizes)

    def all_reduce_s(self, ranks: tuple[int, ...], num_bytes: int) -> float:
        """Over sets, each of which counts once."""
        sets = tuple(dict.fromkeys(map(self._set, ranks)))
        return self.comm.all_reduce_s(sets, self.size * num_bytes)

    def host_link_bytes_per_s(self, rank: int) -> float:
        """PCIe of one GPU to host memory."""
        return self.comm.host_link_bytes_per_s(self._set(rank)) / self.size

    def _set(self, rank: int) -> int:
        return rank // self.size
