"""The executor of a session: its mailbox, its transport, and the ledger of its memory."""

from collections.abc import Callable
from typing import Any

import torch

from zorse_megatron.adapter.compute_dtype import TORCH_DTYPES, boundary_dtype
from zorse_megatron.adapter.groups.plan_communicator import PlanCommunicator
from zorse_megatron.adapter.rank_plan import RankPlan
from zorse_megatron.runtime.executor import Executor
from zorse_megatron.runtime.mailbox import ActivationSpec, Mailbox
from zorse_megatron.runtime.step_times import StepTimes
from zorse_megatron.runtime.transport import make_transport
from zorse_megatron.schedule.actions import edges_of
from zorse_megatron.trace import Trace


def make_executor(
    at: RankPlan,
    config: Any,
    *,
    trace: Trace,
    enter: Callable[[str], None],
    times: StepTimes | None,
) -> Executor:
    """Make it, without a ledger; a collective call. `config`: of the model; see `Executor`."""
    communicator = PlanCommunicator(
        at.plan, rank=at.rank, actions=at.actions, config=config, mailbox=_mailbox(at, config)
    )
    return Executor(
        micro_batches=at.micro_batches,
        chunks=at.chunks,
        last_chunk=at.num_chunks - 1,
        mailbox=communicator.mailbox,
        trace=trace,
        enter=enter,
        times=times,
    )


def _mailbox(at: RankPlan, config: Any) -> Mailbox:
    channels = {
        (each.ranks[0], each.ranks[1]): number
        for each, number in at.channels.items()
        if each.use == "link"
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
            neighbours=_neighbours(at),
        ),
        global_batch_size=at.plan.global_batch_size,
        place=at.place,
    )


def _neighbours(at: RankPlan) -> dict[int, torch.dtype]:
    """Chunk -> the type of its activations, where it may be another one than this rank's."""
    if not at.is_mixed:
        return {}
    return {
        number: TORCH_DTYPES[at.dtypes[chunk.group]] for number, chunk in enumerate(at.plan.chunks)
    }
