"""The demo from end to end, with fewer iterations, and what it says when a job fails."""

import dataclasses
import json
import sys
from pathlib import Path

import pytest

from tests.megatron.launch import MegatronServer
from tests.megatron.stock_log import iterations
from zorse_megatron.demo.jobs import DemoJob, DemoProgress, run_job
from zorse_megatron.demo.model import demo_plan
from zorse_megatron.errors import RankFailure
from zorse_megatron.schema.plan.plan import Chunk, Plan
from zorse_megatron.schema.plan.plan_json import dump_plan, parse_plan, save_plan

ITERATIONS = 4


def smaller_plan() -> Plan:
    """Two of the demo's ranks with its layers: each process takes seconds to import Megatron."""
    plan = demo_plan()
    first, last = plan.groups[1], plan.groups[2]
    alone = dataclasses.replace(last.replicas[0], ranks=(1,), num_microbatches=8)
    groups = (
        dataclasses.replace(first, replicas=(dataclasses.replace(first.replicas[0], ranks=(0,)),)),
        dataclasses.replace(last, replicas=(alone,)),
    )
    chunks = (Chunk(group=0, layers=(0, 4)), Chunk(group=1, layers=(4, 6)))
    return dataclasses.replace(plan, groups=groups, chunks=chunks)


def test_the_demo_runs(tmp_path: Path, megatron_server: MegatronServer) -> None:
    """Its own process has Megatron imported already; those that it starts import it."""
    save_plan(smaller_plan(), path := tmp_path / "smaller.json")
    words = ["--iterations", str(ITERATIONS), "--plan", str(path), "--output", str(tmp_path)]
    answer = megatron_server.run_ranks(words, 1, entry="zorse_megatron.demo", timeout_s=400)
    assert "The two runs are the same" in answer.check().outputs[0]
    result = json.loads((tmp_path / "demo.json").read_text())
    assert result["steps"] == ITERATIONS
    assert result["max_abs_loss_diff"] <= 2e-5
    assert result["max_rel_grad_norm_diff"] <= 1e-4
    assert set(result["validation_losses"]["plan"]) >= {"iteration 2", "iteration 4"}
    # Under a real torchrun: processes that import everything themselves, of which one says so.
    for log in ("stock.log", "plan.log"):
        said = (tmp_path / log).read_text()
        assert said.count("zorse: no GPU found: Megatron runs on CPU over gloo") == 1
        assert [line.iteration for line in iterations(said)] == list(range(1, ITERATIONS + 1))
    for name in ("loss.png", "timeline.png", "plan.json", "stock.log", "plan.log"):
        assert (tmp_path / name).stat().st_size > 0


def test_its_own_plan_is_valid() -> None:
    assert parse_plan(dump_plan(demo_plan()).encode()) == demo_plan()


class OneProcess(DemoJob):
    """Its only rank, without the seconds that torchrun takes to start."""

    @property
    def command(self) -> list[str]:
        return [sys.executable, "-m", "zorse_megatron.pretrain", *self.arguments]


def test_a_failed_job_shows_its_last_lines(tmp_path: Path) -> None:
    job = OneProcess(
        name="plan", num_ranks=1, arguments=("--zorse-plan", "missing.json"), directory=tmp_path
    )
    seen: list[DemoProgress] = []
    with pytest.raises(RankFailure) as failure:
        run_job(job, seen.append)
    assert seen == []
    assert str(job.log) in str(failure.value)
    assert "cannot read missing.json" in job.log.read_text()
