"""Which messages are timed: once for each kind of node, and for each pair of kinds.

All pairs of nodes would take a time that grows with the square of the cluster, and say the same.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations_with_replacement

from zorse_megatron.measure.machine.nodes import SeenNode
from zorse_megatron.schema.profile.profile import TimedOperation, Transfers

_AMONG_ALL: tuple[TimedOperation, ...] = (
    "all_gather",
    "all_gather_unequal",
    "reduce_scatter",
    "reduce_scatter_unequal",
    "all_reduce",
)


@dataclass(frozen=True, kw_only=True)
class LinkTask:
    """Some ranks exchange messages of several sizes, while all others wait."""

    operation: TimedOperation
    nodes: tuple[str, ...]
    """Kinds of the nodes: one for inside a node, two for between nodes."""
    ranks: tuple[int, ...]
    """Who takes part; of sends the first half sends to the second half, each rank to one."""
    gpu_kinds: tuple[str, ...]
    """By rank."""

    @property
    def key(self) -> tuple[object, ...]:
        """Equal to the key of what comes of it."""
        return (self.operation, self.nodes, self.gpu_kinds)

    def __str__(self) -> str:
        """As the progress bar says it."""
        count = len(self.ranks) // 2 if self.operation == "send" else len(self.ranks)
        noun = "pair" if self.operation == "send" else "rank"
        return f"{self.operation}, {count} {noun}{'s'[: count > 1]}: {' | '.join(self.nodes)}"


def link_tasks(nodes: Sequence[SeenNode]) -> tuple[LinkTask, ...]:
    """Return everything that is to be timed on a cluster, each thing once."""
    tasks = [*_inside(nodes), *_between(nodes)]
    return tuple({task.key: task for task in reversed(tasks)}.values())[::-1]


def missing_tasks(tasks: Iterable[LinkTask], known: Iterable[Transfers]) -> tuple[LinkTask, ...]:
    """Return the tasks that have no times yet."""
    keys = {transfers.key for transfers in known}
    return tuple(task for task in tasks if task.key not in keys)


def _inside(nodes: Sequence[SeenNode]) -> Iterator[LinkTask]:
    for node in _first_of_each_kind(nodes):
        if len(node.ranks) < 2:
            continue
        for pair in _pairs_of_kinds(node):
            yield _task("send", (node,), pair)
        for operation in _AMONG_ALL:
            yield _task(operation, (node,), node.ranks)


def _between(nodes: Sequence[SeenNode]) -> Iterator[LinkTask]:
    firsts = _first_of_each_kind(nodes)
    for one, other in combinations_with_replacement(firsts, 2):
        if one is other:
            same = [node for node in nodes if node.kind == one.kind]
            if len(same) < 2:
                continue
            other = same[1]  # noqa: PLW2901  (two nodes of one kind: the first two)
        count = min(len(one.ranks), len(other.ranks))
        for sharing in sorted({1, count}):
            yield _task("send", (one, other), (*one.ranks[:sharing], *other.ranks[:sharing]))
        everyone = (*one.ranks, *other.ranks)
        for operation in _AMONG_ALL:
            yield _task(operation, (one, other), everyone)


def _first_of_each_kind(nodes: Sequence[SeenNode]) -> list[SeenNode]:
    return list({node.kind: node for node in reversed(nodes)}.values())[::-1]


def _pairs_of_kinds(node: SeenNode) -> Iterator[tuple[int, ...]]:
    """Yield the first pair of ranks for each pair of kinds of GPU in a node."""
    ranks_of: dict[str, list[int]] = {}
    for rank, kind in zip(node.ranks, node.gpu_kinds, strict=True):
        ranks_of.setdefault(kind, []).append(rank)
    for one, other in combinations_with_replacement(ranks_of, 2):
        if one != other:
            yield ranks_of[one][0], ranks_of[other][0]
        elif len(ranks_of[one]) > 1:
            yield ranks_of[one][0], ranks_of[one][1]


def _task(
    operation: TimedOperation, nodes: tuple[SeenNode, ...], ranks: tuple[int, ...]
) -> LinkTask:
    kind_of = {
        rank: kind for node in nodes for rank, kind in zip(node.ranks, node.gpu_kinds, strict=True)
    }
    return LinkTask(
        operation=operation,
        nodes=tuple(node.kind for node in nodes),
        ranks=ranks,
        gpu_kinds=tuple(kind_of[rank] for rank in ranks),
    )
