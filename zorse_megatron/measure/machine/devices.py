"""One rank's view of its device and its host.

Reading is behind one small interface, so that everything above it runs without GPUs.
"""

from dataclasses import dataclass
from typing import Protocol

from zorse_megatron.schema.gpus.device_names import kind_of_device
from zorse_megatron.schema.gpus.gpu import LinkType


@dataclass(frozen=True, kw_only=True)
class SeenNic:
    """A network adapter that is up."""

    name: str
    bytes_per_s: float | None
    """What the driver says that it is; None where it does not say."""


@dataclass(frozen=True, kw_only=True)
class SeenDevice:
    """The device of one rank, as its driver describes it."""

    name: str
    memory_bytes: int
    link_type: LinkType
    """What joins it to the other devices of its node."""
    is_gpu: bool

    @property
    def kind(self) -> str:
        """The well-known kind of GPU that it is, or its own name."""
        return kind_of_device(self.name, self.memory_bytes)


@dataclass(frozen=True, kw_only=True)
class SeenRank:
    """What one rank reports."""

    rank: int
    node: str
    local_rank: int
    device: SeenDevice
    host_memory_bytes: int
    nics: tuple[SeenNic, ...]


class DeviceReader(Protocol):
    """Reads what there is on this machine."""

    def device(self, local_rank: int, ranks_on_node: int) -> SeenDevice:
        """Return the device of a rank. Raises MeasureError where there is none."""
        ...
