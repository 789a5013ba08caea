"""A word embedding shared by the first and the last chunk, which are on groups of different size.

Source: `megatron.core.distributed.finalize_model_grads._allreduce_word_embedding_grads`, which sums
the two copies' gradients over pairs of ranks, one from each stage. Here the groups need not have
the same number of ranks, and each cuts its own copy into shards of its own sizes. So after both
groups have reduced their gradients, whoever owns the same elements in both swaps them and adds.
Both then hold the same bits, and the same optimizer rule keeps the copies equal.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.optimizer.optimizer import param_group_identifier_keys
from megatron.core.utils import unwrap_model

from zorse_megatron.runtime.collectives import IntervalExchange, exchange_intervals
from zorse_megatron.schedules.shards import Interval, intersection, overlaps


@dataclass(frozen=True, kw_only=True)
class _Swap:
    """Elements of this rank's copy that `peer` owns in the other copy."""

    peer: int
    gradient: torch.Tensor


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
        """`model_chunks`: this rank's wrapped chunks, of which one may hold a copy.

        `first_ranks`, `last_ranks`: global ranks of the two groups in the order of their process
        groups; disjoint. Raises ValueError when a group's shards are not known or do not fit.
        """
        shared = set(first_ranks) & set(last_ranks)
        if shared:
            raise ValueError(
                f"ranks {sorted(shared)} are in the first and in the last group; expected "
                "disjoint groups (one group that holds both ends has one copy, tied in the model)"
            )
        self.group = group
        rank = dist.get_rank()
        self.is_first = rank in first_ranks
        self.weight: torch.nn.Parameter | None = None
        mine: tuple[int, Interval] | None = None
        if self.is_first or rank in last_ranks:
            self.weight, owned = _tied_weight(model_chunks)
            mine = (self.weight.numel(), owned)
        owners = _gather(mine, group)
        first = [_owned(owners, r) for r in first_ranks]
        last = [_owned(owners, r) for r in last_ranks]
        for side in (first, last):
            _check_cover(side, owners[first_ranks[0]])
        self._swaps = self._list_swaps(first, last, tuple(first_ranks), tuple(last_ranks))

    def _list_swaps(
        self,
        first: Sequence[Interval],
        last: Sequence[Interval],
        first_ranks: tuple[int, ...],
        last_ranks: tuple[int, ...],
    ) -> list[_Swap]:
        """This rank's swaps, in the order in which both groups list all of them."""
        if self.weight is None:
            return []
        gradient = self.weight.main_grad.view(-1)  # type: ignore[attr-defined]
        swaps = []
        for overlap in overlaps(first, last):
            pair = (first_ranks[overlap.first_member], last_ranks[overlap.second_member])
            if dist.get_rank() not in pair:
                continue
            peer = pair[1] if self.is_first else pair[0]
            swaps.append(_Swap(peer=peer, gradient=gradient[overlap.start : overlap.stop]))
        return swaps

    @torch.no_grad()
    def reduce(self) -> None:
        """Add the other copy's gradient to this rank's shard of its copy.

        Call between `finish_grad_sync` of both chunks and the scaling of gradients.
        """
        exchanges = [
            IntervalExchange(
                peer=swap.peer, send=swap.gradient, receive=torch.empty_like(swap.gradient)
            )
            for swap in self._swaps
        ]
        exchange_intervals(exchanges, self.group)
        for swap, exchange in zip(self._swaps, exchanges, strict=True):
            # a + b and b + a have the same bits, so both sides may add in place.
            swap.gradient.add_(exchange.receive)

    def check_update_rule(self, optimizer: Any) -> None:
        """Raise ValueError unless both copies are updated by the same rule.

        A collective call of all ranks of `group`, with Megatron's optimizer of this rank. Name
        patterns in the optimizer's overrides may put the two copies into different groups.
        """
        rule = None if self.weight is None else _update_rule(optimizer, self.weight)
        rules = {r: rule for r, rule in _gather(rule, self.group).items() if rule is not None}
        if len(set(rules.values())) > 1:
            raise ValueError(
                f"the copies of the tied embedding are in different parameter groups: {rules} "
                f"(rank -> {param_group_identifier_keys}); expected one learning rate and weight "
                "decay for both. Make the overrides match both names, or untie the embeddings"
            )


def _tied_weight(model_chunks: Sequence[Any]) -> tuple[torch.nn.Parameter, Interval]:
    """This rank's copy and the interval of it that this rank owns."""
    for chunk in model_chunks:
        weight = unwrap_model(chunk).shared_embedding_or_output_weight()
        for buffer in chunk.buffers:
            bucket = buffer.param_to_bucket.get(weight)
            if bucket is None:
                continue
            start, stop = bucket.param_to_index[weight]
            shard = bucket.shard_bounds[buffer.data_parallel_group.rank()]
            owned = intersection(shard, (start, stop))
            return weight, (owned[0] - start, owned[1] - start) if owned else (0, 0)
    raise ValueError("found no trainable word embedding in this rank's chunks; expected one")


def _gather(mine: Any, group: dist.ProcessGroup) -> dict[int, Any]:
    """`mine` of every rank of `group`, by global rank."""
    everyone: list[Any] = [None] * group.size()
    dist.all_gather_object(everyone, mine, group=group)
    return dict(zip(dist.get_process_group_ranks(group), everyone, strict=True))


def _owned(owners: dict[int, Any], rank: int) -> Interval:
    if owners.get(rank) is None:
        raise ValueError(f"rank {rank} is not in the group or has no copy of the tied embedding")
    return owners[rank][1]


def _check_cover(side: Sequence[Interval], of_first_rank: tuple[int, Interval]) -> None:
    """A group's shards must make up the whole embedding, and both embeddings be one size."""
    total = of_first_rank[0]
    covered = sum(stop - start for start, stop in side)
    if covered != total:
        raise ValueError(
            f"a group's shards {list(side)} of the tied embedding hold {covered} elements; "
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
