"""The process groups of a plan, as Megatron's `ProcessGroupCollection`.

The counterpart of Megatron's `RankGenerator` and `initialize_model_parallel`, which only know grids
of equal groups. A replica is a tensor-parallel group; or ranks that share experts alone, which are
an expert-parallel group, and a tensor-parallel group each. The data-parallel group of a rank is
made of the ranks that hold the same part of the same layers; where replicas of a plan's group cut
their layers differently there are no such ranks, and it is all ranks of the group. A rank is its
own context-parallel group, and else its own expert-parallel one. The group of a distributed
optimizer's instance, over which the gradients' norm is summed, is the world. Over the
model-parallel group `train_step` and `training_log` reduce, in three calls, what ranks without an
optimizer do not know: whether the step was made, the norm, the learning rate. Under a plan every
rank has an optimizer and knows all three, so a rank is its own model-parallel group, which saves
three round trips through the whole cluster in each step. The pipeline has no group of ranks,
because a rank has no single previous and next rank: stock asks its pipeline group for a position
only (`PipelinePosition`).
"""

import copy
import os
from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from datetime import timedelta
from typing import NoReturn

import torch
import torch.distributed as dist
from megatron.core.parallel_state import RankGenerator
from megatron.core.process_groups_config import ProcessGroupCollection

from zorse_megatron.log import say
from zorse_megatron.plan.plan import (
    Plan,
    communicating_ranks,
    data_parallel_ranks,
    ranks_by_region,
    tp_group_of_rank,
)
from zorse_megatron.runtime.collectives import gathered
from zorse_megatron.runtime.hierarchical_collectives import RegionGroups
from zorse_megatron.runtime.host_budget import node_name
from zorse_megatron.runtime.transport import nccl_options
from zorse_megatron.schedule.actions import ActionLists
from zorse_megatron.schedule.communicators import (
    Communicator,
    communicators_of,
    deadlock_note,
    max_ctas,
    planned_communicators,
    threads_note,
)
from zorse_megatron.schedule.shards import regions_of


class PipelinePosition:
    """Stands in for a pipeline process group: which stage of how many, and nothing else.

    Anything but `rank()` and `size()` raises, so that a stock collective over the pipeline, which
    would mean something else under a plan, is found instead of hanging.
    """

    def __init__(self, stage: int, num_stages: int) -> None:
        self._stage = stage
        self._num_stages = num_stages

    def rank(self) -> int:
        """This rank's stage."""
        return self._stage

    def size(self) -> int:
        """Number of stages."""
        return self._num_stages

    def __getattr__(self, name: str) -> NoReturn:
        raise AttributeError(
            f"a plan has no pipeline process group, so it has no {name!r}: stages have different "
            "numbers of ranks. Something in Megatron communicates over the pipeline where "
            "zorse-megatron does not know of it."
        )


@dataclass(frozen=True, kw_only=True)
class PlanGroups:
    """One rank's process groups."""

    group: dist.ProcessGroup
    """The ranks that hold the same part of the same layers; or, without such, all of the group."""
    replica: dist.ProcessGroup
    """The ranks of this rank's replica, which compute together."""
    tp_group: dist.ProcessGroup
    """The same of a tensor-parallel group; else this rank alone."""
    everyone: dist.ProcessGroup
    """The ranks that hold the same layers."""
    alone: dist.ProcessGroup
    """This rank."""
    world: dist.ProcessGroup
    position: PipelinePosition
    """Stands in for the pipeline group; this rank's group's, see `stages_of`."""
    regions: RegionGroups | None = None
    """What a hierarchical group sums and gathers with in place of `group`."""


def stages_of(plan: Plan) -> tuple[int, ...]:
    """Group -> the pipeline stage that stock takes it for while no chunk of it is at work.

    The stages are the groups, in the order of their last chunks; but the group with the first chunk
    comes first, unless it has the last one too: stock looks for data on the first and the last
    stage. With one chunk per group they are the chunks.
    """
    last = len(plan.chunks) - 1

    def place(group: int) -> tuple[bool, bool, int]:
        chunks = plan.chunks_of_group(group)
        return last in chunks, 0 not in chunks, chunks[-1]

    order = sorted(range(len(plan.groups)), key=place)
    return tuple(order.index(group) for group in range(len(plan.groups)))


