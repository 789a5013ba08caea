"""Bytes that tensors of an emulated job represent."""

from collections.abc import Sequence
from typing import Protocol

import torch


class TensorSizes(Protocol):
    """How many bytes a tensor stands for in the emulated job."""

    def message_bytes(self, tensor: torch.Tensor) -> int:
        """Size of a tensor that is sent from rank to rank."""

    def buffer_bytes(self, tensor: torch.Tensor) -> int:
        """Size of a tensor that a collective works on."""

    def part_bytes(self, parts: Sequence[torch.Tensor]) -> list[int]:
        """Size of each rank's part of a tensor that a collective works on."""


class AsTheyAre:
    """`TensorSizes` where tensors stand for themselves."""

    def message_bytes(self, tensor: torch.Tensor) -> int:
        return tensor.nbytes

    def buffer_bytes(self, tensor: torch.Tensor) -> int:
        return tensor.nbytes

    def part_bytes(self, parts: Sequence[torch.Tensor]) -> list[int]:
        return [part.nbytes for part in parts]
