"""What came of the doctor's checks, and on which machine: one file to send, and to read back."""

import math
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import field
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, ConfigDict, TypeAdapter
from pydantic.dataclasses import dataclass

from zorse_megatron.errors import ZorseError, printable
from zorse_megatron.files.json_text import layout, read_json, unreadable
from zorse_megatron.files.quantities import spell_bandwidth
from zorse_megatron.files.strict import FileKind, built, check_version, read_file
from zorse_megatron.files.wording import duration, memory, percent
from zorse_megatron.gpus.gpu import BF16_FROM, Capability
from zorse_megatron.plan.plan import Positive, refuse_non_integer

_CONFIG = ConfigDict(extra="forbid", strict=True)
_VERSION = 1
REPORT_NAME = "doctor.json"


def _without_nan(value: Any) -> Any:
    """JSON has neither NaN nor infinity: None stands for them."""
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _printable_if_text(value: Any) -> Any:
    """Words of torch, NCCL and drivers may hold anything."""
    return printable(value) if isinstance(value, str) else value


Figure = Annotated[float | int | str | None, BeforeValidator(_without_nan)]
Text = Annotated[str, BeforeValidator(_printable_if_text)]


class Status(StrEnum):
    """Each check has one of these, with a reason unless it passed."""

    PASS = "pass"
    FAIL = "fail"
    NOT_POSSIBLE = "not possible here"
    NO_TIME = "no time left"


@dataclass(frozen=True, kw_only=True, config=_CONFIG)
class Finding:
    """What came of one check: a line of the report."""

    status: Status
    said: Text
    """What was found, and of a failure what was expected."""
    figures: Mapping[str, Figure] = field(default_factory=dict)
    """Measured values, with their units in the names; None: no finite number."""
    check: str = ""
    title: str = ""
    remedy: str = ""
    """What to do about a failure, or for more time."""
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


def no_time() -> Finding:
    """A check that was not begun, or cut off, when the time for all was up."""
    remedy = "Give it more with --time-limit, or make fewer checks (--check)"
    return Finding(status=Status.NO_TIME, said="not checked", remedy=remedy)


@dataclass(frozen=True, kw_only=True, config=_CONFIG)
class Gpu:
    """One GPU."""

    name: Text
    capability: Capability
    total_bytes: Positive


@dataclass(frozen=True, kw_only=True, config=_CONFIG)
class Machine:
    """What the checks need to know of it."""

    gpus: tuple[Gpu, ...]
    torch: str
    nccl: str | None
    transformer_engine: str | None
    driver: str | None
    """Its version, as nvidia-smi has it."""
    num_processors: Positive
    unusable_gpus: Text | None = None
    """Those that torch cannot use, and why."""

    def __str__(self) -> str:
        kinds = Counter(f"{gpu.name} ({gpu.total_bytes / 1e9:.0f} GB)" for gpu in self.gpus)
        gpus = " and ".join(f"{count} x {kind}" for kind, count in kinds.items())
        software = {
            "driver": self.driver,
            "torch": self.torch,
            "NCCL": self.nccl,
            "Transformer Engine": self.transformer_engine,
        }
        there = [f"{name} {version}" for name, version in software.items() if version]
        on = f"GPU: {gpus}" if gpus else f"CPU: {self.num_processors} processors"
        return ", ".join([on, *there])

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


@dataclass(frozen=True, kw_only=True, config=_CONFIG)
class Report:
    """All findings, and where they were made: `doctor.json`."""

    schema_version: Annotated[Literal[1], BeforeValidator(refuse_non_integer)] = 1
    version: str
    """Of this package."""
    date: str
    """When the checks were begun."""
    machine: Machine
    checks: tuple[Finding, ...]

    @property
    def is_well(self) -> bool:
        """Whether all was checked that this machine can check, and nothing has failed."""
        return all(each.status in {Status.PASS, Status.NOT_POSSIBLE} for each in self.checks)

    @property
    def summary(self) -> str:
        """How many checks ended how."""
        counts = Counter(each.status for each in self.checks)
        return ", ".join(f"{counts[status]} {status}" for status in Status if counts[status])

    def as_table(self) -> str:
        """All figures in Markdown, under a heading that says where and when they were measured."""
        where = f"Measured by zorse doctor {self.version} on {self.machine}, {self.date[:10]}"
        rows = [("Check", "Result", where), ("---",) * 3, *map(_row, self.checks)]
        return "\n".join(f"| {' | '.join(map(_in_cell, row))} |" for row in rows)


def _row(found: Finding) -> tuple[str, str, str]:
    said = [] if found.figures and found.status is Status.PASS else [found.said]
    figures = ", ".join(_spelled(*each) for each in found.figures.items())
    return found.title, str(found.status), "; ".join([*said, *filter(None, [figures])])


def _in_cell(text: str) -> str:
    return " ".join(text.replace("|", "\\|").split())


# By the ends of their names.
_SPELLED: tuple[tuple[tuple[str, ...], Callable[[float], str]], ...] = (
    (("_bytes_per_s",), spell_bandwidth),
    (("_bytes",), memory),
    (("_s",), duration),
    (("_of_copy", "_spread", "_error", "_beyond_copies"), percent),
)


def _spelled(name: str, value: float | str | None) -> str:
    """A figure as people read it, with its name in the report."""
    if value is None:
        return f"`{name}` no number"
    if isinstance(value, str):
        return f"`{name}` {value}"
    plain = str if isinstance(value, int) else "{:.3g}".format
    spell = next((spell for ends, spell in _SPELLED if name.endswith(ends)), plain)
    return f"`{name}` {spell(value)}"


# The file.


class ReportError(ZorseError):
    """There is no report of the doctor, or it cannot be used."""


REPORT_FILE = FileKind(
    name="report",
    syntax="JSON",
    document="docs/gpus.md",
    error=ReportError,
    root=Report,
    has_long_texts=True,
)


def report_values(report: Report) -> dict[str, Any]:
    """Return it as JSON values."""
    values: dict[str, Any] = TypeAdapter(Report).dump_python(report, mode="json")
    return values


def dump_report(report: Report) -> str:
    """Return the text of the file."""
    return layout(report_values(report)) + "\n"


def load_report(path: Path) -> Report:
    """Read what `zorse doctor` has written. Raises ReportError with every problem."""
    source = str(path)
    value, problems = read_json(read_file(path, REPORT_FILE), source, REPORT_FILE)
    if not (isinstance(value, dict) and {"machine", "checks"} & value.keys()):
        remedy = f"Give the {REPORT_NAME} that zorse doctor has written."
        raise unreadable(source, source, "neither a machine nor checks", remedy, REPORT_FILE)
    check_version(value, source, REPORT_FILE, _VERSION)
    report: Report = built(value, problems, REPORT_FILE, source, rules=lambda _: ())
    return report
