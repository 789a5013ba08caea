"""What is missing where nothing fits: the least memory that makes a plan possible."""

from collections import Counter
from dataclasses import dataclass, replace

from zorse_megatron.errors import Problem
from zorse_megatron.planner.errors import NoPlanError
from zorse_megatron.planner.estimate import Estimator
from zorse_megatron.planner.inputs import Inputs
from zorse_megatron.planner.judge import Judge
from zorse_megatron.planner.outline import Estimate, Outline
from zorse_megatron.planner.teams import Teams
from zorse_megatron.topology.grouping import Grouping
from zorse_megatron.topology.partition import candidates

_GROUPINGS = 24
_CHUNKS = {"1f1b": (1,), "interleaved": (1,), "breadth_first": (1, 4, 16, 64)}
_STEP = 2**20
_ROUNDS_OF_CHECKS = 12


@dataclass(frozen=True, kw_only=True)
class Shortage:
    """So much more memory on every GPU of these kinds, and there is a plan."""

    kinds: tuple[str, ...]
    bytes_per_gpu: int
    num_gpus: int
    estimate: Estimate

    @property
    def total_bytes(self) -> int:
        """In all."""
        return self.bytes_per_gpu * self.num_gpus


def no_plan(inputs: Inputs) -> NoPlanError:
    """The error for a search that found nothing, with the smallest missing amount."""
    counts = Counter(inputs.kinds)
    choices: list[tuple[str, ...]] = [(kind,) for kind in counts]
    if len(counts) > 1:
        choices.append(tuple(counts))
    found = [
        shortage for kinds in choices if (shortage := _shortage(inputs, kinds, counts)) is not None
    ]
    if not found:
        return _more_than_memory(inputs)
    least = min(found, key=lambda each: (each.total_bytes, each.kinds))
    error = NoPlanError("no plan fits in memory", [_problem(inputs, least)])
    error.missing_bytes = least.total_bytes
    error.bytes_per_gpu = least.bytes_per_gpu
    error.gpu_kinds = least.kinds
    return error


def _problem(inputs: Inputs, least: Shortage) -> Problem:
    gib = 2**30
    ranks = [rank for rank, kind in enumerate(inputs.kinds) if kind in least.kinds]
    capacity = min(inputs.capacities_bytes[rank] for rank in ranks)
    groups = ", ".join(
        f"{layers} layers on {len(team.ranks)} GPUs"
        for layers, team in zip(least.estimate.layers, least.estimate.outline.teams, strict=True)
    )
    more = (
        ""
        if inputs.space.recompute == ("none", "selective", "full")
        else (" Recomputation would need less, but the search space does not have all of it.")
    )
    return Problem(
        where=f"GPU memory of {', '.join(least.kinds)} ({len(ranks)} GPUs, first rank {ranks[0]})",
        found=f"{capacity / gib:.2f} GiB that a plan may fill, after a margin of "
        f"{100 * inputs.memory_margin:.3g} %",
        expected=f"{least.bytes_per_gpu} bytes ({least.bytes_per_gpu / gib:.2f} GiB) more on each, "
        f"{least.total_bytes / gib:.2f} GiB in all; then {groups} would fit",
        remedy="Add GPUs or take larger ones, leave out GPUs that are too small for one layer, "
        f"take a smaller model or a shorter sequence, or lower the margin.{more}",
    )


def _more_than_memory(inputs: Inputs) -> NoPlanError:
    return NoPlanError(
        "no plan",
        [
            Problem(
                where="search space",
                found=f"schedules {', '.join(inputs.space.schedules)} and at most "
                f"{inputs.space.max_groups or inputs.num_layers} groups",
                expected="a space with at least one plan, whatever the memory",
                remedy="Allow more schedules or more groups.",
            )
        ],
    )


def _shortage(inputs: Inputs, kinds: tuple[str, ...], counts: Counter[str]) -> Shortage | None:
    """The least extra memory on every GPU of these kinds; None where it does not help."""
    outlines = _outlines(inputs)
    low, high = 0, 64 * _STEP
    while _fits(inputs, kinds, high, outlines) is None:
        low, high = high, 2 * high
        if high > 2**45:
            return None
    while high - low > _STEP:
        middle = (low + high) // 2
        if _fits(inputs, kinds, middle, outlines) is None:
            low = middle
        else:
            high = middle
    checked = _checked(inputs, kinds, high, outlines)
    if checked is None:
        return None
    return Shortage(
        kinds=kinds,
        bytes_per_gpu=checked[0],
        num_gpus=sum(counts[kind] for kind in kinds),
        estimate=checked[1],
    )


def _outlines(inputs: Inputs) -> list[tuple[Grouping, str, int]]:
    most = min(inputs.space.max_groups or inputs.num_layers, inputs.num_layers)
    groupings = [
        each.grouping for each in candidates(inputs.spec, max_groups=most, limit=_GROUPINGS)
    ]
    return [
        (grouping, schedule, chunks)
        for grouping in groupings
        for schedule in inputs.space.schedules
        for chunks in _CHUNKS[schedule]
    ]


def _more(inputs: Inputs, kinds: tuple[str, ...], extra: int) -> Inputs:
    capacities = tuple(
        capacity + (extra if kind in kinds else 0)
        for capacity, kind in zip(inputs.capacities_bytes, inputs.kinds, strict=True)
    )
    return replace(inputs, capacities_bytes=capacities)


def _fits(
    inputs: Inputs, kinds: tuple[str, ...], extra: int, outlines: list[tuple[Grouping, str, int]]
) -> Estimate | None:
    """An estimate that fits in closed form with so much more memory."""
    richer = _more(inputs, kinds, extra)
    estimator, teams = Estimator(richer), Teams(richer)
    for grouping, schedule, chunks in outlines:
        members = tuple(teams.of(group) for group in grouping)
        outline = Outline(
            teams=members,
            levels=(1,) * len(members),
            schedule=schedule,
            num_chunks=min(chunks, inputs.num_layers),
        )
        found = estimator.best(outline)
        if found:
            return found[0]
    return None


def _checked(
    inputs: Inputs, kinds: tuple[str, ...], extra: int, outlines: list[tuple[Grouping, str, int]]
) -> tuple[int, Estimate] | None:
    """Ask the simulator, and add what it finds missing."""
    for _ in range(_ROUNDS_OF_CHECKS):
        richer = _more(inputs, kinds, extra)
        estimate = _fits(inputs, kinds, extra, outlines)
        if estimate is not None:
            verdict = Judge(richer, Estimator(richer)).judge(estimate)
            if verdict is not None and verdict.fits:
                return extra, estimate
            if verdict is not None:
                extra += max(verdict.overflow_bytes)
        extra += _STEP
    return None
