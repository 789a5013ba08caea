"""Cuts the global sample order into global batches, and these into one replica's micro-batches."""

from collections.abc import Collection, Iterator

from zorse_megatron.runtime.course import Course


class PlanBatchSampler:
    """Yields, for each global batch, one list of indices per micro-batch of this replica."""

    def __init__(
        self,
        global_order: Collection[list[int]],
        *,
        global_batch_size: int,
        course: Course,
    ) -> None:
        """`global_order`: lists of indices, in the order in which one process would read them."""
        self.global_order = global_order
        self.global_batch_size = global_batch_size
        self.course = course
        # Kept from one pass over the data to the next: a global batch may span two epochs.
        self.pending: list[int] = []
        self.number = 0
        """Of the next global batch."""

    def __len__(self) -> int:
        return len(self.global_order)

    def __iter__(self) -> Iterator[list[int]]:
        for indices in self.global_order:
            self.pending += indices
            while len(self.pending) >= self.global_batch_size:
                batch = self.pending[: self.global_batch_size]
                self.pending = self.pending[self.global_batch_size :]
                micro_batches = self.course.cut(self.number)
                self.number += 1
                for micro_batch in micro_batches:
                    yield batch[micro_batch.start : micro_batch.stop]
