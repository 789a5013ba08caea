"""Stock's `pretrain`, called with the plan's groups and with the plan's hooks in place."""

import sys
from collections.abc import Callable, Mapping
from datetime import timedelta
from functools import partial
from typing import Any

import torch.distributed as dist
from megatron.training import get_args, training

from zorse_megatron.adapter.arguments.compute_dtype import compute_dtypes
from zorse_megatron.adapter.arguments.recompute import set_recompute
from zorse_megatron.adapter.build_chunks import build_one_by_one, wrap_chunk
from zorse_megatron.adapter.checkpoint.check_before_load import (
    LOAD_HOOKS,
    check_before_load,
    load_of,
)
from zorse_megatron.adapter.checkpoint.chosen_iteration import same_on_all
from zorse_megatron.adapter.checkpoint.fully_parallel import PARALLEL_HOOKS
from zorse_megatron.adapter.checkpoint.save_manifest import MANIFEST_HOOKS
from zorse_megatron.adapter.data.sample_order import datasets_on_rank_0, plan_loader_builder
from zorse_megatron.adapter.data.sample_readers import counting_each_chunk, sample_kind
from zorse_megatron.adapter.data_parallel.parameter_gathers import wait_for_parameters
from zorse_megatron.adapter.groups import global_groups
from zorse_megatron.adapter.groups.process_groups import (
    PlanGroups,
    create_groups,
    nccl_channels,
)
from zorse_megatron.adapter.loss.loss_divisor import loss_divisor
from zorse_megatron.adapter.loss.loss_report import tell_last_rank
from zorse_megatron.adapter.model.local_sizes import LocalSizes, size_hooks
from zorse_megatron.adapter.model.split_norms import with_sequence_parallelism
from zorse_megatron.adapter.model.weight_gradients import delaying_weights
from zorse_megatron.adapter.moving.entering import moving_hooks
from zorse_megatron.adapter.parameters.tied_embeddings import saved_once
from zorse_megatron.adapter.patches import checkpoints, under_plan
from zorse_megatron.adapter.patches.rebind import Make, Rebinding, Replacements
from zorse_megatron.adapter.patches.registry import REGISTRY
from zorse_megatron.adapter.patches.weight_gradients import LINEAR_BACKWARD
from zorse_megatron.adapter.placement import check_placement
from zorse_megatron.adapter.plan_run import PlanRun
from zorse_megatron.adapter.recording.record_files import RecordFiles, check_record_files
from zorse_megatron.adapter.repeated_lines import logged_once
from zorse_megatron.adapter.session import PlanSession
from zorse_megatron.adapter.session_optimizer import build_optimizer
from zorse_megatron.errors import FlagError, OutputError, PlanError, Problem
from zorse_megatron.flags.check import check_arguments
from zorse_megatron.log import complain
from zorse_megatron.runtime.host_link import HostLink
from zorse_megatron.schedules.communicators import Communicator
from zorse_megatron.schema.plan.memory_settings import settings_of_rank
from zorse_megatron.schema.plan.plan_json import fingerprint


def train_under_plan(run: PlanRun, stock_pretrain: Callable[..., Any], cfg: Any) -> Any:
    """Make the session, then call stock's `pretrain` with it.

    `stock_pretrain` has the script's own arguments bound; `cfg` is its config container. Raises
    FlagError when the model of the flags is not the plan's, PlanError when ranks read different
    plans or are on other GPUs than planned, CheckpointError when no checkpoint can be loaded.
    """
    args = get_args()
    # Again, as Megatron has derived sizes since: of the MLP, of the vocabulary.
    if problems := check_arguments(args, run.plan, again=True):
        raise FlagError("The command does not fit the plan", problems)
    _check_same_plan(run)
    check_record_files(
        RecordFiles(trace=run.trace_directory, memory=run.memory_directory, metrics=run.metrics)
    )
    check_placement(run)
    timeout = timedelta(minutes=args.distributed_timeout_minutes)
    channels = nccl_channels(run.plan)
    groups = create_groups(run.plan, rank=args.rank, timeout=timeout, channels=channels)
    global_groups.fill(groups, rank=args.rank)
    session = _session(run, args, groups, channels)
    _configure(cfg, session)
    load = load_of(args, skips_damaged=run.skips_damaged) if run.moved is None else None
    run.enter("while it sets up the model and the data")
    try:
        chosen = None if load is None else check_before_load(load)
        with (
            logged_once(),
            REGISTRY.applied({**_hooks(session, cfg.model), **moving_hooks(run, session)}),
            REGISTRY.applied(same_on_all(args, load, chosen)),
        ):
            result = stock_pretrain(pg_collection=session.collection, skip_model_parallel_init=True)
            # While what runs the plan is there: the last messages may be on their way.
            session.wait_for_parameters()
            dist.barrier()  # a rank that ends before the others would seem to be gone
            return result
    finally:
        _save_records(session, training_ended=sys.exception() is None)


