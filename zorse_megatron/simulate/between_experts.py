"""What tokens on their way between ranks that share experts cost a plan's computations."""

from collections.abc import Sequence
from dataclasses import dataclass

from zorse_megatron.costs.expert_passes import (
    Exchanges,
    ExpertPass,
    LayerParts,
    backward_pass,
    forward_pass,
)
from zorse_megatron.costs.shared_experts import SharedExpertsCompute, TokenMessages
from zorse_megatron.schedule.actions import Kind
from zorse_megatron.simulate.network import NetworkLoads
from zorse_megatron.simulate.rank_bytes import RankSizes


@dataclass(frozen=True, kw_only=True)
class ChunkLayers:
    """What a rank computes of a chunk's layers in a forward or a backward."""

    attention_s: float
    experts_s: float
    attention_again_s: float = 0.0
    """What of it recomputes whole layers."""
    experts_again_s: float = 0.0

    @property
    def seconds_s(self) -> float:
        """All of it."""
        return self.attention_s + self.experts_s

    @property
    def less_again(self) -> "ChunkLayers":
        """Without what recomputes."""
        return ChunkLayers(
            attention_s=self.attention_s - self.attention_again_s,
            experts_s=self.experts_s - self.experts_again_s,
        )


class BetweenExperts:
    """Exchanges of tokens (`adapter.model.expert_exchange`).

    A token is sent once to each rank that has any of its experts. All ranks are told the experts of
    all tokens, and then their weights. Links are taken to be idle.
    """

    def __init__(self, sizes: RankSizes, loads: NetworkLoads) -> None:
        self.sizes = sizes
        self.loads = loads

    def of_pass(
        self,
        ranks: tuple[int, ...],
        chunk: int,
        kind: Kind,
        size: int,
        computed: Sequence[ChunkLayers],
        *,
        splits: bool,
    ) -> ExpertPass:
        """A forward or backward of `size` samples; `computed`: by each rank.

        Where only some layers have experts, each of these takes its part of the others.
        """
        layers, recomputed = self.exchanging(ranks[0], chunk)
        if not layers:
            alone, none = tuple(each.seconds_s for each in computed), (0.0,) * len(ranks)
            return ExpertPass(before_s=alone, computed_s=none, behind_s=none, between_s=0.0)
        parts = self.sizes.parts(ranks[0])
        sent, number = self._exchanges(ranks, chunk, size // parts), parts * layers
        once = [each.less_again if recomputed else each for each in computed]
        experts = [each.experts_s / number for each in once]
        weights = [0.0] * len(ranks)
        if kind is Kind.BACKWARD and not splits:
            of_rows = [self._row_gradients_s(rank, chunk, size // parts) for rank in ranks]
            weights = list(map(min, of_rows, experts))
        of_layer = LayerParts(
            attention_s=[each.attention_s / number for each in once],
            experts_s=[whole - part for whole, part in zip(experts, weights, strict=True)],
            weights_s=weights,
        )
        if kind is Kind.FORWARD:
            return forward_pass(of_layer, sent, layers=layers, parts=parts)
        again = LayerParts(
            attention_s=[each.attention_again_s / max(1, recomputed) for each in computed],
            experts_s=[each.experts_again_s / max(1, recomputed) for each in computed],
        )
        return backward_pass(
            of_layer, sent, layers=layers, parts=parts, again=again, recomputed=recomputed
        )

    def exchanging(self, rank: int, chunk: int) -> tuple[int, int]:
        """Layers of the chunk that send tokens to experts, and those of them that do so again."""
        sizes, (mode, recomputed) = self.sizes, self.sizes.recompute(rank, chunk)
        first, stop = sizes.plan.chunks[chunk].layers
        again = first + (recomputed if mode == "full" else 0)
        counted = sizes.costs.num_with_experts
        return counted(first, stop), counted(first, again)

    def _exchanges(self, ranks: tuple[int, ...], chunk: int, size: int) -> Exchanges:
        sizes = self.sizes
        assert sizes.tp_costs is not None
        messages = TokenMessages.of(
            sizes.replica(ranks[0]),
            size,
            tp_costs=sizes.tp_costs,
            boundary_bytes=lambda own: sizes.boundary_bytes(own, chunk),
            sequence_length=sizes.costs.sequence_length,
        )
        there = messages.there
        back = {pair[::-1]: num_bytes for pair, num_bytes in there.items()}
        there_s, back_s, told_s = (
            self.loads.exchanges([(each, 1)]).alone_s for each in (there, back, messages.told)
        )
        return Exchanges(there_s=there_s, back_s=back_s, told_s=told_s)

    def _row_gradients_s(self, rank: int, chunk: int, size: int) -> float:
        part, tp_costs = self.sizes.part(rank), self.sizes.costs.of_experts.tp_costs
        assert tp_costs is not None, "of a rank that shares experts"
        compute = tp_costs.of_rank(part, self.sizes.group_of(chunk).compute_dtype).compute
        assert isinstance(compute, SharedExpertsCompute)
        return compute.row_gradients_s(self.sizes.costs.kinds[rank], size)
