"""One training run under a plan, on one rank: what the hooks into Megatron share."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.utils import get_model_config
from megatron.training import get_args

from zorse_megatron.adapter.data.sample_readers import SampleKind
from zorse_megatron.adapter.data_parallel.gradient_comm_dtype import comm_dtype_of
from zorse_megatron.adapter.data_parallel.parameter_gathers import wait_for_parameters
from zorse_megatron.adapter.groups.process_groups import (
    PlanGroups,
    collection_of,
    shard_weights_by_group_rank,
)
from zorse_megatron.adapter.groups.stock_stages import stock_stages_of
from zorse_megatron.adapter.loss.loss_report import IdleReplicaLosses, whole_group_losses
from zorse_megatron.adapter.memory.memory_probes import KeptActivations
from zorse_megatron.adapter.memory.session_memory import (
    before_first_step,
    is_parameter,
    watch_logits,
)
from zorse_megatron.adapter.model.chunk_runner import MegatronChunkRunner
from zorse_megatron.adapter.model.step_inputs import StepInputs, iterator_per_chunk
from zorse_megatron.adapter.model.weight_gradients import WeightGradients
from zorse_megatron.adapter.optimizer.shard_update import Update
from zorse_megatron.adapter.parameters.exact_values import start_from_main
from zorse_megatron.adapter.parameters.tied_embeddings import TiedEmbedding
from zorse_megatron.adapter.session_executor import (
    make_executor,
    phase_of,
    rank_device,
    set_place,
    timed,
)
from zorse_megatron.adapter.watching.make_watch import make_watch
from zorse_megatron.flags.computing_flags import is_mixed
from zorse_megatron.rebalance.prepare import Prepared
from zorse_megatron.runtime.activation_offload import ActivationOffload
from zorse_megatron.runtime.course import Course
from zorse_megatron.runtime.device_clock import CudaClock
from zorse_megatron.runtime.executor import Executor
from zorse_megatron.runtime.host_link import HostLink
from zorse_megatron.schedules.actions import COMPUTE, ActionLists
from zorse_megatron.schedules.communicators import Communicator
from zorse_megatron.schedules.list_queries import chunks_left_in_host, released_chunks
from zorse_megatron.schedules.lower import lower_plan
from zorse_megatron.schedules.samples import MicroBatch, replica_micro_batches
from zorse_megatron.schedules.set_parts import has_uneven_parts
from zorse_megatron.schedules.validate import check_executable
from zorse_megatron.schema.plan.memory_settings import settings_of_rank
from zorse_megatron.schema.plan.plan import ComputeDtype, Offload, Plan
from zorse_megatron.schema.plan.rank_axes import holds_equal_parts
from zorse_megatron.schema.status.status import Move
from zorse_megatron.trace import Clock, HostClock, Trace


@dataclass(kw_only=True)
class PlanSession:
    """Executes the plan's lists for Megatron's training loop.

    `forward_backward` takes the place of stock's schedules, `optimizer_step` runs the second half
    of the same list when `train_step` calls the optimizer.
    """

    plan: Plan
    rank: int
    groups: PlanGroups
    tied_embeddings: bool
    sequence_length: int
    samples: SampleKind
    dtypes: tuple[ComputeDtype, ...]
    """Group -> the type that it computes in."""
    timeout: timedelta | None = None
    """Of transfers; None: torch's own."""
    channels: Mapping[Communicator, int] = field(default_factory=dict)
    """Communicator -> what NCCL may use for it."""
    loss_divisor: float = 1.0
    """See the module of that name."""
    update: Update = "auto"
    trace_directory: Path | None = None
    memory_directory: Path | None = None
    memory_limit_bytes: int | None = None
    host_memory_limit_bytes: int | None = None
    enter: Callable[[str], None] | None = None
    """Told in which phase this rank is from now on."""
    make_host_link: Callable[[torch.device], HostLink] = HostLink
    clock: Clock | None = None
    """Of the device; None: CUDA's or the host's."""
    rebalances: bool = False
    """Whether counts of micro-batches follow what ranks take."""
    status_directory: Path | None = None
    may_move: bool = False
    """Whether another plan may be asked for in the directory of the status."""
    moves: tuple[Move, ...] = ()
    """What has been asked for before this plan."""
    tied: TiedEmbedding | None = None
    collection: ProcessGroupCollection = field(init=False)
    training: ActionLists = field(init=False)
    evaluation: ActionLists = field(init=False)

    def __post_init__(self) -> None:
        self.collection = collection_of(self.groups)
        self.training = lower_plan(self.plan, tied=self.tied_embeddings)
        self.evaluation = lower_plan(self.plan, forward_only=True)
        sets = [replica.ranks for group in self.plan.groups for replica in group.replicas]
        check_executable(self.training, sets)
        check_executable(self.evaluation, sets)
        self.stages = stock_stages_of(self.plan)
        self.micro_batches = replica_micro_batches(self.plan, self.rank)
        """As the plan's file has them, and as evaluations run them."""
        self.course = Course(self.micro_batches)
        """Of the training."""
        self.num_done = 0
        """Iterations of this run."""
        self.chunks = self.plan.chunks_of_group(self.plan.group_of_rank(self.rank))
        self.holds_last_chunk = self.num_chunks - 1 in self.chunks
        # Sharded chunks are those that the list gathers before it computes with them.
        self.sharded_chunks = released_chunks(self.training.ranks[self.rank])
        self.chunks_in_host = chunks_left_in_host(self.training.ranks[self.rank])
        """Sharded chunks whose parameters wait in the host when the list begins."""
        self.local_sizes: Any = None
        """`model.local_sizes.LocalSizes` of a rank of a set with unequal parts."""
        self.optimizers: list[Any] = []
        self.settled = False
        self.activations: ActivationOffload | None = None
        self.kept: KeptActivations | None = None
        splits = self.plan.groups[self.plan.group_of_rank(self.rank)].split_backward
        self.weight_gradients = WeightGradients() if splits else None
        self.watches_memory = (self.memory_directory, self.memory_limit_bytes) != (None, None)
        self.offload = settings_of_rank(self.plan, self.rank).offload
        self.host_link = self.make_host_link(rank_device()) if self.offload != Offload() else None
        self.comm_dtype = comm_dtype_of(
            self.plan,
            self.rank,
            sequence_length=self.sequence_length,
            loss_divisor=self.loss_divisor,
        )
        self.place = set_place(self.plan, self.rank, self.groups)
        self.shard_weights = shard_weights_by_group_rank(self.plan, rank=self.rank)
        of_device = CudaClock() if rank_device().type == "cuda" else HostClock()
        self.trace = Trace(num_steps=None if self.trace_directory else 0, clock=of_device)
        self.watch = make_watch(self, self.clock or of_device)
        self.idle_losses = IdleReplicaLosses.of(self.plan, self.rank, self.groups.group)
        self.executor: Executor | None = None
        self.runner: MegatronChunkRunner | None = None
        """Of a training step, from its first forward to its optimizer step."""

    @property
    def num_chunks(self) -> int:
        """Chunks of the whole model."""
        return len(self.plan.chunks)

    @property
    def device(self) -> torch.device:
        """Where this rank computes."""
        return rank_device()

    @property
    def is_mixed(self) -> bool:
        """Whether the plan says in which type groups compute."""
        return is_mixed(self.plan)

    @property
    def readers(self) -> range | tuple[int, int]:
        """The chunks that read samples."""
        last = self.num_chunks - 1
        return range(self.num_chunks) if self.samples.every_chunk_reads else (0, last)

    @property
    def layers(self) -> tuple[tuple[int, int], ...]:
        """[first, stop) of the layers of each chunk that this rank holds."""
        return tuple(self.plan.chunks[chunk].layers for chunk in self.chunks)

    @property
    def last_group_ranks(self) -> list[int]:
        """The ranks that know the loss."""
        return sorted(self.plan.groups[self.plan.chunks[-1].group].ranks)

    def forward_backward(
        self,
        *,
        forward_step_func: Any,
        data_iterator: Any,
        model: Any,
        forward_only: bool = False,
        collect_non_loss_data: bool = False,
        first_val_step: bool | None = None,
        **_unused: Any,
    ) -> list[Any]:
        """Run one step; the counterpart of stock's `forward_backward_func`.

        What stock passes beyond these (sizes, group collection) is in the plan.
        """
        models = model if isinstance(model, list) else [model]
        if isinstance(data_iterator, list):
            (data_iterator,) = data_iterator
        config = get_model_config(models[0])
        chunk_models = dict(zip(self.chunks, models, strict=True))
        executor = self._executor(config, chunk_models)
        with self.before_first_step():
            self._settle(models)
        inputs = StepInputs(
            forward_step_func=forward_step_func,
            data_iterators=iterator_per_chunk(data_iterator, self.chunks, self.readers),
            models=chunk_models,
            config=config,
            forward_only=forward_only,
            collect_non_loss_data=collect_non_loss_data,
            first_val_step=first_val_step,
            are_packed=self.samples.are_packed,
        )
        if not forward_only and self.watch is not None:
            self._rebalance(self.watch.begin(self.num_done))
        lists = self.evaluation if forward_only else self.training
        micro_batches = self.micro_batches if forward_only else self.course.at(self.num_done)
        executor.micro_batches = micro_batches
        runner = self._new_runner(inputs, micro_batches)
        if not forward_only:
            self.runner = runner
        executor.during = phase_of(forward_only=forward_only)
        with timed(config):
            executor.run_until_step(lists.ranks[self.rank], runner)
        if not self.holds_last_chunk or collect_non_loss_data:
            return runner.losses
        losses = self.idle_losses.complete(runner.losses)
        if self.place is not None and self.place.index and not self._has_twins:
            losses = [_without_weight(each) for each in losses]
        if forward_only and self.samples.means_are_averaged:
            return whole_group_losses(losses, self.groups.group)
        return losses

    @property
    def saves_blocks(self) -> bool:
        """Whether parameters are no regular grid of parts for some ranks of the job.

        The copies of a tied embedding are one tensor, so sets of two groups matter, too.
        """
        groups = self.plan.groups
        degrees = {len(replica.ranks) for group in groups for replica in group.replicas}
        return len(degrees) > 1 or any(map(has_uneven_parts, groups))

    @property
    def _has_twins(self) -> bool:
        """Whether the data-parallel group has one rank of each replica."""
        return holds_equal_parts(self.plan.groups[self.plan.group_of_rank(self.rank)])

    def _rebalance(self, prepared: Prepared | None) -> None:
        """From this iteration on, run other counts."""
        if prepared is not None:
            self.training = prepared.lists

    def _new_runner(
        self, inputs: StepInputs, micro_batches: Sequence[MicroBatch]
    ) -> MegatronChunkRunner:
        return MegatronChunkRunner(
            inputs=inputs,
            collection=self.collection,
            num_micro_batches=len(micro_batches),
            stages=self.stages,
            tied=self.tied,
            loss_divisor=self.loss_divisor,
            activations=self.activations,
            kept=self.kept,
            weight_gradients=self.weight_gradients,
            place=self.place,
            optimizers=self.optimizers,
            computations=[a for a in self.training.ranks[self.rank] if a.kind in COMPUTE],
        )

    def before_first_step(self) -> AbstractContextManager[None]:
        """Within the block, this rank may find that the host has too little memory."""
        return before_first_step(self.rank, self.host_link)

    def optimizer_step(self, stock_step: Any) -> Any:
        """Run the rest of the list: the step, by stock's `stock_step`, and the gathers."""
        assert self.runner is not None and self.executor is not None
        self.runner.stock_step = stock_step
        self.executor.run_rest(self.runner)
        result = self.runner.step_result
        self._drop_gradients(self.runner.inputs.models)
        if _reads_parameters_next(get_args()):
            self.wait_for_parameters()
        self.runner = None  # drops this step's graph and losses
        self.num_done += 1
        if self.watch is not None:
            self.watch.end(self.num_done)
        if self.enter is not None:
            self.enter(f"after the step, {self.executor.during}")
        return result

    def wait_for_parameters(self) -> None:
        """Wait for the gathers of the last step, as who reads parameters must."""
        for optimizer in self.optimizers:
            wait_for_parameters(optimizer.model_chunks)

    def _drop_gradients(self, models: Mapping[int, Any]) -> None:
        """Shards of gradients have been used; stock would keep them until the next step."""
        sharded = [model for model in models.values() if model.shards is not None]
        for optimizer in self.optimizers if sharded else ():
            optimizer.zero_grad()
        for model in sharded:
            model.zero_grad_buffer()

    def save_records(self, *, training_ended: bool) -> None:
        """Write what was executed and what memory held, if asked for; the last the session does."""
        self.runner = None  # of a step that failed, which has an iterator
        if self.watch is not None:
            self.watch.reporter.close(ended=training_ended)
        if self.trace_directory is not None:
            self.trace.save(self.trace_directory, rank=self.rank, waits=training_ended)
        if self.memory_directory is not None and self.executor is not None:
            assert self.executor.ledger is not None
            self.executor.ledger.save(self.memory_directory)

    def _executor(self, config: Any, models: Mapping[int, Any]) -> Executor:
        if self.executor is None:
            self.executor = make_executor(self, config, models)
        return self.executor

    def _settle(self, models: list[Any]) -> None:
        """Before the first step, when a checkpoint has been loaded if there is one."""
        if self.settled:
            return
        self.settled = True
        if self.is_mixed:
            start_from_main(models, self.optimizers)
        for model in models:
            if model.parted and not model.shards.releases:
                model.shards.gather()  # a checkpoint has been loaded into what ranks own
        of_models = partial(is_parameter, models)
        if self.offload.activations:
            assert self.host_link is not None
            self.activations = ActivationOffload(link=self.host_link, stays=of_models)
        if self.watches_memory:
            self.kept = KeptActivations(of_models, self.activations)
            watch_logits(models, self.kept)
            if self.weight_gradients is not None:
                self.weight_gradients.kept = self.kept


def _reads_parameters_next(args: Any) -> bool:
    """Whether something other than a forward or a save may read parameters after this step."""
    is_last = args.curr_iteration + 1 >= args.train_iters
    return is_last or args.check_weight_hash_across_dp_replicas_interval is not None


def _without_weight(losses: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The losses of a replica that another rank of its set reports."""
    return {name: torch.zeros_like(value) for name, value in losses.items()}
