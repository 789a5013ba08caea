"""A plan as one rank executes it: what stays as it is from the start of a run to its end."""

from argparse import Namespace
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import timedelta
from itertools import permutations

import torch
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.training import get_args

from zorse_megatron.adapter.groups.global_groups import StockStages, stock_stages_of
from zorse_megatron.adapter.groups.process_groups import (
    PlanGroups,
    collection_of,
    create_groups,
    nccl_channels,
)
from zorse_megatron.adapter.loss import loss_divisor
from zorse_megatron.adapter.samples import SampleKind, sample_kind
from zorse_megatron.errors import FlagError
from zorse_megatron.flags.model_in_flags import compute_dtypes, is_mixed, needs_loads_in_order
from zorse_megatron.gpus.gpu import ComputeDtype
from zorse_megatron.live.batch_schedule import BatchSchedule, plan_for_batch
from zorse_megatron.live.rebalance import Preparation, Prepared
from zorse_megatron.plan.memory_settings import settings_of_rank
from zorse_megatron.plan.plan import Group, Offload, Plan, tp_group_of_rank
from zorse_megatron.runtime.mailbox import ExpertRank, TpRank
from zorse_megatron.schedule.actions import Action, ActionLists, resharded_chunks
from zorse_megatron.schedule.communicators import Communicator
from zorse_megatron.schedule.lower import lower_plan
from zorse_megatron.schedule.samples import MicroBatch, rank_micro_batches
from zorse_megatron.schedule.tensor_parallel_parts import TpPartition
from zorse_megatron.schedule.validate import check_executable


@dataclass(frozen=True, kw_only=True)
class Batch:
    """A training step on batches of one size."""

    lists: ActionLists
    micro_batches: tuple[MicroBatch, ...]
    """Of this rank."""
    loss_divisor: float
    """See `loss`."""


@dataclass(frozen=True, kw_only=True)
class RankPlan:
    """What the plan, and the command beside it, make of a rank."""

    plan: Plan
    rank: int
    group: Group
    """The plan's, that this rank is in."""
    groups: PlanGroups
    collection: ProcessGroupCollection
    """Of those groups, for Megatron."""
    channels: Mapping[Communicator, int]
    """Communicator -> what NCCL may use for it."""
    timeout: timedelta
    """Of transfers."""
    batches: Mapping[int, Batch]
    """Samples -> how they are run: the plan's batch, and others if the command schedules them."""
    schedule: BatchSchedule | None
    """None: all batches are the plan's."""
    evaluation: ActionLists
    stages: StockStages
    chunks: tuple[int, ...]
    sharded_chunks: frozenset[int]
    """Those that the list gathers before it computes with them."""
    place: TpRank | None
    """In this rank's tensor-parallel group; None: it is alone in it."""
    expert_place: ExpertRank | None
    """Among ranks that share experts alone; None: it shares none so."""
    offload: Offload
    dtypes: tuple[ComputeDtype, ...]
    """Group -> the type that it computes in."""
    is_mixed: bool
    """Whether the plan says in which type groups compute."""
    samples: SampleKind
    tied_embeddings: bool
    """Whether first and last chunk have copies of one table, which is trained."""
    sequence_length: int
    loads_in_order: bool
    """Whether a loss of experts needs them."""

    @property
    def batch(self) -> Batch:
        """The plan's, as its file has it; evaluations have its micro-batches."""
        return self.batches[self.plan.global_batch_size]

    @property
    def actions(self) -> tuple[Action, ...]:
        """This rank's list, as the plan's file has it."""
        return self.batch.lists.ranks[self.rank]

    @property
    def num_chunks(self) -> int:
        """Chunks of the whole model."""
        return len(self.plan.chunks)

    @property
    def device(self) -> torch.device:
        """Where this rank computes."""
        if torch.cuda.is_available():  # in CPU mode it is not
            return torch.device("cuda", torch.cuda.current_device())
        return torch.device("cpu")

    @property
    def readers(self) -> range | tuple[int, int]:
        """The chunks that read samples."""
        every = range(self.num_chunks)
        return every if self.samples.every_chunk_reads else (0, every[-1])


