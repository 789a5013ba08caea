"""Stock's pipeline calls between tensor-parallel groups of other degrees, and between replicas."""

from typing import Any

import torch
import torch.distributed as dist

from tests.megatron.plans import plan_of, replica, tp_replica
from tests.megatron.preloaded import run_megatron_ranks
from zorse_megatron.plan.plan import Plan

LENGTH, WIDTH = 6, 3
# A TP group of two, one rank, and a TP group of two of which each rank needs the whole.
IN_A_ROW = plan_of(
    ((tp_replica((0, 1), 2, 2),), 2), ((replica(2, 2, 2),), 1), ((tp_replica((3, 4), 2, 2),), 1)
)
UNEQUAL = plan_of(((replica(0, 2, 2),), 2), ((replica(1, 4, 1),), 2))


def activation(number: int) -> torch.Tensor:
    return torch.arange(LENGTH * 2 * WIDTH).float().view(LENGTH, 2, WIDTH) + 100 * number


def passed_on(plan: Plan) -> Any:
    """What each rank receives, as lists: forward of each micro-batch, then backward."""
    from megatron.core import ModelParallelConfig

    from zorse_megatron.adapter import cpu_mode

    cpu_mode.enable()
    from zorse_megatron.adapter.groups.plan_communicator import PlanCommunicator
    from zorse_megatron.adapter.groups.process_groups import create_groups
    from zorse_megatron.errors import PlanError
    from zorse_megatron.plan.plan import tp_group_of_rank
    from zorse_megatron.runtime.mailbox import ActivationSpec, Mailbox, TpRank
    from zorse_megatron.runtime.transport import make_transport
    from zorse_megatron.schedule.actions import edges_of
    from zorse_megatron.schedule.lower import lower_plan
    from zorse_megatron.schedule.tensor_parallel_parts import TpPartition

    rank, lists = dist.get_rank(), lower_plan(plan)
    groups = create_groups(plan, rank=rank, timeout=dist.default_pg_timeout)
    ranks, place = tp_group_of_rank(plan, rank), None
    if len(ranks) > 1:
        place = TpRank(
            index=ranks.index(rank),
            degree=len(ranks),
            group=groups.tp_group,
            is_split=False,
            tp_shards=TpPartition(degree=len(ranks)),
        )
    cpu = torch.device("cpu")
    mailbox = Mailbox(
        transport=make_transport(rank=rank, edges=edges_of((lists,)), device=cpu),
        spec=ActivationSpec(
            sequence_length=LENGTH, hidden_size=WIDTH, dtype=torch.float32, device=cpu
        ),
        global_batch_size=plan.global_batch_size,
        place=place,
    )
    communicator = PlanCommunicator(
        plan,
        rank=rank,
        actions=lists.ranks[rank],
        config=ModelParallelConfig(pipeline_dtype=torch.float32),
        mailbox=mailbox,
    )
    first, last = communicator.is_pp_first_stage, communicator.is_pp_last_stage
    shape, found = (LENGTH, 2, WIDTH), []
    try:
        for number in range(2):
            taken = communicator.recv_forward(shape, first)
            there = activation(number) if first else taken + 1
            gradient = communicator.send_forward_recv_backward(there, shape, last)
            back = -there if last else gradient * 2
            communicator.send_backward(back, first)
            found.append((None if first else taken.tolist(), None if last else gradient.tolist()))
    except PlanError as error:
        return str(error)
    return communicator.prev_rank, communicator.next_rank, found


def test_stock_s_calls_pass_whole_tensors_through_tp_groups_of_other_degrees() -> None:
    answers = run_megatron_ranks(5, passed_on, IN_A_ROW)
    assert [each[:2] for each in answers] == [
        (None, 2),
        (None, 2),
        (None, None),
        (2, None),
        (2, None),
    ]
    for rank, (_, _, found) in enumerate(answers):
        stage = (0, 0, 1, 2, 2)[rank]
        for number, (taken, gradient) in enumerate(found):
            sent = activation(number)
            assert taken == (None if stage == 0 else (sent + stage - 1).tolist())
            expected = -(sent + 2) * 2 ** (1 - stage) if stage < 2 else None
            assert gradient == (None if expected is None else expected.tolist())


def test_what_stock_s_calls_cannot_serve_is_refused_before_anything_is_sent() -> None:
    for answer in run_megatron_ranks(2, passed_on, UNEQUAL):
        assert "stock's schedules cannot communicate as this plan does" in answer
        assert "micro-batches that are the same on both sides" in answer
