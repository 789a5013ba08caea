"""Communication of tensor-parallel groups: inside computations, and between TP groups.

Without sequence parallelism a layer sums two activations over the TP group forward and two
gradients backward; the vocabulary-parallel embedding sums its output, the output layer its input's
gradient (Shoeybi et al. 2019, arXiv 1909.08053, section 3). With it each sum is a reduce-scatter
and an all-gather, which are as many bytes (Korthikanti et al. 2022, arXiv 2205.05198, section 4.2);
inputs that are gathered once more for the gradients of weights are not counted, as that gather
overlaps with a product. The loss sums one number per token three times
(`vocab_parallel_cross_entropy`). Of adapters what crosses is A x: where inputs are cut forward, and
where outputs are its gradient backward (`adapter.model.lora`).

Links are taken to be idle, and nothing overlaps with computation.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from zorse_megatron.costs.interface import NO_TIME, CommCost, ModelSection, PassTimes, TpCosts

_FLOAT32_BYTES = 4
_SUMS_OF_LOSS = 3


@dataclass(frozen=True, kw_only=True)
class TpCollectives:
    """Collectives of TP groups; `num_bytes` is a whole activation of a micro-batch, `ranks` a TP
    group."""

    comm: CommCost
    tp_costs: TpCosts

    def of(
        self, section: ModelSection, ranks: Sequence[int], num_bytes: int, num_tokens: int
    ) -> PassTimes:
        """One layer, the embedding, or output layer and loss."""
        sum_s = self._sum_s(ranks, num_bytes)
        if section == "layer":
            beside = self._of_adapters(ranks, num_bytes)
            return PassTimes(
                forward_s=2 * sum_s + beside.forward_s, backward_s=2 * sum_s + beside.backward_s
            )
        half_s = self.gather_s(ranks, num_bytes) if self.tp_costs.sequence_parallel else 0.0
        if section == "embedding":
            # Its output is summed and cut; the gradient is gathered from its parts. Learned
            # positions are added in between, to the whole (`LanguageModelEmbedding.forward`).
            whole_s = self.comm.all_reduce_s(tuple(ranks), num_bytes)
            forward_s = whole_s if self.tp_costs.learns_positions else sum_s - half_s
            return PassTimes(forward_s=forward_s, backward_s=half_s)
        loss_s = _SUMS_OF_LOSS * self.comm.all_reduce_s(tuple(ranks), num_tokens * _FLOAT32_BYTES)
        return PassTimes(forward_s=half_s + loss_s, backward_s=sum_s - half_s)

    def gather_s(self, ranks: Sequence[int], num_bytes: int) -> float:
        """An activation of which every rank has its part of the sequence."""
        return self.comm.all_gather_s(tuple(ranks), _parts(num_bytes, len(ranks)))

    def _of_adapters(self, ranks: Sequence[int], num_bytes: int) -> PassTimes:
        """Of one layer; `num_bytes`: of a whole activation."""
        columns, rows = (
            [round(num_bytes * each) for each in x] for x in self.tp_costs.adapter_shares
        )
        if not columns and not rows:
            return NO_TIME
        group, comm = tuple(ranks), self.comm
        if not self.tp_costs.sequence_parallel:
            return PassTimes(
                forward_s=sum(comm.all_reduce_s(group, each) for each in rows),
                backward_s=sum(comm.all_reduce_s(group, each) for each in columns),
            )
        gathers_s, scatters_s = (
            [
                sum(time_s(group, _parts(each, len(group))) for each in sizes)
                for sizes in (columns, rows)
            ]
            for time_s in (comm.all_gather_s, comm.reduce_scatter_s)
        )
        return PassTimes(
            forward_s=gathers_s[0] + scatters_s[1], backward_s=scatters_s[0] + gathers_s[1]
        )

    def _sum_s(self, ranks: Sequence[int], num_bytes: int) -> float:
        if not self.tp_costs.sequence_parallel:
            return self.comm.all_reduce_s(tuple(ranks), num_bytes)
        scatter_s = self.comm.reduce_scatter_s(tuple(ranks), _parts(num_bytes, len(ranks)))
        return scatter_s + self.gather_s(ranks, num_bytes)


def _parts(num_bytes: int, count: int) -> tuple[int, ...]:
    return tuple(num_bytes * (n + 1) // count - num_bytes * n // count for n in range(count))
