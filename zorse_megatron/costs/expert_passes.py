"""A micro-batch, or its two halves, through layers whose experts ranks share (`ExpertParallel`).

Each rank computes one thing after the other. The exchanges of its replica run one after the other,
too: each starts when all ranks have come to it and the one before is done. So times follow from
sums and maxima alone. The order is that of the runtime: half A before half B forward, and exactly
reversed backward.
"""

from collections.abc import Sequence
from dataclasses import dataclass

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
    """Before tokens leave; backward, behind their return."""
    experts_s: Sequence[float]
    """Between exchanges."""
    weights_s: Sequence[float] = ()
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

    @property
    def exposed_s(self) -> float:
        """What exchanges add to the computations of the rank that has most of them."""
        return self.between_s - max(self.computed_s)

    def of_rank(self, index: int) -> list[float]:
        """What one of the ranks computes: before, between and behind."""
        return [self.before_s[index], self.computed_s[index], self.behind_s[index]]


class _Ranks:
    """Where computations and exchanges have come to."""

    def __init__(self, number: int, sent: Exchanges, parts: int) -> None:
        self.now_s, self.sent = np.zeros(number), sent
        self.exchanged_s = 0.0
        self.halves = range(parts)
        self.returned_s = [0.0] * parts
        """When what was last sent back arrives, of each half."""

    def compute(self, seconds_s: np.ndarray, after_s: float = 0.0) -> None:
        self.now_s = np.maximum(self.now_s, after_s) + seconds_s

    def exchange(self, seconds_s: float) -> float:
        """When it ends; nobody waits for that yet."""
        self.exchanged_s = max(self.exchanged_s, float(np.max(self.now_s))) + seconds_s
        return self.exchanged_s

    def forward(self, attention: np.ndarray, experts: np.ndarray, *, has_begun: bool) -> None:
        """Through one layer; `has_begun`: whether the first half has had its attention."""
        arrived_s = []
        for half in self.halves:
            if half or not has_begun:
                self.compute(attention, self.returned_s[half])
            told_s = self.exchange(self.sent.told_s)
            self.now_s = np.maximum(self.now_s, told_s)  # waits for numbers of rows
            arrived_s.append(self.exchange(self.sent.there_s + self.sent.told_s))
        for half in self.halves:
            self.compute(experts, arrived_s[half])
            self.returned_s[half] = self.exchange(self.sent.back_s)


def forward_pass(once: LayerParts, sent: Exchanges, *, layers: int, parts: int) -> ExpertPass:
    """Return what a forward takes of a micro-batch in `parts` through `layers`, at least 1 each."""
    attention, experts = np.array(once.attention_s), np.array(once.experts_s)
    ranks = _Ranks(len(attention), sent, parts)
    for layer in range(layers):
        ranks.forward(attention, experts, has_begun=not layer)
    return ExpertPass(
        before_s=_numbers(attention),
        computed_s=_numbers(parts * layers * (attention + experts) - attention),
        behind_s=(0.0,) * len(attention),
        between_s=ranks.returned_s[-1],
    )


def backward_pass(
    once: LayerParts,
    sent: Exchanges,
    *,
    layers: int,
    parts: int,
    again: LayerParts,
    recomputed: int,
) -> ExpertPass:
    """Return what a backward takes, in which the first `recomputed` layers are computed `again`."""
    attention, experts, weights = map(np.array, (once.attention_s, once.experts_s, once.weights_s))
    attention_again, experts_again = np.array(again.attention_s), np.array(again.experts_s)
    ranks = _Ranks(len(attention), sent, parts)
    before = attention_again * (recomputed == layers)
    total = layers * (attention + experts + weights) + recomputed * (
        attention_again + experts_again
    )
    backwards, sent_s = range(parts)[::-1], [0.0] * parts
    for layer in reversed(range(layers)):
        is_last = layer == layers - 1
        if layer < recomputed:
            ranks.returned_s = [0.0] * parts
            ranks.forward(attention_again, experts_again, has_begun=is_last)
            ranks.compute(np.zeros(len(attention)), max(ranks.returned_s))
        if is_last or layer < recomputed:
            for half in backwards:
                sent_s[half] = ranks.exchange(sent.there_s)
        for half in backwards:
            ranks.compute(experts, sent_s[half])
            ranks.returned_s[half] = ranks.exchange(sent.back_s + sent.told_s)
            ranks.compute(weights)
        for half in backwards:
            ranks.compute(attention, ranks.returned_s[half])
            if layer > recomputed:
                sent_s[half] = ranks.exchange(sent.there_s)
    behind = ranks.now_s - ranks.returned_s[0]
    return ExpertPass(
        before_s=_numbers(before),
        computed_s=_numbers(parts * total - before - behind),
        behind_s=_numbers(behind),
        between_s=ranks.returned_s[0],
    )


def _numbers(of_ranks: np.ndarray) -> tuple[float, ...]:
    return tuple(map(float, of_ranks))
