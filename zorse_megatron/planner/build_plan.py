"""From an estimate to a plan: exact micro-batches, shard weights, settings."""

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from zorse_megatron.costs.topology import Topology
from zorse_megatron.plan.plan import (
    Chunk,
    ExpertParallel,
    Group,
    Offload,
    Plan,
    Recompute,
    Replica,
    Schedule,
)
from zorse_megatron.planner.closed_form.candidate import Estimate, layers_of_chunks
from zorse_megatron.planner.closed_form.communication import in_two_levels
from zorse_megatron.planner.closed_form.device_groups import (
    BatchSplit,
    ClassSettings,
    MemorySettings,
    ReplicaClass,
    Stage,
    best_split,
)
from zorse_megatron.planner.closed_form.estimator import Estimator
from zorse_megatron.planner.closed_form.stage_costs import StageCost
from zorse_megatron.planner.closed_form.stage_memory import water_fill
from zorse_megatron.planner.orders import with_limits, with_times

_WEIGHT_UNIT_BYTES = 1_000_000  # whole megabytes: short numbers in the file
_MANY_UNITS = 100  # where shares are smaller, bytes


class Builder:
    """Makes plans of estimates."""

    def __init__(self, estimator: Estimator) -> None:
        self.inputs = estimator.inputs
        self.cost_model = estimator.cost_model
        self.communication = estimator.communication
        self._splits: dict[tuple[object, ...], BatchSplit | None] = {}

    def plan(self, estimate: Estimate) -> Plan | None:
        """The plan; None where state does not fit with exact micro-batches."""
        bare = [
            self._bare_group(stage, cost)
            for stage, cost in zip(estimate.stages, estimate.costs, strict=True)
        ]
        groups = []
        for stage, cost, group in zip(estimate.stages, estimate.costs, bare, strict=True):
            weights = self._weights(stage, cost.settings, group)
            if weights is None:
                return None
            replicas = tuple(
                replace(replica, shard_weight=weight)
                for replica, weight in zip(group.replicas, weights, strict=True)
            )
            groups.append(replace(group, replicas=replicas))
        plan = Plan(
            schema_version=2,
            global_batch_size=self.inputs.global_batch_size,
            model=self.inputs.model,
            groups=tuple(groups),
            chunks=chunks_of(estimate.layers, estimate.candidate.num_chunks),
            schedule=Schedule(name=estimate.candidate.schedule),  # type: ignore[arg-type]
            cluster=self.inputs.cluster,
        )
        plan = with_regions(plan, self.inputs.spec)
        is_hierarchical = self.communication.is_hierarchical
        stages = enumerate(estimate.stages)
        levels = [number for number, stage in stages if is_hierarchical(stage.device_group)]
        members = self.inputs.members
        plan = in_two_levels(members.expanded(plan), levels)
        if plan.schedule.name == "breadth_first":  # its order is fixed
            return plan
        plan = with_times(members.base, plan)
        if not any(estimate.extras):
            return plan
        return with_limits(plan, estimate.extras)

    def _bare_group(self, stage: Stage, cost: StageCost) -> Group:
        shares = self._split(stage, cost)
        said = [_said(stage, own) for own in cost.settings]
        # What all replicas do is said once.
        of_group = said[0] if len(set(cost.settings)) == 1 else {}
        classes = zip(stage.device_group.gpu_classes, shares, said, strict=True)
        replicas = [
            Replica(
                ranks=(rank,),
                micro_batch_size=share.micro_batch_size,
                num_microbatches=share.num_microbatches,
                shard_weight=1.0,
                **({} if of_group else own),
            )
            for gpu_class, row, own in classes
            for rank, share in zip(gpu_class.ranks, row, strict=True)
        ]
        return Group(
            replicas=tuple(sorted(replicas, key=lambda replica: replica.ranks)),
            **of_group,
            compute_dtype=self.inputs.dtype_of(stage.device_group.ranks),
        )

    def _split(self, stage: Stage, cost: StageCost) -> BatchSplit:
        key = (stage.key, cost.settings)
        if key not in self._splits:
            classes = []
            for index, (gpu_class, most) in enumerate(
                zip(stage.device_group.gpu_classes, stage.sizes, strict=True)
            ):
                times = {}
                for size in self.inputs.space.sizes_to(most):
                    sizes = (*stage.sizes[:index], size, *stage.sizes[index + 1 :])
                    passes = self.cost_model.passes(replace(stage, sizes=sizes), cost.settings)
                    times[size] = passes[index].both_s
                classes.append(ReplicaClass(count=len(gpu_class.ranks), times_s=times))
            self._splits[key] = best_split(self.inputs.global_batch_size, classes)
        split = self._splits[key]
        assert split is not None, "every replica may run micro-batches of one block"
        return split

    def missing_bytes(self, estimate: Estimate) -> tuple[int, ...]:
        """For each group, what its GPUs lack with exact micro-batches; 0 where all fits."""
        found = []
        for stage, cost in zip(estimate.stages, estimate.costs, strict=True):
            free_bytes = self._free_bytes(stage, cost.settings, self._bare_group(stage, cost))
            shared = self.cost_model.memory.shared_bytes(stage, cost.settings[0])
            spread = (shared - sum(max(0.0, free) for free in free_bytes)) / len(free_bytes)
            found.append(math.ceil(max(0.0, -min(free_bytes), spread)))
        return tuple(found)

    def _free_bytes(self, stage: Stage, settings: ClassSettings, group: Group) -> list[float]:
        """What is free on each GPU beside its shard."""
        class_of = {
            rank: (gpu_class, own)
            for gpu_class, own in zip(stage.device_group.gpu_classes, settings, strict=True)
            for rank in gpu_class.ranks
        }
        free_bytes = []
        for replica in group.replicas:
            size, count = replica.micro_batch_size, replica.num_microbatches
            one, own = class_of[replica.ranks[0]]
            free_bytes.append(self.cost_model.memory.gpu_free_bytes(stage, own, size, count, one))
        return free_bytes

    def _weights(
        self, stage: Stage, settings: ClassSettings, group: Group
    ) -> tuple[float, ...] | None:
        """Even where that fits, otherwise by free memory."""
        free_bytes = self._free_bytes(stage, settings, group)
        shared = self.cost_model.memory.shared_bytes(stage, settings[0])
        filled = water_fill(shared, free_bytes)
        if filled is None or min(free_bytes) < 0:
            return None
        if len(set(filled)) == 1:
            return (1.0,) * len(filled)
        unit = _WEIGHT_UNIT_BYTES if max(filled) > _MANY_UNITS * _WEIGHT_UNIT_BYTES else 1
        return tuple(float(int(share / unit)) for share in filled)


