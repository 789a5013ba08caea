"""From what the ranks report to nodes and kinds of nodes. Nodes of one kind are measured once."""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby

from zorse_megatron.errors import MeasureError, Problem
from zorse_megatron.measure.machine.devices import SeenNic, SeenRank
from zorse_megatron.schema.gpus.gpu import LinkType
from zorse_megatron.schema.text.quantities import spell_bandwidth

# From the slowest: what joins all devices of a node is what joins the worst of them.
_LINK_TYPES: tuple[LinkType, ...] = ("pcie", "nvlink", "nvswitch")


@dataclass(frozen=True, kw_only=True)
class SeenNode:
    """One machine with consecutive ranks."""

    name: str
    ranks: tuple[int, ...]
    gpu_kinds: tuple[str, ...]
    """By rank of the node."""
    link_type: LinkType
    host_memory_bytes: int
    nics: tuple[SeenNic, ...]

    @property
    def kind(self) -> str:
        """What nodes that need be measured only once have in common, for people to read too."""
        parts = [f"{len(list(same))} x {kind}" for kind, same in groupby(self.gpu_kinds)]
        parts.append(self.link_type)
        rates = Counter(nic.bytes_per_s for nic in self.nics)
        for rate, count in sorted(rates.items(), key=lambda pair: pair[0] or 0.0):
            parts.append(f"{count} x {spell_bandwidth(rate) if rate else 'NIC'}")
        return ", ".join(parts)

    @property
    def is_mixed(self) -> bool:
        """Whether it has GPUs of several kinds."""
        return len(set(self.gpu_kinds)) > 1


def nodes_of(ranks: Sequence[SeenRank]) -> tuple[SeenNode, ...]:
    """Return the nodes in the order of their ranks. Raises MeasureError with every problem.

    The cluster file numbers ranks node by node, so each node needs consecutive ranks.
    """
    ordered = sorted(ranks, key=lambda seen: seen.rank)
    nodes = tuple(_node(list(same)) for _, same in groupby(ordered, key=lambda seen: seen.node))
    problems = [*_scattered(nodes), *_shared(ordered)]
    if problems:
        raise MeasureError("the ranks cannot be described as a cluster", problems)
    return nodes


def kinds_of_gpu(nodes: Sequence[SeenNode]) -> dict[str, int]:
    """Return each kind of GPU with the first rank that has it, which measures for all of them."""
    first: dict[str, int] = {}
    for node in nodes:
        for rank, kind in zip(node.ranks, node.gpu_kinds, strict=True):
            first.setdefault(kind, rank)
    return first


def _node(ranks: list[SeenRank]) -> SeenNode:
    return SeenNode(
        name=ranks[0].node,
        ranks=tuple(seen.rank for seen in ranks),
        gpu_kinds=tuple(seen.device.kind for seen in ranks),
        link_type=min((seen.device.link_type for seen in ranks), key=_LINK_TYPES.index),
        host_memory_bytes=min(seen.host_memory_bytes for seen in ranks),
        nics=ranks[0].nics,
    )


def _scattered(nodes: Sequence[SeenNode]) -> Iterator[Problem]:
    for name, count in Counter(node.name for node in nodes).items():
        if count > 1:
            found = [rank for node in nodes if node.name == name for rank in node.ranks]
            yield Problem(
                where=f"node {name}",
                found=f"ranks {', '.join(map(str, found))}",
                expected="ranks that follow each other",
                remedy="Start the ranks node by node: srun --distribution=block.",
            )


def _shared(ranks: Sequence[SeenRank]) -> Iterator[Problem]:
    counts = Counter((seen.node, seen.local_rank) for seen in ranks)
    for (node, local_rank), count in counts.items():
        if count > 1:
            yield Problem(
                where=f"node {node}",
                found=f"{count} ranks with the local number {local_rank}",
                expected="one rank for each GPU",
                remedy="Two machines with one name? ZORSE_NODE_NAME gives each its own.",
            )
