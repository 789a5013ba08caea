"""Which micro-batches a replica runs of each global batch, and which samples these have."""

from collections.abc import Collection, Iterator, Sequence

from zorse_megatron.schedule.samples import MicroBatch

# Which micro-batches a replica runs of each global batch: they may change between two.


class MicroBatchAssignment:
    """A replica's micro-batches, by the number of the global batch, counted from 0.

    A data loader is ahead of the training: what it has cut stays as it was cut.
    """

    def __init__(self, micro_batches: Sequence[MicroBatch], *, batch_size: int) -> None:
        """`batch_size`: samples of a global batch."""
        self._changes = [(0, batch_size, tuple(micro_batches))]
        self.num_cut = 0
        """Global batches that the data loader has begun to cut."""

    def at(self, number: int) -> tuple[MicroBatch, ...]:
        """The micro-batches of a global batch."""
        return self._from(number)[2]

    def size_at(self, number: int) -> int:
        """Samples of a global batch."""
        return self._from(number)[1]

    def cut(self, number: int) -> tuple[MicroBatch, ...]:
        """The same, for the data loader."""
        self.num_cut = max(self.num_cut, number + 1)
        return self.at(number)

    def change(self, number: int, micro_batches: Sequence[MicroBatch]) -> None:
        """Let there be others from a global batch on, that has not been cut."""
        assert number >= self.num_cut, f"global batch {number} of {self.num_cut} has been cut"
        _, size, _ = self._changes[-1]
        self._changes = [*self._changes[-1:], (number, size, tuple(micro_batches))]

    def follow(self, course: Sequence[tuple[int, int, Sequence[MicroBatch]]]) -> None:
        """Before any is cut: let there be (first global batch, samples of one, micro-batches)."""
        assert self.num_cut == 0, f"{self.num_cut} global batches have been cut"
        self._changes = [(first, size, tuple(each)) for first, size, each in course]

    def _from(self, number: int) -> tuple[int, int, tuple[MicroBatch, ...]]:
        return next(change for change in reversed(self._changes) if change[0] <= number)


def batches_ahead(*, num_prefetched: int, fewest: int) -> int:
    """Global batches that a loader has begun at most beyond those that have been run.

    `num_prefetched`: micro-batches that its workers may have before they are asked for; `fewest`:
    micro-batches of a global batch at least.
    """
    return -(-num_prefetched // max(1, fewest))


class PlanBatchSampler:
    """Yields, for each global batch, one list of indices per micro-batch of this replica."""

    def __init__(
        self,
        global_order: Collection[list[int]],
        *,
        assignment: MicroBatchAssignment,
    ) -> None:
        """`global_order`: lists of indices, in the order in which one process would read them."""
        self.global_order = global_order
        self.assignment = assignment
        # Kept from one pass over the data to the next: a global batch may span two epochs.
        self.pending: list[int] = []
        self.number = 0
        """Of the next global batch."""

    def __len__(self) -> int:
        return len(self.global_order)

    def __iter__(self) -> Iterator[list[int]]:
        for indices in self.global_order:
            self.pending += indices
            while len(self.pending) >= (size := self.assignment.size_at(self.number)):
                batch, self.pending = self.pending[:size], self.pending[size:]
                micro_batches = self.assignment.cut(self.number)
                self.number += 1
                for micro_batch in micro_batches:
                    yield batch[micro_batch.start : micro_batch.stop]
