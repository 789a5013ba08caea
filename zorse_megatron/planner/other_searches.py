"""What another search finds: on the same GPUs, on one more, and without a GPU, node or region."""

from collections.abc import Callable
from dataclasses import dataclass, replace

from zorse_megatron.planner.find_plan import find_plan
from zorse_megatron.planner.inputs.search_inputs import Inputs, with_one_more
from zorse_megatron.planner.outcome import NoPlanError, SearchProgress

MOST_GPUS = 256
"""Beyond it a search for each kind takes minutes."""


@dataclass(frozen=True, kw_only=True)
class OneMore:
    """The plan that is found with one more GPU of a kind."""

    kind: str
    node: str
    """Where the new GPU is: the smallest node of the kind, or a new one like it."""
    iteration_s: float
    speedup: float
    """Iterations per second over those of the best plan without it."""


@dataclass(frozen=True, kw_only=True)
class Replans:
    """Other searches beside a plan."""

    again_s: float
    """Iteration of the best plan that is known for the same GPUs."""
    one_more: tuple[OneMore, ...]
    """By gain, largest first; those that fit."""


def replan(
    inputs: Inputs,
    *,
    found_s: float | None = None,
    on_progress: Callable[[SearchProgress], None] | None = None,
) -> Replans | None:
    """Search with one more GPU of each kind.

    None where the cluster is too large for that. `found_s`: iteration of the best plan for
    `inputs`; if it is left out, that is searched first.
    """
    if inputs.world_size >= MOST_GPUS:
        return None
    if found_s is None:
        found_s = find_plan(inputs, on_progress=_titled("again", on_progress)).iteration_s
    return Replans(again_s=found_s, one_more=_one_more(inputs, found_s, on_progress))


def _one_more(
    inputs: Inputs, found_s: float, on_progress: Callable[[SearchProgress], None] | None
) -> tuple[OneMore, ...]:
    rows = []
    for kind in dict.fromkeys(inputs.kinds):
        larger, node = with_one_more(inputs, kind)
        try:
            report = _titled(f"one more {kind}", on_progress)
            iteration_s = find_plan(larger, on_progress=report).iteration_s
        except NoPlanError:  # a GPU that is too small for one layer, once more
            continue
        speedup = found_s / iteration_s
        rows.append(OneMore(kind=kind, node=node, iteration_s=iteration_s, speedup=speedup))
    rows.sort(key=lambda each: (each.iteration_s, each.kind))
    return tuple(rows)


def _titled(
    title: str, on_progress: Callable[[SearchProgress], None] | None
) -> Callable[[SearchProgress], None] | None:
    if on_progress is None:
        return None
    return lambda progress: on_progress(replace(progress, phase=f"{title}: {progress.phase}"))
