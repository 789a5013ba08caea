"""Stock's `pretrain`, called with the plan's groups and with the plan's hooks in place."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch.distributed as dist
from megatron.training import get_args, training

from zorse_megatron.adapter.arguments import set_recompute
from zorse_megatron.adapter.build_chunks import ChunkBuilder
from zorse_megatron.adapter.checkpoint.adapters import AdapterRun, refuse_adapters
from zorse_megatron.adapter.checkpoint.before_load import (
    brings_all_weights,
    check_before_load,
    load_hooks,
    load_of,
    refuse_other_model,
    same_on_all,
)
from zorse_megatron.adapter.checkpoint.saved_optimizer import PARALLEL_HOOKS
from zorse_megatron.adapter.checkpoint.saved_parameters import saved_as_nothing
from zorse_megatron.adapter.checkpoint.saving import MANIFEST_HOOKS, written_alone
from zorse_megatron.adapter.data_parallel.chunk_shards import wait_for_parameters
from zorse_megatron.adapter.groups import global_groups
from zorse_megatron.adapter.loss import IdleReplicaLosses, tell_last_rank
from zorse_megatron.adapter.model.expert_layers import with_plan_layers
from zorse_megatron.adapter.model.overlapped_layer import overlapping
from zorse_megatron.adapter.model.uneven_tp_shards import (
    LocalSizes,
    SelfAttentionToNothing,
    layer_spec_with,
    replacing_attention,
    size_hooks,
    with_sequence_parallelism,
)
from zorse_megatron.adapter.model.weight_gradients import WeightGradients, delaying_weights
from zorse_megatron.adapter.moving.leave_plan import moving_hooks
from zorse_megatron.adapter.patches.rebind import REGISTRY, Make, Replacements
from zorse_megatron.adapter.plan_run import PlanRun
from zorse_megatron.adapter.preload import logged_once
from zorse_megatron.adapter.rank_plan import RankPlan, plan_of_this_rank
from zorse_megatron.adapter.recording import check_record_files
from zorse_megatron.adapter.samples import (
    attending_within_sequences,
    counting_each_chunk,
    datasets_on_rank_0,
    left_as_one_sequence,
    plan_loader_builder,
)
from zorse_megatron.adapter.session import PlanSession
from zorse_megatron.adapter.start_checks import check_placement
from zorse_megatron.adapter.tied_embeddings import saved_once
from zorse_megatron.adapter.watching import make_watch
from zorse_megatron.errors import FlagError, OutputError, PlanError, Problem
from zorse_megatron.flags.check import check_arguments
from zorse_megatron.live.watched_rank import ASKED_TO_END
from zorse_megatron.log import complain
from zorse_megatron.plan.memory_settings import settings_of_rank
from zorse_megatron.plan.plan import Offload
from zorse_megatron.plan.plan_file import fingerprint
from zorse_megatron.runtime.batch_sampler import MicroBatchAssignment
from zorse_megatron.runtime.collectives import gathered, on_rank_0
from zorse_megatron.runtime.host_link import HostLink
from zorse_megatron.runtime.step_times import CudaClock
from zorse_megatron.trace import HostClock, Trace


def train_under_plan(run: PlanRun, stock_pretrain: Callable[..., Any], cfg: Any) -> Any:
    """Make the session, then call stock's `pretrain` with it.

    `stock_pretrain` has the script's own arguments bound; `cfg` is its config container. Raises
    FlagError when the model of the flags is not the plan's, PlanError when ranks read different
    plans or are on other GPUs than planned, CheckpointError when no checkpoint can be loaded.
    """
    args = get_args()
    if problems := check_arguments(args, run.plan, again=True):
        raise FlagError("The command does not fit the plan", problems)
    _check_same_plan(run)
    check_record_files(run.options)
    check_placement(run)
    at = plan_of_this_rank(run.plan)
    global_groups.fill(at.groups, rank=at.rank)
    session = _session(at, run)
    local_sizes = _configure(cfg, at)
    run.enter("while it sets up the model and the data")
    try:
        with written_alone(args.save, run.elastic_run) as refuse_other_writer:
            source = _source_of_weights(run, args)
            hooks = _hooks(session, cfg.model, local_sizes, source)
            hooks["save_checkpoint"] = partial(_save_once, run.enter, refuse_other_writer)
            with (
                _asking_for_another_start() if run.elastic_run else nullcontext(),
                logged_once(),
                REGISTRY.applied({**hooks, **moving_hooks(session)}),
                REGISTRY.applied(source.hooks),
            ):
                result = stock_pretrain(pg_collection=at.collection, skip_model_parallel_init=True)
                # While what runs the plan is there: the last messages may be on their way.
                session.wait_for_parameters()
                dist.barrier()  # a rank that ends before the others would seem to be gone
                return result
    finally:
        _save_records(session, training_ended=sys.exception() is None)


@dataclass(frozen=True, kw_only=True)
class _WeightsSource:
    """Where a run has its weights from."""

    are_replaced: bool
    """Whether no initial value stays, but for those of adapters."""
    adapters: AdapterRun | None
    hooks: Replacements
    """What loads them."""


def _source_of_weights(run: PlanRun, args: Any) -> _WeightsSource:
    """Find and check the checkpoints that are to be loaded; a collective call."""
    skips_damaged, lora = run.options.skips_damaged, run.options.lora
    if lora is not None:
        has_moved = run.moved is not None
        adapters = AdapterRun(lora, args, skips_damaged=skips_damaged, has_moved=has_moved)
        return _WeightsSource(
            are_replaced=adapters.brings_base(args), adapters=adapters, hooks=adapters.hooks(args)
        )
    load = load_of(args, skips_damaged=skips_damaged) if run.moved is None else None
    chosen = None if load is None else check_before_load(load)
    if chosen is not None:
        on_rank_0(partial(refuse_adapters, chosen.folder))
        on_rank_0(partial(refuse_other_model, chosen.folder, args))
    return _WeightsSource(
        are_replaced=run.moved is not None or brings_all_weights(chosen, args),
        adapters=None,
        hooks={
            **load_hooks(None if chosen is None else chosen.folder),
            **same_on_all(args, load, chosen),
        },
    )


@contextmanager
def _asking_for_another_start() -> Iterator[None]:
    """Let a rank that ends because of a signal to any rank have a status of its own.

    By status 0 a torchrun that has not heard of a new node yet would take the training for done,
    and leave its node out of all further starts.
    """
    is_asked = False

    def noted(stock: Callable[..., list[Any]]) -> Callable[..., list[Any]]:
        def signals_received(handler: Any) -> list[Any]:
            nonlocal is_asked
            received = stock(handler)
            is_asked = any(received)
            return received

        return signals_received

    with REGISTRY.applied({"signals_received": noted}):
        try:
            yield
        except SystemExit as request:
            if is_asked and not request.code:
                request.code = ASKED_TO_END
            raise


def _session(at: RankPlan, run: PlanRun) -> PlanSession:
    of_device = CudaClock() if at.device.type == "cuda" else HostClock()
    assignment = MicroBatchAssignment(at.batch.micro_batches, batch_size=at.plan.global_batch_size)
    make_link = (run.setup and run.setup.make_host_link) or HostLink
    return PlanSession(
        at=at,
        run=run,
        assignment=assignment,
        trace=Trace(
            num_steps=None if run.options.trace else 0,
            clock=of_device,
            directory=run.options.trace,
            sent=None if at.expert_place is None else at.expert_place.log.sent,
        ),
        watch=make_watch(at, run, assignment, (run.setup and run.setup.clock) or of_device),
        link=None if at.offload == Offload() else make_link(at.device),
        weight_gradients=WeightGradients() if at.group.split_backward else None,
        idle_losses=IdleReplicaLosses.of(at.plan, at.rank, at.groups.group),
    )


def _save_records(session: PlanSession, *, training_ended: bool) -> None:
    """Write what the run recorded; where it failed itself, that stays what it ends with."""
    try:
        session.save_records(training_ended=training_ended)
    except OutputError as error:
        if training_ended:
            raise
        complain(str(error), everywhere=True)


def _check_same_plan(run: PlanRun) -> None:
    """Every rank reads its own copy of the file; they must be the same."""
    theirs = gathered(fingerprint(run.plan))
    others = {rank: other for rank, other in enumerate(theirs) if other != theirs[0]}
    if others:
        raise PlanError(
            "The ranks have different plans",
            [
                Problem(
                    where=f"rank {rank}",
                    found=f"plan {other}",
                    expected=f"plan {theirs[0]}, as on rank 0",
                    remedy="Copy the same plan file to every node.",
                )
                for rank, other in others.items()
            ],
        )


def _change_layers(cfg: Any, change: Callable[[Any], None]) -> None:
    """Let layers be built as `change` leaves their spec."""
    given = cfg.model.transformer_layer_spec
    cfg.model.transformer_layer_spec = layer_spec_with(change, given)


def _configure(cfg: Any, at: RankPlan) -> LocalSizes | None:
    """Set on the script's config container what the plan needs; returns what differs by rank."""
    # The user's flag is kept in args: it decides the format of checkpoints.
    cfg.ddp.use_distributed_optimizer = True
    cfg.ddp.overlap_param_gather = False
    # Also in checkpoints.
    at.stages.show_groups()
    recompute = settings_of_rank(at.plan, at.rank).recompute
    if recompute is not None:
        set_recompute(cfg.model.transformer, recompute)
    shared = at.expert_place
    if shared is not None and not shared.tokens[shared.index]:
        _change_layers(cfg, replacing_attention(SelfAttentionToNothing))
    if shared is not None and shared.overlap:
        _change_layers(cfg, overlapping)
    if at.place is None or at.place.tp_shards.are_equal:
        return None
    local_sizes = LocalSizes(cfg.model, at.place)
    local_sizes.show()
    return local_sizes