# A group with the ranks of another is not made.
_LARGEST_FIRST = ("everyone", "group", "tp_group")


def create_groups(
    plan: Plan,
    *,
    rank: int,
    timeout: timedelta,
    channels: Mapping[Communicator, int] | None = None,
) -> PlanGroups:
    """Create the groups of `rank`; a collective call, after `init_process_group`.

    `new_group` sorts its ranks, so a rank's place in `group` is its place among the group's sorted
    ranks (see `shard_weights_by_group_rank`). `channels`: what NCCL may use for each communicator;
    none is made for a group before its first sum, and a rank that is a group makes none.
    """
    number = plan.group_of_rank(rank)
    limits: dict[tuple[str, tuple[int, ...]], int] = {
        (each.use, each.ranks): count for each, count in (channels or {}).items()
    }
    alone = dist.new_group([rank], timeout=timeout, use_local_synchronization=True)
    # Every group is created by all ranks, in one order: see `runtime.transport`.
    mine: dict[str, dist.ProcessGroup] = {}
    for use, ranks in _ranks_of_groups(plan):
        options = nccl_options(limits.get((use, ranks)), timeout)
        made = dist.new_group(list(ranks), timeout=timeout, pg_options=options)
        if rank in ranks:
            mine[use] = made
    assert dist.group.WORLD is not None
    return PlanGroups(
        group=mine.get("group", alone),
        replica=mine.get("tp_group", alone),
        tp_group=mine.get("tp_group", alone) if len(tp_group_of_rank(plan, rank)) > 1 else alone,
        everyone=next((mine[use] for use in _LARGEST_FIRST if use in mine), alone),
        alone=alone,
        world=dist.group.WORLD,
        position=PipelinePosition(stages_of(plan)[number], len(plan.groups)),
        regions=_region_groups(plan, rank, mine),
    )


def _region_groups(
    plan: Plan, rank: int, mine: Mapping[str, dist.ProcessGroup]
) -> RegionGroups | None:
    """Of a rank in a hierarchical group."""
    if "across" not in mine:
        return None
    group = plan.groups[plan.group_of_rank(rank)]
    (ranks,) = (ranks for ranks in data_parallel_ranks(group) if rank in ranks)
    return RegionGroups(
        inside=mine.get("region"),
        across=mine["across"],
        regions=regions_of(ranks_by_region(group, ranks)),
    )


def _ranks_of_groups(plan: Plan) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Use and ranks of each group of several ranks, in one order."""
    ranks_of, made = PlanRankGenerator(plan), set()
    replicas = [list(replica.ranks) for group in plan.groups for replica in group.replicas]
    for use, found in (
        ("group", ranks_of.get_ranks("dp")),
        ("tp_group", replicas),
        ("everyone", ranks_of.get_ranks("tp-dp")),
    ):
        for ranks in map(tuple, found):
            if len(ranks) > 1 and (use != "everyone" or ranks not in made):
                made.add(ranks)
                yield use, ranks
    for group in plan.groups if any(each.hierarchical for each in plan.groups) else ():
        for use, ranks in communicating_ranks(group):
            if use != "group" and len(ranks) > 1:
                yield use, ranks


def nccl_channels(plan: Plan, lists: Sequence[ActionLists] = ()) -> dict[Communicator, int]:
    """Communicator -> how many channels NCCL may use; nothing of another backend.

    `lists`: all that are run, if they are not the plan's alone. A collective call. Rank 0 says so
    where their kernels may fill a GPU, or their threads a node's cores.
    """
    if dist.get_backend() != "nccl":
        return {}
    properties = torch.cuda.get_device_properties(torch.cuda.current_device())
    own = properties.multi_processor_count, node_name(), os.sched_getaffinity(0)
    counts, nodes, cores = zip(*gathered(own), strict=True)
    if dist.get_rank() == 0:
        _warn_of_crowds(plan, counts, nodes, cores)
    needed = communicators_of(plan, lists) if lists else planned_communicators(plan)
    return max_ctas(needed, counts)


def _warn_of_crowds(
    plan: Plan, num_sms: Sequence[int], nodes: Sequence[str], cores: Sequence[Set[int]]
) -> None:
    """Of each rank: its GPU's multiprocessors, its node, and the cores that it may run on."""
    of_node: dict[str, set[int]] = {}
    for node, usable in zip(nodes, cores, strict=True):
        of_node.setdefault(node, set()).update(usable)
    numbers = {node: len(usable) for node, usable in of_node.items()}
    for note in (deadlock_note(plan, num_sms), threads_note(plan, nodes, numbers)):
        if note is not None:
            say(f"warning: {note}")


