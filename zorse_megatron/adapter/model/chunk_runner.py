"""What the actions of a list mean for a Megatron model: stock's own forward and backward steps."""

import contextlib
import copy
import itertools
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

import torch
from megatron.core.pipeline_parallel.schedules import (
    backward_step,
    deallocate_output_tensor,
    forward_step,
)
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.utils import get_model_config
from megatron.training import get_args

from zorse_megatron.adapter.data_parallel.chunk_shards import wait_for_parameters
from zorse_megatron.adapter.data_parallel.ddp import NotedNorms
from zorse_megatron.adapter.groups.global_groups import StockStages, presented
from zorse_megatron.adapter.groups.process_groups import at_chunk
from zorse_megatron.adapter.loss import with_token_counts
from zorse_megatron.adapter.memory import SavedActivations
from zorse_megatron.adapter.model.experts import ExpertLoads, scale_router_losses
from zorse_megatron.adapter.model.weight_gradients import WeightGradients
from zorse_megatron.adapter.rerun_votes import RerunVotes
from zorse_megatron.adapter.samples import PackedLayout
from zorse_megatron.adapter.step_sums import StepSums
from zorse_megatron.adapter.tied_embeddings import TiedEmbedding
from zorse_megatron.runtime.mailbox import TpRank
from zorse_megatron.runtime.offload import ActivationOffload, GradientsInHost
from zorse_megatron.schedule.actions import Action, Kind
from zorse_megatron.schedule.samples import MicroBatch
from zorse_megatron.schedule.transfer_windows import leaving_activations

# What a step is given: the script's forward step, the models, and the samples of each chunk.


@dataclass(kw_only=True)
class StepInputs:
    """What `train_step` and `evaluate` hand to the schedule, for one step."""

    forward_step_func: Callable[..., Any]
    data_iterators: Mapping[int, Iterator[Any] | None]
    """Chunk -> where its micro-batches come from."""
    models: Mapping[int, Any]
    """Chunk -> the wrapped model."""
    config: Any
    forward_only: bool
    collect_non_loss_data: bool
    first_val_step: bool | None
    are_packed: bool = False
    """Whether the samples of a micro-batch are one long sequence."""


def iterator_per_chunk(
    iterator: Iterator[Any] | None, chunks: tuple[int, ...], readers: Container[int]
) -> dict[int, Iterator[Any] | None]:
    """Let each chunk of `readers` that a rank holds read the same micro-batches."""
    mine = [chunk for chunk in chunks if chunk in readers]
    if iterator is None or len(mine) < 2:
        return dict.fromkeys(chunks, iterator)
    # Not the iterator itself: stock's has no __iter__ that tee could call.
    copies = itertools.tee((next(iterator) for _ in itertools.count()), len(mine))
    # Scripts change a batch to what its stage needs.
    own = {chunk: map(copy.copy, each) for chunk, each in zip(mine, copies, strict=True)}
    return {**dict.fromkeys(chunks), **own}


