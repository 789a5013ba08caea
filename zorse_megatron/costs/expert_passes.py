"""A micro-batch, or its two halves, through layers whose experts ranks share (`ExpertParallel`).

Each rank computes one thing after the other. The exchanges of its replica run one after the other,
too: each starts when all ranks have come to it and the one before is done. So times follow from
sums and maxima alone. The order is that of the runtime: half A before half B forward, and exactly
reversed backward.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np


@dataclass(frozen=True, kw_only=True)
class Exchanges:
    """Seconds that the exchanges of one part of a micro-batch take in each layer."""

    there_s: float
    """Tokens to the ranks of their experts."""
    back_s: float
    told_s: float
    """Which experts tokens go to; as long take their weights, or the gradients of these."""


@dataclass(frozen=True, kw_only=True)
class LayerParts:
    """Seconds that each rank computes of one part of a micro-batch in one layer."""

    attention_s: Sequence[float]
    """Before tokens leave; backward, behind their return. Of a dense layer all of it."""
    experts_s: Sequence[float] | None
    """Between exchanges; None: of a dense layer, which has none."""
    weights_s: Sequence[float] | float = 0.0
    """Gradients of experts' weights, while those of tokens go back."""


@dataclass(frozen=True, kw_only=True)
class ExpertPass:
    """A forward or a backward; seconds, of each rank or of all."""

    before_s: tuple[float, ...]
    """What each rank computes alone before the first exchange."""
    computed_s: tuple[float, ...]
    """What each computes from there to the end of the last exchange."""
    behind_s: tuple[float, ...]
    """What it then has left."""
    between_s: float
    """From where all ranks have come to the first exchange to the end of the last one."""
    apart_s: tuple[tuple[float, ...], ...] | None = None
    """Where ranks that come to it apart are not done as if all had begun with the last one.

    [a][b]: what rank b takes from where a has begun, if that were all it has to wait for.
    """

    @property
    def exposed_s(self) -> float:
        """What exchanges add to the computations of the rank that has most of them."""
        return self.between_s - max(self.computed_s)

    def of_rank(self, index: int) -> list[float]:
        """What one of the ranks computes: before, between and behind."""
        return [self.before_s[index], self.computed_s[index], self.behind_s[index]]


class _Ranks:
    """Where computations and exchanges have come to.

    From the first exchange on, time counts from where all ranks have come to it: to each as if all
    had begun at once.
    """

    def __init__(
        self, number: int, sent: Exchanges, parts: int, *, alone: int | None = None
    ) -> None:
        """`alone`: what follows from this rank having begun at 0; the others wait for nothing."""
        self.now_s, self.sent = np.zeros(number), sent
        self.total_s = np.zeros(number)
        """Computed so far."""
        self.before_s: np.ndarray | None = None
        """What of it was before the first exchange, once that has come."""
        self.exchanged_s = 0.0
        self.halves = range(parts)
        self.returned_s = [-math.inf] * parts
        """When what was last sent back arrives, of each half."""
        if alone is not None:
            self.now_s = np.where(np.arange(number) == alone, 0.0, -math.inf)
            self.before_s, self.exchanged_s = self.now_s, -math.inf

    def compute(self, seconds_s: Sequence[float] | float, after_s: float = -math.inf) -> None:
        self.now_s = np.maximum(self.now_s, after_s) + seconds_s
        self.total_s = self.total_s + seconds_s

    def exchange(self, seconds_s: float) -> float:
        """When it ends; nobody waits for that yet."""
        if self.before_s is None:
            self.before_s, self.now_s = self.now_s, self.now_s - np.max(self.now_s)
        self.exchanged_s = max(self.exchanged_s, float(np.max(self.now_s))) + seconds_s
        return self.exchanged_s

    def forward(self, layer: LayerParts) -> None:
        """Through one layer."""
        arrived_s = []
        for half in self.halves:
            self.compute(layer.attention_s, self.returned_s[half])
            if layer.experts_s is not None:
                told_s = self.exchange(self.sent.told_s)
                self.compute(0.0, told_s)  # waits for numbers of rows
                arrived_s.append(self.exchange(self.sent.there_s + self.sent.told_s))
        for half, there_s in enumerate(arrived_s):
            self.compute(layer.experts_s or 0.0, there_s)
            self.returned_s[half] = self.exchange(self.sent.back_s)

    def found(self) -> ExpertPass:
        """What all of it takes."""
        before = self.now_s if self.before_s is None else self.before_s
        behind = np.maximum(0.0, self.now_s - self.exchanged_s) * (self.before_s is not None)
        # What is more, of a second half's dense layers, was computed while others were to come.
        computed = np.minimum(self.total_s - before - behind, self.exchanged_s)
        return ExpertPass(
            before_s=_numbers(self.total_s - computed - behind),
            computed_s=_numbers(computed),
            behind_s=_numbers(behind),
            between_s=self.exchanged_s,
        )


def forward_pass(layers: Sequence[LayerParts], sent: Exchanges, *, parts: int) -> ExpertPass:
    """Return what a forward takes of a micro-batch in `parts` through `layers`, at least 1 each."""
    ranks = _Ranks(len(layers[0].attention_s), sent, parts)
    for layer in layers:
        ranks.forward(layer)
    return ranks.found()


def backward_pass(
    layers: Sequence[LayerParts], sent: Exchanges, *, parts: int, again: Sequence[LayerParts]
) -> ExpertPass:
    """Return what a backward takes, in which the first layers are computed `again`."""
    number = len(layers[0].attention_s)
    found = _backward(_Ranks(number, sent, parts), layers, again).found()
    has_experts = any(each.experts_s is not None for each in layers)
    if parts == 1 or not has_experts or layers[-1].experts_s is not None:
        return found
    # A rank computes its second half's dense layers while the first half's tokens wait for others.
    apart = [
        _backward(_Ranks(number, sent, parts, alone=rank), layers, again).now_s
        for rank in range(number)
    ]
    return replace(found, apart_s=tuple(map(_numbers, apart)))


def _backward(ranks: _Ranks, layers: Sequence[LayerParts], again: Sequence[LayerParts]) -> _Ranks:
    sent, sent_s = ranks.sent, [0.0] * len(ranks.halves)
    backwards, last = ranks.halves[::-1], len(layers) - 1
    for number, layer in reversed([*enumerate(layers)]):
        if number < len(again):
            ranks.forward(again[number])
            ranks.compute(0.0, max(ranks.returned_s))
        if layer.experts_s is not None:
            for half in backwards if number in {last, *range(len(again))} else ():
                sent_s[half] = ranks.exchange(sent.there_s)
            for half in backwards:
                ranks.compute(layer.experts_s, sent_s[half])
                ranks.returned_s[half] = ranks.exchange(sent.back_s + sent.told_s)
                ranks.compute(layer.weights_s)
        for half in backwards:
            ranks.compute(layer.attention_s, ranks.returned_s[half])
            # Gradients of the layer before are on their way as soon as they are there.
            if number > len(again) and layers[number - 1].experts_s is not None:
                sent_s[half] = ranks.exchange(sent.there_s)
    return ranks


def _numbers(of_ranks: np.ndarray) -> tuple[float, ...]:
    return tuple(map(float, of_ranks))
