"""A plan as one rank executes it: what stays as it is from the start of a run to its end."""

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta

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
from zorse_megatron.flags.model_in_flags import compute_dtypes, is_mixed
from zorse_megatron.gpus.gpu import ComputeDtype
from zorse_megatron.plan.memory_settings import settings_of_rank
from zorse_megatron.plan.plan import Group, Offload, Plan, tp_group_of_rank
from zorse_megatron.runtime.mailbox import TpRank
from zorse_megatron.schedule.actions import Action, ActionLists, resharded_chunks
from zorse_megatron.schedule.communicators import Communicator
from zorse_megatron.schedule.lower import lower_plan
from zorse_megatron.schedule.samples import MicroBatch, replica_micro_batches
from zorse_megatron.schedule.tensor_parallel_parts import TpPartition
from zorse_megatron.schedule.validate import check_executable


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
    training: ActionLists
    """As the plan's file has it."""
    evaluation: ActionLists
    stages: StockStages
    micro_batches: tuple[MicroBatch, ...]
    """As the plan's file has them, and as evaluations run them."""
    chunks: tuple[int, ...]
    sharded_chunks: frozenset[int]
    """Those that the list gathers before it computes with them."""
    place: TpRank | None
    """In this rank's tensor-parallel group; None: it is alone in it."""
    offload: Offload
    dtypes: tuple[ComputeDtype, ...]
    """Group -> the type that it computes in."""
    is_mixed: bool
    """Whether the plan says in which type groups compute."""
    samples: SampleKind
    tied_embeddings: bool
    sequence_length: int
    loss_divisor: float
    """See `loss`."""

    @property
    def actions(self) -> tuple[Action, ...]:
        """This rank's list, as the plan's file has it."""
        return self.training.ranks[self.rank]

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
    channels = nccl_channels(plan)
    groups = create_groups(plan, rank=args.rank, timeout=timeout, channels=channels)
    tied = not args.untie_embeddings_and_output_weights
    dtypes = compute_dtypes(plan, args.zorse_job_dtype)
    training, evaluation = executable_lists(plan, tied=tied)
    group = plan.group_of_rank(args.rank)
    return RankPlan(
        plan=plan,
        rank=args.rank,
        group=plan.groups[group],
        groups=groups,
        collection=collection_of(groups),
        channels=channels,
        timeout=timeout,
        training=training,
        evaluation=evaluation,
        stages=stock_stages_of(plan),
        micro_batches=replica_micro_batches(plan, args.rank),
        chunks=plan.chunks_of_group(group),
        sharded_chunks=resharded_chunks(training.ranks[args.rank]),
        place=_tp_rank(plan, args.rank, groups),
        offload=settings_of_rank(plan, args.rank).offload,
        dtypes=dtypes,
        is_mixed=is_mixed(plan),
        samples=sample_kind(args),
        tied_embeddings=tied,
        sequence_length=args.seq_length,
        loss_divisor=loss_divisor(
            plan, dtypes, sequence_length=args.seq_length, is_sum=args.zorse_per_token_loss
        ),
    )


def executable_lists(plan: Plan, *, tied: bool) -> tuple[ActionLists, ActionLists]:
    """What ranks execute in a training step and in an evaluation; raises PlanError as checked."""
    lists = lower_plan(plan, tied=tied), lower_plan(plan, forward_only=True)
    for each in lists:
        check_executable(each, [r.ranks for group in plan.groups for r in group.replicas])
    return lists


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