def _session(
    run: PlanRun, args: Any, groups: PlanGroups, channels: Mapping[Communicator, int]
) -> PlanSession:
    dtypes = compute_dtypes(run.plan, args.zorse_job_dtype)
    return PlanSession(
        plan=run.plan,
        rank=args.rank,
        groups=groups,
        timeout=timedelta(minutes=args.distributed_timeout_minutes),
        channels=channels,
        tied_embeddings=not args.untie_embeddings_and_output_weights,
        sequence_length=args.seq_length,
        samples=sample_kind(args),
        dtypes=dtypes,
        loss_divisor=loss_divisor(
            run.plan,
            dtypes,
            sequence_length=args.seq_length,
            is_sum=args.zorse_per_token_loss,
        ),
        update=run.update,
        trace_directory=run.trace_directory,
        memory_directory=run.memory_directory,
        memory_limit_bytes=run.memory_limit_bytes,
        host_memory_limit_bytes=run.host_memory_limit_bytes,
        enter=run.enter,
        make_host_link=run.make_host_link or HostLink,
        clock=run.clock,
        rebalances=run.rebalances,
        status_directory=run.status_directory,
        may_move=run.check_next is not None and run.status_directory is not None,
        moves=run.moves,
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
    mine = fingerprint(run.plan)
    theirs: list[str | None] = [None] * dist.get_world_size()
    dist.all_gather_object(theirs, mine)
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


def _configure(cfg: Any, session: PlanSession) -> None:
    """Set on the script's config container what the plan needs."""
    # The user's flag is kept in args: it decides the format of checkpoints.
    cfg.ddp.use_distributed_optimizer = True
    cfg.ddp.overlap_param_gather = False
    # Also in checkpoints.
    session.stages.show_groups()
    recompute = settings_of_rank(session.plan, session.rank).recompute
    if recompute is not None:
        set_recompute(cfg.model.transformer, recompute)
    if session.place is not None and not session.place.parts.are_equal:
        session.local_sizes = LocalSizes(cfg.model, session.place)
        session.local_sizes.show()


def _hooks(session: PlanSession, model_config: Any) -> Replacements:
    return {
        **PARALLEL_HOOKS,
        **MANIFEST_HOOKS,
        **LOAD_HOOKS,
        checkpoints.SAVE_CHECKPOINT: partial(_save_once, session.enter),
        **_model_hooks(session, model_config),
        **size_hooks(session.place),
        **_split_hooks(session),
        **_data_hooks(session),
        **_report_hooks(session),
    }


def _model_hooks(session: PlanSession, model_config: Any) -> Replacements:
    return {
        under_plan.BUILD_MODELS: partial(build_one_by_one, session, model_config),
        under_plan.TORCH_NORM: with_sequence_parallelism,
        under_plan.DDP_CLASS: lambda _stock: partial(wrap_chunk, session),
        under_plan.GET_OPTIMIZER: lambda _stock: partial(build_optimizer, session),
        under_plan.GET_SCHEDULE: lambda _stock: lambda *args, **kwargs: session.forward_backward,
    }


def _split_hooks(session: PlanSession) -> Replacements:
    if session.weight_gradients is None:
        return {}
    return {LINEAR_BACKWARD: partial(delaying_weights, session.weight_gradients)}


def _data_hooks(session: PlanSession) -> Replacements:
    build_loader = partial(
        plan_loader_builder,
        global_batch_size=session.plan.global_batch_size,
        course=session.course,
    )
    hooks: dict[Rebinding, Make] = {
        under_plan.BUILD_LOADER: build_loader,
        under_plan.BUILD_DATASETS: partial(datasets_on_rank_0, rank=session.rank),
    }
    if session.samples.are_packed:
        hooks[under_plan.COUNT_SEQUENCES] = partial(
            counting_each_chunk,
            loop=training,
            num_chunks=session.num_chunks,
            device=session.device,
        )
    return hooks


def _report_hooks(session: PlanSession) -> Replacements:
    """Where the last rank does not know the losses, it is told them."""
    last_rank = session.plan.world_size - 1
    knows = session.last_group_ranks
    if last_rank in knows:
        return {}
    tell = partial(tell_last_rank, source=knows[0], target=last_rank, rank=session.rank)
    return {under_plan.TRAIN_STEP: tell, under_plan.EVALUATE: tell}


def _save_once(
    enter: Callable[[str], None] | None, stock: Callable[..., Any]
) -> Callable[..., Any]:
    """Let nothing be saved twice. `enter` is told of the save."""

    def save_checkpoint(iteration: int, model: Any, *args: Any, **kwargs: Any) -> Any:
        if enter is not None:
            enter(f"in the save of iteration {iteration}")
        wait_for_parameters(model)
        with saved_once(model):
            result = stock(iteration, model, *args, **kwargs)
        if enter is not None:
            enter(f"after the save of iteration {iteration}")
        return result

    return save_checkpoint
