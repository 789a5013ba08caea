"""Baseline `stock`: the best layouts of stock Megatron, as plans.

As a plan a layout is executed by this project's runtime and costed so; what stock Megatron itself
takes says `stock_best`.
"""

from collections.abc import Sequence

from zorse_megatron.planner.baselines.stock_best import MOST_GPUS, StockLayout, StockSearches
from zorse_megatron.planner.closed_form.batch_split import ReplicaShare
from zorse_megatron.planner.closed_form.device_groups import DeviceGroup
from zorse_megatron.planner.closed_form.stage import MemorySettings
from zorse_megatron.planner.evaluate.evaluator import Evaluation, Evaluator
from zorse_megatron.planner.inputs.search_inputs import Inputs
from zorse_megatron.planner.plans.builder import chunks_of, offload_setting, recompute_setting
from zorse_megatron.schema.plan.plan import Group, Plan, Replica, Schedule


def stock_layouts(inputs: Inputs) -> tuple[StockLayout, ...]:
    """Stock's layouts on all GPUs that fit, fastest first; none are looked for on too many."""
    searches = StockSearches(inputs)
    return searches.on(searches.everything) if inputs.world_size <= MOST_GPUS else ()


def stock_plans(evaluator: Evaluator, layouts: Sequence[StockLayout]) -> list[Evaluation]:
    """Evaluations of layouts on all GPUs, in their order; this runtime may prefer another one.

    This runtime's transfers are under way while it computes, which takes memory for a few more
    activations: a layout that fills a GPU under unmodified Megatron may not fit.
    """
    plans = [layout.plan_on(evaluator.inputs) for layout in layouts]
    return [each for plan in plans if (each := evaluator.evaluate_plan(plan)) is not None]


def even_group(
    device_group: DeviceGroup,
    shares: dict[int, ReplicaShare],
    settings: MemorySettings,
    num_layers: int,
    num_chunks: int = 1,
) -> Group:
    """A group with equal shards."""
    return Group(
        replicas=tuple(
            Replica(
                ranks=(rank,),
                micro_batch_size=shares[rank].micro_batch_size,
                num_microbatches=shares[rank].num_microbatches,
                shard_weight=1.0,
            )
            for rank in device_group.ranks
        ),
        recompute=recompute_setting(settings, num_layers, num_chunks),
        offload=offload_setting(settings),
    )


def whole_plan(
    inputs: Inputs, groups: list[Group], layers: list[int], schedule: str, num_chunks: int
) -> Plan:
    """Groups in model order as a plan."""
    return Plan(
        schema_version=1,
        global_batch_size=inputs.global_batch_size,
        model=inputs.model,
        groups=tuple(groups),
        chunks=chunks_of(layers, num_chunks),
        schedule=Schedule(name=schedule),  # type: ignore[arg-type]
        cluster=inputs.cluster,
    )
