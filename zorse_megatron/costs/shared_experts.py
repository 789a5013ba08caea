"""Costs of a rank that shares experts with others and has samples of its own (`ExpertParallel`).

Sizes of micro-batches are those of all its ranks together. Of each the rank has its own samples,
and of the rows of all tokens' experts those of the experts that it holds. Routing is taken to be
even unless an `ExpertLoad` is given. Rows are computed by formula, at the ratio by which measured
layers differ from it.
"""

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import cache

import numpy as np

from zorse_megatron.costs.interface import (
    NO_TIME,
    LayerTimes,
    ModelSection,
    PassTimes,
    RecomputeMode,
    TpCosts,
    TpShard,
)
from zorse_megatron.costs.model_memory import TransformerMemory
from zorse_megatron.costs.profiled_compute import ProfiledCompute
from zorse_megatron.plan.plan import Replica

_ROUTE_BYTES = 4  # the number of an expert; or its weight, or the gradient of that, in fp32


@dataclass(frozen=True, kw_only=True)
class ExpertLoad:
    """How uneven routing is, alike in all layers: what each expert gets of all rows.

    A token's experts are distinct, and otherwise independent of each other: of all choices with
    these loads the one of the greatest entropy, in which a set S of experts is chosen in proportion
    to the product of weights w over S (Chen, Dempster and Liu 1994, Biometrika 81, 457). Then the
    tokens that pass none of some experts are e_k(w of the others) / e_k(w), where e_k is the
    elementary symmetric polynomial; with equal loads a ratio of binomial coefficients.
    """

    shares: tuple[float, ...]
    """Of all rows, expert by expert. They add up to 1, and are at most 1 over a token's experts."""
    anywhere: bool = False
    """Whether any rank may have the busiest experts of a layer, so that each costs what it would
    with these: no order of the experts takes longer. Then `shares` descend."""

    @classmethod
    def falling(cls, busiest: float, number: int) -> "ExpertLoad":
        """Loads that fall by a constant factor from expert to expert. `busiest`: the largest over
        the mean, from 1 to `number`."""
        low, high = 0.0, 1.0  # of the factor: the smaller, the larger is the first load
        for _ in range(100):
            middle = (low + high) / 2
            loads = middle ** np.arange(number)
            low, high = (middle, high) if number > busiest * loads.sum() else (low, middle)
        loads = (low if busiest > 1 else 1.0) ** np.arange(number)
        return cls(shares=tuple(map(float, loads / loads.sum())), anywhere=True)

    @property
    def is_even(self) -> bool:
        """Whether all experts get the same."""
        return len(set(self.shares)) == 1

    def rows(self, experts: range) -> float:
        """Share of all rows that a rank with these experts gets."""
        return sum(self._of(experts))

    def tokens(self, experts: range, per_token: int) -> float:
        """Share of all tokens that pass at least one of them. `per_token`: experts of a token."""
        held = range(len(experts)) if self.anywhere else experts
        return 1 - _missing(self.shares, held, per_token)

    def _of(self, experts: range) -> tuple[float, ...]:
        if self.anywhere:
            return self.shares[: len(experts)]
        return self.shares[experts.start : experts.stop]


_MOST_OFTEN = 1 - 1e-9  # an expert of every token would have an infinite weight


@cache
def _weights(shares: tuple[float, ...], per_token: int) -> tuple[float, ...]:
    """Those with which experts are chosen as often as loads say; the method of Chen et al."""
    wanted = np.minimum(np.array(shares) * per_token, _MOST_OFTEN)
    weights = wanted / (1 - wanted)
    number = len(shares)
    for _ in range(2000):
        # Of each expert, choices of the others beside it.
        beside = np.zeros((number, per_token))
        beside[:, 0] = 1.0
        for at, weight in enumerate(weights):
            factors = np.full((number, 1), weight)
            factors[at] = 0.0
            beside[:, 1:] += factors * beside[:, :-1]
        whole = _symmetric(weights, per_token)
        if np.abs(weights * beside[:, -1] / whole - wanted).max() < 1e-9:
            break
        weights = wanted * whole / beside[:, -1]
    return tuple(map(float, weights))


@cache
def _missing(shares: tuple[float, ...], experts: range, per_token: int) -> float:
    """Share of all tokens that pass none of these experts."""
    weights = _weights(shares, per_token)
    others = [weight for at, weight in enumerate(weights) if at not in experts]
    return _symmetric(others, per_token) / _symmetric(weights, per_token)


