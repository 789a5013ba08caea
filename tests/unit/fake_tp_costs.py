"""Costs of tensor-parallel groups in closed form."""

from dataclasses import dataclass, field

from tests.unit.fake_costs import FakeComm, FakeCompute, FakeMemory
from zorse_megatron.costs.interface import LayerTimes, PassTimes, TpRankCosts, TpTraits


class SplitCompute(FakeCompute):
    """Of one rank; its collectives are not in it."""

    measured = False
    attention_share = 0.25

    def layer_in_two(self, kind, size):
        def times(share):
            of_all = self.layer(kind, size)
            return PassTimes(
                forward_s=share * of_all.forward_s, backward_s=share * of_all.backward_s
            )

        share = self.attention_share
        return LayerTimes(attention=times(share), mlp=times(1.0 - share))

    def includes_collectives(self, kind, section):
        return self.measured


@dataclass(kw_only=True)
class FakeTpCosts:
    """A layer of `cut` parameters that TP groups cut and `whole` ones; computations take 1 /
    degree."""

    cut: int = 600
    whole: int = 40
    boundary: int = 0
    saved: int = 1000
    positions: int = 0
    forward_s: float = 1.0
    factors: dict = field(default_factory=dict)
    sequence_parallel: bool = False
    learns_positions: bool = False
    adapter_shares: tuple = ((), ())
    measured: bool = False
    attention_shares: dict = field(default_factory=dict)
    """Index in a TP group with uneven TP shards -> which part of a layer's time is attention's."""

    @property
    def traits(self):
        return TpTraits(
            sequence_parallel=self.sequence_parallel,
            learns_positions=self.learns_positions,
            adapter_shares=self.adapter_shares,
        )

    def compute(self, degree, index=0):
        costs = SplitCompute(
            forward_s=self.forward_s / degree,
            backward_s=2 * self.forward_s / degree,
            factors=self.factors,
        )
        costs.measured = self.measured
        costs.attention_share = self.attention_shares.get(index, costs.attention_share)
        return costs

    def memory(self, degree):
        saved = self.saved // degree
        return FakeMemory(
            layer_count=self.whole + self.cut // degree,
            embedding_count=self.positions,
            saved={"none": saved, "selective": saved, "full": saved // 10},
            boundary=self.boundary // (degree if self.sequence_parallel else 1),
        )

    def of_rank(self, part, dtype):
        compute = self.compute(part.degree, part.index)
        return TpRankCosts(compute=compute, memory=self.memory(part.degree))

    def cut_parameters(self, section):
        return {"mlp_columns": self.cut} if section == "layer" else {"vocabulary_rows": 0}

    def alone(self):
        """What `simulate` takes for ranks that are TP groups of their own."""
        return {"compute": self.compute(1), "memory": self.memory(1)}


class RingComm(FakeComm):
    """All-reduces cost bytes, too: as a ring does them."""

    def all_reduce_s(self, ranks, num_bytes):
        return 2 * self.all_gather_s(ranks, (num_bytes,)) if num_bytes > 4 else 0.0
