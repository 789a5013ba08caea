"""Baseline `zorse-paper`: the planner of the Zorse paper (MLSys 2026), on our cost models.

Groups by SPLIT on the complete graph of GPUs for every k, ordered by descending bandwidth inside;
layers in proportion to the groups' speed; one micro-batch size for all, counts in proportion to
speed; ministages round robin; every layer recomputed; equal shards. Micro-batch size and number of
ministages are enumerated. Boundary activations wait in the host where they do not fit otherwise.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import combinations

from zorse_megatron.planner.baselines.stock import even_group, whole_plan
from zorse_megatron.planner.closed_form.batch_split import Share, WorkerClass, best_split
from zorse_megatron.planner.closed_form.device_groups import Team, Teams
from zorse_megatron.planner.closed_form.estimator import Estimator
from zorse_megatron.planner.closed_form.stage import Job, Place, Settings
from zorse_megatron.planner.evaluate.evaluator import Judge, Verdict, best_first
from zorse_megatron.planner.groupings.gpu_graph import paper_groupings
from zorse_megatron.planner.inputs.search_inputs import Inputs
from zorse_megatron.schema.plan.plan import Plan

_SIMULATED = 5
_TRIED = 12
_SIZES = (1, 2, 4, 8)
_MINISTAGES = (1, 2, 3, 4, 6, 8)


@dataclass(frozen=True, kw_only=True)
class _Candidate:
    estimated_s: float
    plan: Plan


def zorse_paper_plans(inputs: Inputs, judge: Judge, teams: Teams) -> list[Verdict]:
    """Verdicts on the best plans that fit, fastest first."""
    found = sorted(_candidates(inputs, judge.estimator, teams), key=lambda each: each.estimated_s)
    verdicts: list[Verdict] = []
    for candidate in found[:_TRIED]:
        verdict = judge.judge_plan(candidate.plan)
        if verdict is not None and verdict.fits:
            verdicts.append(verdict)
            if len(verdicts) == _SIMULATED:
                break
    return best_first(verdicts)


def _candidates(inputs: Inputs, estimator: Estimator, teams: Teams) -> Iterator[_Candidate]:
    most = min(len(inputs.spec.nodes), inputs.num_layers, inputs.space.max_groups or 64)
    for step in paper_groupings(inputs.spec, most):
        members = [teams.of(group) for group in step.grouping]
        order = sorted(members, key=lambda team: (-_bandwidth(inputs, team), team.ranks))
        for size in _SIZES:
            if inputs.global_batch_size % size:
                continue
            layers = _proportional(inputs.num_layers, [_speed(estimator, t, size) for t in order])
            if layers is None:
                continue
            for ministages in _MINISTAGES:
                if ministages > max(layers):
                    continue
                candidate = _candidate(estimator, order, layers, size=size, ministages=ministages)
                if candidate is not None:
                    yield candidate


def _bandwidth(inputs: Inputs, team: Team) -> float:
    """Mean over pairs of a few of its ranks."""
    pairs = list(combinations(team.ranks[:: max(1, len(team.ranks) // 8)], 2))
    if not pairs:
        return math.inf
    size = 10**8
    return sum(size / inputs.comm.transfer_s(*pair, size) for pair in pairs) / len(pairs)


def _speed(estimator: Estimator, team: Team, size: int) -> float:
    return sum(
        len(cell.ranks) * size / sum(estimator.stages.layer_s(cell.kind, size))
        for cell in team.cells
    )


def _proportional(num_layers: int, speeds: Sequence[float]) -> list[int] | None:
    """Rounded to whole layers by largest remainder, one at least; None with too many groups."""
    if len(speeds) > num_layers:
        return None
    exact = [num_layers * speed / sum(speeds) for speed in speeds]
    layers = [max(1, math.floor(part)) for part in exact]
    while sum(layers) < num_layers:
        layers[max(range(len(layers)), key=lambda i: exact[i] - layers[i])] += 1
    while sum(layers) > num_layers:
        rest = [i for i, count in enumerate(layers) if count > 1]
        layers[min(rest, key=lambda i: exact[i] - layers[i])] -= 1
    return layers


def _candidate(
    estimator: Estimator, order: Sequence[Team], layers: list[int], *, size: int, ministages: int
) -> _Candidate | None:
    stages, inputs, groups = estimator.stages, estimator.inputs, []
    busy_s = fill_s = 0.0
    for at, (team, count) in enumerate(zip(order, layers, strict=True)):
        place = Place(
            is_first=at == 0,
            is_last=at == len(order) - 1,
            window=0.0,
            schedule="breadth_first",
            num_chunks=ministages,
        )
        job = Job(team, count, (size,) * len(team.cells), place)
        full = Settings(mode="full", recomputed=count)
        shares = _shares(inputs, estimator, job, full)
        settings = _fitting(estimator, job, full, shares)
        if shares is None or settings is None:
            return None
        passes = stages.passes(job, settings)
        kinds = zip(team.cells, passes, strict=True)
        busy_s = max(
            busy_s,
            *(shares[rank].num_microbatches * p.both_s for c, p in kinds for rank in c.ranks),
        )
        fill_s += max(each.both_s for each in passes) / job.num_chunks
        group = even_group(team, shares, settings, count, job.num_chunks)
        groups.append(replace(group, compute_dtype=inputs.dtype_of(team.ranks)))
    plan = whole_plan(inputs, groups, layers, "breadth_first", ministages)
    return _Candidate(estimated_s=busy_s + fill_s, plan=plan)


def _shares(
    inputs: Inputs, estimator: Estimator, job: Job, settings: Settings
) -> dict[int, Share] | None:
    passes = estimator.stages.passes(job, settings)
    classes = [
        WorkerClass(count=len(cell.ranks), times_s={each.size: each.both_s})
        for cell, each in zip(job.team.cells, passes, strict=True)
    ]
    split = best_split(inputs.global_batch_size, classes)
    if split is None:
        return None
    rows = zip(job.team.cells, split.shares, strict=True)
    return {rank: one for cell, row in rows for rank, one in zip(cell.ranks, row, strict=True)}


def _fitting(
    estimator: Estimator, job: Job, full: Settings, shares: dict[int, Share] | None
) -> Settings | None:
    """Boundary activations in the host only where they must; None where it does not fit at all."""
    stages, inputs = estimator.stages, estimator.inputs
    tried = [full]
    if inputs.space.offload:
        tried.append(Settings(mode="full", recomputed=job.num_layers, offload_activations=True))
    for settings in tried:
        share = stages.memory.shared_bytes(job, settings) / len(job.team.ranks)
        if shares is not None and all(
            share
            + stages.memory.local_bytes(
                job, settings, shares[rank].micro_batch_size, shares[rank].num_microbatches
            )
            <= cell.capacity_bytes
            for cell in job.team.cells
            for rank in cell.ranks
        ):
            return settings
    return None
