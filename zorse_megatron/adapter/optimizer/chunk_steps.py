"""One update of the shards, made for one chunk after the other.

An update is the same for every element, with Adam as with SGD, so the chunks of a rank may be
stepped one by one, and the parameters of the first be on their way to the group while the next one
is stepped. Whether to step at all, and how gradients are scaled, has been decided for all of them
before (NORM).
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import chain
from typing import Any

from zorse_megatron.runtime.host_link import copied_to_host


class ChunkSteps:
    """Narrows an inner optimizer to one chunk's shards at a time."""

    def __init__(self, optimizer: Any) -> None:
        """`optimizer`: an `UnevenDistributedOptimizer`."""
        self.inner = optimizer.optimizer
        self._shards: dict[int, set[int]] = {id(chunk): set() for chunk in optimizer.model_chunks}
        for chunk, _, _, shard in optimizer.owned_shards:
            if optimizer.muon is not None and optimizer.muon.steps(shard):
                continue
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
        with stepping(self.inner, [[s for s in g["params"] if id(s) in mine] for g in groups]):
            yield

    def _counts(self) -> list[int]:
        """Steps that each group has counted, 0 where it counts none."""
        return [group.get("step", 0) for group in self.inner.param_groups]

    def _count_from(self, counts: list[int]) -> None:
        for group, count in zip(self.inner.param_groups, counts, strict=True):
            if "step" in group:
                group["step"] = count


@contextmanager
def stepping(inner: Any, parameters: Sequence[list[Any]]) -> Iterator[None]:
    """Within the block, the inner optimizer has these parameters only, by group."""
    everything = [group["params"] for group in inner.param_groups]
    _set_parameters(inner, parameters)
    try:
        yield
    finally:
        _set_parameters(inner, everything)


def _set_parameters(inner: Any, parameters: Sequence[list[Any]]) -> None:
    for group, mine in zip(inner.param_groups, parameters, strict=True):
        group["params"] = mine


# The parameters that an optimizer steps, made for one chunk after the other.
#
# Stock reads what a rank owns out of unsharded parameters: of all chunks at once. Here a sharded
# chunk has the memory of its unsharded parameters only while its own are made.


_MODEL_16_BIT, _MODEL_FP32, _SHARD_FP32, _MAIN = 0, 1, 3, 4
"""Places in what stock returns: parameters, shards of fp32 ones, fp32 copies of 16-bit ones."""


def by_chunk(
    stock: Callable[[list[dict]], tuple[list[list], ...]],
    opt_group_ranges: Sequence[dict],
    chunks: Sequence[Any],
    *,
    mains_in_host: bool,
) -> tuple[list[list], ...]:
    """Return what stock returns for all chunks: lists by kind, parameter group and parameter.

    `stock`: `DistributedOptimizer._build_model_and_main_param_groups` for these group ranges. Like
    it, sets the parameters of the groups' `orig_group`, which are in the order of the chunks.
    `mains_in_host`: fp32 copies of 16-bit parameters leave the device as soon as they are made.
    """
    parts = []
    for chunk in chunks:
        parts.append(_of_chunk(stock, opt_group_ranges, chunk))
        for main in chain(*parts[-1][_MAIN]) if mains_in_host else ():
            main.data = copied_to_host(main)
    found = tuple(
        [list(chain(*of_group)) for of_group in zip(*kind, strict=True)]
        for kind in zip(*parts, strict=True)
    )
    for group, shards, mains in zip(
        opt_group_ranges, found[_SHARD_FP32], found[_MAIN], strict=True
    ):
        group["orig_group"]["params"] = [*shards, *mains]
    return found


def _of_chunk(
    stock: Callable[[list[dict]], tuple[list[list], ...]],
    opt_group_ranges: Sequence[dict],
    chunk: Any,
) -> tuple[list[list], ...]:
    mine = set(chunk.params_with_grad)
    groups = [
        {**group, "params": [p for p in group["params"] if p in mine]} for group in opt_group_ranges
    ]
    if chunk.shards is None:
        return stock(groups)
    with chunk.shards.on_device():
        with chunk.shards.owned_in_place():
            parts = stock(groups)
        # Stock steps views of the unsharded fp32 parameters; what this rank keeps are the shards.
        for parameters, shards in zip(parts[_MODEL_FP32], parts[_SHARD_FP32], strict=True):
            for parameter, shard in zip(parameters, shards, strict=True):
                shard.data = chunk.parameter_piece(parameter, *chunk.owned_part(parameter))
        # What is packed is not in the order that stock has read.
        for parameters, mains in zip(parts[_MODEL_16_BIT], parts[_MAIN], strict=True):
            for parameter, main in zip(parameters, mains, strict=True):
                if parameter in chunk.mixed_tp:
                    main.data.copy_(chunk.parameter_piece(parameter, *chunk.owned_part(parameter)))
    return parts
