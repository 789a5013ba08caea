"""What one rank reports of its GPU and of what is installed on its node."""

from dataclasses import dataclass

from pydantic import TypeAdapter

from zorse_megatron.errors import Problem
from zorse_megatron.schema.gpus.compute_capability import Capability


@dataclass(frozen=True, kw_only=True)
class SeenGpu:
    """The GPU that a rank takes."""

    name: str
    """As the driver calls it."""
    uuid: str
    capability: Capability


@dataclass(frozen=True, kw_only=True)
class RankSoftware:
    """One rank's view; what is not installed is None or not among `extensions`."""

    rank: int
    node: str
    gpu: SeenGpu | None
    """None: no GPU is visible."""
    torch: str
    """Version of the build, such as "2.13.0+cu130"."""
    archs: tuple[str, ...]
    """What `torch.cuda.get_arch_list()` returns."""
    nccl: str | None
    transformer_engine: str | None
    flash_attention: str | None
    extensions: tuple[str, ...]
    """Those CUDA extensions that `machine_flags` knows and that are installed."""
    host_id: str | None = None
    """What NCCL takes for the name of the host, where that is set for this rank (NCCL_HOSTID)."""
    transformer_impl: str | None = None
    """What its command says or was given for --transformer-impl; None: stock's default."""
    refused: tuple[Problem, ...] = ()
    """Flags of its command that cannot work there."""

    def to_json(self) -> str:
        """Write it for other ranks, in one line."""
        return TypeAdapter(RankSoftware).dump_json(self).decode()

    @classmethod
    def from_json(cls, text: str) -> "RankSoftware":
        """Read what `to_json` wrote."""
        return TypeAdapter(cls).validate_json(text)
