"""Fills Megatron's global `parallel_state` from a plan, its pipeline stages among it.

Parts of stock Megatron read these globals although a collection was passed (checkpointing,
samplers, `get_batch`). Upstream has no way to set most of them, so the private names are set here,
after checking that each exists.
"""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
from megatron.core import parallel_state
from megatron.training import get_args

from zorse_megatron.adapter.groups.process_groups import PipelinePosition, PlanGroups, stages_of
from zorse_megatron.errors import Problem, SeamError
from zorse_megatron.flags.conditions import layout, layout_of
from zorse_megatron.plan.plan import Plan

_ALONE = (
    "_CONTEXT_PARALLEL_GROUP",
    "_GTP_WEIGHT_REMAT_GROUP",
    "_EXPERT_GTP_WEIGHT_REMAT_GROUP",
    "_EXPERT_MODEL_PARALLEL_GROUP",
)
_TP = (
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
    values |= dict.fromkeys(_TP, groups.tp_group)
    values |= dict.fromkeys(_GROUP, groups.group)
    values |= dict.fromkeys(_EVERYONE, groups.everyone)
    values |= dict.fromkeys(_WORLD, groups.world)
    values |= {
        "_PIPELINE_MODEL_PARALLEL_GROUP": groups.position,
        "_PIPELINE_GLOBAL_RANKS": None,
        "_global_process_group_list": [None, groups.group, groups.alone],
        "_MPU_PIPELINE_MODEL_PARALLEL_RANK": groups.position.rank(),
        "_MPU_PIPELINE_MODEL_PARALLEL_WORLD_SIZE": groups.position.size(),
        "_MPU_DATA_PARALLEL_WORLD_SIZE": 1,
        "_DATA_PARALLEL_GLOBAL_RANKS": group_ranks,
        "_DATA_PARALLEL_GLOBAL_RANKS_WITH_CP": group_ranks,
        "_TENSOR_MODEL_PARALLEL_GLOBAL_RANKS": dist.get_process_group_ranks(groups.tp_group),
        "_CONTEXT_PARALLEL_GLOBAL_RANKS": [rank],
        "_EXPERT_MODEL_PARALLEL_RANKS": [rank],
        "_EMBEDDING_GROUP": None,
        "_POSITION_EMBEDDING_GROUP": None,
    }
    _refuse_unknown(values)
    for name, value in values.items():
        setattr(parallel_state, name, value)
    parallel_state._set_global_memory_buffer()


def _refuse_unknown(names: Iterable[str]) -> None:
    missing = [name for name in names if not hasattr(parallel_state, name)]
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


@contextmanager
def one_rank_alone(alone: dist.ProcessGroup) -> Iterator[None]:
    """Within the block, stock sees this rank as a tensor-parallel group of its own."""
    args, ranks = get_args(), dist.get_process_group_ranks(alone)
    with (
        presented(
            parallel_state,
            _TENSOR_MODEL_PARALLEL_GROUP=alone,
            _TENSOR_AND_CONTEXT_PARALLEL_GROUP=alone,
            _TENSOR_MODEL_PARALLEL_GLOBAL_RANKS=ranks,
        ),
        presented(args, tensor_model_parallel_size=1, sequence_parallel=False),
    ):
        yield


@contextmanager
def presented(owner: Any, /, **values: Any) -> Iterator[None]:
    """Within the block, whoever reads `owner.name` finds the value given as `name`."""
    before = {name: getattr(owner, name) for name in values}
    try:
        for name, value in values.items():
            setattr(owner, name, value)
        yield
    finally:
        for name, value in before.items():
            setattr(owner, name, value)


# What stock takes for the pipeline's stages: the groups, or the chunks while one is at work.
#
# Stock asks the parallel state where it is in the pipeline, and scripts also make a model config
# from the arguments whenever they need one (upstream's `get_batch` does for every micro-batch). So
# both must say the same at any time.


@dataclass(frozen=True, kw_only=True)
class StockStages:
    """A plan's stages as stock counts them.

    Layouts are as in `--pipeline-model-parallel-layout`; None for a single stage.
    """

    num_groups: int
    num_chunks: int
    group_layout: str | None
    chunk_layout: str | None

    def show_groups(self) -> None:
        """Let the arguments say, from now on, that the groups are the stages."""
        args = get_args()
        args.pipeline_model_parallel_size = self.num_groups
        args.pipeline_model_parallel_layout = self.group_layout
        # Of experts, which there are none of. Stock's report of memory divides all ranks into so
        # many for each stage, and by what comes out; its default is the degree of this rank's TP
        # group.
        args.expert_tensor_parallel_size = 1

    @contextmanager
    def at_chunk(self, chunk: int) -> Iterator[None]:
        """Within the block, stock sees this rank on the pipeline stage that is the chunk."""
        if self.num_chunks == self.num_groups:  # one chunk per group: they are the same stages
            yield
            return
        with (
            presented(
                parallel_state,
                _MPU_PIPELINE_MODEL_PARALLEL_RANK=chunk,
                _MPU_PIPELINE_MODEL_PARALLEL_WORLD_SIZE=self.num_chunks,
                _PIPELINE_MODEL_PARALLEL_GROUP=PipelinePosition(chunk, self.num_chunks),
            ),
            presented(
                get_args(),
                pipeline_model_parallel_size=self.num_chunks,
                pipeline_model_parallel_layout=self.chunk_layout,
            ),
        ):
            yield


def stock_stages_of(plan: Plan) -> StockStages:
    """The stages of a plan; which group is which stage says `process_groups.stages_of`."""
    stage_of, layers = stages_of(plan), [0] * len(plan.groups)
    for chunk in plan.chunks:
        layers[stage_of[chunk.group]] += chunk.num_layers
    return StockStages(
        num_groups=len(plan.groups),
        num_chunks=len(plan.chunks),
        group_layout=layout(layers),
        chunk_layout=layout_of(plan),
    )
