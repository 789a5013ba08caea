"""What stock takes for the pipeline's stages: the groups, or the chunks while one is at work.

Stock asks the parallel state where it is in the pipeline, and scripts also make a model config from
the arguments whenever they need one (upstream's `get_batch` does for every micro-batch). So both
must say the same at any time.
"""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass

from megatron.core import parallel_state
from megatron.training import get_args

from zorse_megatron.adapter.groups.global_groups import presented
from zorse_megatron.adapter.groups.process_groups import PipelinePosition, stages_of
from zorse_megatron.flags.conditions import layout, layout_of
from zorse_megatron.schema.plan.plan import Plan


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
        # many for each stage, and by what comes out; its default is the degree of this rank's set.
        args.expert_tensor_parallel_size = 1

    def at_chunk(self, chunk: int) -> AbstractContextManager[None]:
        """Within the block, stock sees this rank on the pipeline stage that is the chunk."""
        # With one chunk per group they are the same stages.
        return nullcontext() if self.num_chunks == self.num_groups else self._show_chunk(chunk)

    @contextmanager
    def _show_chunk(self, chunk: int) -> Iterator[None]:
        args, position = get_args(), PipelinePosition(chunk, self.num_chunks)
        with (
            presented(parallel_state, "_MPU_PIPELINE_MODEL_PARALLEL_RANK", chunk),
            presented(parallel_state, "_MPU_PIPELINE_MODEL_PARALLEL_WORLD_SIZE", self.num_chunks),
            presented(parallel_state, "_PIPELINE_MODEL_PARALLEL_GROUP", position),
            presented(args, "pipeline_model_parallel_size", self.num_chunks),
            presented(args, "pipeline_model_parallel_layout", self.chunk_layout),
        ):
            yield


def stock_stages_of(plan: Plan) -> StockStages:
    """The stages of a plan; which group is which stage says `process_groups.stages_of`."""
    stage_of, layers = stages_of(plan), [0] * len(plan.groups)
    for chunk in plan.chunks:
        layers[stage_of[chunk.group]] += chunk.layers[1] - chunk.layers[0]
    return StockStages(
        num_groups=len(plan.groups),
        num_chunks=len(plan.chunks),
        group_layout=layout(layers),
        chunk_layout=layout_of(plan),
    )
