"""Megatron's flags that a machine needs, beside what the command says."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class NeededFlag:
    """A flag that is added where the command lacks it; `value` is None for a switch."""

    flag: str
    value: str | None = None
    why: str

    @property
    def words(self) -> list[str]:
        """As in a command."""
        return [self.flag] if self.value is None else [self.flag, self.value]


def lacking(needed: Sequence[NeededFlag], given: Mapping[str, str]) -> list[NeededFlag]:
    """Those of them that are not among the flags given."""
    return [each for each in needed if each.flag not in given]