def shard_weights_by_group_rank(plan: Plan, *, rank: int) -> tuple[float, ...]:
    """Shard weights of the data-parallel group of `rank`, in its order (sorted ranks).

    Each rank of a replica owns the replica's share of the part that it holds.
    """
    group = plan.groups[plan.group_of_rank(rank)]
    weights = {
        member: replica.shard_weight for replica in group.replicas for member in replica.ranks
    }  # not used where what ranks own is packed
    (ranks,) = (ranks for ranks in data_parallel_ranks(group) if rank in ranks)
    return tuple(weights[member] for member in ranks)


def collection_of(groups: PlanGroups) -> ProcessGroupCollection:
    """The collection that is passed to Megatron's models, DDP, optimizer and training loop."""
    alone, group, world, own_tp = groups.alone, groups.group, groups.world, groups.tp_group
    shares_experts = groups.replica if groups.replica is not own_tp else alone
    collection = ProcessGroupCollection(
        tp=own_tp, cp=alone, tp_cp=own_tp, ep=shares_experts, expt_tp=own_tp, tp_ep=own_tp,
        gtp_remat=alone, expt_gtp_remat=alone,
        dp=group, dp_cp=group, dp_cp_gtp_remat=group, intra_dp_cp=group,
        tp_dp_cp=groups.everyone,
        expt_dp=group, expt_dp_gtp_remat=group, intra_expt_dp=group,
        mp=alone, tp_ep_pp=world, tp_ep_pp_with_egtp_remat=world, intra_dist_opt=world,
        pp=groups.position,
    )  # fmt: skip
    # Set explicitly: stock tells "None on purpose" from "forgotten".
    collection.embd = None
    collection.pos_embd = None
    return collection


def at_chunk(
    collection: ProcessGroupCollection, chunk: int, num_chunks: int
) -> ProcessGroupCollection:
    """The same groups for one chunk of the rank, which to stock is a pipeline stage of its own."""
    there = copy.copy(collection)
    there.pp = PipelinePosition(chunk, num_chunks)
    return there


# The ranks of each axis of parallelism, as Megatron's `RankGenerator` lists them, from a plan.
#
# Megatron's own makes them from one size per axis, which only describes grids of equal groups.
# Those that ask by token (`tp`, `dp`, `tp-dp`, `tp-pp`...) can be given this one.


class PlanRankGenerator(RankGenerator):
    """`RankGenerator` for a plan: lists of ranks, one for each group of a kind."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.world_size = plan.world_size
        self.rank_offset = 0

    def get_ranks(self, token: str) -> list[list[int]]:
        """Return the groups along the axes of `token`, joined by hyphens, such as `tp-dp`.

        `cp`, `ep` and `gtp_remat` have size 1. Raises ValueError for the pipeline without `tp` and
        `dp`: stages have different numbers of ranks, so none has one previous and one next rank.
        """
        axes = set(token.split("-")) - {"cp", "ep", "gtp_remat"}
        groups = self.plan.groups
        if not axes:
            return [[rank] for rank in range(self.world_size)]
        if axes == {"tp"}:
            found = (tp_group_of_rank(self.plan, rank) for group in groups for rank in group.ranks)
            return list(map(list, dict.fromkeys(found)))
        if axes == {"dp"}:
            return [list(ranks) for group in groups for ranks in data_parallel_ranks(group)]
        if axes == {"tp", "dp"}:
            return [sorted(group.ranks) for group in groups]
        if axes == {"tp", "dp", "pp"}:
            return [list(range(self.world_size))]
        raise ValueError(
            f"found {token!r}; expected tp, dp, tp-dp or tp-dp-pp: a plan's groups have different "
            "numbers of ranks, so ranks of different stages are not paired"
        )
