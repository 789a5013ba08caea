"""Which core attention a layer ran, by what it kept for its backward."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from zorse_megatron.schema.gpus.gpu import Attention


class SeenAttention:
    """What was seen of a forward."""

    def __init__(self, seq_length: int) -> None:
        self._sides = (seq_length, seq_length)
        self.kept_scores = False

    @property
    def attention(self) -> Attention:
        """As the cost models know it: whether scores are kept, whoever computed them."""
        return "unfused" if self.kept_scores else "flash"

    @contextmanager
    def looking(self) -> Iterator[None]:
        """Within the block, look at all tensors that autograd is given to keep.

        Scores, or their softmax, are floating, of each head (and sample), and square in tokens.
        Flash and fused attention keep one number per head and token in their place.
        """

        def keep(tensor: torch.Tensor) -> torch.Tensor:
            is_square = tensor.ndim > 2 and tuple(tensor.shape[-2:]) == self._sides
            self.kept_scores |= is_square and tensor.is_floating_point()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            yield
