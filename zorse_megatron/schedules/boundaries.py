"""What travels between neighbouring chunks, laid out once for a whole plan."""

from dataclasses import dataclass, field

from zorse_megatron.schedules.samples import (
    MicroBatch,
    MicroBatchKey,
    Piece,
    layouts,
    pieces,
)
from zorse_megatron.schema.plan.plan import Plan


@dataclass(kw_only=True)
class Boundary:
    """Between a group and another one, or itself; the same wherever the two meet.

    Activations go along it, gradients back. Pieces are in sample order.
    """

    is_local: bool
    """Whether both ends are the same group, so that nothing leaves a rank."""
    by_source: dict[MicroBatchKey, list[Piece]] = field(default_factory=dict)
    by_target: dict[MicroBatchKey, list[Piece]] = field(default_factory=dict)


class Boundaries:
    """Every group's micro-batches, and the boundary after each chunk."""

    def __init__(self, plan: Plan) -> None:
        self.groups = tuple(chunk.group for chunk in plan.chunks)
        """Chunk -> the number of its group."""
        self.last = len(self.groups) - 1
        laid_out = layouts(plan)
        self.queues = [_by_replica(layout) for layout in laid_out]
        """Group -> replica -> its micro-batches in order; only replicas that have any."""
        # With several chunks per group the same pair of groups meets again and again.
        found: dict[tuple[int, int], Boundary] = {}
        self.after_chunk: list[Boundary] = []
        """Chunk -> the boundary to the next chunk."""
        for source, target in zip(self.groups, self.groups[1:], strict=False):
            if (source, target) not in found:
                found[source, target] = boundary = Boundary(is_local=source == target)
                for piece in pieces(laid_out[source], laid_out[target]):
                    boundary.by_source.setdefault(piece.source.key, []).append(piece)
                    boundary.by_target.setdefault(piece.target.key, []).append(piece)
            self.after_chunk.append(found[source, target])


def _by_replica(layout: tuple[MicroBatch, ...]) -> dict[int, tuple[MicroBatch, ...]]:
    queues: dict[int, list[MicroBatch]] = {}
    for micro_batch in layout:
        queues.setdefault(micro_batch.replica, []).append(micro_batch)
    return {replica: tuple(queue) for replica, queue in sorted(queues.items())}
