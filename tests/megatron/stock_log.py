"""Read what stock Megatron prints about its iterations."""

import re
from dataclasses import dataclass

_ITERATION = re.compile(r"\biteration +(\d+)/ *\d+ \|(.*)")


@dataclass(frozen=True, kw_only=True)
class IterationLog:
    """One line of stock's training log; None where the line has no such field."""

    iteration: int
    lm_loss: float | None
    grad_norm: float | None
    loss_scale: float | None
    elapsed_ms: float | None


def iterations(output: str) -> list[IterationLog]:
    """Return the logged iterations in `output`; stock prints them on the last rank alone."""
    return [_parse(int(match[1]), match[2]) for match in _ITERATION.finditer(output)]


def _parse(iteration: int, fields: str) -> IterationLog:
    values: dict[str, float] = {}
    for field in fields.split("|"):
        name, colon, value = field.rpartition(":")
        if colon and name.strip() in _FIELDS:
            values[_FIELDS[name.strip()]] = float(value)
    return IterationLog(
        iteration=iteration, **{name: values.get(name) for name in _FIELDS.values()}
    )


_FIELDS = {
    "lm loss": "lm_loss",
    "grad norm": "grad_norm",
    "loss scale": "loss_scale",
    "elapsed time per iteration (ms)": "elapsed_ms",
}
