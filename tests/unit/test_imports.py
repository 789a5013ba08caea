"""What is imported, rebound and patched is there."""

import ast
import importlib
import re
import tomllib
from fnmatch import fnmatch
from pathlib import Path

import pytest

from zorse_megatron.adapter import patches
from zorse_megatron.adapter.patches.rebind import Rebinding
from zorse_megatron.adapter.patches.registry import REGISTRY

ROOT = Path(__file__).parents[2]
# At any depth, as much is imported where it is needed; `from a import (` on several lines, too.
IMPORT = re.compile(
    r"^\s*(?:from ((?:zorse_megatron|tests|scripts)[\w.]*) import (\([^)]*\)|[^#\n]*)"
    r"|import ((?:zorse_megatron|tests|scripts)[\w.]*))",
    re.MULTILINE,
)


@pytest.mark.parametrize("own", ["tests", "scripts"])
def test_every_module_that_is_imported_is_there(own):
    paths = [path for path in (ROOT / own).rglob("*.py") if path != Path(__file__)]
    imported = {path: list(_modules(path.read_text(encoding="utf-8"))) for path in paths}
    assert any(imported.values())
    lost = [
        f"{path.relative_to(ROOT)}: {module}"
        for path, modules in imported.items()
        for module in modules
        if not _is_there(module)
    ]
    assert not lost


def test_the_check_finds_what_is_lost():
    text = """
import tests.gone
def late():
    from zorse_megatron.errors import Problem
    from zorse_megatron.gone.deeper import (
        Name,
    )
from zorse_megatron.inputs import cluster, gone as other
from zorse_megatron.costs import (
    topology,
    vanished,
)
"""
    lost = [module for module in _modules(text) if not _is_there(module)]
    assert lost == [
        "tests.gone",
        "zorse_megatron.gone.deeper",
        "zorse_megatron.inputs.gone",
        "zorse_megatron.costs.vanished",
    ]


def test_mypy_forgives_no_missing_module_of_our_own():
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["mypy"]
    overrides = settings.pop("overrides")
    assert not settings.get("ignore_missing_imports")
    forgiven = {
        pattern
        for each in overrides
        if each.get("ignore_missing_imports") or each.get("follow_imports") == "skip"
        for pattern in each["module"]
    }
    ours = ("zorse_megatron", "zorse_megatron.gone", "tests", "tests.gone")
    assert forgiven and not [p for p in forgiven if any(fnmatch(own, p) for own in ours)]


def _modules(text):
    """Modules that a text imports; of `from package import name` the name, too, as one of them."""
    for module, names, whole in IMPORT.findall(text):
        if whole:
            yield whole
            continue
        place = ROOT.joinpath(*module.split("."))
        # Of a package that binds nothing itself, all names are modules.
        marker = place / "__init__.py"
        if marker.is_file() and not re.search(r"^(from|\w+ = )", marker.read_text("utf-8"), re.M):
            yield from (f"{module}.{name}" for name in re.findall(r"(?:^|[(,])\s*(\w+)", names))
        else:
            yield module


def _is_there(module):
    place = ROOT.joinpath(*module.split("."))
    return place.with_suffix(".py").is_file() or place.is_dir()


# Rebound names.

FOLDER = Path(patches.__file__).parent
DISTRIBUTIONS = {"megatron-core"}  # our own code takes what it needs as arguments


def files_with(pattern):
    """Files of the package that a regular expression matches."""
    files = (ROOT / "zorse_megatron").rglob("*.py")
    return {path for path in files if re.search(pattern, path.read_text(encoding="utf-8"))}


def test_records_are_made_in_one_place_and_all_listed():
    making = files_with(r"\bRebinding\(|partial\(\s*Rebinding\b")
    assert {path.parent for path in making} == {FOLDER}
    defined = [
        value
        for path in FOLDER.glob("*.py")
        for value in vars(importlib.import_module(f"{patches.__name__}.{path.stem}")).values()
        if isinstance(value, Rebinding)
    ]
    assert set(defined) == set(REGISTRY.records)
    assert len(set(REGISTRY.records)) == len(REGISTRY.records)


def test_there_is_one_registry():
    assert files_with(r" Registry\(") == {FOLDER / "registry.py"}


@pytest.mark.parametrize("record", REGISTRY.records, ids=lambda record: record.target)
def test_records_say_all(record):
    assert record.distribution in DISTRIBUTIONS
    assert all([record.versions, record.becomes.endswith("."), record.why, record.delete_when])
    name, _, function = record.test.partition("::")
    tree = ast.parse((ROOT / name).read_text(encoding="utf-8"))
    tests = {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}
    assert function in tests if function else any(each.startswith("test_") for each in tests)
