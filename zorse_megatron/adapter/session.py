"""One training run under a plan, on one rank: what the hooks into Megatron share."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from megatron.core.num_microbatches_calculator import get_current_global_batch_size
from megatron.core.utils import get_model_config
from megatron.training import get_args

from zorse_megatron.adapter.compute_dtype import TORCH_DTYPES, boundary_dtype, start_from_main
from zorse_megatron.adapter.data_parallel.chunk_shards import wait_for_parameters
from zorse_megatron.adapter.loss import IdleReplicaLosses, whole_group_losses
from zorse_megatron.adapter.memory import (
    SavedActivations,
    before_first_step,
    is_parameter,
    make_ledger,
    watch_logits,
)
from zorse_megatron.adapter.model.chunk_runner import (
    MegatronChunkRunner,
    StepInputs,
    iterator_per_chunk,
)
from zorse_megatron.adapter.model.experts import ExpertLoads, LoadsInOrder
from zorse_megatron.adapter.model.forward_overflow import ForwardOverflow
from zorse_megatron.adapter.model.weight_gradients import WeightGradients
from zorse_megatron.adapter.plan_run import PlanRun
from zorse_megatron.adapter.rank_plan import Batch, RankPlan
from zorse_megatron.adapter.rerun_votes import RerunVotes
from zorse_megatron.adapter.session_optimizer import (
    build_optimizer,
    parameters_norm,
    tied_embedding,
)
from zorse_megatron.adapter.tied_embeddings import TiedEmbedding
from zorse_megatron.adapter.watching import RunWatch
from zorse_megatron.plan.plan import has_equal_tp_shards
from zorse_megatron.runtime.batch_sampler import MicroBatchAssignment
from zorse_megatron.runtime.executor import Executor
from zorse_megatron.runtime.host_link import HostLink
from zorse_megatron.runtime.mailbox import ActivationSpec, Mailbox
from zorse_megatron.runtime.offload import ActivationOffload
from zorse_megatron.runtime.transport import make_transport
from zorse_megatron.schedule.actions import COMPUTE, ActionLists, edges_of
from zorse_megatron.trace import Trace


@dataclass(kw_only=True, eq=False)
class PlanSession:
    """Executes the plan's lists for Megatron's training loop.

    `forward_backward` takes the place of stock's schedules, `optimizer_step` runs the second half
    of the same list when `train_step` calls the optimizer, which `build_optimizer` has made.
    """

    at: RankPlan
    run: PlanRun
    assignment: MicroBatchAssignment
    """Of the training."""
    trace: Trace
    watch: RunWatch | None
    """None: nobody asked how long ranks take."""
    link: HostLink | None
    """To host memory, on a rank that offloads."""
    weight_gradients: WeightGradients | None
    """Of a group that splits backwards."""
    idle_losses: IdleReplicaLosses

    def __post_init__(self) -> None:
        self.batch: Batch = self.at.batch
        """Of the step that runs."""
        self.lists: ActionLists = self.batch.lists
        """Of a step, as counts of micro-batches are now."""
        self.votes = RerunVotes()
        self._has_begun = False
        self.num_done = 0
        """Iterations of this run."""
        self.optimizer: Any = None
        """Made before anything asks for it: training alone runs under a plan."""
        self.tied: TiedEmbedding | None = None
        self.executor: Executor | None = None
        self.runner: MegatronChunkRunner | None = None
        """Of a training step, from its first forward to its optimizer step."""
        self.activations: ActivationOffload | None = None
        self.kept: SavedActivations | None = None
        self.loads: ExpertLoads | None = None
        """Of a mixture of experts, from the first step on."""
        self.overflow: ForwardOverflow | None = None
        """Of a rank that computes in fp16."""

    def build_optimizer(
        self, config: Any, model_chunks: list[Any], config_overrides: Any = None, **options: Any
    ) -> Any:
        """The counterpart of stock's `get_megatron_optimizer`; the executor calls its step."""
        optimizer = build_optimizer(
            self.at,
            self.run.options,
            config,
            model_chunks,
            link=self.link,
            on_change=self._sample_memory,
            config_overrides=config_overrides,
            dump_param_to_param_group_map=options.get("dump_param_to_param_group_map"),
        )
        (self.optimizer,) = optimizer.chained_optimizers
        self.tied = tied_embedding(self.at, model_chunks, optimizer)
        stock_step = optimizer.step
        optimizer.step = lambda: self.optimizer_step(stock_step)
        return optimizer

    def forward_backward(self, *, forward_only: bool = False, **given: Any) -> list[Any]:
        """Run one step; the counterpart of stock's `forward_backward_func`."""
        at = self.at
        inputs = self._inputs(forward_only=forward_only, **given)
        executor = self.executor or self._start(inputs)
        if not forward_only:
            self._choose_lists()
        executor.micro_batches = (
            at.batch.micro_batches if forward_only else self.assignment.at(self.num_done)
        )
        runner = self._new_runner(inputs, len(executor.micro_batches))
        if not forward_only:
            self.runner = runner
        executor.during = _phase_of(forward_only=forward_only)
        lists = at.evaluation if forward_only else self.lists
        with _timed(inputs.config):
            executor.run_until_step(lists.ranks[at.rank], runner)
        if at.num_chunks - 1 not in at.chunks or inputs.collect_non_loss_data:
            return runner.losses
        return self._reported(runner.losses, forward_only=forward_only)

    def begin_batches(self, consumed: int) -> None:
        """Let batches have the sizes that are scheduled after so many samples; the first time."""
        if self._has_begun or self.at.schedule is None:
            return
        self._has_begun = True
        self.assignment.follow(
            [
                (number, size, self.at.batches[size].micro_batches)
                for number, size in self.at.schedule.changes_after(consumed)
            ]
        )

    def _choose_lists(self) -> None:
        """Those of the next step, whose batch or counts may be others than before."""
        prepared = None if self.watch is None else self.watch.begin(self.num_done)
        if prepared is not None:
            self.lists = prepared.lists
        if self.at.schedule is not None:
            self.begin_batches(get_args().consumed_train_samples)  # where no loader is built
            size = self.assignment.size_at(self.num_done)
            assert size == get_current_global_batch_size(), "sizes are not as Megatron schedules"
            self.batch = self.at.batches[size]
            self.lists = self.batch.lists

    def _inputs(
        self,
        *,
        forward_step_func: Any,
        data_iterator: Any,
        model: Any,
        forward_only: bool,
        collect_non_loss_data: bool = False,
        first_val_step: bool | None = None,
        **_unused: Any,
    ) -> StepInputs:
        """What stock passes to its schedules; the rest (sizes, group collection) is in the plan."""
        chunks = self.at.chunks
        models = model if isinstance(model, list) else [model]
        if isinstance(data_iterator, list):
            (data_iterator,) = data_iterator
        return StepInputs(
            forward_step_func=forward_step_func,
            data_iterators=iterator_per_chunk(data_iterator, chunks, self.at.readers),
            models=dict(zip(chunks, models, strict=True)),
            config=get_model_config(models[0]),
            forward_only=forward_only,
            collect_non_loss_data=collect_non_loss_data,
            first_val_step=first_val_step,
            are_packed=self.at.samples.are_packed,
        )

    def optimizer_step(self, stock_step: Any) -> Any:
        """Run the rest of the list: the step, by stock's `stock_step`, and the gathers."""
        assert self.runner is not None and self.executor is not None
        self.runner.stock_step = stock_step
        self.executor.run_rest(self.runner)
        result = self.runner.step_result
        if self.overflow is not None:
            self.overflow.after_step(
                is_skipped=not result[0], iteration=get_args().curr_iteration + 1
            )
        self._drop_gradients(self.runner.inputs.models)
        if _reads_parameters_next(get_args()):
            self.wait_for_parameters()
        self.runner = None  # drops this step's graph and losses
        self.num_done += 1
        if self.watch is not None:
            self.watch.end(self.num_done)
        self.run.enter(f"after the step, {self.executor.during}")
        return result

    def parameters_norm(self, _model: Any, _force_create_fp32_copy: bool = False) -> float:
        """The counterpart of stock's `calc_params_l2_norm`."""
        return parameters_norm(self.at, self.optimizer)

    def logging_router_losses(self, _stock: Any) -> Callable[..., None]:
        """Return the counterpart of stock's `MoEMetricsTracker._sync_metrics`."""

        def _sync_metrics(tracker: Any, *_args: Any, **_kwargs: Any) -> None:
            assert self.loads is not None
            self.loads.tell(tracker)

        return _sync_metrics

    def wait_for_parameters(self) -> None:
        """Wait for the gathers of the last step, as who reads parameters must."""
        wait_for_parameters(self.optimizer.model_chunks)

    def save_records(self, *, training_ended: bool) -> None:
        """Write what was executed and what memory held, if asked for; the last the session does."""
        options = self.run.options
        self.runner = None  # of a step that failed, which has an iterator
        if self.watch is not None:
            self.watch.reporter.close(ended=training_ended)
        if options.trace is not None:
            self.trace.save(options.trace, rank=self.at.rank, waits=training_ended)
        if options.memory is not None and self.executor is not None:
            assert self.executor.ledger is not None
            self.executor.ledger.save(options.memory)

    def _start(self, inputs: StepInputs) -> Executor:
        """Before the first step, when a checkpoint has been loaded if there is one."""
        at, models, options = self.at, list(inputs.models.values()), self.run.options
        watches_memory = (options.memory, options.memory_limit_bytes) != (None, None)
        self.executor = Executor(
            micro_batches=at.batch.micro_batches,
            chunks=at.chunks,
            last_chunk=at.num_chunks - 1,
            mailbox=_make_mailbox(at, inputs.config),
            trace=self.trace,
            enter=self.run.enter,
            times=None if self.watch is None else self.watch.times,
        )
        self.executor.ledger = make_ledger(
            at,
            self.executor,
            models,
            self.optimizer,
            activation_bytes=lambda: self.kept.highest_bytes() if self.kept else 0,
            link=self.link,
            watches=watches_memory,
            limit_bytes=options.memory_limit_bytes,
        )
        if inputs.config.num_moe_experts is not None:
            is_counted = at.place is None or at.place.index == 0
            self.loads = ExpertLoads(models, inputs.config, is_counted=is_counted)
            if at.loads_in_order:
                self.loads.put_in_order(
                    LoadsInOrder(
                        block_samples=get_args().micro_batch_size,
                        timeout=at.timeout,
                        waiting=self.executor.mailbox.waiting,
                    )
                )
        with before_first_step(at.rank, self.link):
            self._settle(models, watches_memory=watches_memory)
        if at.dtypes[at.plan.group_of_rank(at.rank)] == "fp16":
            self.overflow = ForwardOverflow(at, inputs.models)
        return self.executor

    def _settle(self, models: list[Any], *, watches_memory: bool) -> None:
        if self.at.is_mixed:
            start_from_main(models, self.optimizer)
        for model in models:
            if model.mixed_tp:
                model.shards.on_summed = self._sample_memory
            if model.mixed_tp and not model.shards.reshards:
                model.shards.unshard()  # a checkpoint has been loaded into what ranks own
        of_models = partial(is_parameter, models)
        if self.at.offload.activations:
            assert self.link is not None
            self.activations = ActivationOffload(link=self.link, stays=of_models)
        if watches_memory:
            self.kept = SavedActivations(of_models, self.activations)
            watch_logits(models, self.kept)
            if self.weight_gradients is not None:
                self.weight_gradients.kept = self.kept

    def _new_runner(self, inputs: StepInputs, num_micro_batches: int) -> MegatronChunkRunner:
        at = self.at
        return MegatronChunkRunner(
            inputs=inputs,
            collection=at.collection,
            num_micro_batches=num_micro_batches,
            stages=at.stages,
            tied=self.tied,
            loss_divisor=self.batch.loss_divisor,
            activations=self.activations,
            kept=self.kept,
            weight_gradients=self.weight_gradients,
            place=at.place,
            are_halved=at.expert_place is not None and at.expert_place.overlap,
            optimizer=self.optimizer,
            votes=self.votes,
            loads=self.loads,
            computations=[a for a in self.lists.ranks[at.rank] if a.kind in COMPUTE],
        )

    def _reported(self, losses: list[Any], *, forward_only: bool) -> list[Any]:
        """What stock adds up over the data-parallel group, on a rank of the last chunk."""
        at = self.at
        losses = self.idle_losses.complete(losses)
        has_twins = has_equal_tp_shards(at.group)  # then that group has one rank of each replica
        if at.place is not None and at.place.index and not has_twins:
            # Another rank of the TP group reports them.
            losses = [{name: torch.zeros_like(v) for name, v in each.items()} for each in losses]
        if forward_only and at.samples.means_are_averaged:
            return whole_group_losses(losses, at.groups.group)
        return losses

    def _drop_gradients(self, models: Mapping[int, Any]) -> None:
        """Shards of gradients have been used; stock would keep them until the next step."""
        sharded = [model for model in models.values() if model.shards is not None]
        if sharded:
            self.optimizer.zero_grad()
        for model in sharded:
            model.zero_grad_buffer()

    def _sample_memory(self) -> None:
        if self.executor is not None:
            self.executor.sample_memory()


