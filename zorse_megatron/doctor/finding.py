"""What came of a check."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from types import MappingProxyType
from typing import Any

Figure = float | int | str | None


class Status(StrEnum):
    """Each check has one of these, with a reason unless it passed."""

    PASS = "pass"
    FAIL = "fail"
    NOT_POSSIBLE = "not possible here"


@dataclass(frozen=True, kw_only=True)
class Finding:
    """What came of one check."""

    status: Status
    said: str
    """What was found, in one sentence; of a failure, what was expected and what to do as well."""
    figures: Mapping[str, Figure] = field(default_factory=lambda: MappingProxyType({}))
    """Measured values, with their units in the names."""


@dataclass(frozen=True, kw_only=True)
class CheckResult:
    """A line of the report."""

    name: str
    title: str
    finding: Finding
    duration_s: float

    def as_json(self) -> dict[str, Any]:
        """For programs."""
        return {
            "check": self.name,
            "title": self.title,
            "status": str(self.finding.status),
            "said": self.finding.said,
            "figures": dict(self.finding.figures),
            "duration_s": round(self.duration_s, 3),
        }


def passed(said: str, **figures: Figure) -> Finding:
    """A check that passed."""
    return Finding(status=Status.PASS, said=said, figures=figures)


def failed(said: str, **figures: Figure) -> Finding:
    """A check that failed."""
    return Finding(status=Status.FAIL, said=said, figures=figures)


def not_possible(reason: str) -> Finding:
    """A check that this machine cannot make."""
    return Finding(status=Status.NOT_POSSIBLE, said=reason)
