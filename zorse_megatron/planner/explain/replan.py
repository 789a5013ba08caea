"""What another search finds: on the same GPUs, on one more, and without a GPU, node or region."""

from collections.abc import Callable
from dataclasses import dataclass, replace

from zorse_megatron.planner.find_plan import find_plan
from zorse_megatron.planner.inputs.other_gpus import on_ranks, with_one_more
from zorse_megatron.planner.inputs.search_inputs import Inputs
from zorse_megatron.planner.outcome import SearchProgress
from zorse_megatron.planner.planner_errors import NoPlanError
from zorse_megatron.planner.selection.explore import WORTH_IT
from zorse_megatron.planner.selection.fewer import PartName, parts_of_cluster

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
class OneLess:
    """The plan that is found without one GPU, one node or one region."""

    part: PartName
    name: str
    """Of the region or node; of a GPU its kind and node."""
    ranks: tuple[int, ...]
    """What is left out."""
    iteration_s: float
    speedup: float
    """Iterations per second over those of the best plan with it; above 1 it slows the others."""


@dataclass(frozen=True, kw_only=True)
class Replans:
    """Other searches beside a plan."""

    again_s: float
    """Iteration of the best plan that is known for the same GPUs."""
    one_more: tuple[OneMore, ...]
    """By gain, largest first; those that fit."""
    one_less: tuple[OneLess, ...] = ()
    """Fastest first; those that fit."""

    @property
    def faster_without(self) -> tuple[OneLess, ...]:
        """What slows the others by more than 0.2 %, the worst first."""
        return tuple(each for each in self.one_less if each.speedup * WORTH_IT > 1)


def replan(
    inputs: Inputs,
    *,
    found_s: float | None = None,
    on_progress: Callable[[SearchProgress], None] | None = None,
    with_less: bool = True,
) -> Replans | None:
    """Search with one more GPU of each kind.

    `with_less`: and with a GPU of each kind, a node or a region less.

    None where the cluster is too large for that. `found_s`: iteration of the best plan for
    `inputs`; if it is left out, that is searched first. Of nodes that are alike one is left out.
    """
    if inputs.world_size >= MOST_GPUS:
        return None
    if found_s is None:
        found_s = find_plan(inputs, on_progress=_titled("again", on_progress)).iteration_s
    return Replans(
        again_s=found_s,
        one_more=_one_more(inputs, found_s, on_progress),
        one_less=_one_less(inputs, found_s, on_progress) if with_less else (),
    )


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


def _one_less(
    inputs: Inputs, found_s: float, on_progress: Callable[[SearchProgress], None] | None
) -> tuple[OneLess, ...]:
    rows: list[OneLess] = []
    seen: set[tuple[int, ...]] = set()
    for part, name, ranks in parts_of_cluster(inputs):
        if ranks in seen:  # a region of one node, a node of one GPU
            continue
        seen.add(ranks)
        left = on_ranks(inputs, [rank for rank in range(inputs.world_size) if rank not in ranks])
        try:
            report = _titled(f"without {part} {name}", on_progress)
            iteration_s = find_plan(left, on_progress=report).iteration_s
        except NoPlanError:  # less memory
            continue
        speedup = found_s / iteration_s
        rows.append(
            OneLess(part=part, name=name, ranks=ranks, iteration_s=iteration_s, speedup=speedup)
        )
    return tuple(sorted(rows, key=lambda each: (each.iteration_s, len(each.ranks))))


def _titled(
    title: str, on_progress: Callable[[SearchProgress], None] | None
) -> Callable[[SearchProgress], None] | None:
    if on_progress is None:
        return None
    return lambda progress: on_progress(replace(progress, phase=f"{title}: {progress.phase}"))
