"""What was trained between two changes of the cluster, and how long the changes took."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Part:
    """What one start of the job trained."""

    label: str
    first_iteration: int
    """Of those that it trained."""
    iterations_s: tuple[float, ...]
    losses: tuple[float, ...]
    pause_s: float
    """From the end of the part before to its first iteration."""
    oracle_s: tuple[float, ...]
    """Iteration -> what the best plan for the cluster as it was then takes."""


@dataclass(frozen=True, kw_only=True)
class Span:
    """One iteration, or a pause."""

    start_s: float
    end_s: float
    iteration: int | None
    """None: a pause."""
    part: int


def spans(parts: Sequence[Part]) -> Iterator[Span]:
    """Yield iterations and pauses in the order of time."""
    now_s = 0.0
    for number, part in enumerate(parts):
        if part.pause_s:
            yield Span(start_s=now_s, end_s=now_s + part.pause_s, iteration=None, part=number)
            now_s += part.pause_s
        for offset, taken_s in enumerate(part.iterations_s):
            iteration = part.first_iteration + offset
            yield Span(start_s=now_s, end_s=now_s + taken_s, iteration=iteration, part=number)
            now_s += taken_s


def all_losses(parts: Sequence[Part]) -> Iterator[tuple[int, float]]:
    """Yield iteration and loss of all that was trained, those that were lost too."""
    for part in parts:
        yield from enumerate(part.losses, start=part.first_iteration)