def chunks_of(layers: Sequence[int], num_chunks: int) -> tuple[Chunk, ...]:
    """Chunks round robin, each group's layers in `num_chunks` parts (see `layers_of_chunks`)."""
    parts = [
        layers_of_chunks(count, num_chunks, is_last=group == len(layers) - 1)
        for group, count in enumerate(layers)
    ]
    chunks, first = [], 0
    for turn in range(num_chunks):
        for group, row in enumerate(parts):
            if row[turn]:
                chunks.append(Chunk(group=group, layers=(first, first + row[turn])))
                first += row[turn]
    return tuple(chunks)


def _said(stage: Stage, settings: MemorySettings) -> dict[str, Any]:
    """What the plan file says of a GPU class."""
    found = {
        "recompute": recompute_setting(settings, stage.num_layers, stage.num_chunks),
        "offload": offload_setting(settings),
    }
    return {name: value for name, value in found.items() if value is not None}


def recompute_setting(
    settings: MemorySettings, num_layers: int, num_chunks: int
) -> Recompute | None:
    """What the plan file says; None where nothing is recomputed."""
    if not settings.recomputed:
        return None
    if settings.mode != "full" or settings.recomputed >= num_layers:
        return Recompute(mode=settings.mode)
    return Recompute(mode="full", num_layers=-(-settings.recomputed // num_chunks))


def offload_setting(settings: MemorySettings) -> Offload | None:
    """What the plan file says; None where nothing waits in the host."""
    if not settings.offloads_anything:
        return None
    return Offload(
        parameters=settings.offload_parameters,
        optimizer_state=settings.offload_state,
        gradients=settings.offload_gradients,
        activations=settings.offload_activations,
    )


# Regions of replicas, for the plan file, so that samples stay in theirs.


def with_regions(plan: Plan, spec: Topology) -> Plan:
    """The plan with each replica's region, if any group has replicas in several."""

    def region_of(replica: Replica) -> str:
        return spec.node_with(replica.ranks[0]).region

    if all(len({region_of(each) for each in group.replicas}) == 1 for group in plan.groups):
        return plan
    placed = (replace(each, region=region_of(each)) for _, _, each in plan.numbered_replicas())
    return plan.with_replicas(placed)


def sharing_experts(replicas: Sequence[Replica], experts: Sequence[int]) -> Replica:
    """One replica of all these ranks, each with its samples; `experts`: of each rank, in ascending
    order."""
    samples: dict[int, int] = {}
    overlap = False
    for each in replicas:
        shared = each.expert_parallel
        overlap |= shared is not None and shared.overlap
        own = (each.micro_batch_size,) if shared is None else shared.samples
        samples.update(zip(each.ranks, own, strict=True))
    ranks = tuple(sorted(samples))
    return replace(
        min(replicas, key=lambda each: each.ranks),
        ranks=ranks,
        micro_batch_size=sum(samples.values()),
        shard_weight=sum(each.shard_weight for each in replicas),
        expert_parallel=ExpertParallel(
            experts=tuple(experts),
            samples=tuple(samples[rank] for rank in ranks),
            overlap=overlap,
        ),
    )
