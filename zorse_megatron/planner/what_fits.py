"""Where nothing fits: the longest sequence, the most layers, the largest batch that would."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from zorse_megatron.errors import Problem
from zorse_megatron.planner.inputs import Inputs
from zorse_megatron.planner.shortage import fitting
from zorse_megatron.schema.model import ModelShape

Make = Callable[[ModelShape, int], Inputs]
"""Inputs for a model and a global batch on the same cluster."""

_STEPS = 6  # of each bisection: a sequence to a 64th of what was asked for


@dataclass(frozen=True, kw_only=True)
class WhatFits:
    """Each alone, the rest as it was asked for; None where no smaller one fits either."""

    sequence_length: int | None
    num_layers: int | None
    global_batch_size: int | None


def what_fits(make: Make, model: ModelShape, batch: int) -> WhatFits:
    """Find each by bisection; of each a simulated plan has fitted, and slightly more may, too."""
    return WhatFits(
        sequence_length=_largest(
            lambda length: make(_with_length(model, length), batch), model.seq_length
        ),
        num_layers=_largest(
            lambda layers: make(replace(model, num_layers=layers), batch), model.num_layers
        ),
        global_batch_size=_largest(lambda size: make(model, size), batch),
    )


def fits_problem(found: WhatFits, model: ModelShape, batch: int) -> Problem:
    """Tell it beside the reasons of a misfit."""
    said = list(_said(found))
    return Problem(
        where="what would fit",
        found=f"{model.num_layers} layers, sequences of {model.seq_length} tokens and batches of "
        f"{batch}",
        expected=", or ".join(said) if said else "larger GPUs, more of them or another model",
        remedy="Each alone, the rest as it is. Simulated plans fit with these; a little more may."
        if said
        else "Neither a shorter sequence, fewer layers nor a smaller batch alone makes a plan fit.",
    )


def _said(found: WhatFits) -> Iterator[str]:
    if found.sequence_length:
        yield f"sequences of at most {found.sequence_length} tokens"
    if found.num_layers:
        yield f"at most {found.num_layers} layers"
    if found.global_batch_size:
        yield f"batches of at most {found.global_batch_size}"


def _with_length(model: ModelShape, length: int) -> ModelShape:
    """Learned positions stay: a table that is too long does no harm."""
    return replace(model, seq_length=length)


def _largest(make: Callable[[int], Inputs], asked: int) -> int | None:
    """The largest number below what was asked for that fits; None if even the least does not."""
    unit = max(1, asked >> _STEPS)
    low, high = 0, -(-asked // unit)  # in units; the upper one does not fit
    while high - low > 1:
        middle = (low + high) // 2
        if fitting(make(middle * unit)) is not None:
            low = middle
        else:
            high = middle
    return low * unit or None
