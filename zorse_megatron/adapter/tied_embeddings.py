"""A word embedding of which first and last chunk have copies, on groups of different size.

Source: `megatron.core.distributed.finalize_model_grads._allreduce_word_embedding_grads`, which sums
the two copies' gradients over pairs of ranks, one from each stage. Here the groups need not have
the same number of ranks, each copy is cut into parts and shards of its own sizes, and one group may
hold both copies in two chunks. So after both chunks' gradients have been reduced, whoever owns the
same elements of the two copies swaps them and adds. Both copies then hold the same bits, and the
same optimizer rule keeps them equal.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.optimizer.optimizer import param_group_identifier_keys
from megatron.core.utils import unwrap_model

from zorse_megatron.adapter.compute_dtype import original_entry
from zorse_megatron.adapter.groups.global_groups import presented
from zorse_megatron.runtime.collectives import IntervalExchange, exchange_intervals, gathered
from zorse_megatron.schedule.shards import intersection
from zorse_megatron.schedule.tensor_parallel_parts import Run

_FIRST, _LAST = 0, 1
_SECOND_COPY = "zorse_second_copy"


def is_second_copy(tensor: Any) -> bool:
    """Whether this is the last chunk's copy of the embedding, on a rank with the first one's."""
    return getattr(tensor, _SECOND_COPY, False)


@dataclass(frozen=True, kw_only=True)
class _Copy:
    """This rank's part of one of the two copies."""

    chunk: Any
    weight: torch.nn.Parameter
    runs: tuple[Run, ...]
    """What this rank owns of the flattened whole weight."""

    @property
    def total(self) -> int:
        """Elements of the whole weight."""
        return math.prod(self.chunk.parts[self.weight].shape)

    def gradient(self, start: int, stop: int) -> torch.Tensor:
        """Owned elements of the gradient, wherever the chunk has them now."""
        return self.chunk.gradient_piece(self.weight, start, stop)


@dataclass(frozen=True, kw_only=True)
class _Swap:
    """Elements of this rank's copy `end` that `peer` owns in the other one.

    `start`, `stop`: as the chunk numbers what it owns.
    """

    rank: int
    end: int
    peer: int
    start: int
    stop: int
    there: int
    """Where the peer has them."""


@contextmanager
def saved_once(chunks: Sequence[Any]) -> Iterator[None]:
    """Within the block, the models' sharded state dicts have no second copy.

    Stock's parallel save gives each tensor to one rank of a group, by its name. A rank with both
    copies would save it twice.
    """
    with ExitStack() as stack:
        for model in map(unwrap_model, chunks):
            others = partial(_without_second_copies, model.sharded_state_dict)
            stack.enter_context(presented(model, sharded_state_dict=others))
        yield


def _without_second_copies(stock: Callable[..., dict], *args: Any, **kwargs: Any) -> dict:
    return {
        name: entry
        for name, entry in stock(*args, **kwargs).items()
        if not is_second_copy(_parameter_of(entry))
    }


def _parameter_of(entry: Any) -> Any:
    """What an entry of a model's sharded state dict, or the blocks in its place, are made of."""
    first = next(iter(entry.values())) if isinstance(entry, dict) else entry
    return getattr(original_entry(first), "data", None)


