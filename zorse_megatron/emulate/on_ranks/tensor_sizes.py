"""Bytes that tensors of an emulated job represent."""

from collections.abc import Sequence
from typing import Protocol

import torch

from zorse_megatron.runtime.part_exchange import Exchanged


class TensorSizes(Protocol):
    """How many bytes a tensor stands for in the emulated job."""

    def message_bytes(self, tensor: torch.Tensor) -> int:
        """Size of a tensor that is sent from rank to rank."""

    def buffer_bytes(self, tensor: torch.Tensor) -> int:
        """Size of a tensor that a collective works on."""

    def part_bytes(self, parts: Sequence[torch.Tensor]) -> list[int]:
        """Size of each rank's part of a tensor that a collective works on."""

    def on_operation(self) -> None:
        """Told that gradients are about to be summed, or parameters gathered."""

    def is_set(self, ranks: Sequence[int]) -> bool:
        """Whether these ranks are this rank's tensor-parallel set, of several."""

    def inside_bytes(self, tensor: torch.Tensor) -> int | None:
        """Size of a tensor that a collective of the set works on; None: it takes no time."""

    def activation_bytes(self, num_elements: int) -> int:
        """Size of an activation of so many elements."""

    def exchange_bytes(self, exchanged: Exchanged) -> dict[tuple[int, int], int]:
        """(source, target) -> size of what one sends the other in an exchange of parts."""


class AsTheyAre:
    """`TensorSizes` where tensors stand for themselves."""

    def message_bytes(self, tensor: torch.Tensor) -> int:
        return tensor.nbytes

    def buffer_bytes(self, tensor: torch.Tensor) -> int:
        return tensor.nbytes

    def part_bytes(self, parts: Sequence[torch.Tensor]) -> list[int]:
        return [part.nbytes for part in parts]

    def on_operation(self) -> None:
        pass

    def is_set(self, ranks: Sequence[int]) -> bool:
        return False

    def inside_bytes(self, tensor: torch.Tensor) -> int:
        return tensor.nbytes

    def activation_bytes(self, num_elements: int) -> int:
        raise AssertionError("without sets nothing asks for this")

    def exchange_bytes(self, exchanged: Exchanged) -> dict[tuple[int, int], int]:
        sizes: dict[tuple[int, int], int] = {}
        for tensor in exchanged.unit:
            for pair, count in exchanged.messages(tensor).items():
                sizes[pair] = sizes.get(pair, 0) + 4 * count
        return sizes
