"""Layers that run a micro-batch as two interleaved halves, so that tokens travel beside products.

Of ranks that share experts each cuts its samples in two. While tokens of one half are on their way
to experts or back, the other half's attention or experts are computed; what a layer's experts
return arrives within the next layer. Backwards run in the reverse order, and so do the same.

Source: `TransformerLayer.forward`; stock interleaves two micro-batches, one forward and the other
backward (`--overlap-moe-expert-parallel-comm`).
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from megatron.core.transformer.transformer_layer import TransformerLayer

from zorse_megatron.adapter.model.expert_layers import PlanMoELayer

Arrive = Callable[[], torch.Tensor]
"""Waits for a layer's output of one half: [sequence, samples, hidden]."""


@dataclass(kw_only=True)
class Halves:
    """What one layer hands to the next, which leaves nothing here."""

    arrive: list[Arrive]
    last: torch.Tensor
    """What experts return of the second half, whose gradient is the first that a backward has."""

    def noticed(self, note: Callable[[torch.Tensor], None]) -> "Halves":
        """The same, of which `note` is given each half when it arrives."""

        def noticing(arrive: Arrive) -> torch.Tensor:
            found = arrive()
            note(found)
            return found

        return Halves(arrive=[partial(noticing, arrive) for arrive in self.arrive], last=self.last)

    def take(self) -> list[Arrive]:
        """Both, once: else who calls the next layer keeps what they are made of meanwhile."""
        found = self.arrive
        del self.arrive, self.last
        return found


def overlapping(layer: Any) -> None:
    """Let a layer's spec build one that is overlapped."""
    layer.module = OverlappedLayer


class OverlappedLayer(TransformerLayer):
    """Stock's, for a micro-batch in two halves."""

    hands_on = True
    """Whether the next layer of the rank takes halves; not of a chunk's last layer."""

    def forward(
        self,
        *,
        hidden_states: torch.Tensor | Halves,
        attention_mask: torch.Tensor | None = None,
        padding_mask: torch.Tensor | None = None,
        **others: Any,
    ) -> tuple[torch.Tensor | Halves, None]:
        """As stock's; `hidden_states` [sequence, samples, hidden] have an even number of samples.

        All but masks is alike for all samples.
        """
        halves = hidden_states if isinstance(hidden_states, Halves) else _cut(hidden_states)
        masks = zip(_parts(attention_mask), _parts(padding_mask), strict=True)
        arrive = halves.take()
        # In this order: see the module's docstring.
        begun = [
            self._begin(arrive.pop(0), attention_mask=mask, padding_mask=padding, **others)
            for mask, padding in masks
        ]
        first, second = [experts() for experts in begun]
        found = Halves(arrive=[first[0], second[0]], last=second[1])
        return found if self.hands_on else _whole(found), None

    def _begin(
        self, arrive: Arrive, *, padding_mask: torch.Tensor | None, **others: Any
    ) -> Callable[[], tuple[Arrive, torch.Tensor]]:
        """Up to where tokens leave. Returns what waits for them and sends them back."""
        if not isinstance(self.mlp, PlanMoELayer):  # a dense layer
            output, _ = super().forward(hidden_states=arrive(), padding_mask=padding_mask, **others)
            return lambda: (lambda: output, output)
        hidden, _ = self._forward_attention(hidden_states=arrive(), **others)
        normed = self._forward_pre_mlp_layernorm(hidden)
        checkpoint = getattr(self, "pre_mlp_norm_checkpoint", None)
        residual = hidden.float() if self.config.fp32_residual_connection else hidden
        compute = self.mlp(normed, padding_mask=padding_mask)

        def experts() -> tuple[Arrive, torch.Tensor]:
            returning, arrived = compute()

            def whole() -> torch.Tensor:
                self.pre_mlp_norm_checkpoint = checkpoint  # else that of the other half
                return self._forward_post_mlp((arrived(), None), residual)

            return whole, returning

        return experts


def _cut(whole: torch.Tensor) -> Halves:
    """Copies: what the halves are of may be let go."""
    halves = whole.chunk(2, dim=1)
    first, second = (each.clone(memory_format=torch.contiguous_format) for each in halves)
    return Halves(arrive=[lambda: first, lambda: second], last=second)


def _whole(halves: Halves) -> torch.Tensor:
    return torch.cat([arrive() for arrive in halves.take()], dim=1)


def _parts(mask: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
    """Of the samples of each half, where a mask [samples, ...] is not one for all."""
    return (mask, mask) if mask is None or len(mask) == 1 else mask.chunk(2)
