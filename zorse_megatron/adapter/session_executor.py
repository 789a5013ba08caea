"""The executor of a session: its mailbox, its transport, and the ledger of its memory."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from megatron.training import get_args

from zorse_megatron.adapter.arguments.compute_dtype import torch_dtype
from zorse_megatron.adapter.data_parallel.parted_shards import PartedShards
from zorse_megatron.adapter.groups.plan_communicator import PlanCommunicator
from zorse_megatron.adapter.groups.process_groups import PlanGroups
from zorse_megatron.adapter.memory.session_memory import make_ledger
from zorse_megatron.runtime.executor import Executor
from zorse_megatron.runtime.mailbox import ActivationSpec, Mailbox
from zorse_megatron.runtime.set_place import SetPlace
from zorse_megatron.runtime.transport import make_transport
from zorse_megatron.schedules.list_queries import edges_of
from zorse_megatron.schedules.set_parts import SetParts
from zorse_megatron.schema.plan.plan import Plan
from zorse_megatron.schema.plan.rank_axes import set_of_rank

if TYPE_CHECKING:
    from zorse_megatron.adapter.session import PlanSession


def make_executor(session: "PlanSession", config: Any, models: Mapping[int, Any]) -> Executor:
    """Make it; a collective call. `config`: of the model; `models`: chunk -> wrapped model."""
    communicator = PlanCommunicator(
        session.plan,
        rank=session.rank,
        actions=session.training.ranks[session.rank],
        config=config,
        mailbox=_mailbox(session, config),
    )
    executor = Executor(
        micro_batches=session.micro_batches,
        chunks=session.chunks,
        last_chunk=session.num_chunks - 1,
        mailbox=communicator.mailbox,
        trace=session.trace,
        enter=session.enter,
        times=None if session.watch is None else session.watch.times,
    )
    executor.ledger = make_ledger(
        executor,
        models,
        session.optimizers,
        rank=session.rank,
        device=rank_device(),
        activation_bytes=lambda: session.kept.highest_bytes() if session.kept else 0,
        link=session.host_link,
        watches=session.watches_memory,
        limit_bytes=session.memory_limit_bytes,
    )
    for model in models.values():
        if isinstance(model.shards, PartedShards):
            model.shards.on_summed = executor.sample_memory
    return executor


def _mailbox(session: "PlanSession", config: Any) -> Mailbox:
    edges = edges_of((session.training, session.evaluation))
    return Mailbox(
        transport=make_transport(
            rank=session.rank,
            edges=edges,
            device=rank_device(),
            timeout=session.timeout,
            channels={
                (each.ranks[0], each.ranks[1]): number
                for each, number in session.channels.items()
                if each.use == "link"
            },
        ),
        spec=ActivationSpec(
            sequence_length=session.sequence_length,
            hidden_size=config.hidden_size,
            dtype=boundary_dtype(config),
            device=rank_device(),
            neighbours=_neighbours(session),
        ),
        global_batch_size=session.plan.global_batch_size,
        place=session.place,
    )


def set_parts_of(plan: Plan, rank: int) -> SetParts:
    """The parts of the rank's tensor-parallel set."""
    group, replica = plan.replica_of_rank(rank)
    return SetParts.of(plan.groups[group].replicas[replica])


def set_place(plan: Plan, rank: int, groups: PlanGroups) -> SetPlace | None:
    """Where this rank is in its tensor-parallel set; None where that is the rank alone."""
    ranks = set_of_rank(plan, rank)
    if len(ranks) == 1:
        return None
    return SetPlace(
        index=ranks.index(rank),
        degree=len(ranks),
        group=groups.set,
        is_split=bool(get_args().sequence_parallel),
        parts=set_parts_of(plan, rank),
    )


def _neighbours(session: "PlanSession") -> dict[int, torch.dtype]:
    """Chunk -> the type of its activations, where it may be another one than this rank's."""
    if not session.is_mixed:
        return {}
    groups = [chunk.group for chunk in session.plan.chunks]
    return {chunk: torch_dtype(session.dtypes[group]) for chunk, group in enumerate(groups)}


def rank_device() -> torch.device:
    """Where this rank computes."""
    if torch.cuda.is_available():  # in CPU mode it is not
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


def boundary_dtype(config: Any) -> torch.dtype:
    """The dtype of activations between stages, as stock's `P2PCommunicator` has it."""
    if config.pipeline_dtype is not None:
        return config.pipeline_dtype
    return config.params_dtype


@contextmanager
def timed(config: Any) -> Iterator[None]:
    """As stock's schedules are, by Megatron's timers."""
    if config.timers is None:
        yield
        return
    config.timers("forward-backward", log_level=1).start(barrier=config.barrier_with_L1_time)
    yield
    config.timers("forward-backward").stop()


def phase_of(*, forward_only: bool) -> str:
    """What a list is executed for."""
    done = getattr(get_args(), "curr_iteration", None)  # before the iteration that runs
    if not forward_only:
        return f"in iteration {(done or 0) + 1}"
    return "in an evaluation" if done is None else f"in the evaluation after iteration {done + 1}"