def _hooks(
    session: PlanSession,
    model_config: Any,
    local_sizes: LocalSizes | None,
    source: _WeightsSource,
) -> dict[str, Make]:
    at = session.at
    build = ChunkBuilder(
        at=at,
        model_config=model_config,
        local_sizes=local_sizes,
        link=session.link,
        weight_gradients=session.weight_gradients,
        are_replaced=source.are_replaced,
        adapters=source.adapters,
    )
    hooks: dict[str, Make] = {
        **PARALLEL_HOOKS,
        **MANIFEST_HOOKS,
        "warm_up": partial(_warming_up_alone, at.groups.alone),
        "build_models": build.one_by_one,
        "torch_norm": with_sequence_parallelism,
        "ddp_class": lambda _stock: build.wrap,
        "get_optimizer": lambda _stock: session.build_optimizer,
        "parameters_norm": lambda _stock: session.parameters_norm,
        "rerun_votes": session.votes.answering,
        "get_schedule": lambda _stock: lambda *args, **kwargs: session.forward_backward,
        **size_hooks(at.place),
        "build_loader": partial(
            plan_loader_builder, assignment=session.assignment, begin=session.begin_batches
        ),
        "build_datasets": partial(datasets_on_rank_0, rank=at.rank),
        **_report_hooks(at),
    }
    if session.weight_gradients is not None:
        hooks["linear_backward"] = partial(delaying_weights, session.weight_gradients)
    args = get_args()
    if args.num_experts is not None:
        tokens = args.seq_length if at.samples.are_packed else None
        hooks["experts_spec"] = partial(
            with_plan_layers,
            args.micro_batch_size,
            at.place,
            at.expert_place,
            packed_tokens=tokens,
        )
        hooks["router_losses"] = session.logging_router_losses
    if at.expert_place is not None:
        hooks["split_gate"] = saved_as_nothing  # others' experts have no rows here
    if at.samples.are_packed:
        hooks["count_sequences"] = partial(
            counting_each_chunk, loop=training, num_chunks=at.num_chunks, device=at.device
        )
        hooks["packed_attention"] = attending_within_sequences
        hooks["packed_samples_of_experts"] = lambda _stock: left_as_one_sequence
    return hooks


