"""What travels between neighbouring chunks, laid out once for a whole plan."""

from dataclasses import dataclass, field

from zorse_megatron.schedules.samples import (
    MicroBatch,
    MicroBatchKey,
    Piece,
    micro_batches,
    pieces,
)
from zorse_megatron.schema.plan.plan import Plan


@dataclass(kw_only=True)
class Link:
    """From a group to another one, or to itself, as every boundary between the two has it.

    Activations go along it, gradients back. Pieces are in sample order.
    """

    is_local: bool
    """Whether both ends are the same group, so that nothing leaves a rank."""
    by_source: dict[MicroBatchKey, list[Piece]] = field(default_factory=dict)
    by_target: dict[MicroBatchKey, list[Piece]] = field(default_factory=dict)


class Links:
    """Every group's micro-batches, and the link behind each chunk."""

    def __init__(self, plan: Plan) -> None:
        self.groups = tuple(chunk.group for chunk in plan.chunks)
        """Chunk -> the number of its group."""
        self.last = len(self.groups) - 1
        layouts = [micro_batches(group) for group in plan.groups]
        self.queues = [_by_replica(layout) for layout in layouts]
        """Group -> replica -> its micro-batches in order; only replicas that have any."""
        # With several chunks per group the same pair of groups meets again and again.
        found: dict[tuple[int, int], Link] = {}
        self.links: list[Link] = []
        """Chunk -> the link to the next chunk."""
        for source, target in zip(self.groups, self.groups[1:], strict=False):
            if (source, target) not in found:
                found[source, target] = link = Link(is_local=source == target)
                for piece in pieces(layouts[source], layouts[target]):
                    link.by_source.setdefault(piece.source.key, []).append(piece)
                    link.by_target.setdefault(piece.target.key, []).append(piece)
            self.links.append(found[source, target])


def _by_replica(layout: tuple[MicroBatch, ...]) -> dict[int, tuple[MicroBatch, ...]]:
    queues: dict[int, list[MicroBatch]] = {}
    for micro_batch in layout:
        queues.setdefault(micro_batch.replica, []).append(micro_batch)
    return {replica: tuple(queue) for replica, queue in sorted(queues.items())}
