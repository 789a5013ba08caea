"""The link to host memory that an emulated rank is given: the same copies, with times."""

from collections.abc import Sequence
from typing import Any

import torch

from zorse_megatron.emulate.on_ranks.host_copies import HostCopies, HostCopy
from zorse_megatron.emulate.on_ranks.pacer import Pacer
from zorse_megatron.runtime.host_link import HostBacked, HostLink


class EmulatedHostLink(HostLink):
    """Copies at once, and lets the rank's clock say when that would be done on the emulated GPU."""

    def __init__(self, pacer: Pacer, device: torch.device) -> None:
        super().__init__(device)
        self._pacer = pacer

    @property
    def _copies(self) -> HostCopies:
        return self._pacer.host

    def start_to_host(self, source: torch.Tensor, host: torch.Tensor) -> HostCopy | None:
        super().start_to_host(source, host)
        return self._copies.start(source, to_host=True)

    def start_from_host(self, host: torch.Tensor, target: torch.Tensor) -> HostCopy | None:
        super().start_from_host(host, target)
        return self._copies.start(target, to_host=False)

    def hold_back(self, copied: Any) -> None:
        """Let the rank's clock wait where a CUDA stream would."""
        self._copies.hold_back(copied)

    def expect_activations(self, memories: Sequence[HostBacked]) -> None:
        """What a tiny forward kept stands for what the real one keeps."""
        self._copies.add_activations(memories, self._pacer.forward_bytes)

    def expect_state(self, state: Any) -> None:
        """Pieces of the tiny state stand for pieces of the real one."""
        self._copies.add_state(state)

    def piece_sizes(self, shards: Sequence[Any]) -> Sequence[int]:
        """As many pieces as the real state has."""
        return self._copies.piece_sizes(shards)