class TiedEmbedding:
    """The two copies of the word embedding, seen from one rank of the first or the last group.

    Every rank of `group` makes one, which is a collective call; `group` holds all ranks of both
    groups (the world will do). Ranks of neither group pass no chunk and only take part in that.
    """

    def __init__(
        self,
        *,
        model_chunks: Sequence[Any],
        first_ranks: Sequence[int],
        last_ranks: Sequence[int],
        group: dist.ProcessGroup,
    ) -> None:
        """`model_chunks`: this rank's wrapped chunks, of which up to two hold a copy.

        `first_ranks`, `last_ranks`: global ranks of the two groups in the order of their process
        groups; they may be the same group. Raises ValueError when a rank of them has no copy or
        its group's shards do not fit.
        """
        self.group = group
        rank = dist.get_rank()
        self.copies = {
            end: _copy_in(model_chunks, end)
            for end, ranks in ((_FIRST, first_ranks), (_LAST, last_ranks))
            if rank in ranks
        }
        if len(self.copies) == 2:
            setattr(self.copies[_LAST].weight, _SECOND_COPY, True)
        mine = {end: (copy.total, copy.runs) for end, copy in self.copies.items()}
        owners = _gather(mine, group)
        sides = [
            _owned(owners, ranks, end)
            for end, ranks in ((_FIRST, first_ranks), (_LAST, last_ranks))
        ]
        for side in sides:
            _check_cover(side, owners[first_ranks[0]][_FIRST][0])
        # Both groups list all swaps in the order of the elements.
        self._swaps = [swap for swap in _swaps(*sides) if swap.rank == rank]

    @torch.no_grad()
    def reduce(self) -> None:
        """Add the other copy's gradient to this rank's shard of its copy.

        Call between the end of both chunks' reductions and the scaling of gradients.
        """
        rank = dist.get_rank()
        remote = [swap for swap in self._swaps if swap.peer != rank]
        gradients = [self.copies[s.end].gradient(s.start, s.stop) for s in remote]
        exchanges = [
            IntervalExchange(peer=swap.peer, send=gradient, receive=torch.empty_like(gradient))
            for swap, gradient in zip(remote, gradients, strict=True)
        ]
        exchange_intervals(exchanges, self.group)
        # a + b and b + a have the same bits, so both sides may add in place.
        for gradient, exchange in zip(gradients, exchanges, strict=True):
            gradient.add_(exchange.receive)
        for swap in self._swaps:
            if swap.peer == rank:
                here = self.copies[_FIRST].gradient(swap.start, swap.stop)
                there = self.copies[_LAST].gradient(swap.there, swap.there + swap.stop - swap.start)
                there.copy_(here.add_(there))

    def check_update_rule(self, optimizer: Any) -> None:
        """Raise ValueError unless both copies are updated by the same rule.

        A collective call of all ranks of `group`, with Megatron's optimizer of this rank. Name
        patterns in the optimizer's overrides may put the two copies into different groups.
        """
        mine = {_update_rule(optimizer, copy.weight) for copy in self.copies.values()} - {None}
        rules = {rank: found for rank, found in _gather(mine, self.group).items() if found}
        if len(set().union(*rules.values())) > 1:
            raise ValueError(
                f"the copies of the tied embedding are in different parameter groups: {rules} "
                f"(rank -> {param_group_identifier_keys}); expected one learning rate and weight "
                "decay for both. Make the overrides match both names, or untie the embeddings"
            )


_Side = list[tuple[Run, int]]
"""What ranks own of one copy, in the order of its elements, with the ranks."""


def _swaps(first: _Side, last: _Side) -> Iterator[_Swap]:
    """What is swapped between the owners of the same elements of both copies."""
    left = right = 0
    while left < len(first) and right < len(last):
        (one, here), (other, there) = first[left], last[right]
        both = intersection((one.start, one.stop), (other.start, other.stop))
        if both is not None:
            size = both[1] - both[0]
            at, other_at = one.at + both[0] - one.start, other.at + both[0] - other.start
            yield _Swap(rank=here, end=_FIRST, peer=there, start=at, stop=at + size, there=other_at)
            if here != there:
                yield _Swap(
                    rank=there, end=_LAST, peer=here, start=other_at, stop=other_at + size, there=at
                )
        if one.stop <= other.stop:
            left += 1
        if other.stop <= one.stop:
            right += 1


def _copy_in(model_chunks: Sequence[Any], end: int) -> _Copy:
    """This rank's part of the first or of the last chunk's copy."""
    for chunk in model_chunks:
        model = unwrap_model(chunk)
        if not (model.pre_process if end == _FIRST else model.post_process):
            continue
        weight = model.shared_embedding_or_output_weight()
        if weight.requires_grad:
            return _Copy(chunk=chunk, weight=weight, runs=chunk.owned_runs(weight))
    where = "first" if end == _FIRST else "last"
    raise ValueError(
        f"found no trainable word embedding in this rank's chunks; expected the {where} chunk's"
    )


def _gather(mine: Any, group: dist.ProcessGroup) -> dict[int, Any]:
    """`mine` of every rank of `group`, by global rank."""
    return dict(zip(dist.get_process_group_ranks(group), gathered(mine, group), strict=True))


def _owned(owners: dict[int, Any], ranks: Sequence[int], end: int) -> _Side:
    side: _Side = []
    for rank in ranks:
        if end not in owners.get(rank, {}):
            raise ValueError(
                f"rank {rank} is not in the group or has no copy of the tied embedding"
            )
        side += [(run, rank) for run in owners[rank][end][1]]
    return sorted(side, key=lambda each: each[0].start)


def _check_cover(side: _Side, total: int) -> None:
    """A group's shards must make up the whole embedding, and both embeddings be one size."""
    covered = sum(run.stop - run.start for run, _ in side)
    if covered != total:
        raise ValueError(
            f"a group's shards {side} of the tied embedding hold {covered} elements; "
            f"expected {total}"
        )


def _update_rule(optimizer: Any, weight: torch.nn.Parameter) -> tuple | None:
    """What tells the parameter group of `weight` from others; None where this rank owns none."""
    for part in getattr(optimizer, "chained_optimizers", [optimizer]):
        position = part.model_param_group_index_map.get(weight)
        if position is not None:
            group = part.optimizer.param_groups[position[0]]
            return tuple(group.get(key) for key in param_group_identifier_keys)
    return None
