"""The versions that we know, checked before Megatron is imported."""

import importlib.metadata
import importlib.util
import re
from pathlib import Path

from packaging.specifiers import SpecifierSet
from packaging.version import Version

from zorse_megatron.errors import Problem, SeamError

MEGATRON_VERSIONS = ">=0.19,<0.20"

_NUMBER = re.compile(r"^(MAJOR|MINOR|PATCH|PRE_RELEASE) = ['\"]?(\w*)['\"]?", re.MULTILINE)


def megatron_directory() -> Path | None:
    """Where `import megatron.core` would come from, found without importing it."""
    spec = importlib.util.find_spec("megatron")
    if spec is None or not spec.submodule_search_locations:
        return None
    return Path(next(iter(spec.submodule_search_locations)))


def installed_megatron() -> str | None:
    """Version of the megatron-core that an import would find, None without one.

    Read from its `package_info.py`: a checkout of Megatron-LM on the path has no distribution, and
    may hide one of another version.
    """
    directory = megatron_directory()
    info = None if directory is None else directory / "core" / "package_info.py"
    if info is None or not info.is_file():
        return None
    number = dict(_NUMBER.findall(info.read_text()))
    return f"{number['MAJOR']}.{number['MINOR']}.{number['PATCH']}{number['PRE_RELEASE']}"


def installed_version(distribution: str) -> str | None:
    """Version of a distribution, None where it is not there; of Megatron what an import finds."""
    if distribution == "megatron-core":
        return installed_megatron()
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def check_megatron(version: str | None) -> None:
    """Raise SeamError unless `version` is one that our hooks were written for."""
    # Release candidates of a known version have the same seams.
    if version is not None and SpecifierSet(MEGATRON_VERSIONS).contains(
        Version(version), prereleases=True
    ):
        return
    found = "no megatron-core" if version is None else f"megatron-core {version}"
    raise SeamError(
        "This Megatron cannot run a plan",
        [
            Problem(
                where="the Python environment",
                found=found,
                expected=f"megatron-core {MEGATRON_VERSIONS}",
                remedy='Run: pip install "megatron-core[training]>=0.19,<0.20"',
            )
        ],
    )
