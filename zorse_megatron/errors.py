"""Errors that say what was found, what was expected, where, and what to do."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Self

# What is found may be anything: it must not steer the terminal that shows it.
_CONTROLS = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069]")


def printable(text: str) -> str:
    """The text, with the names of signs in place of those that would steer a terminal."""
    return _CONTROLS.sub(lambda control: ascii(control[0])[1:-1], text)


@dataclass(frozen=True, kw_only=True)
class Problem:
    """One thing that is wrong with an input.

    `where` locates it (a file and a path inside it, a flag, a rank), `found` and `expected` state
    the facts, `remedy` says what to do about it.
    """

    where: str
    found: str
    expected: str
    remedy: str

    def __str__(self) -> str:
        text = f"{self.where}: found {self.found}; expected {self.expected}. {self.remedy}"
        return printable(text)


class ZorseError(Exception):
    """An error with all of its problems, raised before anything is lost."""

    facts: Mapping[str, object] = MappingProxyType({})
    """What programs are told beside the problems: numbers to the last digit."""
    is_of_one_rank = False
    """Whether the other ranks do not know of it: then the rank has to say it itself."""

    def __init__(self, title: str, problems: Sequence[Problem]) -> None:
        if not problems:
            raise ValueError("a ZorseError needs at least one problem")
        self.title = title
        self.problems = tuple(problems)
        super().__init__(str(self))

    @classmethod
    def of(cls, title: str, *, where: str, found: str, expected: str, remedy: str) -> Self:
        """The error with one problem."""
        return cls(title, [Problem(where=where, found=found, expected=expected, remedy=remedy)])

    def __str__(self) -> str:
        lines = [f"{self.title} ({len(self.problems)} problem{'s'[: len(self.problems) > 1]}):"]
        lines += [f"  {number}. {problem}" for number, problem in enumerate(self.problems, start=1)]
        return printable("\n".join(lines))

    def __reduce__(self) -> tuple[object, ...]:
        """Ranks hand errors to each other; by default the message alone would be handed on."""
        return type(self), (self.title, self.problems)


class PlanError(ZorseError):
    """The plan file cannot be used."""


class ClusterError(ZorseError):
    """The cluster file cannot be used."""


class ModelError(ZorseError):
    """The description of the model cannot be used."""


class ProfileError(ZorseError):
    """The profile, or a file that a profile is made from, cannot be used."""


class FlagError(ZorseError):
    """The command's flags do not fit the plan."""


class OutputError(ZorseError):
    """A file cannot be written."""


class SeamError(ZorseError):
    """A place in Megatron that we hook into is not as we know it."""


class LaunchError(ZorseError):
    """The environment does not say which rank of which job a process is."""


class RankFailure(ZorseError):
    """A rank died or did not answer in time."""


class OutOfTime(RankFailure):
    """Ranks of which none had failed were ended when their time was up, or not even started."""


class MeasureError(ZorseError):
    """The cluster cannot be measured, or not as it was asked for."""


class CheckpointError(ZorseError):
    """No checkpoint can be loaded as the command says."""
