"""The GPU benchmark's dry run: everything runs end to end on the CPU, and the arithmetic holds."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def test_dry_run(tmp_path: Path) -> None:
    result_path = tmp_path / "offload.json"
    command = [sys.executable, str(ROOT / "scripts" / "bench_offload_gpu.py"), "--dry-run"]
    subprocess.run(
        [*command, "--json", str(result_path)],
        check=True,
        capture_output=True,
        timeout=300,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
    )
    result = json.loads(result_path.read_text())
    # 6 layers of width 64, embedding, positions, head, final norm; 4 + 4 + 8 bytes a parameter.
    count = 6 * (12 * 64**2 + 13 * 64) + (256 + 64 + 256 + 2) * 64
    assert result["state_bytes"] == 16 * count
    assert result["peak_bytes"] < result["budget_bytes"] < result["state_bytes"]
    assert result["peak_bytes"] == pytest.approx(result["predicted_peak_bytes"], rel=0.05)
    assert result["peak_error"] == result["peak_bytes"] / result["predicted_peak_bytes"] - 1
    assert result["slowdown"] == result["offloaded_s"] / result["resident_s"] - 1
    assert len(result["losses"]) == 4
    assert result["reached"]["trains"] and result["reached"]["peak"]


def test_a_budget_that_would_show_nothing(tmp_path: Path) -> None:
    command = [sys.executable, str(ROOT / "scripts" / "bench_offload_gpu.py"), "--budget", "1000"]
    done = subprocess.run(
        command,
        check=False,
        capture_output=True,
        text=True,
        timeout=120,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
    )
    assert done.returncode == 1
    assert "found 1,000,000,000,000 bytes" in done.stderr
