"""The dry run of `zorse doctor`: what needs no GPU runs, the rest says why it does not."""

import json
import os
import time
from collections import Counter
from pathlib import Path

import pytest

from tests.megatron.launch import run_ranks
from tests.megatron.small_run import TOKENIZER_FLAGS
from zorse_megatron.doctor import checks, timed
from zorse_megatron.doctor.checks import CHECKS, examine
from zorse_megatron.doctor.doctor_run import DoctorRun, compared, machine_here
from zorse_megatron.doctor.plans import (
    CASES,
    EXACT,
    FP32_FLAGS,
    SMALL_GPT,
    UNEVEN_PLAN,
)
from zorse_megatron.doctor.report import Finding, Report, Status, dump_report, load_report
from zorse_megatron.emulate.rank_jobs import RankJob
from zorse_megatron.schedule.communicators import planned_communicators

ELSEWHERE = ("adapters", "sums in two levels", "unequal parts", "weight gradients apart")
"""Cases that other tests train on the CPU, left out of the dry run but with ZORSE_TEST_EXAMPLES."""
TRIES_ALL = bool(os.environ.get("ZORSE_TEST_EXAMPLES"))
STOCK = f"stock {' '.join(FP32_FLAGS)}"


def on_test_server(job: RankJob) -> None:
    """Run a job as the tests do; `zorse doctor` starts a process of its own that forks.

    With ZORSE_TEST_EXAMPLES plans train in the rehearsal, where every wait is there; that takes a
    minute more.
    """
    words, env, entry = job.arguments, dict(job.environment), job.entry
    if TRIES_ALL and entry == "zorse_megatron.pretrain" and "--zorse-plan" in words:
        entry = "tests.megatron.rehearsal_entry"
        env["ZORSE_TEST_RECORD"] = str(job.directory / "rehearsed")
    run_ranks(words, job.world_size, entry=entry, timeout_s=job.limit_s, env=env).check()
    for path in job.directory.glob("rehearsed/rehearsal-rank*.json"):
        assert json.loads(path.read_text())["hazards"] == [], job.name


@pytest.fixture
def dry_run(corpus_prefix: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> DoctorRun:
    """As few iterations as a move needs, and one evaluation."""
    short = (*SMALL_GPT, "--eval-interval", "3", "--eval-iters", "1")
    monkeypatch.setattr(checks, "SMALL_GPT", short)
    return DoctorRun(
        machine=machine_here(on_test_server, tmp_path),
        run_job=on_test_server,
        directory=tmp_path,
        ends_s=time.monotonic() + 300,
        data=("--data-path", str(corpus_prefix), *TOKENIZER_FLAGS),
    )


def test_dry_run(dry_run: DoctorRun, monkeypatch: pytest.MonkeyPatch) -> None:
    assert not dry_run.machine.gpus
    told: list[Finding] = []
    left_out = () if TRIES_ALL else ELSEWHERE
    chosen = [each for each in CHECKS if not any(words in each.title for words in left_out)]
    findings = examine(dry_run, chosen, told.append)
    assert findings == told and len(findings) == len(chosen)
    assert [each.said for each in findings if each.status == Status.FAIL] == []
    passed = [each.title for each in findings if each.status == Status.PASS]
    apart = ("queue", *left_out)
    of_cpu = [case for case in CASES if not any(words in case.name for words in apart)]
    assert passed == [
        *(
            f"Plan {case.name} against {'one rank' if case.reference else 'stock'}"
            for case in of_cpu
        ),
        "Another plan resumes from a checkpoint",
        "A running job moves to another plan",
    ]
    refused = [each.said for each in findings if each.status == Status.NOT_POSSIBLE]
    assert all(said.startswith("no CUDA device") for said in refused)
    assert_report_is_read_back(dry_run, findings)
    assert_mistakes_are_found(dry_run)
    assert_ranks_connect(dry_run)
    assert_speed_is_measured(dry_run, monkeypatch)


def assert_report_is_read_back(run: DoctorRun, findings: list[Finding]) -> None:
    """Also the report of a run with figures, reasons and software as they are here."""
    report = Report(version="0", date="2026", machine=run.machine, checks=tuple(findings))
    path = run.directory / "doctor.json"
    path.write_text(dump_report(report))
    assert load_report(path) == report
    assert len(report.as_table().splitlines()) == 2 + len(findings)


def assert_mistakes_are_found(run: DoctorRun) -> None:
    """A learning rate too high by 1 %, and a plan whose groups compute in 16 bits."""
    flags = (*checks.SMALL_GPT, *FP32_FLAGS)
    stock = run.trained(STOCK, None, flags)
    wrong = run.trained("too fast", None, (*flags, "--lr", "1.01e-3"))
    assert "abs_loss differs" in compared(wrong, stock, EXACT).said
    mixed = run.trained(CASES[-1].name, CASES[-1].plan, ())
    assert compared(mixed, stock, EXACT).status == Status.FAIL


def assert_ranks_connect(run: DoctorRun) -> None:
    """What the ranks of the check that needs NCCL do, over gloo."""
    taken = run.connected()
    assert run.connected() is taken
    planned = planned_communicators(UNEVEN_PLAN)
    contexts = [("context", (rank,)) for rank in range(UNEVEN_PLAN.world_size)]
    found = Counter((row["use"], tuple(row["ranks"])) for row in taken)
    of_plan = {(each.use, each.ranks): len(each.ranks) for each in planned}
    assert found == Counter(of_plan) + Counter(contexts)


def assert_speed_is_measured(run: DoctorRun, monkeypatch: pytest.MonkeyPatch) -> None:
    """Stock and plan train the same from the same flags; how long they take here says nothing."""
    small = timed.TimedSize(hidden=128, micro_batch=1)
    monkeypatch.setattr(timed, "size_for", lambda machine: small)
    monkeypatch.setattr(timed, "_SEQUENCE", 128)
    monkeypatch.setattr(timed, "_TURN_ITERATIONS", 3)
    finding = timed.speed(run)
    assert finding.said.startswith("stock "), finding.said
    assert finding.figures["ratio"] > 0
    assert finding.figures["stock_start_and_end_s"] > 0 < finding.figures["plan_start_and_end_s"]