def plan_of_this_rank(plan: Plan) -> RankPlan:
    """Make its groups, too; a collective call, once Megatron has parsed the command."""
    args = get_args()
    timeout = timedelta(minutes=args.distributed_timeout_minutes)
    # The copies of a frozen table have no gradients to sum.
    is_trained = getattr(args, "zorse_lora", None) is None
    tied = is_trained and not args.untie_embeddings_and_output_weights
    dtypes = compute_dtypes(plan, args.zorse_job_dtype)
    training, evaluation = executable_lists(plan, tied=tied)
    schedule = _schedule(args)
    prepared = [
        Prepared(plan=plan, lists=training),
        *(() if schedule is None else _smaller_batches(plan, training, schedule, tied=tied)),
    ]
    channels = nccl_channels(plan, [evaluation, *(each.lists for each in prepared)])
    groups = create_groups(plan, rank=args.rank, timeout=timeout, channels=channels)
    group = plan.group_of_rank(args.rank)
    return RankPlan(
        plan=plan,
        rank=args.rank,
        group=plan.groups[group],
        groups=groups,
        collection=collection_of(groups),
        channels=channels,
        timeout=timeout,
        batches={each.plan.global_batch_size: _batch(each, args, dtypes) for each in prepared},
        schedule=schedule,
        evaluation=evaluation,
        stages=stock_stages_of(plan),
        chunks=plan.chunks_of_group(group),
        sharded_chunks=resharded_chunks(training.ranks[args.rank]),
        place=_tp_rank(plan, args.rank, groups),
        expert_place=_expert_rank(plan, args.rank, groups, sequence_length=args.seq_length),
        offload=settings_of_rank(plan, args.rank).offload,
        dtypes=dtypes,
        is_mixed=is_mixed(plan) and {args.zorse_job_dtype, *dtypes} != {"fp32"},
        samples=sample_kind(args),
        tied_embeddings=tied,
        sequence_length=args.seq_length,
        loads_in_order=needs_loads_in_order(args),
    )


def _batch(prepared: Prepared, args: Namespace, dtypes: tuple[ComputeDtype, ...]) -> Batch:
    return Batch(
        lists=prepared.lists,
        micro_batches=rank_micro_batches(prepared.plan, args.rank),
        loss_divisor=loss_divisor(
            prepared.plan,
            dtypes,
            sequence_length=args.seq_length,
            is_sum=args.zorse_per_token_loss,
        ),
    )


def _schedule(args: Namespace) -> BatchSchedule | None:
    text = args.step_batch_size_schedule
    return None if text is None else BatchSchedule.parse(text, sequence_length=args.seq_length)


def _smaller_batches(
    plan: Plan, training: ActionLists, schedule: BatchSchedule, *, tied: bool
) -> Iterator[Prepared]:
    """Lists for the schedule's other sizes, each within what the plan's own lets ranks hold.

    Raises FlagError for a size at which a rank would hold more.
    """
    links = frozenset(permutations(range(plan.world_size), 2))  # all that they need are made
    in_order = needs_loads_in_order(get_args())
    preparation = Preparation.of(plan, training, tied=tied, links=links, in_order=in_order)
    for size in schedule.sizes[:-1]:
        found = preparation.prepare_plan(plan_for_batch(plan, size))
        if isinstance(found, str):
            raise FlagError.of(
                "The command does not fit the plan",
                where="--step-batch-size-schedule",
                found=f"batches of {size} samples, for which {found}",
                expected="sizes that fit where the plan's batch fits",
                remedy="Leave this size out.",
            )
        yield found


def executable_lists(plan: Plan, *, tied: bool) -> tuple[ActionLists, ActionLists]:
    """What ranks execute in a training step and in an evaluation; raises PlanError as checked."""
    lists = lower_plan(plan, tied=tied), lower_plan(plan, forward_only=True)
    for each in lists:
        check_executable(each, [r.ranks for group in plan.groups for r in group.replicas])
    return lists


def _expert_rank(
    plan: Plan, rank: int, groups: PlanGroups, *, sequence_length: int
) -> ExpertRank | None:
    group, index = plan.replica_of_rank(rank)
    replica = plan.groups[group].replicas[index]
    shared = replica.expert_parallel
    if shared is None:
        return None
    return ExpertRank(
        index=replica.ranks.index(rank),
        group=groups.replica,
        parts=TpPartition.of(replica),
        tokens=tuple(count // shared.parts * sequence_length for count in shared.samples),
        overlap=shared.overlap,
    )


def _tp_rank(plan: Plan, rank: int, groups: PlanGroups) -> TpRank | None:
    ranks = tp_group_of_rank(plan, rank)
    if len(ranks) == 1:
        return None
    group, replica = plan.replica_of_rank(rank)
    return TpRank(
        index=ranks.index(rank),
        degree=len(ranks),
        group=groups.tp_group,
        is_split=bool(get_args().sequence_parallel),
        tp_shards=TpPartition.of(plan.groups[group].replicas[replica]),
    )