@dataclass(kw_only=True)
class MegatronChunkRunner:
    """Runs the chunks of a Megatron model that one rank holds, through one step.

    Results are in `losses`: one entry per micro-batch, as stock's schedules return them.
    """

    inputs: StepInputs
    collection: ProcessGroupCollection
    num_micro_batches: int
    stages: StockStages
    tied: TiedEmbedding | None
    loss_divisor: float = 1.0
    """Of the loss before its backward, made up for by `scale`."""
    activations: ActivationOffload | None = None
    """Where activations wait, if the group offloads them."""
    kept: SavedActivations | None = None
    """Counts what forwards keep, if asked to."""
    weight_gradients: WeightGradients | None = None
    """Those that wait for their own action, if the group splits backwards."""
    place: TpRank | None = None
    """In this rank's tensor-parallel group."""
    are_halved: bool = False
    """Whether layers have samples in halves (`overlapped_layer`)."""
    computations: Sequence[Action] = ()
    """The list's forwards and backwards."""
    optimizer: Any = None
    votes: RerunVotes = field(default_factory=RerunVotes)
    """On running the step again."""
    loads: ExpertLoads | None = None
    """Of a mixture of experts."""
    stock_step: Callable[[], Any] | None = None
    losses: list[Any] = field(default_factory=list)
    step_result: Any = None

    def __post_init__(self) -> None:
        self.saved: dict[tuple[int, int], tuple[Any, torch.Tensor]] = {}
        self.num_tokens = torch.zeros([], dtype=torch.int, device="cuda")
        self.backwards_left = dict.fromkeys(self.inputs.models, self.num_micro_batches)
        self.without_sync: dict[int, AbstractContextManager[Any]] = {}
        self.reducing: list[int] = []
        """Chunks whose gradients are on their way, in list order."""
        self.leaving: GradientsInHost | None = None
        """Gradients that are on their way to the host."""
        is_cut = self.inputs.config.sequence_parallel and self.collection.tp.size() > 1
        self.packed = (
            PackedLayout(tp_group=self.collection.tp if is_cut else None)
            if self.inputs.are_packed
            else None
        )
        loads = None if self.inputs.forward_only else self.loads
        self.in_order = None if loads is None else loads.in_order
        if self.in_order is not None:
            self.in_order.begin_step()
        self.num_computed = 0
        self.leaving_activations = leaving_activations(self.computations)
        """Forwards, if activations are offloaded."""

    def begin(self) -> None:
        """See `runtime.executor.ChunkRunner`; brings back what the computation after it needs.

        Copies come after all that the stream waits for so far, so not after what is received.
        """
        if self.activations is None or self.inputs.forward_only:
            return
        self.num_computed += 1
        following = next(iter(self.computations[self.num_computed :][:1]), None)
        if following is not None and following.kind is Kind.BACKWARD:
            self.activations.start_back(_key(following))

    def forward(
        self, chunk: int, micro_batch: MicroBatch, activation: torch.Tensor | None
    ) -> torch.Tensor | None:
        """See `runtime.executor.ChunkRunner`; stock's `forward_step`."""
        inputs, is_last = self.inputs, chunk == self.stages.num_chunks - 1
        if not inputs.forward_only:
            self._hold_back_gradient_sync(chunk)
        activation = self._as_layers_take(activation)
        if activation is not None:
            activation.requires_grad_(not inputs.forward_only)
        if self.in_order is not None:
            self.in_order.enter(chunk, micro_batch)
        first = micro_batch.index == 0
        step = inputs.forward_step_func
        with (
            self.stages.at_chunk(chunk),
            self._told_size(micro_batch),
            self._offloading(chunk, micro_batch),
        ):
            output, num_tokens = forward_step(
                with_token_counts(step, self.loss_divisor) if is_last else step,
                inputs.data_iterators[chunk],
                inputs.models[chunk],
                self.num_micro_batches,
                activation,
                self.losses,
                inputs.config,
                self.collection.cp.size(),
                inputs.collect_non_loss_data,
                is_first_microbatch=first and (inputs.first_val_step in (None, True)),
                current_microbatch=micro_batch.index,
                is_last_stage=is_last,
            )
            if self.loads is not None:
                scale_router_losses(self.loss_divisor)
            if self.activations is not None and not is_last:
                self.activations.hand_on(output)
        if self.in_order is not None:
            self.in_order.tell(chunk, micro_batch)
        # Before the last chunk it is a zero on the host, and the copy of that would be waited for.
        if is_last and (self.place is None or self.place.index == 0):
            self.num_tokens += num_tokens.to(self.num_tokens.device)
        if not inputs.forward_only:
            self.saved[chunk, micro_batch.index] = (activation, output)
            if activation is not None:
                self._let_go_of_copied(activation)
        if is_last:
            return None
        # The alias keeps the data until it has been used; stock's deallocation then only leaves
        # the graph behind.
        alias = self._as_sent(output.detach(), micro_batch)
        if not inputs.forward_only:
            deallocate_output_tensor(output, inputs.config.deallocate_pipeline_outputs)
        return alias

    def backward(
        self, chunk: int, micro_batch: MicroBatch, gradient: torch.Tensor | None
    ) -> torch.Tensor | None:
        """See `runtime.executor.ChunkRunner`; stock's `backward_step`."""
        activation, output = self.saved.pop((chunk, micro_batch.index))
        self.backwards_left[chunk] -= 1
        if self.backwards_left[chunk] == 0:
            self._let_gradients_sync(chunk)
        shards = self.inputs.models[chunk].shards
        if shards is not None:
            shards.open_gradients()
            shards.wait_until_unsharded()
        if self.activations is not None:
            self.activations.wait_until_back((chunk, micro_batch.index))
        if self.in_order is not None:
            self.in_order.wait_for_earlier(chunk, micro_batch)
        # Counts what is computed again.
        counting = contextlib.nullcontext() if self.kept is None else self.kept.counting()
        gradient = self._as_layers_take(gradient)
        with counting, self._delaying(chunk, micro_batch):
            given = backward_step(activation, output, gradient, self.inputs.config)
        return self._as_sent(given, micro_batch)

    def _let_go_of_copied(self, activation: torch.Tensor) -> None:
        """Of what a chunk has been sent, where its layers have copies of the halves; its gradient
        is all that the backward asks of it."""
        if self.are_halved:
            activation.untyped_storage().resize_(0)
        if self.kept is not None and self.activations is None:
            self.kept.hold(activation)

    def _as_layers_take(self, sent: torch.Tensor | None) -> torch.Tensor | None:
        """Packed samples are one sequence to a layer; without any there is nothing to pack."""
        if sent is None or self.packed is None or not sent.shape[1]:
            return sent
        return self.packed.one_sequence(sent)

    def _as_sent(self, own: torch.Tensor | None, micro_batch: MicroBatch) -> torch.Tensor | None:
        """Packed samples are sent like others, so that they can be cut apart."""
        if own is None or self.packed is None or not own.shape[1]:
            return own
        return self.packed.by_samples(own, micro_batch.size)

    def weight_gradient(self, chunk: int, micro_batch: MicroBatch) -> None:
        """See `runtime.executor.ChunkRunner`."""
        assert self.weight_gradients is not None
        self.weight_gradients.compute((chunk, micro_batch.index))

    def reduce(self, chunk: int) -> None:
        """Sum gradients over the group: the DDP wrapper's reduce-scatter into uneven shards.

        This only starts the sum; whatever needs it next waits for it.
        """
        model = self.inputs.models[chunk]
        if model.shards is None:
            self._let_gradients_sync(chunk)
        if model.reduces_beside:
            # At most two chunks have unsharded gradients, or copies of them that are exchanged: the
            # one before must have left. Not sooner, as what a rank holds would hang on the network.
            self._finish_reductions()
        model.begin_grad_sync()
        self.reducing.append(chunk)

    def tie(self) -> None:
        """Sum the tied embedding's gradient over the first and the last chunk's group."""
        assert self.tied is not None
        self._finish_reductions()
        self.tied.reduce()

    def scale(self) -> None:
        """Let all ranks know what makes gradients those of the mean loss over all tokens of the
        global batch, and their norm; the step multiplies them.

        Only ranks of the last chunk have counted tokens, each replica its own on one of its ranks,
        so the sum over the world is the number of tokens of the global batch whatever the split.
        """
        self._finish_reductions()
        self._let_gradients_go()
        models = self.inputs.models.values()
        wait_for_parameters(models)  # without micro-batches, nothing has
        noted = NotedNorms(group for model in models for group in model.bucket_groups)
        sums = StepSums()
        tokens = sums.add(self.num_tokens)
        self.votes.cast(sums, noted, self.num_tokens.device)
        gradients = sums.add(self.optimizer.factors.read())
        loads = None if self.loads is None else sums.add(self.loads.take())
        sums.reduce(self.collection.intra_dist_opt)
        self.num_tokens.copy_(tokens.on_device[0])
        factor = self.loss_divisor / torch.clamp(self.num_tokens, min=1)
        self.optimizer.factors.know(gradients, factor)
        if self.loads is not None and loads is not None:
            self.loads.give(loads.on_device)

    def norm(self) -> None:
        """Stock's optimizer step, in which ours only decides (`step_with_ready_grads`)."""
        assert self.stock_step is not None
        self.step_result = self.stock_step()
        _, grad_norm, _ = self.step_result
        self.votes.look_after(grad_norm)

    def step(self, chunk: int) -> None:
        """Update this rank's shard of the chunk, unless the step is skipped on all ranks."""
        self.optimizer.step_chunk(self.inputs.models[chunk])

    def unshard(self, chunk: int) -> None:
        """Unshard the parameters.

        A resident chunk's are unsharded again after the step, unless that was skipped on all
        ranks. This only starts the gather; the chunk's computations wait for it, and `scale`.
        """
        model = self.inputs.models[chunk]
        if model.shards is not None:
            model.shards.unshard()
        elif self.step_result[0]:
            model.gathers.start()

    def reshard(self, chunk: int) -> None:
        """Keep the shard of a sharded chunk's parameters only."""
        self.inputs.models[chunk].shards.reshard()

    def fetch(self, chunk: int) -> None:
        """Start to bring the shard of a sharded chunk's parameters back from the host."""
        self.inputs.models[chunk].shards.fetch()

    def offload(self, chunk: int) -> None:
        """Let the shard of a sharded chunk's parameters wait in the host."""
        self.inputs.models[chunk].shards.offload()

    def offload_gradients(self, chunk: int) -> None:
        """Let the shard of a sharded chunk's gradients wait in the host for the step.

        The one before must have left: no more than one is on its way.
        """
        self._let_gradients_go()
        self._finish_reductions()
        self.leaving = self.inputs.models[chunk].shards.gradients_in_host
        self.leaving.send()

    def _let_gradients_go(self) -> None:
        if self.leaving is not None:
            self.leaving.let_go()
        self.leaving = None

    def _delaying(self, chunk: int, micro_batch: MicroBatch) -> AbstractContextManager[None]:
        if self.weight_gradients is None:
            return contextlib.nullcontext()
        return self.weight_gradients.delaying((chunk, micro_batch.index))

    def _told_size(self, micro_batch: MicroBatch) -> AbstractContextManager[None]:
        """The TP group's first rank reads samples; scripts size what the others receive by a
        flag."""
        if self.place is None:
            return contextlib.nullcontext()
        return presented(get_args(), micro_batch_size=micro_batch.size)

    @contextlib.contextmanager
    def _offloading(self, chunk: int, micro_batch: MicroBatch) -> Iterator[None]:
        """Send what this forward keeps to the host, if it is to wait there."""
        away = None if self.inputs.forward_only else self.activations
        key = chunk, micro_batch.index
        leaves = away is not None and key in self.leaving_activations
        keeping: AbstractContextManager[Any] = contextlib.nullcontext()
        if self.kept is not None and not self.inputs.forward_only:
            keeping = self.kept.counting(key if leaves else None)
        elif away is not None and leaves:
            keeping = away.keeping(key)
        with keeping:
            yield
        if away is not None and not leaves:
            away.let_go()

    def _finish_reductions(self) -> None:
        reducing, self.reducing = self.reducing, []
        for chunk in reducing:
            self._finalize(chunk)

    def _finalize(self, chunk: int) -> None:
        """Stock's `finalize_model_grads`, without the number of tokens.

        Stock would broadcast that along a pipeline group that a plan does not have (see `scale`).
        """
        model = self.inputs.models[chunk]
        there = at_chunk(self.collection, chunk, self.stages.num_chunks)
        there.tp = there.cp  # what TP groups hold whole has been summed, see `tp_sums`
        # No rank waits for all others there (--timing-log-level): each comes at a time of its own,
        # while others need what it sends later. The bias of experts follows the loads of the whole
        # step, see `scale`.
        less = {"barrier_with_L1_time": False, "moe_router_enable_expert_bias": False}
        with self.stages.at_chunk(chunk), presented(get_model_config(model), **less):
            self.inputs.config.finalize_model_grads_func([model], None, pg_collection=there)

    def _hold_back_gradient_sync(self, chunk: int) -> None:
        if chunk not in self.without_sync and self.backwards_left[chunk]:
            context = self.inputs.models[chunk].no_sync()
            context.__enter__()
            self.without_sync[chunk] = context

    def _let_gradients_sync(self, chunk: int) -> None:
        if chunk in self.without_sync:
            self.without_sync.pop(chunk).__exit__(None, None, None)


def _key(action: Action) -> tuple[int, int]:
    assert action.chunk is not None and action.micro_batch is not None
    return action.chunk, action.micro_batch
