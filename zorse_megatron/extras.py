"""What the basic installation lacks, and which of the package's extras provides it.

The light install plans; `[train]` trains, `[plots]` draws. Commands say before their work what they
lack, with the command that brings it.
"""

import importlib
import importlib.metadata
import importlib.util
import sys
from collections.abc import Mapping
from pathlib import Path

from zorse_megatron.errors import Problem, ZorseError

PACKAGE = "zorse-megatron"
MODULES: Mapping[str, tuple[str, ...]] = {
    "train": ("torch", "megatron", "safetensors"),
    "plots": ("matplotlib",),
}
"""Extra -> the top-level modules that it brings and that are imported by name."""
TRAINS_FROM = (3, 12)
"""The first Python that megatron-core 0.19 takes (its Requires-Python)."""


class MissingExtra(ZorseError):
    """What a command needs is not installed."""


def refuse_without(*extras: str, what: str) -> None:
    """Raise MissingExtra with all that is absent of these extras. `what` needs them: a command."""
    absent = {
        extra: tuple(name for name in MODULES[extra] if not _is_there(name)) for extra in extras
    }
    if any(absent.values()):
        raise MissingExtra(f"{what} cannot be run", [_problem(absent, what)])


def _is_there(module: str) -> bool:
    try:
        return module in sys.modules or importlib.util.find_spec(module) is not None
    except (ImportError, ValueError):  # a finder that refuses it; a module without a spec
        return False


def _requirement() -> str:
    """What pip finds: the installed package by its name, else the directory that this runs from.

    No index has to know the name: pip takes what is installed, and fetches what the extra adds.
    """
    try:
        importlib.metadata.distribution(PACKAGE)
    except importlib.metadata.PackageNotFoundError:
        return str(Path(__file__).parents[1])
    return PACKAGE


def _problem(absent: Mapping[str, tuple[str, ...]], what: str) -> Problem:
    modules = [module for each in absent.values() for module in each]
    extras = ",".join(extra for extra, each in absent.items() if each)
    remedy = f"Run: pip install '{_requirement()}[{extras}]'"
    if absent.get("train") and sys.version_info < TRAINS_FROM:
        older, newer = (".".join(map(str, each)) for each in (sys.version_info[:2], TRAINS_FROM))
        remedy = f"This is Python {older}; megatron-core needs {newer}. {remedy} there"
    return Problem(
        where=what,
        found=f"no module {' and no module '.join(modules)}",
        expected=f"the package with [{extras}]",
        remedy=f"{remedy}.",
    )
