"""Load that an operation puts on the emulated cluster's links, at the planner's costs.

The emulation does not verify these costs: it shares them with the planner (`costs.comm`), and finds
out what schedule, order, overlap and runtime make of them.
"""

from collections.abc import Mapping, Sequence

from zorse_megatron.costs.interface import CommCost
from zorse_megatron.emulate.clock.messages import (
    Collective,
    Operation,
    PartExchange,
    Transfer,
)
from zorse_megatron.simulate.network_loads import NetworkLoads, TaskWork


class LinkModel:
    """Costs of operations between the ranks of a job."""

    def __init__(
        self,
        comm: CommCost,
        gpus: Sequence[int],
        *,
        link_factors: Mapping[str, float] | None = None,
    ) -> None:
        """`gpus`: rank of the job -> global rank of its GPU in the cluster, which `comm` knows.

        `link_factors`: name of a link -> its bandwidth is this many times what `comm` says.
        Raises SimulationError for a link that no two of the GPUs share.
        """
        self.gpus = tuple(gpus)
        self.comm = comm
        self._routes = NetworkLoads(comm, link_factors=link_factors)
        for source in self.gpus:  # so that all links are known before the first operation
            for target in self.gpus:
                if source != target:
                    self._routes.transfer(source, target, 1)
        self.capacities_bytes_per_s = self._routes.capacities
        self._works: dict[Operation, TaskWork] = {}

    def work(self, operation: Operation) -> TaskWork | None:
        """Flow and latency of an operation; None for a transfer whose size is not said."""
        if isinstance(operation, Transfer) and operation.num_bytes is None:
            return None
        if operation not in self._works:
            self._works[operation] = self._work(operation)
        return self._works[operation]

    def alone_s(self, operation: Operation) -> float:
        """How long an operation takes on idle links."""
        work = self.work(operation)
        assert work is not None
        return work.alone_s

    def _work(self, operation: Operation) -> TaskWork:
        if isinstance(operation, Transfer):
            return self._transfer(operation)
        if isinstance(operation, PartExchange):
            messages = {
                (self.gpus[source], self.gpus[target]): num_bytes
                for source, target, num_bytes in operation.messages
            }
            return self._routes.exchanges([(messages, 1)])
        return self._collective(operation)

    def _transfer(self, transfer: Transfer) -> TaskWork:
        source, target = self.gpus[transfer.source], self.gpus[transfer.target]
        assert transfer.num_bytes is not None
        return self._routes.transfer(source, target, transfer.num_bytes)

    def _collective(self, collective: Collective) -> TaskWork:
        ranks = tuple(self.gpus[rank] for rank in collective.ranks)
        parts, total = collective.part_bytes, sum(collective.part_bytes)
        if len(ranks) == 1 or collective.kind == "meeting":
            return TaskWork(seconds_s=0.0)
        if collective.kind == "reduce_scatter":
            return self._routes.collective(ranks, total, self.comm.reduce_scatter_s(ranks, parts))
        if collective.kind == "exchange":
            return self._routes.collective(ranks, total, self.comm.exchange_s(ranks, parts))
        if collective.kind == "all_gather":
            return self._routes.collective(ranks, total, self.comm.all_gather_s(ranks, parts))
        if collective.kind == "broadcast":
            # The way down of the tree that an all-reduce goes up and down.
            return self._routes.collective(ranks, total, self.comm.all_reduce_s(ranks, total) / 2)
        even = (-(-total // len(ranks)),) * len(ranks)
        in_two_s = self.comm.reduce_scatter_s(ranks, even) + self.comm.all_gather_s(ranks, even)
        alone_s = min(in_two_s, self.comm.all_reduce_s(ranks, total))
        return self._routes.collective(ranks, 2 * total, alone_s)