def _make_mailbox(at: RankPlan, config: Any) -> Mailbox:
    """A collective call. `config`: of the model."""
    channels = {
        (each.ranks[0], each.ranks[1]): number
        for each, number in at.channels.items()
        if each.use == "link"
    }
    # In a plan without types of its own, all chunks have this rank's.
    neighbours = {
        number: TORCH_DTYPES[at.dtypes[chunk.group]] for number, chunk in enumerate(at.plan.chunks)
    }
    return Mailbox(
        transport=make_transport(
            rank=at.rank,
            edges=edges_of((at.evaluation, *(batch.lists for batch in at.batches.values()))),
            device=at.device,
            timeout=at.timeout,
            channels=channels,
        ),
        spec=ActivationSpec(
            sequence_length=at.sequence_length,
            hidden_size=config.hidden_size,
            dtype=boundary_dtype(config),
            device=at.device,
            neighbours=neighbours if at.is_mixed else {},
        ),
        global_batch_size=at.plan.global_batch_size,
        place=at.place,
    )


def _reads_parameters_next(args: Any) -> bool:
    """Whether something other than a forward or a save may read parameters after this step."""
    is_last = args.curr_iteration + 1 >= args.train_iters
    return is_last or args.check_weight_hash_across_dp_replicas_interval is not None


@contextmanager
def _timed(config: Any) -> Iterator[None]:
    """Time the block as stock's schedules are timed."""
    if config.timers is not None:
        config.timers("forward-backward", log_level=1).start(barrier=config.barrier_with_L1_time)
    yield
    if config.timers is not None:
        config.timers("forward-backward").stop()


def _phase_of(*, forward_only: bool) -> str:
    """What a list is executed for."""
    done = getattr(get_args(), "curr_iteration", None)  # before the iteration that runs
    if not forward_only:
        return f"in iteration {(done or 0) + 1}"
    return "in an evaluation" if done is None else f"in the evaluation after iteration {done + 1}"