def _symmetric(weights: Sequence[float] | np.ndarray, degree: int) -> float:
    """The elementary symmetric polynomial."""
    found = np.zeros(degree + 1)
    found[0] = 1.0
    for weight in weights:
        found[1:] += weight * found[:-1]
    return float(found[-1])


def parts_of(counts: Sequence[int]) -> list[range]:
    """Experts of each rank, of which they have so many in order."""
    stops = list(itertools.accumulate(counts))
    return [range(stop - count, stop) for stop, count in zip(stops, counts, strict=True)]


@dataclass(frozen=True, kw_only=True)
class Sharing:
    """What a rank has of a micro-batch."""

    own: int
    """Samples, of `total`."""
    total: int
    experts: float
    """Of all experts' rows, the part that its own have."""

    @classmethod
    def of(cls, part: TpShard, experts: float) -> "Sharing":
        """That of a plan's rank."""
        shared = part.shared
        assert shared is not None, "of ranks that share experts"
        return cls(own=shared.samples[part.index], total=sum(shared.samples), experts=experts)

    def samples(self, size: int) -> int:
        """Its own of a micro-batch of `size`."""
        return size * self.own // self.total

    def rows(self, size: int) -> float:
        """Samples with as many rows as its experts have."""
        return size * self.experts


@dataclass(frozen=True, kw_only=True)
class TokenMessages:
    """What a layer sends of a micro-batch: (source, target) -> bytes, in the mean."""

    there: Mapping[tuple[int, int], int]
    """Tokens, once to each rank that has any of their experts. As many bytes go back."""
    told: Mapping[tuple[int, int], int]
    """Which experts all tokens pass, to all ranks. Their weights are a second message of as many
    bytes, to which the gradients go back."""

    @classmethod
    def of(
        cls,
        replica: Replica,
        size: int,
        *,
        tp_costs: TpCosts,
        boundary_bytes: Callable[[int], int],
        sequence_length: int,
    ) -> "TokenMessages":
        """Those of `size` samples, which have `boundary_bytes` between layers."""
        shared, ranks = replica.expert_parallel, replica.ranks
        assert shared is not None, "of ranks that share experts"
        routes_bytes = tp_costs.traits.experts_per_token * sequence_length * _ROUTE_BYTES
        there: dict[tuple[int, int], int] = {}
        told: dict[tuple[int, int], int] = {}
        for (source, samples), (target, held) in itertools.product(
            zip(ranks, shared.samples, strict=True),
            zip(ranks, parts_of(shared.experts), strict=True),
        ):
            own = size * samples // sum(shared.samples)
            if source != target and own:
                told[source, target] = own * routes_bytes
                sent = boundary_bytes(own) * tp_costs.share_of_tokens(held)
                there[source, target] = round(sent)
        return cls(there=there, told=told)


