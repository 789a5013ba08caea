"""Which ranks of two replicas send each other what of a piece of a micro-batch.

A tensor-parallel group cuts it along the sequence, ranks that share experts alone by samples: each
has whole samples of its own.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from zorse_megatron.plan.plan import Replica
from zorse_megatron.schedule.samples import MicroBatch, Piece, rank_part
from zorse_megatron.schedule.shards import Interval, intersection
from zorse_megatron.schedule.tensor_parallel_parts import SequenceSlice, slice_pairs


@dataclass(frozen=True, kw_only=True, slots=True)
class RankMessage:
    """From one rank to another; gradients go the other way."""

    source: int
    target: int
    samples: Interval
    """Of the global batch."""
    positions: SequenceSlice | None
    """None: the whole sequence."""


def rank_messages(piece: Piece, source: Replica, target: Replica) -> Iterator[RankMessage]:
    """Yield the messages in the order of samples, then of positions; each element crosses once."""
    pairs = slice_pairs(source.tp_degree, target.tp_degree)
    whole = piece.start, piece.stop
    for senders, sent in _cut(whole, piece.source, source):
        for receivers, samples in _cut(sent, piece.target, target):
            for pair in pairs:
                yield RankMessage(
                    source=senders[pair.source],
                    target=receivers[pair.target],
                    samples=samples,
                    positions=pair.positions,
                )


def _cut(
    samples: Interval, micro_batch: MicroBatch, replica: Replica
) -> Iterator[tuple[tuple[int, ...], Interval]]:
    """The ranks that have the same of these samples, a TP group or one, and which."""
    if replica.expert_parallel is None:
        yield replica.ranks, samples
        return
    for index, rank in enumerate(replica.ranks):
        own = rank_part(micro_batch, replica, index)
        both = intersection((own.start, own.stop), samples)
        if both is not None:
            yield (rank,), both
