"""Megatron's `P2PCommunicator` for the ranks of a plan: the sends and receives of its list.

Stock's has one rank before and one after itself, and one tensor for each micro-batch. A rank of a
plan may exchange with several: with all ranks of a tensor-parallel group, which have a part of the
sequence each, and with several replicas. The runtime's executor starts these transfers in the order
of its list, which tells them apart; they are made by the communicator's mailbox. Stock's schedules
make one call for each micro-batch, and all their calls come to `_communicate`: here it makes all
transfers of the next micro-batch in that direction.
"""

from collections.abc import Iterator, Sequence
from itertools import repeat
from typing import Any

import torch
from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator

from zorse_megatron.adapter.groups.process_groups import PipelinePosition
from zorse_megatron.errors import PlanError, Problem
from zorse_megatron.plan.plan import Group, Plan
from zorse_megatron.runtime.mailbox import Mailbox
from zorse_megatron.schedule.actions import RECEIVES, TRANSFERS, Action, Kind
from zorse_megatron.schedule.samples import MicroBatch, rank_micro_batches


class PlanCommunicator(P2PCommunicator):
    """Transfers of one rank; pass it to a stock schedule as `p2p_communicator`.

    Stock's methods wait until what they send has left. They serve plans with one chunk for each
    group whose micro-batches are the same on both sides of every boundary, whatever the degrees;
    for others they raise PlanError, as stock's order of calls does not fit these.
    """

    def __init__(
        self, plan: Plan, *, rank: int, actions: Sequence[Action], config: Any, mailbox: Mailbox
    ) -> None:
        """`actions`: the rank's list; `config`: of the model, as stock takes it."""
        self.mailbox = mailbox
        self.micro_batches = rank_micro_batches(plan, rank)
        self._cuts_micro_batches = len(set(map(_samples_of, repeat(plan), plan.groups))) > 1
        self._chunks = plan.chunks_of_group(plan.group_of_rank(rank))
        self._transfers = [action for action in actions if action.kind in TRANSFERS]
        self._counts: dict[Kind, int] = {}
        """Calls so far."""
        # Stock's `__init__` asks the pipeline's process group for neighbours; a plan has no such.
        self.pp_group = PipelinePosition(self._chunks[0], len(plan.chunks))
        self.config = config
        self.virtual_pipeline_model_parallel_size = None
        self.prev_rank = self._only_peer(Kind.RECV_F)
        self.next_rank = self._only_peer(Kind.SEND_F)

    def _only_peer(self, kind: Kind) -> int | None:
        """The rank that all of these go to or come from; None if there are several."""
        peers = {action.peer for action in self._transfers if action.kind is kind}
        return peers.pop() if len(peers) == 1 else None

    def _communicate(
        self,
        *,
        tensor_send_next: torch.Tensor | None,
        tensor_send_prev: torch.Tensor | None,
        recv_prev: bool,
        recv_next: bool,
        tensor_shape: Any,
        wait_on_reqs: bool = True,
    ) -> tuple[Any, Any, None]:
        """Make the transfers of the next micro-batch in each direction, and wait for them.

        Raises PlanError where stock's calls cannot serve the plan, ValueError for another shape.
        """
        self._refuse(wait_on_reqs)
        wanted: list[tuple[Kind, torch.Tensor | None]] = [
            (kind, None)
            for kind, receives in (
                (Kind.RECV_F, recv_prev),
                (Kind.RECV_B, recv_next),
            )
            if receives
        ]
        wanted += [
            (kind, tensor)
            for kind, tensor in (
                (Kind.SEND_F, tensor_send_next),
                (Kind.SEND_B, tensor_send_prev),
            )
            if tensor is not None
        ]
        arrived = self._transfer(wanted)
        for tensor in arrived.values():
            if tensor_shape is not None and tuple(tensor_shape) != tuple(tensor.shape):
                raise ValueError(
                    f"found a tensor of shape {tuple(tensor.shape)}; expected {tuple(tensor_shape)}"
                )
        return arrived.get(Kind.RECV_F), arrived.get(Kind.RECV_B), None

    def _transfer(
        self, wanted: Sequence[tuple[Kind, torch.Tensor | None]]
    ) -> dict[Kind, torch.Tensor]:
        """What has arrived of each kind."""
        numbers = {kind: self._counts.get(kind, 0) for kind, _ in wanted}
        steps = [
            (action, self.micro_batches[numbers[kind] % len(self.micro_batches)], tensor)
            for kind, tensor in wanted
            for action in self._of(kind, numbers[kind] % len(self.micro_batches))
        ]
        self._counts |= {kind: number + 1 for kind, number in numbers.items()}
        self.mailbox.begin([action for action, _, _ in steps])
        self.mailbox.come_to(0)
        taken: dict[Kind, tuple[Action, MicroBatch]] = {}
        for position, (action, micro_batch, tensor) in enumerate(steps):
            if action.kind in RECEIVES:
                self.mailbox.start_receive(position)
                taken[action.kind] = action, micro_batch
            else:
                assert tensor is not None
                self.mailbox.start_send(position, action, tensor.detach(), micro_batch)
        arrived = {}
        for kind, (action, micro_batch) in taken.items():
            assert action.chunk is not None
            tensor = self.mailbox.take(
                activation=kind is Kind.RECV_F,
                chunk=action.chunk,
                micro_batch=micro_batch,
            )
            arrived[kind] = tensor.requires_grad_()
        self.mailbox.flush()
        return arrived

    def _of(self, kind: Kind, number: int) -> list[Action]:
        return [a for a in self._transfers if a.kind is kind and a.micro_batch == number]

    def _refuse(self, wait_on_reqs: bool) -> None:
        problems = list(self._problems(wait_on_reqs))
        if problems:
            raise PlanError("stock's schedules cannot communicate as this plan does", problems)

    def _problems(self, wait_on_reqs: bool) -> Iterator[Problem]:
        if len(self._chunks) > 1:
            yield Problem(
                where="chunks",
                found=f"{len(self._chunks)} of one group: {list(self._chunks)}",
                expected="one chunk for each group",
                remedy="Let the runtime execute the plan, which knows whose tensor it sends.",
            )
        if not wait_on_reqs:
            yield Problem(
                where="config.overlap_p2p_comm",
                found="transfers that are not waited for",
                expected="calls that wait",
                remedy="Turn it off: it is for stock's interleaved schedule.",
            )
        if self._cuts_micro_batches:
            yield Problem(
                where="groups",
                found="micro-batches of which other groups have pieces",
                expected="micro-batches that are the same on both sides of every boundary",
                remedy="Let the runtime execute the plan, or use equal micro-batches.",
            )


def _samples_of(plan: Plan, group: Group) -> frozenset[tuple[int, int]]:
    """Samples of each micro-batch of a group's replicas."""
    return frozenset(
        (micro_batch.start, micro_batch.stop)
        for rank in group.ranks
        for micro_batch in rank_micro_batches(plan, rank)
    )
