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

from zorse_megatron.planner.baselines.gpu_graph import paper_groupings
from zorse_megatron.planner.baselines.stock import even_group, whole_plan
from zorse_megatron.planner.closed_form.batch_split import ReplicaClass, ReplicaShare, best_split
from zorse_megatron.planner.closed_form.device_groups import DeviceGroup, DeviceGroups
from zorse_megatron.planner.closed_form.estimator import Estimator
from zorse_megatron.planner.closed_form.stage import MemorySettings, Stage, StagePosition
from zorse_megatron.planner.evaluate.evaluator import Evaluation, Evaluator, best_first
from zorse_megatron.planner.inputs.search_inputs import Inputs
from zorse_megatron.schema.plan.plan import Plan

_SIMULATED = 5
_TRIED = 12
_SIZES = (1, 2, 4, 8)
_MINISTAGES = (1, 2, 3, 4, 6, 8)


@dataclass(frozen=True, kw_only=True)
class _EstimatedPlan:
    estimated_s: float
    plan: Plan


def zorse_paper_plans(
    inputs: Inputs, evaluator: Evaluator, device_groups: DeviceGroups
) -> list[Evaluation]:
    """Evaluations of the best plans that fit, fastest first."""
    found = sorted(
        _estimated_plans(inputs, evaluator.estimator, device_groups),
        key=lambda each: each.estimated_s,
    )
    evaluations: list[Evaluation] = []
    for estimated in found[:_TRIED]:
        evaluation = evaluator.evaluate_plan(estimated.plan)
        if evaluation is not None and evaluation.fits:
            evaluations.append(evaluation)
            if len(evaluations) == _SIMULATED:
                break
    return best_first(evaluations)


def _estimated_plans(
    inputs: Inputs, estimator: Estimator, device_groups: DeviceGroups
) -> Iterator[_EstimatedPlan]:
    most = min(len(inputs.spec.nodes), inputs.num_layers, inputs.space.max_groups or 64)
    for step in paper_groupings(inputs.spec, most):
        members = [device_groups.of(group) for group in step.grouping]
        order = sorted(
            members,
            key=lambda device_group: (-_bandwidth(inputs, device_group), device_group.ranks),
        )
        for size in _SIZES:
            if inputs.global_batch_size % size:
                continue
            layers = _proportional(inputs.num_layers, [_speed(estimator, t, size) for t in order])
            if layers is None:
                continue
            for ministages in _MINISTAGES:
                if ministages > max(layers):
                    continue
                estimated = _estimated_plan(
                    estimator, order, layers, size=size, ministages=ministages
                )
                if estimated is not None:
                    yield estimated


def _bandwidth(inputs: Inputs, device_group: DeviceGroup) -> float:
    """Mean over pairs of a few of its ranks."""
    pairs = list(combinations(device_group.ranks[:: max(1, len(device_group.ranks) // 8)], 2))
    if not pairs:
        return math.inf
    size = 10**8
    return sum(size / inputs.comm.transfer_s(*pair, size) for pair in pairs) / len(pairs)


def _speed(estimator: Estimator, device_group: DeviceGroup, size: int) -> float:
    return sum(
        len(gpu_class.ranks) * size / sum(estimator.cost_model.layer_s(gpu_class.kind, size))
        for gpu_class in device_group.gpu_classes
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


def _estimated_plan(
    estimator: Estimator,
    order: Sequence[DeviceGroup],
    layers: list[int],
    *,
    size: int,
    ministages: int,
) -> _EstimatedPlan | None:
    cost_model, inputs, groups = estimator.cost_model, estimator.inputs, []
    busy_s = fill_s = 0.0
    for at, (device_group, count) in enumerate(zip(order, layers, strict=True)):
        position = StagePosition(
            is_first=at == 0,
            is_last=at == len(order) - 1,
            in_flight_limit=0.0,
            schedule="breadth_first",
            num_chunks=ministages,
        )
        stage = Stage(device_group, count, (size,) * len(device_group.gpu_classes), position)
        full = MemorySettings(mode="full", recomputed=count)
        shares = _shares(inputs, estimator, stage, full)
        settings = _fitting(estimator, stage, full, shares)
        if shares is None or settings is None:
            return None
        passes = cost_model.passes(stage, stage.alike(settings))
        kinds = zip(device_group.gpu_classes, passes, strict=True)
        busy_s = max(
            busy_s,
            *(shares[rank].num_microbatches * p.both_s for c, p in kinds for rank in c.ranks),
        )
        fill_s += max(each.both_s for each in passes) / stage.num_chunks
        group = even_group(device_group, shares, settings, count, stage.num_chunks)
        groups.append(replace(group, compute_dtype=inputs.dtype_of(device_group.ranks)))
    plan = whole_plan(inputs, groups, layers, "breadth_first", ministages)
    return _EstimatedPlan(estimated_s=busy_s + fill_s, plan=plan)


def _shares(
    inputs: Inputs, estimator: Estimator, stage: Stage, settings: MemorySettings
) -> dict[int, ReplicaShare] | None:
    passes = estimator.cost_model.passes(stage, stage.alike(settings))
    classes = [
        ReplicaClass(count=len(gpu_class.ranks), times_s={each.size: each.both_s})
        for gpu_class, each in zip(stage.device_group.gpu_classes, passes, strict=True)
    ]
    split = best_split(inputs.global_batch_size, classes)
    if split is None:
        return None
    rows = zip(stage.device_group.gpu_classes, split.shares, strict=True)
    return {
        rank: one for gpu_class, row in rows for rank, one in zip(gpu_class.ranks, row, strict=True)
    }


def _fitting(
    estimator: Estimator, stage: Stage, full: MemorySettings, shares: dict[int, ReplicaShare] | None
) -> MemorySettings | None:
    """Boundary activations in the host only where they must; None where it does not fit at all."""
    cost_model, inputs = estimator.cost_model, estimator.inputs
    tried = [full]
    if inputs.space.offload:
        tried.append(
            MemorySettings(mode="full", recomputed=stage.num_layers, offload_activations=True)
        )
    for settings in tried:
        share = cost_model.memory.shared_bytes(stage, settings) / len(stage.device_group.ranks)
        if shares is not None and all(
            share
            + cost_model.memory.local_bytes(
                stage,
                settings,
                shares[rank].micro_batch_size,
                shares[rank].num_microbatches,
                gpu_class.kind,
            )
            <= gpu_class.capacity_bytes
            for gpu_class in stage.device_group.gpu_classes
            for rank in gpu_class.ranks
        ):
            return settings
    return None
