"""What a plan does with each flag of Megatron: one table for runs and planning commands."""

from collections.abc import Iterator
from fnmatch import translate
from functools import cache
from re import Pattern
from re import compile as compiled
from typing import Any, Literal

from zorse_megatron.flags.accepted import COMPARED, FINE, PREDICTED
from zorse_megatron.flags.refused import DECIDED_BY_PLAN, REFUSED, UNTRIED, FlagFamily
from zorse_megatron.flags.table import defaults

Handling = Literal["refused", "decided", "compared", "predicted", "fine"]
_UNKNOWN = FlagFamily(what="Not looked at yet", names="*", remedy=UNTRIED)
_ACCEPTED: tuple[tuple[Handling, str], ...] = (
    ("compared", COMPARED),
    ("predicted", PREDICTED),
    ("fine", FINE),
)


def handlings_of(name: str) -> list[tuple[Handling, FlagFamily | None]]:
    """Every way in which an argument is handled: one, if the lists are right."""
    found: list[tuple[Handling, FlagFamily | None]] = []
    for handling, families in (("decided", DECIDED_BY_PLAN), ("refused", REFUSED)):
        found += [(handling, each) for each in families if is_among(name, each.names)]  # type: ignore[misc]
    return found + [(handling, None) for handling, names in _ACCEPTED if is_among(name, names)]


@cache
def handling_of(name: str) -> tuple[Handling, FlagFamily | None]:
    """How an argument is handled; what is in no list is refused."""
    return next(iter(handlings_of(name)), ("refused", _UNKNOWN))


def is_among(name: str, names: str) -> bool:
    """Whether a list has the name, or a star for it."""
    return _pattern(names).match(name) is not None


@cache
def _pattern(names: str) -> Pattern[str]:
    """One expression for a whole list: every rank goes through all of them at its start."""
    return compiled("|".join(map(translate, names.split())) or r"(?!)")


def is_refused(name: str, value: Any) -> FlagFamily | None:
    """The family for which this value of an argument is refused; None where it is not."""
    _, family = handling_of(name)
    default = defaults().get(name)
    if family is None or value in (None, default, *family.accepted):
        return None
    is_off = not default and not value
    return None if is_off else family


@cache
def refusable() -> tuple[str, ...]:
    """Arguments of which some value is refused, whatever the plan."""
    return tuple(name for name in defaults() if handling_of(name)[1] is not None)


def names_of(family: FlagFamily) -> Iterator[str]:
    """Arguments of a family, in the parser's order."""
    return (name for name in defaults() if is_among(name, family.names))
