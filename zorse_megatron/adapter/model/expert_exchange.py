"""Tokens on their way to experts of other ranks, and back.

Ranks that share experts alone each have samples of their own. A token is sent once to each rank
that has any of its experts, and from each it gets the weighted sum of what these returned. All
ranks are told which experts all tokens go to, so that each knows what it will receive, and in
which order: the host waits once per layer, for numbers of rows. What is dispatched or combined is
waited for where it is needed next, forward and backward (`_Passage`), so other samples may be
computed meanwhile (`overlapped_layer`). Gradients of experts' weights are computed while those of
tokens are on their way back. Sums are in an order that does not depend on the run.

Source: `MoETokenDispatcher` in megatron/core/transformer/moe/token_dispatcher.py.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.transformer.moe.token_dispatcher import MoETokenDispatcher

from zorse_megatron.kernels.grouped_gemm import GroupedProduct
from zorse_megatron.runtime.mailbox import ExpertRank
from zorse_megatron.runtime.transport import started


class TokensByRank(MoETokenDispatcher):
    """Nothing of a micro-batch stays here once its forward is over."""

    def __init__(
        self, config: Any, pg_collection: Any, place: ExpertRank, left: list[GroupedProduct]
    ) -> None:
        """`left`: what experts' weight gradients are made of, which are computed while tokens'
        gradients leave."""
        super().__init__(config, pg_collection)
        self.place, self.left = place, left
        self.ranks = len(place.tokens)
        counts = torch.tensor(place.parts.proportions("experts"))
        self.owners = torch.arange(self.ranks).repeat_interleave(counts)
        """Of each expert, the index of the rank that holds it."""

    def dispatch_preprocess(
        self, tokens: torch.Tensor, routing_map: torch.Tensor, probs: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """`tokens` [length, samples, width]; `routing_map` and `probs` [tokens, experts].

        Returns what is sent to each rank [rows, width], and weights of each token's experts
        [tokens, k].
        """
        self.shape, copies = tokens.shape, int(self.config.moe_router_topk)
        # Each row has k of them.
        chosen = routing_map.byte().topk(copies, dim=1).indices.sort(dim=1).values
        self.owners = self.owners.to(chosen.device)
        everyone = _told_to_all(chosen.to(torch.int32), self.place).long()
        self.routes = _routes(chosen, everyone, self.owners, self.place)
        flat = tokens.reshape(-1, self.shape[-1])
        return _Moved.apply(flat, self.routes.sent, _copy, _sum), probs.gather(1, chosen)

    def token_dispatch(
        self, hidden_states: torch.Tensor, probs: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """To the ranks of its experts: rows [received, width], and all weights [all tokens, k].

        `dispatch_postprocess` waits for them.
        """
        self.passage = _Passage(
            ways=[_Way(self.routes.exchange), _ToAll(self.place)], place=self.place, left=self.left
        )
        rows, weights = self.passage.begin(hidden_states, probs)
        return rows, weights

    def dispatch_postprocess(
        self, hidden_states: torch.Tensor, probs: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Tokens by expert, each as often as it has experts here, counts, and their weights."""
        routes = self.routes
        rows, probs = self.passage.end(hidden_states, probs)
        weights = probs.reshape(-1).index_select(0, routes.pairs)
        return _Moved.apply(rows, routes.computed, _copy, _sum), routes.counts, weights

    def combine_preprocess(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """The sum of what a row's experts here have returned."""
        total: torch.Tensor = _Moved.apply(hidden_states, self.routes.computed, _sum, _copy)
        return total

    def token_combine(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """Back to the tokens' ranks; `combine_postprocess` waits."""
        back = _Way(self.routes.exchange.reversed)
        self.passage = _Passage(ways=[back], place=self.place, left=[])
        (rows,) = self.passage.begin(hidden_states)
        return rows

    def combine_postprocess(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """As the layer was given them."""
        (rows,) = self.passage.end(hidden_states)
        total: torch.Tensor = _Moved.apply(rows, self.routes.sent, _sum, _copy)
        del self.routes, self.passage  # the graph has what a backward needs
        return total.view(self.shape)


# Which rows go where.


@dataclass(frozen=True, kw_only=True)
class Copies:
    """Rows that are copied from those of another tensor, and whose sums go back to it."""

    rows: torch.Tensor
    """Of each copy, the row that it is of."""
    order: torch.Tensor | None
    """Numbers of the copies; None: as they are."""
    pieces: Sequence[int]
    """How many of these follow each other in which no row is twice."""
    total: int
    """Rows of the other tensor."""


@dataclass(frozen=True, kw_only=True)
class Exchange:
    """How many rows go to each rank, and come from it."""

    sent: list[int]
    received: list[int]
    returns: bool = False
    """Whether they come from the experts' ranks."""

    @property
    def reversed(self) -> "Exchange":
        """The way back."""
        return Exchange(sent=self.received, received=self.sent, returns=not self.returns)


@dataclass(frozen=True, kw_only=True)
class Routes:
    """Those of a micro-batch in one layer."""

    sent: Copies
    """Tokens as they are sent, by rank."""
    exchange: Exchange
    computed: Copies
    """What is received, by expert."""
    pairs: torch.Tensor
    """Of each of these, its place among all tokens' experts."""
    counts: torch.Tensor
    """Rows of each of this rank's experts."""


def _routes(
    chosen: torch.Tensor, everyone: torch.Tensor, owners: torch.Tensor, place: ExpertRank
) -> Routes:
    """`chosen` [tokens, k]: experts of this rank's tokens; `everyone`: of all ranks' tokens."""
    ranks, experts, (_, copies) = len(place.tokens), place.experts, everyone.shape
    goes = (owners[chosen].unsqueeze(2) == torch.arange(ranks, device=chosen.device)).any(dim=1)
    is_here = owners[everyone] == place.index
    arrives = is_here.any(dim=1)
    keys = torch.where(is_here, everyone - experts.start, len(experts)).view(-1)
    counts = keys.new_zeros(len(experts) + 1).scatter_add_(0, keys, torch.ones_like(keys))[:-1]
    earlier = is_here.long().cumsum(dim=1)  # how many of a row's experts here, up to each
    of_source = torch.stack([each.sum() for each in arrives.split(place.tokens)])
    most = min(copies, len(experts))
    of_turn = torch.stack([(earlier[:, -1] > turn).sum() for turn in range(most)] or [counts.sum()])
    # The one wait for the device.
    found = torch.cat([goes.sum(dim=0), of_source, of_turn]).tolist()
    sent, received, turns = found[:ranks], found[ranks : 2 * ranks], found[2 * ranks :]
    # What is true comes first, and stays in order.
    order = (~goes.t()).reshape(-1).byte().argsort(stable=True)[: sum(sent)]
    pairs = keys.argsort(stable=True)[: sum(turns)]
    row_of = arrives.long().cumsum(dim=0) - 1
    by_turn = earlier.view(-1)[pairs].argsort(stable=True)
    # They are there until the backward: in 32 bits, without the rest of what some are a part of.
    return Routes(
        sent=Copies(
            rows=(order % max(1, len(chosen))).int(), order=None, pieces=sent, total=len(chosen)
        ),
        exchange=Exchange(sent=sent, received=received),
        computed=Copies(
            rows=row_of[pairs // copies].int(),
            order=by_turn.int(),
            pieces=turns,
            total=sum(received),
        ),
        pairs=pairs.int(),
        counts=counts,
    )


# Copies and their sums, each of which is the other one's backward. No sum depends on which thread
# comes first.


_Move = Callable[[torch.Tensor, Copies], torch.Tensor]


def _copy(rows: torch.Tensor, copies: Copies) -> torch.Tensor:
    return rows.index_select(0, copies.rows)


def _sum(rows: torch.Tensor, copies: Copies) -> torch.Tensor:
    dtype = torch.promote_types(rows.dtype, torch.float32)  # 16 bits would round each addition
    total = rows.new_zeros(copies.total, rows.shape[1], dtype=dtype)
    for start, stop in pairwise(accumulate(copies.pieces, initial=0)):
        if copies.order is None:
            at, added = copies.rows[start:stop], rows[start:stop]
        else:
            piece = copies.order[start:stop]
            at, added = copies.rows.index_select(0, piece), rows.index_select(0, piece)
        total.index_add_(0, at, added.to(dtype))
    return total.to(rows.dtype)


class _Moved(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, rows: torch.Tensor, copies: Copies, move: _Move, back: _Move
    ) -> torch.Tensor:
        # As all that forwards keep for backwards.
        ctx.save_for_backward(copies.rows, copies.order)
        ctx.back, ctx.pieces, ctx.total = back, copies.pieces, copies.total
        return move(rows, copies)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[Any, ...]:
        rows, order = ctx.saved_tensors
        copies = Copies(rows=rows, order=order, pieces=ctx.pieces, total=ctx.total)
        return ctx.back(gradient, copies), None, None, None


# What is sent.

_Started = tuple[torch.Tensor, Callable[[], Any]]
"""What is received, and what waits for it."""


def _start(rows: torch.Tensor, exchange: Exchange, place: ExpertRank) -> _Started:
    row_bytes, others = rows[:1].nbytes, list(exchange.sent)
    others[place.index] = 0
    place.log.sent.append(tuple(row_bytes * count for count in others))
    place.log.returns = exchange.returns
    rows, received = rows.contiguous(), rows.new_empty(sum(exchange.received), *rows.shape[1:])
    counts = exchange.received, exchange.sent
    work = dist.all_to_all_single(received, rows, *counts, group=place.group, async_op=True)
    return received, started(work).wait


def _told_to_all(own: torch.Tensor, place: ExpertRank) -> torch.Tensor:
    """What each rank has of its tokens, one rank after the other."""
    received, wait = _ToAll(place).start(own, place)
    wait()
    return received


class _Way:
    """How rows are sent, and the gradients of those that are received."""

    def __init__(self, exchange: Exchange) -> None:
        self.exchange = exchange

    def start(self, rows: torch.Tensor, place: ExpertRank) -> _Started:
        return _start(rows, self.exchange, place)

    def start_back(self, gradient: torch.Tensor, place: ExpertRank) -> _Started:
        return _start(gradient, self.exchange.reversed, place)

    def given(self, gradients: torch.Tensor) -> torch.Tensor:
        """The gradient of what was sent."""
        return gradients


class _ToAll(_Way):
    """All of a rank's rows go to each rank."""

    def __init__(self, place: ExpertRank) -> None:
        self.ranks = len(place.tokens)
        own = [place.tokens[place.index]] * self.ranks
        super().__init__(Exchange(sent=own, received=list(place.tokens)))

    def start(self, rows: torch.Tensor, place: ExpertRank) -> _Started:
        return super().start(rows.repeat(self.ranks, 1), place)

    def given(self, gradients: torch.Tensor) -> torch.Tensor:
        """Of each row one rank has a gradient, all others zeros."""
        return gradients.view(self.ranks, -1, gradients.shape[1]).sum(dim=0)


@dataclass(kw_only=True, eq=False)
class _Passage:
    """Tensors on their way, from `begin` to `end`; their gradients on the way back.

    Autograd runs the latest functions first. So where other samples are computed between the two
    in a forward, they are in the backward, and all ranks have messages in one order.
    """

    ways: list[_Way]
    """Of each tensor."""
    place: ExpertRank
    left: list[GroupedProduct]
    """What is computed while gradients are on their way."""
    started: list[_Started] = field(default_factory=list)

    def begin(self, *tensors: torch.Tensor) -> Sequence[torch.Tensor]:
        """Send them; what is returned is not there yet."""
        found: Sequence[torch.Tensor] = _Begun.apply(self, *tensors)
        return found

    def end(self, *tensors: torch.Tensor) -> Sequence[torch.Tensor]:
        """Wait for them."""
        found: Sequence[torch.Tensor] = _Ended.apply(self, *tensors)
        return found

    def wait(self) -> list[torch.Tensor]:
        """What is received."""
        for _, wait in self.started:
            wait()
        found = [received for received, _ in self.started]
        self.started = []
        return found


class _Begun(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, passage: _Passage, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.passage, place = passage, passage.place
        both = zip(passage.ways, tensors, strict=True)
        passage.started = [way.start(tensor, place) for way, tensor in both]
        return tuple(received for received, _ in passage.started)

    @staticmethod
    def backward(ctx: Any, *_: torch.Tensor) -> tuple[Any, ...]:
        passage: _Passage = ctx.passage
        both = zip(passage.ways, passage.wait(), strict=True)
        return None, *(way.given(gradients) for way, gradients in both)


class _Ended(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, passage: _Passage, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.passage = passage
        passage.wait()
        return tensors

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[Any, ...]:
        passage: _Passage = ctx.passage
        both = zip(passage.ways, gradients, strict=True)
        passage.started = [way.start_back(each, passage.place) for way, each in both]
        while passage.left:
            passage.left.pop(0).accumulate()
        return None, *gradients
