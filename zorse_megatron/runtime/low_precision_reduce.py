"""Reduce-scatter with 16-bit messages and fp32 sums: half the bytes of fp32.

Every rank sends each owner its part of the buffer in 16 bits, all in one all-to-all of unequal
parts. The owner adds them to its own part, which is never rounded, in fp32 and in the order of the
group. So each contribution is rounded once (in a 16-bit reduce-scatter every partial sum is), and
the sum has the same bits whatever arrives first.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import torch
import torch.distributed as dist

from zorse_megatron.kernels import pack, sum_parts
from zorse_megatron.runtime.collectives import Works, as_one_operation, finish, views
from zorse_megatron.runtime.transport import Work
from zorse_megatron.schedules.shards import Interval


@dataclass(frozen=True, kw_only=True)
class CommDtype:
    """How gradients are sent.

    `factor`: what they are multiplied by before they are rounded, and divided by again in fp32; a
    power of two, so that only range changes. Overflow becomes inf, as in a 16-bit backward.
    """

    dtype: torch.dtype
    factor: float = 1.0


def reduce_scatter_low_precision(
    full: torch.Tensor,
    bounds: Sequence[Interval],
    group: dist.ProcessGroup,
    comm_dtype: CommDtype,
    *,
    async_op: bool = False,
) -> Works | None:
    """Sum fp32 `full` over the group into this rank's interval of it, in place.

    The other intervals stay as they are. Returns the work when `async_op`, else None when done; the
    sum is made by whoever waits, so all works must be waited for. Raises ValueError when `bounds`
    do not fit the buffer and the group, or the buffer is not fp32.
    """
    parts = views(full, bounds, group)
    if full.dtype != torch.float32:
        raise ValueError(f"found gradients in {full.dtype}; expected them in torch.float32")
    works: list[Work] = [] if group.size() == 1 else [_exchange(full, parts, group, comm_dtype)]
    return finish(works, async_op)


def _exchange(
    full: torch.Tensor,
    parts: Sequence[torch.Tensor],
    group: dist.ProcessGroup,
    comm_dtype: CommDtype,
) -> "_Exchange":
    """Start to send each owner its part; nothing goes to this rank itself."""
    me, others = group.rank(), group.size() - 1
    own = parts[me]
    sent = full.new_empty(full.numel() - own.numel(), dtype=comm_dtype.dtype)
    received = full.new_empty(others * own.numel(), dtype=comm_dtype.dtype)
    start = sum(part.numel() for part in parts[:me])
    _round_off(sent, full, (start, start + own.numel()), comm_dtype)
    start_calls = partial(_start_exchange, parts, group, sent, received)
    works = as_one_operation("exchange", parts, group, start_calls, sent_as=comm_dtype.dtype)
    return _Exchange(Works(works), sent, received, own=own, group_rank=me, comm_dtype=comm_dtype)


@torch.no_grad()
def _round_off(
    sent: torch.Tensor, full: torch.Tensor, own: Interval, comm_dtype: CommDtype
) -> None:
    """Write all but `own` into `sent`, multiplied and rounded in one pass."""
    start, stop = own
    if comm_dtype.factor == 1.0:
        pack(sent, full, [(0, start), (stop, full.numel())])
    else:
        torch.mul(full[:start], comm_dtype.factor, out=sent[:start])
        torch.mul(full[stop:], comm_dtype.factor, out=sent[start:])


def _start_exchange(
    parts: Sequence[torch.Tensor],
    group: dist.ProcessGroup,
    sent: torch.Tensor,
    received: torch.Tensor,
) -> list[Work]:
    """`sent`: the parts of others in their order; `received`: others' of this rank's, in theirs."""
    ranks, me = range(group.size()), group.rank()
    own = parts[me].numel()
    send_sizes = [0 if rank == me else parts[rank].numel() for rank in ranks]
    receive_sizes = [0 if rank == me else own for rank in ranks]
    work = dist.all_to_all_single(
        received, sent, receive_sizes, send_sizes, group=group, async_op=True
    )
    assert work is not None, "this rank is not in the group"
    return [work]


class _Exchange:
    """An exchange under way; whoever waits for it makes the sum."""

    def __init__(
        self,
        works: Works,
        sent: torch.Tensor,
        received: torch.Tensor,
        *,
        own: torch.Tensor,
        group_rank: int,
        comm_dtype: CommDtype,
    ) -> None:
        """`group_rank`: this rank's in the group; see `_start_exchange`."""
        self._works = works
        self._buffers: tuple[torch.Tensor, ...] = (sent, received)
        self._own, self._group_rank, self._comm_dtype = own, group_rank, comm_dtype

    @property
    def buffer_bytes(self) -> int:
        """What is sent and received, until the sum is made."""
        return sum(buffer.nbytes for buffer in self._buffers)

    def is_completed(self) -> bool:
        """Whether everything has arrived, without waiting."""
        return self._works.is_completed()

    @torch.no_grad()
    def wait(self) -> None:
        """Wait for all contributions and add them to this rank's own."""
        if not self._buffers:
            return
        self._works.wait()
        _, received = self._buffers
        self._buffers = ()
        own = self._own
        if not own.numel():
            return
        parts = list(received.split(own.numel()))
        weights = [1.0 / self._comm_dtype.factor] * len(parts)
        parts.insert(self._group_rank, own)
        weights.insert(self._group_rank, 1.0)
        sum_parts(own, parts, weights)
