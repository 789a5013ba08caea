"""The dry run of `zorse doctor`: what needs no GPU runs, the rest says why it does not."""

import dataclasses
import json
import time
from pathlib import Path

import pytest

from tests.megatron.launch import run_ranks
from tests.megatron.small_run import TOKENIZER_FLAGS
from zorse_megatron.doctor import workshop as workshop_module
from zorse_megatron.doctor.check_list import CHECKS
from zorse_megatron.doctor.checks import against_stock
from zorse_megatron.doctor.checks.gathers import gather_s
from zorse_megatron.doctor.examine import examine
from zorse_megatron.doctor.finding import CheckResult, Status
from zorse_megatron.doctor.machine import Gpu, machine_here
from zorse_megatron.doctor.plans import BREADTH_FIRST, CASES, FP32_FLAGS
from zorse_megatron.doctor.rank_jobs import RankJob
from zorse_megatron.doctor.report import Report
from zorse_megatron.doctor.workshop import CONNECTED, Workshop
from zorse_megatron.errors import Problem, RankFailure
from zorse_megatron.schedules.communicators import planned_communicators

REFUSED = RankFailure(
    "No", [Problem(where="rank 1", found="Duplicate GPU", expected="", remedy="")]
)


class OnTestServer:
    """Runs jobs as the tests do; `zorse doctor` starts a process of its own that forks."""

    def run(self, job: RankJob) -> None:
        run_ranks(
            job.arguments,
            job.world_size,
            entry=job.entry,
            timeout_s=job.limit_s,
            env=job.environment,
        ).check()


@pytest.fixture
def short_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """One iteration before a checkpoint and one after it."""
    for module in (workshop_module, against_stock):
        monkeypatch.setattr(module, "ITERATIONS", 2)
        monkeypatch.setattr(module, "SAVE_EVERY", 1)


@pytest.mark.usefixtures("short_runs")
def test_dry_run(corpus_prefix: Path, tmp_path: Path) -> None:
    machine = machine_here(OnTestServer(), tmp_path)
    assert not machine.has_gpu
    workshop = Workshop(
        machine=machine,
        runner=OnTestServer(),
        directory=tmp_path,
        ends_s=time.monotonic() + 300,
        data=("--data-path", str(corpus_prefix), "--split", "1,0,0", *TOKENIZER_FLAGS),
    )
    told: list[CheckResult] = []
    results = examine(workshop, CHECKS, told.append)
    assert results == told and len(results) == len(CHECKS)
    by_status = {
        status: [r.title for r in results if r.finding.status == status] for status in Status
    }
    assert by_status[Status.FAIL] == [], [r.finding.said for r in results]
    assert by_status[Status.PASS] == [
        *(f"Plan {case.name} against stock, CUDA_DEVICE_MAX_CONNECTIONS=1" for case in CASES),
        "Another plan resumes from a checkpoint",
    ]
    for result in results:
        if result.finding.status == Status.NOT_POSSIBLE:
            assert result.finding.said.startswith("no CUDA device")
    # The mixed plan is not stock's own training, so a comparison can tell runs apart.
    distances = {
        r.title: r.finding.figures["relative_grad_norm"]
        for r in results
        if "relative_grad_norm" in r.finding.figures
    }
    mixed = distances.pop(next(title for title in distances if "bf16" in title))
    assert len(distances) == len(CASES)  # of the exact plans and of the resumed one
    assert mixed > 10 * max(distances.values())
    assert_staged_is_gloo(workshop, tmp_path / "staged")
    assert_ranks_connect(workshop, tmp_path / "connected")
    report = Report(machine=machine, results=tuple(results), version="0")
    values, page = report.save(tmp_path / "out")
    found = json.loads(values.read_text())
    assert found["ok"] and len(found["checks"]) == len(CHECKS)
    assert page.read_text().count("<tr>") == 1 + len(CHECKS)


def assert_ranks_connect(workshop: Workshop, directory: Path) -> None:
    """What the ranks of the two checks that need NCCL do, over gloo."""
    there = dataclasses.replace(workshop, directory=directory)
    taken = there.connected()
    assert there.connected() is taken
    planned = planned_communicators(CONNECTED)
    assert {(each.use, each.ranks) for each in taken} == {(p.use, p.ranks) for p in planned}
    assert len(taken) == sum(len(communicator.ranks) for communicator in planned)
    assert 0 < gather_s(there, ranks=2) < 10


def assert_staged_is_gloo(workshop: Workshop, directory: Path) -> None:
    """What takes NCCL's place where it lets no ranks share a GPU: gathers, sums, messages."""
    one_gpu = Gpu(
        name="",
        capability=(8, 0),
        total_bytes=0,
        host_to_gpu_bytes_per_s=1,
        gpu_to_host_bytes_per_s=1,
    )
    machine = dataclasses.replace(workshop.machine, gpus=(one_gpu,))
    on_one_gpu = dataclasses.replace(
        workshop, machine=machine, directory=directory, connection=REFUSED, _runs={}
    )
    staged = on_one_gpu.trained("staged", BREADTH_FIRST, FP32_FLAGS)
    gloo = workshop.trained("breadth-first, all offloaded, 1 queues", BREADTH_FIRST)
    assert staged.directory != gloo.directory
    assert (staged.losses, staged.grad_norms) == (gloo.losses, gloo.grad_norms)
