"""What a step is given: the script's forward step, the models, and the samples of each chunk."""

import copy
import itertools
from collections.abc import Callable, Container, Iterator, Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(kw_only=True)
class StepInputs:
    """What `train_step` and `evaluate` hand to the schedule, for one step."""

    forward_step_func: Callable[..., Any]
    data_iterators: Mapping[int, Iterator[Any] | None]
    """Chunk -> where its micro-batches come from."""
    models: Mapping[int, Any]
    """Chunk -> the wrapped model."""
    config: Any
    forward_only: bool
    collect_non_loss_data: bool
    first_val_step: bool | None
    are_packed: bool = False
    """Whether the samples of a micro-batch are one long sequence."""


def iterator_per_chunk(
    iterator: Iterator[Any] | None, chunks: tuple[int, ...], readers: Container[int]
) -> dict[int, Iterator[Any] | None]:
    """Let each chunk of `readers` that a rank holds read the same micro-batches."""
    mine = [chunk for chunk in chunks if chunk in readers]
    if iterator is None or len(mine) < 2:
        return dict.fromkeys(chunks, iterator)
    # Not the iterator itself: stock's has no __iter__ that tee could call.
    copies = itertools.tee((next(iterator) for _ in itertools.count()), len(mine))
    # Scripts change a batch to what its stage needs.
    own = {chunk: map(copy.copy, each) for chunk, each in zip(mine, copies, strict=True)}
    return {**dict.fromkeys(chunks), **own}
