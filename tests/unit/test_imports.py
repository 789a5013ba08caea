"""What is imported, rebound and patched is there."""

import ast
import re
import tomllib
from fnmatch import fnmatch
from pathlib import Path

import pytest

from zorse_megatron.adapter.patches.rebind import REGISTRY

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


def test_every_record_is_applied_somewhere():
    files = [path.read_text("utf-8") for path in (ROOT / "zorse_megatron").rglob("*.py")]
    named = set(re.findall(r'"([a-z_]+)"', "\n".join(files)))
    assert set(REGISTRY.records) <= named


@pytest.mark.parametrize("record", REGISTRY.records.values(), ids=list(REGISTRY.records))
def test_records_say_all(record):
    assert record.target.startswith("megatron.")
    assert all([record.becomes.endswith("."), record.why, record.delete_when])
    name, _, function = record.test.partition("::")
    tree = ast.parse((ROOT / name).read_text(encoding="utf-8"))
    tests = {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}
    assert function in tests if function else any(each.startswith("test_") for each in tests)
