"""What came of the checks, and on which machine: one file to send."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from typing import Any

from zorse_megatron.schema.gpus.compute_capability import BF16_FROM, Capability

NO_CUDA = "no CUDA device"
Figure = float | int | str | None


class Status(StrEnum):
    """Each check has one of these, with a reason unless it passed."""

    PASS = "pass"
    FAIL = "fail"
    NOT_POSSIBLE = "not possible here"


@dataclass(frozen=True, kw_only=True)
class Finding:
    """What came of one check: a line of the report."""

    status: Status
    said: str
    """What was found, and of a failure what was expected."""
    figures: Mapping[str, Figure] = field(default_factory=dict)
    """Measured values, with their units in the names."""
    check: str = ""
    title: str = ""
    remedy: str = ""
    """What to do about a failure."""
    duration_s: float = 0.0

    def __str__(self) -> str:
        line = f"{self.status}: {self.title}: {self.said}"
        return f"{line}. {self.remedy}" if self.remedy else line


def passed(said: str, **figures: Figure) -> Finding:
    """A check that passed."""
    return Finding(status=Status.PASS, said=said, figures=figures)


def failed(said: str, **figures: Figure) -> Finding:
    """A check that failed."""
    return Finding(status=Status.FAIL, said=said, figures=figures)


def not_possible(reason: str) -> Finding:
    """A check that this machine cannot make."""
    return Finding(status=Status.NOT_POSSIBLE, said=reason)


@dataclass(frozen=True, kw_only=True)
class Gpu:
    """One GPU."""

    name: str
    capability: Capability
    total_bytes: int


@dataclass(frozen=True, kw_only=True)
class Machine:
    """What the checks need to know of it."""

    gpus: tuple[Gpu, ...]
    torch: str
    nccl: str | None
    transformer_engine: str | None

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
        return bool(self.gpus) and world_size > len(self.gpus)


@dataclass(frozen=True, kw_only=True)
class Report:
    """All findings, and where they were made."""

    machine: Machine
    findings: tuple[Finding, ...]
    version: str

    @property
    def has_failed(self) -> bool:
        """Whether any check has."""
        return any(each.status == Status.FAIL for each in self.findings)

    @property
    def summary(self) -> str:
        """How many checks ended how."""
        counts = Counter(each.status for each in self.findings)
        return ", ".join(f"{counts[status]} {status}" for status in Status if counts[status])

    def as_json(self) -> dict[str, Any]:
        """For programs, and to be sent: `doctor.json`."""
        values = asdict(self)
        checks = values.pop("findings")
        return {"ok": not self.has_failed, "summary": self.summary, **values, "checks": checks}
