"""Embedding and loss on a rank that holds no row of the vocabulary.

Megatron's lookup needs a row, and its cross entropy a logit for each token. Both get one that
changes nothing: a row of zeros, whose result is masked as that of every row that another rank has,
and a logit of minus infinity, which is no maximum and adds nothing to the sum. The sums over the
set, forward and backward, are Megatron's own.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F


def looking_up_nothing(stock: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """Wrap `VocabParallelEmbedding.forward`."""

    def forward(self: Any, input_: torch.Tensor) -> torch.Tensor:
        return stock(self if len(self.weight) else _WithRow(self), input_)

    return forward


class _WithRow:
    """A `VocabParallelEmbedding` as it would be with a row of zeros."""

    def __init__(self, embedding: Any) -> None:
        self._embedding = embedding
        # Made of the weight, so that backwards take part in what the set gathers there.
        self.weight = F.pad(embedding.weight, (0, 0, 0, 1))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._embedding, name)


def without_a_logit(stock: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """Wrap `LanguageModule.compute_language_model_loss`."""

    def compute_language_model_loss(
        self: Any, labels: torch.Tensor, logits: torch.Tensor
    ) -> torch.Tensor:
        if not logits.shape[-1]:
            logits = F.pad(logits, (0, 1), value=-torch.inf)
        return stock(self, labels, logits)

    return compute_language_model_loss
