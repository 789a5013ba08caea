"""The loss: what it is divided by, who knows it, and who prints it; how large gradients then are.

Stock sums losses over the last stage's data-parallel group, each member of which has run at least
one micro-batch, and prints on the job's last rank, which is in that group. Neither need hold under
a plan: a replica of the last group may run no micro-batch, and the last rank may be in any group.
"""

import functools
import pickle
from collections.abc import Callable, Collection
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from zorse_megatron.errors import FlagError
from zorse_megatron.gpus.gpu import ComputeDtype
from zorse_megatron.plan.plan import Plan, data_parallel_ranks
from zorse_megatron.runtime.hierarchical_collectives import CommDtype


def with_token_counts(
    forward_step_func: Callable[..., Any], loss_divisor: float
) -> Callable[..., Any]:
    """Wrap the script's forward step: its loss function must say how many tokens it summed over.

    The loss whose backward runs is divided by `loss_divisor`; what is reported is not.

    Stock also takes a mean over an unknown number of tokens (a pair instead of a triple), from
    which no exact mean over unequal parts can be made. Raises FlagError for that.
    """

    def forward_step(*args: Any, **kwargs: Any) -> Any:
        output, loss_func = forward_step_func(*args, **kwargs)
        return output, None if loss_func is None else partial(_divided, loss_func, loss_divisor)

    return forward_step


def _divided(loss_func: Callable[..., Any], loss_divisor: float, output: Any, **kwargs: Any) -> Any:
    result = loss_func(output, **kwargs)
    if kwargs.get("non_loss_data"):
        return result
    counted = len(result) == 3 and all(value.numel() == 2 for value in result[2].values())
    if not counted:
        raise FlagError.of(
            "This script's loss cannot be summed over unequal replicas",
            where="the loss function that forward_step returns",
            found=f"a tuple of {len(result)} without token counts",
            expected="(sum of losses, number of tokens, {name: [sum, number]})",
            remedy="Return sums and counts, as upstream's pretrain_gpt.py does.",
        )
    loss, num_tokens, report = result
    # Not in place: the report may hold the same tensor.
    return loss if loss_divisor == 1.0 else loss / loss_divisor, num_tokens, report


class IdleReplicaLosses:
    """Zero losses for replicas of the last group that run no micro-batch.

    They take part in stock's sum over the group (`train_step`, `evaluate`) without adding to it.
    """

    def __init__(self, *, group: dist.ProcessGroup, has_idle: bool, first_active_rank: int) -> None:
        """`first_active_rank`: the global rank that tells the others which losses there are."""
        self.group = group
        self.has_idle = has_idle
        self.first_active_rank = first_active_rank
        self.names: tuple[str, ...] | None = None

    @classmethod
    def of(cls, plan: Plan, rank: int, group: dist.ProcessGroup) -> "IdleReplicaLosses":
        """Those of a plan's last group; `group`: the data-parallel group of `rank`."""
        last = plan.groups[plan.chunks[-1].group]
        replicas = last.replicas
        active = [replica for replica in replicas if replica.num_microbatches]
        twins = next((ranks for ranks in data_parallel_ranks(last) if rank in ranks), last.ranks)
        return cls(
            group=group,
            has_idle=len(active) < len(replicas),
            first_active_rank=next(each for each in active[0].ranks if each in twins),
        )

    def complete(self, losses: list[Any]) -> list[Any]:
        """Return `losses`, or zeros if there are none; a collective call the first time."""
        if not self.has_idle:
            return losses
        if self.names is None:
            self.names = self._agree_on_names(losses)
        if losses:
            return losses
        return [{name: torch.zeros(2, device="cuda") for name in self.names}]

    def _agree_on_names(self, losses: list[Any]) -> tuple[str, ...]:
        names = [tuple(losses[0]) if losses else None]
        dist.broadcast_object_list(names, src=self.first_active_rank, group=self.group)
        assert names[0] is not None
        return names[0]


def whole_group_losses(
    losses: list[dict[str, torch.Tensor]], group: dist.ProcessGroup
) -> list[dict[str, torch.Tensor]]:
    """Return one entry with the sums and counts of all replicas of `group`; a collective call.

    Stock's `evaluate` averages means of micro-batches, then of ranks, for `--sft`: a mean over
    unequal parts. From this entry it makes the mean over all tokens.
    """
    sums = {name: torch.stack([each[name] for each in losses]).sum(dim=0) for name in losses[0]}
    if group.size() > 1:  # a rank alone needs no communicator for it
        for total in sums.values():
            dist.all_reduce(total, group=group)
    return [sums]


def tell_last_rank(
    function: Callable[..., Any], *, source: int, target: int, rank: int
) -> Callable[..., Any]:
    """Wrap `train_step` or `evaluate`: the last rank gets the losses of `source`.

    Both return a tuple whose first item is the dictionary of losses. Only `source`, a rank of the
    last group, and `target`, the job's last rank, communicate; `source` does not wait.
    """
    messages = LossMessages(peer=target if rank == source else source)

    @functools.wraps(function)
    def with_losses(*args: Any, **kwargs: Any) -> Any:
        losses, *rest = function(*args, **kwargs)
        if rank == source:
            messages.send(losses)
        elif rank == target:
            losses = messages.receive()
        return (losses, *rest)

    return with_losses


