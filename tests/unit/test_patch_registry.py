"""The registry of rebound names is complete, the documents show it, and its tests exist."""

import ast
import importlib
import re
from pathlib import Path

import pytest

from scripts.write_patch_tables import SHOWN_IN, with_tables
from zorse_megatron.adapter import patches
from zorse_megatron.adapter.patches.rebind import Rebinding
from zorse_megatron.adapter.patches.registry import REGISTRY

ROOT = Path(__file__).parents[2]
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


@pytest.mark.parametrize("name", SHOWN_IN)
def test_documents_show_the_records(name):
    text = (ROOT / name).read_text(encoding="utf-8")
    assert with_tables(text, SHOWN_IN[name]) == text, "run scripts/write_patch_tables.py"


def test_documents_show_every_record():
    shown = [
        record for each in SHOWN_IN.values() for records in each.values() for record in records
    ]
    assert tuple(shown) == REGISTRY.records


def test_a_document_without_a_place_is_refused():
    with pytest.raises(ValueError, match="no single place"):
        with_tables("# A document\n", {})


@pytest.mark.parametrize("record", REGISTRY.records, ids=lambda record: record.target)
def test_records_say_all(record):
    assert record.distribution in DISTRIBUTIONS
    assert all([record.versions, record.becomes.endswith("."), record.why, record.delete_when])
    name, _, function = record.test.partition("::")
    tree = ast.parse((ROOT / name).read_text(encoding="utf-8"))
    tests = {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}
    assert function in tests if function else any(each.startswith("test_") for each in tests)
