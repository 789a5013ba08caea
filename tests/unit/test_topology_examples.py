"""What docstrings and the benchmark promise still runs."""

import doctest
import json
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

from zorse_megatron.costs import communication
from zorse_megatron.planner.groupings import pools

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize(
    "module", [communication, pools, pools], ids=lambda module: module.__name__
)
def test_docstrings(module: ModuleType) -> None:
    results = doctest.testmod(module)
    assert results.attempted and not results.failed


@pytest.mark.slow
def test_the_benchmark_prints_json() -> None:
    command = [sys.executable, ROOT / "scripts/bench_topology.py", "--gpus", "32", "64", "--json"]
    rows = json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
    assert [row["gpus"] for row in rows] == [32, 64]
    assert all(value >= 0 for row in rows for value in row.values())
    assert "candidates_1000_s" in rows[0]
