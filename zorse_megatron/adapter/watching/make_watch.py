"""The watch of a session; made once, by all ranks together."""

from itertools import permutations
from typing import TYPE_CHECKING

import torch.distributed as dist
from megatron.training import get_args

from zorse_megatron.adapter.moving.requests import PlanRequests
from zorse_megatron.adapter.watching.exchange import Exchange
from zorse_megatron.adapter.watching.run_watch import RunWatch
from zorse_megatron.adapter.watching.status import StatusReporter
from zorse_megatron.adapter.watching.switching import Switching
from zorse_megatron.rebalance.balancer import Balancer
from zorse_megatron.rebalance.link_times import LinkTimes
from zorse_megatron.rebalance.prepare import Preparation
from zorse_megatron.rebalance.run_status import RunStatus
from zorse_megatron.runtime.device_clock import CudaClock
from zorse_megatron.runtime.step_times import StepTimes
from zorse_megatron.schedules.list_queries import edges_of

if TYPE_CHECKING:
    from zorse_megatron.adapter.session import PlanSession
    from zorse_megatron.trace import Clock

# Of torch's DataLoader, for each worker.
_PREFETCH_FACTOR = 2


def make_watch(session: "PlanSession", clock: "Clock") -> RunWatch | None:
    """Make it if it was asked for; a collective call."""
    if not session.rebalances and session.status_directory is None:
        return None
    plan = session.plan
    links = LinkTimes(edges=edges_of((session.training,)), world_size=plan.world_size)
    status = RunStatus(
        plan=plan,
        links=links,
        tokens_per_iteration=plan.global_batch_size * session.sequence_length,
        first_iteration=0,
        moves=list(session.moves),
    )
    return RunWatch(
        plan=plan,
        times=StepTimes(clock, behind=int(isinstance(clock, CudaClock))),
        exchange=Exchange(timeout=session.timeout),
        switching=_switching(session) if session.rebalances else None,
        links=links,
        rank=session.rank,
        reporter=StatusReporter(status, directory=session.status_directory),
        requests=PlanRequests.of(
            session.status_directory, rank=session.rank, is_first=not session.moves
        )
        if session.may_move
        else None,
    )


def _switching(session: "PlanSession") -> Switching:
    plan = session.plan
    links = frozenset(edges_of((session.training, session.evaluation)))
    if dist.get_backend() != "nccl":  # which has a communicator for each link, made at the start
        links = frozenset(permutations(range(plan.world_size), 2))
    return Switching(
        balancer=Balancer(plan=plan),
        preparation=Preparation.of(
            plan, session.training, tied=session.tied_embeddings, links=links
        ),
        course=session.course,
        rank=session.rank,
        num_prefetched=_PREFETCH_FACTOR * get_args().num_workers,
    )