class LossMessages:
    """Sends dictionaries of losses from one rank to another, each in one message of known size.

    What the dictionaries are like is told with the first one, and again when it changes. Messages
    are batches of one, which the world's own communicator carries: for any other message torch
    makes a communicator of two ranks (`ProcessGroupNCCL::pointToPoint`), which no plan counts.
    """

    def __init__(self, *, peer: int) -> None:
        self.peer = peer
        self._like: dict[str, torch.Tensor] = {}
        """The last dictionary that was sent as an object."""
        self._leaving: tuple[Any, torch.Tensor] | None = None

    def send(self, losses: dict[str, torch.Tensor] | None) -> None:
        """Start to send; what was sent before must have arrived."""
        if self._leaving is not None:
            self._leaving[0].wait()
        message = self._empty()
        known = losses is not None and _are_numbers(losses) and _alike(losses, self._like)
        if losses is not None and known:
            message[0] = 1
            message[1:] = torch.stack([value.double().reshape([]) for value in losses.values()])
        self._leaving = self._start(dist.isend, message), message
        if not known:
            self._like = losses or {}
            in_host = losses and {name: value.cpu() for name, value in losses.items()}
            for each in _as_messages(in_host):
                self._start(dist.isend, each).wait()

    def receive(self) -> dict[str, torch.Tensor] | None:
        """Wait for the next dictionary."""
        message = self._empty()
        self._start(dist.irecv, message).wait()
        if message[0]:
            values = zip(self._like.items(), message[1:], strict=True)
            return {name: number.to(like).view_as(like) for (name, like), number in values}
        size = torch.zeros(1, dtype=torch.long, device="cuda")
        self._start(dist.irecv, size).wait()
        pickled = torch.empty(int(size), dtype=torch.uint8, device="cuda")
        self._start(dist.irecv, pickled).wait()
        in_host: dict[str, torch.Tensor] | None = pickle.loads(bytes(pickled.tolist()))
        losses = in_host and {name: value.cuda() for name, value in in_host.items()}
        self._like = losses or {}
        return losses

    def _start(self, operation: Callable[..., Any], message: torch.Tensor) -> Any:
        (work,) = dist.batch_isend_irecv([dist.P2POp(operation, message, self.peer)])
        return work

    def _empty(self) -> torch.Tensor:
        """[whether the losses follow, each of them]; float64 has every float32 as it is."""
        return torch.zeros(1 + len(self._like), dtype=torch.float64, device="cuda")


def _as_messages(losses: dict[str, torch.Tensor] | None) -> tuple[torch.Tensor, torch.Tensor]:
    """Of any dictionary: how many bytes follow, and its bytes."""
    pickled = torch.frombuffer(bytearray(pickle.dumps(losses)), dtype=torch.uint8).cuda()
    return torch.tensor([len(pickled)], dtype=torch.long, device="cuda"), pickled


def _are_numbers(losses: dict[str, torch.Tensor]) -> bool:
    return bool(losses) and all(value.numel() == 1 for value in losses.values())


def _alike(first: dict[str, torch.Tensor], second: dict[str, torch.Tensor]) -> bool:
    """Whether they differ by their values only."""
    forms = [[(name, v.dtype, v.shape) for name, v in each.items()] for each in (first, second)]
    return forms[0] == forms[1]


# What the loss is divided by before its backward, so that fp16 gradients are stock's numbers.
#
# Under a plan the loss is a sum over tokens, and gradients are divided by the number of tokens
# after the last sum (SCALE). By default stock divides the loss itself: its 16-bit gradients are
# those of a mean, which is what loss scales are chosen for. Gradients of a sum are larger by the
# tokens of a batch: of fp16's 40 powers of two, which a loss scale is to place them in, a batch of
# 131,072 tokens would take 17.


def loss_divisor(
    plan: Plan, dtypes: Collection[ComputeDtype], *, sequence_length: int, is_sum: bool
) -> float:
    """The divisor of one job, the same on all ranks and in all steps.

    With fp16 it is the tokens of a global batch, masked ones included: if all count, that is what
    stock divides by, so what overflows under stock overflows here.

    `dtypes`: what groups compute in. bf16 has fp32's range and takes sums as they are, so a job
    without fp16 has 1. `is_sum`: whether the command itself says --calculate-per-token-loss; its
    loss scale is for the gradients of a sum then, as under stock.
    """
    if is_sum or "fp16" not in dtypes:
        return 1.0
    return float(plan.global_batch_size * sequence_length)


def comm_dtype_of(
    plan: Plan, rank: int, *, sequence_length: int, loss_divisor: float
) -> CommDtype | None:
    """How the rank's group sends gradients; None: in the dtype that they are kept in.

    In fp16 gradients are sent in the size of means: divided by the tokens of the global batch, to a
    power of two, which changes no digit, if the loss was not (`loss_divisor`: what it was divided
    by). bf16 has the range of fp32.
    """
    name = plan.groups[plan.group_of_rank(rank)].grad_reduce_dtype
    if name is None:
        return None
    if name == "bf16":
        return CommDtype(dtype=torch.bfloat16)
    tokens = plan.global_batch_size * sequence_length
    factor = 1.0 if loss_divisor > 1.0 else 0.5 ** (tokens.bit_length() - 1)
    return CommDtype(dtype=torch.float16, factor=factor)
