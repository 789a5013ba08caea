"""What tokens on their way between ranks that share experts cost a plan's computations."""

from zorse_megatron.costs.expert_passes import (
    Exchanges,
    ExpertPass,
    LayerParts,
    backward_pass,
    forward_pass,
)
from zorse_megatron.costs.interface import TpRankCosts
from zorse_megatron.costs.shared_experts import SharedExpertsCompute, TokenMessages
from zorse_megatron.schedule.actions import Kind
from zorse_megatron.simulate.network import NetworkLoads
from zorse_megatron.simulate.rank_bytes import RankSizes


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
        *,
        splits: bool,
    ) -> ExpertPass:
        """A forward or backward of `size` samples."""
        parts = self.sizes.parts(ranks[0])
        sent = self._exchanges(ranks, chunk, size // parts)
        layers = self._layers(ranks, chunk, size // parts, kind, splits=splits)
        if kind is Kind.FORWARD:
            return forward_pass(layers, sent, parts=parts)
        mode, recomputed = self.sizes.recompute(ranks[0], chunk)
        again: list[LayerParts] = []
        if mode == "full" and recomputed:
            again = self._layers(ranks, chunk, size // parts, Kind.FORWARD)[:recomputed]
        return backward_pass(layers, sent, parts=parts, again=again)

    def _layers(
        self, ranks: tuple[int, ...], chunk: int, size: int, kind: Kind, *, splits: bool = False
    ) -> list[LayerParts]:
        """`size` samples through each of the chunk's layers, of which none is computed again."""
        sizes, dtype = self.sizes, self.sizes.group_of(chunk).compute_dtype
        at, stop = sizes.plan.chunks[chunk].layers
        found: list[LayerParts] = []
        for costs, count in sizes.costs.runs(at, stop):
            assert costs.tp_costs is not None, "of ranks that share experts"
            of_rank = costs.tp_costs.of_rank
            of_ranks = [
                self._seconds(
                    rank, chunk, of_rank(sizes.part(rank), dtype), size, kind, splits=splits
                )
                for rank in ranks
            ]
            attention_s, experts_s, weights_s = zip(*of_ranks, strict=True)
            has_experts = sizes.costs.num_with_experts(at, at + 1)
            parts = LayerParts(
                attention_s=attention_s,
                experts_s=experts_s if has_experts else None,
                weights_s=weights_s,
            )
            found += [parts] * count
            at += count
        return found

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

    def _seconds(
        self, rank: int, chunk: int, costs: TpRankCosts, size: int, kind: Kind, *, splits: bool
    ) -> tuple[float, float, float]:
        """Of one layer on one rank: attention, experts, and gradients of experts' weights."""
        compute, gpu = costs.compute, self.sizes.costs.kinds[rank]
        assert isinstance(compute, SharedExpertsCompute)
        times = compute.layer_in_two(gpu, size)
        if kind is Kind.FORWARD:
            return times.attention.forward_s, times.mlp.forward_s, 0.0
        attention_s, experts_s = times.attention.backward_s, times.mlp.backward_s
        weights_s = 0.0 if splits else min(compute.row_gradients_s(gpu, size), experts_s)
        if splits and attention_s + experts_s:
            left = 1 - compute.weight_gradients_s(gpu, size) / (attention_s + experts_s)
            attention_s, experts_s = left * attention_s, left * experts_s
        mode, _ = self.sizes.recompute(rank, chunk)
        if mode == "selective":
            attention_s += compute.recompute_s(gpu, size, mode)
        return attention_s, experts_s - weights_s, weights_s
