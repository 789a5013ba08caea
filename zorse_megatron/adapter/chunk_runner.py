"""What the actions of a list mean for a Megatron model: stock's own forward and backward steps."""

import contextlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.pipeline_parallel.schedules import (
    backward_step,
    deallocate_output_tensor,
    forward_step,
)
from megatron.core.process_groups_config import ProcessGroupCollection

from zorse_megatron.adapter.loss_report import with_token_counts
from zorse_megatron.adapter.tied_embeddings import TiedEmbedding
from zorse_megatron.schedules.samples import MicroBatch


@dataclass(kw_only=True)
class StepInputs:
    """What `train_step` and `evaluate` hand to the schedule, for one step."""

    forward_step_func: Callable[..., Any]
    data_iterator: Iterator[Any] | None
    model: Any
    config: Any
    forward_only: bool
    collect_non_loss_data: bool
    first_val_step: bool | None


@dataclass(kw_only=True)
class MegatronChunkRunner:
    """Runs one chunk of a Megatron model on one rank, through one step.

    Results are in `losses`: one entry per micro-batch, as stock's schedules return them.
    """

    inputs: StepInputs
    collection: ProcessGroupCollection
    num_micro_batches: int
    is_last_chunk: bool
    tied: TiedEmbedding | None
    stock_step: Callable[[], Any] | None = None
    losses: list[Any] = field(default_factory=list)
    step_result: Any = None

    def __post_init__(self) -> None:
        self.saved: dict[int, tuple[Any, torch.Tensor]] = {}
        self.num_tokens = torch.zeros([], dtype=torch.int, device="cuda")
        self.backwards_left = self.num_micro_batches
        self.without_sync: AbstractContextManager[Any] | None = None

    def forward(
        self, chunk: int, micro_batch: MicroBatch, activation: torch.Tensor | None
    ) -> torch.Tensor | None:
        """See `runtime.executor.ChunkRunner`; stock's `schedules.forward_step`."""
        inputs = self.inputs
        if not inputs.forward_only:
            self._hold_back_gradient_sync()
        if activation is not None:
            activation.requires_grad_(not inputs.forward_only)
        first = micro_batch.index == 0
        output, num_tokens = forward_step(
            with_token_counts(inputs.forward_step_func)
            if self.is_last_chunk
            else inputs.forward_step_func,
            inputs.data_iterator,
            inputs.model,
            self.num_micro_batches,
            activation,
            self.losses,
            inputs.config,
            self.collection.cp.size(),
            inputs.collect_non_loss_data,
            is_first_microbatch=first and (inputs.first_val_step in (None, True)),
            current_microbatch=micro_batch.index,
            is_last_stage=self.is_last_chunk,
        )
        self.num_tokens += num_tokens.to(self.num_tokens.device)
        if inputs.forward_only:
            return None if self.is_last_chunk else output.detach()
        self.saved[micro_batch.index] = (activation, output)
        if self.is_last_chunk:
            return None
        # The alias keeps the data until it has been sent; stock's deallocation then only leaves
        # the graph behind.
        alias = output.detach()
        deallocate_output_tensor(output, inputs.config.deallocate_pipeline_outputs)
        return alias

    def backward(
        self, chunk: int, micro_batch: MicroBatch, gradient: torch.Tensor | None
    ) -> torch.Tensor | None:
        """See `runtime.executor.ChunkRunner`; stock's `schedules.backward_step`."""
        activation, output = self.saved.pop(micro_batch.index)
        self.backwards_left -= 1
        if self.backwards_left == 0:
            self._let_gradients_sync()
        return backward_step(activation, output, gradient, self.inputs.config)

    def reduce(self, chunk: int) -> None:
        """Sum gradients over the group: the DDP wrapper's reduce-scatter into uneven shards.

        Stock's `finalize_model_grads`, without the number of tokens: stock would broadcast it
        along a pipeline group that a plan does not have (see `scale`).
        """
        self._let_gradients_sync()
        self.inputs.config.finalize_model_grads_func(
            [self.inputs.model], None, pg_collection=self.collection
        )

    def tie(self) -> None:
        """Sum the tied embedding's gradient over the first and the last chunk's group."""
        assert self.tied is not None
        self.tied.reduce()

    def scale(self) -> None:
        """Make the gradients those of the mean loss over all tokens of the global batch.

        Only ranks of the last chunk have counted tokens, each its own, so the sum over the world
        is the number of tokens of the global batch whatever the split.
        """
        dist.all_reduce(self.num_tokens, group=self.collection.mp)
        self.inputs.model.scale_gradients(1.0 / torch.clamp(self.num_tokens, min=1))

    def step(self) -> None:
        """Stock's optimizer step, without the gather of parameters that follows it."""
        assert self.stock_step is not None
        self.step_result = self.stock_step()

    def gather(self, chunk: int) -> None:
        """Make the parameters whole again, unless the step was skipped on all ranks."""
        if self.step_result[0]:
            self.inputs.model.start_param_sync()

    def _hold_back_gradient_sync(self) -> None:
        if self.without_sync is None and self.backwards_left:
            no_sync = self.inputs.config.no_sync_func or contextlib.nullcontext
            self.without_sync = no_sync()
            self.without_sync.__enter__()

    def _let_gradients_sync(self) -> None:
        if self.without_sync is not None:
            self.without_sync.__exit__(None, None, None)
            self.without_sync = None
