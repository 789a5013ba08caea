"""One update of the shards, made for one chunk after the other.

Adam's rule is the same for every element, so the chunks of a rank may be stepped one by one, and
the parameters of the first be on their way to the group while the next one is stepped. Whether to
step at all, and how gradients are scaled, has been decided for all of them before (NORM).
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


class ChunkSteps:
    """Narrows an inner optimizer to one chunk's shards at a time."""

    def __init__(self, optimizer: Any) -> None:
        """`optimizer`: an `UnevenDistributedOptimizer`."""
        self.inner = optimizer.optimizer
        self._shards: dict[int, set[int]] = {id(chunk): set() for chunk in optimizer.model_chunks}
        for chunk, _, _, shard in optimizer.owned_shards():
            self._shards[id(chunk)].add(id(shard))
        self._before = self._after = self._counts()

    def begin(self) -> None:
        """An update begins: what follows, until this is called again, counts as one step."""
        self._before = self._after = self._counts()

    @contextmanager
    def counting_one(self) -> Iterator[None]:
        """Within the block, the inner optimizer makes a part of the update.

        Fused optimizers count steps by group, once per call, and not in groups that are empty then.
        """
        self._count_from(self._before)
        yield
        self._after = [max(counts) for counts in zip(self._after, self._counts(), strict=True)]
        self._count_from(self._after)

    @contextmanager
    def only(self, chunk: Any) -> Iterator[None]:
        """Within the block, the inner optimizer has the chunk's shards only."""
        mine = self._shards[id(chunk)]
        groups = self.inner.param_groups
        everything = [group["params"] for group in groups]
        for group in groups:
            group["params"] = [shard for shard in group["params"] if id(shard) in mine]
        try:
            yield
        finally:
            for group, parameters in zip(groups, everything, strict=True):
                group["params"] = parameters

    def _counts(self) -> list[int]:
        """Steps that each group has counted, 0 where it counts none."""
        return [group.get("step", 0) for group in self.inner.param_groups]

    def _count_from(self, counts: list[int]) -> None:
        for group, count in zip(self.inner.param_groups, counts, strict=True):
            if "step" in group:
                group["step"] = count