def _warming_up_alone(alone: dist.ProcessGroup, stock: Callable[..., None]) -> Callable[..., None]:
    def set_jit_fusion_options(tp_size: int | None = None) -> None:
        with global_groups.one_rank_alone(alone):
            stock(tp_size=1)

    return set_jit_fusion_options


def _report_hooks(at: RankPlan) -> Replacements:
    """Where the last rank does not know the losses, it is told them."""
    last_rank = at.plan.world_size - 1
    knows = sorted(at.plan.groups[at.plan.chunks[-1].group].ranks)
    if last_rank in knows:
        return {}
    tell = partial(tell_last_rank, source=knows[0], target=last_rank, rank=at.rank)
    return {"train_step": tell, "evaluate": tell}


def _save_once(
    enter: Callable[[str], None], begin: Callable[[], None], stock: Callable[..., Any]
) -> Callable[..., Any]:
    """Let nothing be saved twice. `enter` is told of the save; `begin` may refuse it."""

    def save_checkpoint(iteration: int, model: Any, *args: Any, **kwargs: Any) -> Any:
        enter(f"in the save of iteration {iteration}")
        begin()
        wait_for_parameters(model)
        with saved_once(model):
            result = stock(iteration, model, *args, **kwargs)
        enter(f"after the save of iteration {iteration}")
        return result

    return save_checkpoint