@dataclass(frozen=True, kw_only=True)
class SharedExpertsCompute:
    """`TpComputeCost` of the rank; by kind, of models that differ in experts alone."""

    sharing: Sharing
    whole: Mapping[str, ProfiledCompute]
    """All experts, as they may have been measured."""
    dense: Mapping[str, ProfiledCompute]
    """None but the shared one, which each rank has."""
    routed: Mapping[str, ProfiledCompute]
    """Those that the rank holds, and no shared one."""
    bare: Mapping[str, ProfiledCompute]
    """No experts and no MLP."""

    def layer_in_two(self, kind: str, micro_batch_size: int) -> LayerTimes:
        """What is computed of the rank's own samples, and of its experts' rows."""
        own, rows = self.sharing.samples(micro_batch_size), self.sharing.rows(micro_batch_size)
        measured = self.whole[kind].layer(kind, max(1, own))
        formula = self.whole[kind].analytic.layer(kind, max(1, own))
        forward = measured.forward_s / formula.forward_s
        backward = measured.backward_s / formula.backward_s

        def scaled(times: PassTimes, less: PassTimes = NO_TIME) -> PassTimes:
            return PassTimes(
                forward_s=forward * (times.forward_s - less.forward_s),
                backward_s=backward * (times.backward_s - less.backward_s),
            )

        of_rows, of_own = NO_TIME, NO_TIME
        if rows:
            with_rows = self.routed[kind].analytic.layer(kind, rows)
            of_rows = scaled(with_rows, self.bare[kind].analytic.layer(kind, rows))
        if own:
            of_own = scaled(self.dense[kind].analytic.layer(kind, own))
        return LayerTimes(attention=of_own, mlp=of_rows)

    def layer(self, kind: str, micro_batch_size: int) -> PassTimes:
        """Both."""
        times = self.layer_in_two(kind, micro_batch_size)
        return times.attention + times.mlp

    def embedding(self, kind: str, micro_batch_size: int) -> PassTimes:
        """Of its own samples, as is the head."""
        own = self.sharing.samples(micro_batch_size)
        return self.whole[kind].embedding(kind, own) if own else NO_TIME

    def head(self, kind: str, micro_batch_size: int) -> PassTimes:
        """See `embedding`."""
        own = self.sharing.samples(micro_batch_size)
        return self.whole[kind].head(kind, own) if own else NO_TIME

    def recompute_s(self, kind: str, micro_batch_size: int, mode: RecomputeMode) -> float:
        """What recomputing one layer adds to its backward."""
        if mode == "full":
            return self.layer(kind, micro_batch_size).forward_s
        own = self.sharing.samples(micro_batch_size)
        return self.dense[kind].recompute_s(kind, own, mode) if own else 0.0  # attention

    def weight_gradients_s(self, kind: str, micro_batch_size: int) -> float:
        """What gradients of its matrices take of one layer's backward."""
        own = self.sharing.samples(micro_batch_size)
        own_s = self.dense[kind].analytic.weight_gradients_s(kind, own) if own else 0.0
        return own_s + self.row_gradients_s(kind, micro_batch_size)

    def row_gradients_s(self, kind: str, micro_batch_size: int) -> float:
        """Those of its experts."""
        rows = self.sharing.rows(micro_batch_size)
        if not rows:
            return 0.0
        routed_s = self.routed[kind].analytic.weight_gradients_s(kind, rows)
        return routed_s - self.bare[kind].analytic.weight_gradients_s(kind, rows)

    def step_s(self, kind: str, num_parameters: int) -> float:
        """Optimizer step on a shard of `num_parameters`."""
        return self.whole[kind].step_s(kind, num_parameters)

    def includes_collectives(self, kind: str, section: ModelSection) -> bool:
        """Exchanges of tokens are never measured with it."""
        return False


@dataclass(frozen=True, kw_only=True)
class SharedExpertsMemory(TransformerMemory):
    """`MemoryCost` of the rank; `model` has the experts that it holds."""

    sharing: Sharing
    whole: TransformerMemory
    """With all experts."""
    own: TransformerMemory
    """With routers, and none of the experts but the shared one."""

    @classmethod
    def of(
        cls,
        sharing: Sharing,
        held: TransformerMemory,
        whole: TransformerMemory,
        own: TransformerMemory,
    ) -> "SharedExpertsMemory":
        """Those of a plan's rank; `held`: of the model with the experts that it holds."""
        same = {each.name: getattr(held, each.name) for each in fields(TransformerMemory)}
        return cls(**same, sharing=sharing, whole=whole, own=own)

    def activation_bytes(
        self, micro_batch_size: int, mode: RecomputeMode, kind: str | None = None
    ) -> int:
        """What one layer keeps of its own samples, and of its experts' rows."""
        own = self.own.activation_bytes(self.sharing.samples(micro_batch_size), mode, kind)
        with_rows = self.whole.activation_bytes(micro_batch_size, mode, kind)
        return own + self._of_rows(
            with_rows - self.own.activation_bytes(micro_batch_size, mode, kind)
        )

    def delayed_bytes(self, micro_batch_size: int) -> int:
        """What one layer keeps from a backward to weight gradients that are computed apart."""
        own = self.own.delayed_bytes(self.sharing.samples(micro_batch_size))
        with_rows = self.whole.delayed_bytes(micro_batch_size)
        return own + self._of_rows(with_rows - self.own.delayed_bytes(micro_batch_size))

    def arriving_bytes(self, micro_batch_size: int) -> int:
        """Gradients of what a layer's last matrices return."""
        if self.model.experts is None:
            return self.whole.arriving_bytes(self.sharing.samples(micro_batch_size))
        return self._of_rows(self.whole.arriving_bytes(micro_batch_size))

    def boundary_bytes(self, micro_batch_size: int) -> int:
        """One activation between two layers, as it is sent."""
        return self.whole.boundary_bytes(self.sharing.samples(micro_batch_size))

    def head_bytes(self, micro_batch_size: int) -> int:
        """Logits and what the loss keeps while the head runs."""
        return self.whole.head_bytes(self.sharing.samples(micro_batch_size))

    def _of_rows(self, of_all: int) -> int:
        return round(self.sharing.experts * of_all)
