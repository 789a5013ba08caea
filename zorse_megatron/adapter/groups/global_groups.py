"""Fills Megatron's global `parallel_state` from a plan.

Parts of stock Megatron read these globals although a collection was passed (checkpointing,
samplers, `get_batch`). Upstream has no way to set most of them, so the private names are set here,
after checking that each exists.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist
from megatron.core import parallel_state
from megatron.training import get_args

from zorse_megatron.adapter.groups.process_groups import PlanGroups
from zorse_megatron.errors import Problem, SeamError

_ALONE = (
    "_CONTEXT_PARALLEL_GROUP",
    "_GTP_WEIGHT_REMAT_GROUP",
    "_EXPERT_GTP_WEIGHT_REMAT_GROUP",
    "_EXPERT_MODEL_PARALLEL_GROUP",
)
_SET = (
    "_TENSOR_MODEL_PARALLEL_GROUP",
    "_TENSOR_AND_CONTEXT_PARALLEL_GROUP",
    "_EXPERT_TENSOR_PARALLEL_GROUP",
    "_EXPERT_TENSOR_AND_MODEL_PARALLEL_GROUP",
)
_GROUP = (
    "_DATA_PARALLEL_GROUP",
    "_DATA_PARALLEL_GROUP_WITH_CP",
    "_DATA_PARALLEL_GROUP_WITH_GTP_REMAT",
    "_DATA_PARALLEL_GROUP_WITH_CP_WITH_GTP_REMAT",
    "_INTRA_PARTIAL_DATA_PARALLEL_GROUP_WITH_CP",
    "_INTRA_PARTIAL_DATA_PARALLEL_GROUP_WITH_CP_WITH_GTP_REMAT",
    "_EXPERT_DATA_PARALLEL_GROUP",
    "_EXPERT_DATA_PARALLEL_GROUP_WITH_GTP_REMAT",
    "_INTRA_PARTIAL_EXPERT_DATA_PARALLEL_GROUP",
    "_INTRA_PARTIAL_EXPERT_DATA_PARALLEL_GROUP_WITH_GTP_REMAT",
)
_EVERYONE = (
    "_TENSOR_AND_DATA_PARALLEL_GROUP",
    "_TENSOR_AND_DATA_PARALLEL_GROUP_WITH_CP",
)
_WORLD = (
    "_MODEL_PARALLEL_GROUP",
    "_EXPERT_TENSOR_MODEL_PIPELINE_PARALLEL_GROUP",
    "_EXPERT_TENSOR_MODEL_PIPELINE_PARALLEL_GROUP_WITH_EGTP",
    "_INTRA_DISTRIBUTED_OPTIMIZER_INSTANCE_GROUP",
)


def fill(groups: PlanGroups, *, rank: int) -> None:
    """Set the globals for one rank. Raises SeamError naming every name that is missing.

    The data-parallel *size* reads 1, because stock uses it in batch arithmetic only (micro-batches
    per step, consumed samples), and a plan takes one global batch per step whatever the group.
    The data-parallel *rank* and *group* are the plan's.
    """
    group_ranks = dist.get_process_group_ranks(groups.group)
    values: dict[str, Any] = dict.fromkeys(_ALONE, groups.alone)
    values |= dict.fromkeys(_SET, groups.set)
    values |= dict.fromkeys(_GROUP, groups.group)
    values |= dict.fromkeys(_EVERYONE, groups.everyone)
    values |= dict.fromkeys(_WORLD, groups.world)
    values |= {
        "_PIPELINE_MODEL_PARALLEL_GROUP": groups.position,
        "_PIPELINE_GLOBAL_RANKS": None,
        "_global_process_group_list": [None, groups.group, groups.alone],
        "_MPU_PIPELINE_MODEL_PARALLEL_RANK": groups.stage,
        "_MPU_PIPELINE_MODEL_PARALLEL_WORLD_SIZE": groups.num_stages,
        "_MPU_DATA_PARALLEL_WORLD_SIZE": 1,
        "_DATA_PARALLEL_GLOBAL_RANKS": group_ranks,
        "_DATA_PARALLEL_GLOBAL_RANKS_WITH_CP": group_ranks,
        "_TENSOR_MODEL_PARALLEL_GLOBAL_RANKS": dist.get_process_group_ranks(groups.set),
        "_CONTEXT_PARALLEL_GLOBAL_RANKS": [rank],
        "_EXPERT_MODEL_PARALLEL_RANKS": [rank],
        "_EMBEDDING_GROUP": None,
        "_POSITION_EMBEDDING_GROUP": None,
    }
    missing = [name for name in values if not hasattr(parallel_state, name)]
    if missing:
        raise SeamError(
            "Megatron's parallel state has changed",
            [
                Problem(
                    where=f"megatron.core.parallel_state.{name}",
                    found="no such name",
                    expected="a module variable that a plan sets",
                    remedy="Install a megatron-core version that zorse-megatron knows.",
                )
                for name in missing
            ],
        )
    for name, value in values.items():
        setattr(parallel_state, name, value)
    parallel_state._set_global_memory_buffer()


@contextmanager
def one_data_parallel_rank() -> Iterator[None]:
    """Within the block, stock sees rank 0 of 1 in data parallelism: the global sample order."""
    with presented(parallel_state, "_MPU_DATA_PARALLEL_RANK", 0):
        yield


@contextmanager
def one_rank_alone(alone: dist.ProcessGroup) -> Iterator[None]:
    """Within the block, stock sees this rank as a tensor-parallel set of its own."""
    args, ranks = get_args(), dist.get_process_group_ranks(alone)
    with (
        presented(parallel_state, "_TENSOR_MODEL_PARALLEL_GROUP", alone),
        presented(parallel_state, "_TENSOR_AND_CONTEXT_PARALLEL_GROUP", alone),
        presented(parallel_state, "_TENSOR_MODEL_PARALLEL_GLOBAL_RANKS", ranks),
        presented(args, "tensor_model_parallel_size", 1),
        presented(args, "sequence_parallel", False),
    ):
        yield


@contextmanager
def first_stage() -> Iterator[None]:
    """Within the block, stock sees this rank on the first pipeline stage."""
    with presented(parallel_state, "_MPU_PIPELINE_MODEL_PARALLEL_RANK", 0):
        yield


@contextmanager
def presented(owner: Any, name: str, value: Any) -> Iterator[None]:
    """Within the block, whoever reads `owner.name` finds `value`."""
    before = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before)
