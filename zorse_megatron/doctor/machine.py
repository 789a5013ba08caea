"""The machine at hand: its GPUs, and what is installed; asked for in a process of its own.

A process that has asked CUDA keeps hundreds of megabytes of each GPU, so this one never does.
"""

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from zorse_megatron.doctor.rank_jobs import RankJob, Runner
from zorse_megatron.schema.gpus.compute_capability import BF16_FROM

_ENTRY = "zorse_megatron.doctor.on_ranks.machine_main"
NO_CUDA = "no CUDA device"


@dataclass(frozen=True, kw_only=True)
class Gpu:
    """One GPU."""

    name: str
    capability: tuple[int, int]
    total_bytes: int
    host_to_gpu_bytes_per_s: float
    """From pinned memory."""
    gpu_to_host_bytes_per_s: float


@dataclass(frozen=True, kw_only=True)
class Machine:
    """What the checks need to know."""

    gpus: tuple[Gpu, ...]
    torch: str
    nccl: str | None
    transformer_engine: str | None
    apex: bool

    @property
    def has_gpu(self) -> bool:
        """Whether anything runs on CUDA here."""
        return bool(self.gpus)

    @property
    def dtype_flag(self) -> str:
        """Of Megatron: the 16-bit type that all GPUs have units for."""
        return "--bf16" if all(gpu.capability >= BF16_FROM for gpu in self.gpus) else "--fp16"

    @property
    def layer_flags(self) -> tuple[str, ...]:
        """Of Megatron: 16 bits, and its own layers where Transformer Engine is not installed."""
        local = ("--transformer-impl", "local", "--no-masked-softmax-fusion")
        return (self.dtype_flag, *(() if self.transformer_engine else local))

    def shares_gpus(self, world_size: int) -> bool:
        """Whether so many ranks are more than there are GPUs."""
        return self.has_gpu and world_size > len(self.gpus)

    def as_json(self) -> dict[str, Any]:
        """For programs."""
        return asdict(self)


def machine_here(runner: Runner, directory: Path, *, limit_s: float = 120.0) -> Machine:
    """Look. Raises RankFailure where even that fails."""
    answer = directory / "machine.json"
    runner.run(
        RankJob(
            name="machine",
            entry=_ENTRY,
            arguments=(str(answer),),
            world_size=1,
            directory=directory,
            limit_s=limit_s,
        )
    )
    return machine_from_json(json.loads(answer.read_text()))


def machine_from_json(value: dict[str, Any]) -> Machine:
    """Read what `on_ranks.machine_main` wrote."""
    gpus = tuple(Gpu(**gpu | {"capability": tuple(gpu["capability"])}) for gpu in value["gpus"])
    return Machine(**value | {"gpus": gpus})
