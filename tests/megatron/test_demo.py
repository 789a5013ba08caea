"""The demo from end to end, with fewer iterations, and what it says when a job fails."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from zorse_megatron.demo.jobs import DemoJob, DemoProgress, run_job
from zorse_megatron.errors import RankFailure

ITERATIONS = 6


def test_the_demo_runs(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "zorse_megatron.demo", "--iterations", str(ITERATIONS)]
    answer = subprocess.run(
        [*command, "--output", str(tmp_path)], capture_output=True, text=True, check=False
    )
    assert answer.returncode == 0, answer.stdout + answer.stderr
    assert "The two runs are the same" in answer.stdout
    result = json.loads((tmp_path / "demo.json").read_text())
    assert result["steps"] == ITERATIONS
    assert result["max_abs_loss_diff"] <= 2e-5
    assert result["max_rel_grad_norm_diff"] <= 1e-4
    assert set(result["validation_losses"]["plan"]) >= {"iteration 3", "iteration 6"}
    for name in ("loss.png", "timeline.png", "plan.json", "stock.log", "plan.log"):
        assert (tmp_path / name).stat().st_size > 0


def test_a_failed_job_shows_its_last_lines(tmp_path: Path) -> None:
    job = DemoJob(
        name="plan", num_ranks=1, arguments=("--zorse-plan", "missing.json"), directory=tmp_path
    )
    seen: list[DemoProgress] = []
    with pytest.raises(RankFailure) as failure:
        run_job(job, seen.append)
    assert seen == []
    assert str(job.log) in str(failure.value)
    assert "cannot read missing.json" in job.log.read_text()
