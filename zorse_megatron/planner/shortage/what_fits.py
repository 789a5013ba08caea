"""The longest sequence, most layers and largest batch that fit when the request does not."""

from collections.abc import Callable
from dataclasses import dataclass, replace

from zorse_megatron.errors import Problem
from zorse_megatron.planner.inputs.search_inputs import Inputs
from zorse_megatron.planner.shortage.gpu_memory import fitting, gib_missing, no_plan
from zorse_megatron.schema.model.model_shape import ModelShape
from zorse_megatron.schema.text.counted import number_of

MakeInputs = Callable[[ModelShape, int], Inputs]
"""Inputs for a model and a global batch on the same cluster."""

_STEPS = 6  # of each bisection: a sequence to a 64th of what was asked for


@dataclass(frozen=True, kw_only=True)
class WhatFits:
    """Each alone, the rest as it was asked for; None where not even the least that was tried fits.

    `reasons` says of those why.
    """

    sequence_length: int | None
    num_layers: int | None
    global_batch_size: int | None
    reasons: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class _Tried:
    """One quantity: what of it was asked for, and how to describe so many of it."""

    asked: int
    make: Callable[[int], Inputs]
    describe: Callable[[int], str]

    @property
    def step(self) -> int:
        """It is tried in multiples of this, the least of which comes first."""
        return max(1, self.asked >> _STEPS)

    def largest(self) -> int | None:
        """The largest below what was asked for that fits; None if even the least does not."""
        low, high = 0, -(-self.asked // self.step)  # in steps; the upper one does not fit
        while high - low > 1:
            middle = (low + high) // 2
            if fitting(self.make(middle * self.step)) is not None:
                low = middle
            else:
                high = middle
        return low * self.step or None

    def reason(self) -> str:
        """Why not even the least fits."""
        if self.asked <= self.step:
            return f"{self.describe(self.asked)} is the least there is"
        missing = no_plan(self.make(self.step))
        if missing.bytes_per_gpu:
            kinds = " and ".join(missing.gpu_kinds)
            lacks = f"{gib_missing(missing.bytes_per_gpu)} more is needed on each {kinds}"
        else:
            first = missing.problems[0]
            lacks = f"{first.where}: {first.found}; needed is {first.expected}"
        return f"not even {self.describe(self.step)} fits: {lacks}"


def what_fits(make: MakeInputs, model: ModelShape, batch: int) -> WhatFits:
    """Find each by bisection; of each a simulated plan has fitted, and slightly more may, too."""
    tried = (
        _Tried(
            asked=model.seq_length,
            make=lambda length: make(_with_length(model, length), batch),
            describe=lambda length: f"a sequence of {number_of(length, 'token')}",
        ),
        _Tried(
            asked=model.num_layers,
            make=lambda layers: make(replace(model, num_layers=layers), batch),
            describe=lambda layers: f"a model of {number_of(layers, 'layer')}",
        ),
        _Tried(
            asked=batch,
            make=lambda size: make(model, size),
            describe=lambda size: f"a batch of {size}",
        ),
    )
    length, layers, size = found = [each.largest() for each in tried]
    return WhatFits(
        sequence_length=length,
        num_layers=layers,
        global_batch_size=size,
        reasons=tuple(
            each.reason() for each, fits in zip(tried, found, strict=True) if fits is None
        ),
    )


def fits_problem(found: WhatFits, model: ModelShape, batch: int) -> Problem:
    """Tell it beside the reasons of a misfit."""
    said = [
        f"{words} of at most {number}{unit}"
        for words, number, unit in (
            ("sequences", found.sequence_length, " tokens"),
            ("models", found.num_layers, " layers"),
            ("batches", found.global_batch_size, ""),
        )
        if number
    ]
    one = "Each alone, the rest as it is. Simulated plans fit with these; a little more may."
    none = "Neither a shorter sequence, fewer layers nor a smaller batch alone makes a plan fit."
    why = "".join(f" {reason[0].upper()}{reason[1:]}." for reason in found.reasons)
    return Problem(
        where="what would fit",
        found=f"{model.num_layers} layers, sequences of {model.seq_length} tokens and batches of "
        f"{batch}",
        expected=", or ".join(said) if said else "larger GPUs, more of them or another model",
        remedy=(one if said else none) + why,
    )


def not_looked_for(found: str, expected: str) -> Problem:
    """Say that nothing smaller was tried, and why."""
    return Problem(
        where="what would fit",
        found=found,
        expected=expected,
        remedy="Shorter sequences, fewer layers and smaller batches were not tried: ask for one.",
    )


def _with_length(model: ModelShape, length: int) -> ModelShape:
    """Learned positions stay: a table that is too long does no harm."""
    return replace(model, seq_length=length)
