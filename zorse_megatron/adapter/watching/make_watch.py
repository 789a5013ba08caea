"""The watch of a run; made once, by all ranks together."""

from itertools import permutations

import torch.distributed as dist
from megatron.training import get_args

from zorse_megatron.adapter.moving.requests import PlanRequests
from zorse_megatron.adapter.plan_run import PlanRun
from zorse_megatron.adapter.rank_plan import RankPlan
from zorse_megatron.adapter.watching.exchange import Exchange
from zorse_megatron.adapter.watching.run_watch import RunWatch
from zorse_megatron.adapter.watching.status import StatusReporter
from zorse_megatron.adapter.watching.switching import Switching
from zorse_megatron.rebalance.balancer import Balancer
from zorse_megatron.rebalance.link_times import LinkTimes
from zorse_megatron.rebalance.prepare import Preparation
from zorse_megatron.rebalance.run_status import RunStatus
from zorse_megatron.runtime.course import Course
from zorse_megatron.runtime.device_clock import CudaClock
from zorse_megatron.runtime.step_times import StepTimes
from zorse_megatron.schedules.list_queries import edges_of
from zorse_megatron.trace import Clock

# Of torch's DataLoader, for each worker.
_PREFETCH_FACTOR = 2


def make_watch(at: RankPlan, run: PlanRun, course: Course, clock: Clock) -> RunWatch | None:
    """Make it if it was asked for; a collective call. `course`: of the training."""
    if not run.rebalances and run.status_directory is None:
        return None
    links = LinkTimes(edges=edges_of((at.training,)), world_size=at.plan.world_size)
    status = RunStatus(
        plan=at.plan,
        links=links,
        tokens_per_iteration=at.plan.global_batch_size * at.sequence_length,
        first_iteration=0,
        moves=list(run.moves),
    )
    return RunWatch(
        plan=at.plan,
        times=StepTimes(clock, behind=int(isinstance(clock, CudaClock))),
        exchange=Exchange(timeout=at.timeout),
        switching=_switching(at, course) if run.rebalances else None,
        links=links,
        rank=at.rank,
        reporter=StatusReporter(status, directory=run.status_directory),
        requests=PlanRequests.of(run.status_directory, rank=at.rank, is_first=not run.moves)
        if run.may_move
        else None,
    )


def _switching(at: RankPlan, course: Course) -> Switching:
    links = frozenset(edges_of((at.training, at.evaluation)))
    if dist.get_backend() != "nccl":  # which has a communicator for each link, made at the start
        links = frozenset(permutations(range(at.plan.world_size), 2))
    return Switching(
        balancer=Balancer(plan=at.plan),
        preparation=Preparation.of(at.plan, at.training, tied=at.tied_embeddings, links=links),
        course=course,
        rank=at.rank,
        num_prefetched=_PREFETCH_FACTOR * get_args().num_workers,
    )
