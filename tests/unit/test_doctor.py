"""What `zorse doctor` concludes from jobs that went well, badly, or not at all."""

import dataclasses
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from typer.testing import CliRunner

from zorse_megatron.cli.main import app
from zorse_megatron.doctor import check_list, rank_jobs
from zorse_megatron.doctor.check_list import CHECKS, Check
from zorse_megatron.doctor.checks.against_stock import compared
from zorse_megatron.doctor.examine import examine
from zorse_megatron.doctor.finding import CheckResult, Status, failed, not_possible, passed
from zorse_megatron.doctor.machine import Gpu, Machine
from zorse_megatron.doctor.plans import CASES, EXACT, WITHIN_ROUNDING
from zorse_megatron.doctor.rank_jobs import ForkedRanks, RankJob, SpawnedRanks
from zorse_megatron.doctor.report import Report
from zorse_megatron.doctor.timed_cases import (
    PARAMETERS_PER_LAYER,
    TimedCase,
    cluster_of,
    predicted,
)
from zorse_megatron.doctor.workshop import STAGED, Trained, Workshop
from zorse_megatron.emulate.forks.fork_client import ForkedEnd
from zorse_megatron.errors import Problem, RankFailure
from zorse_megatron.launch.shared_gpus import share_gpus
from zorse_megatron.schedules.refusals import refuse_unsupported
from zorse_megatron.schema.cluster.cluster_yaml import parse_cluster
from zorse_megatron.schema.plan.plan_json import load_plan

# Of other models: times of this one come from published figures.
PROFILE = Path(__file__).parents[2] / "examples" / "mini-profile.json"
A100 = Gpu(
    name="NVIDIA A100-SXM4-40GB",
    capability=(8, 0),
    total_bytes=42 * 10**9,
    host_to_gpu_bytes_per_s=25e9,
    gpu_to_host_bytes_per_s=20e9,
)
T4 = dataclasses.replace(A100, name="Tesla T4", capability=(7, 5))


def machine(*gpus, **changes):
    return Machine(
        gpus=gpus, torch="2.13.0", nccl="2.29", transformer_engine=None, apex=False, **changes
    )


class Answering:
    """A runner whose ranks have done nothing but write these answers, or fail."""

    def __init__(self, answers=None, failure=None, times_s=None, peak_bytes=0):
        self.answers = {"communicators": TAKEN} | (answers or {})
        self.failure, self.jobs = failure or {}, []
        self.times_s, self.peak_bytes = times_s or {}, peak_bytes

    def run(self, job: RankJob) -> None:
        self.jobs.append(job)
        if job.name in self.failure:
            problem = Problem(where="", found="", expected="", remedy=self.failure[job.name])
            raise RankFailure("The job failed", [problem])
        answer = self.answers.get(job.name, self.answers.get("training"))
        if job.name == "profile":
            shutil.copy(PROFILE, job.arguments[job.arguments.index("--out") + 1])
            return
        if "--zorse-memory" in job.arguments:
            peaks = {"peaks": {"total": {"num_bytes": self.peak_bytes}}}
            directory = Path(job.arguments[job.arguments.index("--zorse-memory") + 1])
            (directory / "memory-rank0.json").write_text(json.dumps(peaks))
        if "--zorse-metrics" in job.arguments:
            path = job.arguments[job.arguments.index("--zorse-metrics") + 1]
            with open(path, "w") as metrics:
                for step, (loss, norm) in enumerate(answer, start=1):
                    took_s = self.times_s.get(job.name, 1.0)
                    line = {"iteration": step, "lm loss": loss, "grad_norm": norm}
                    line["elapsed_s"] = took_s if step > 1 else None
                    metrics.write(json.dumps(line) + "\n")
        else:
            (job.directory / "answer.json").write_text(json.dumps(answer))


def workshop(there, runner, tmp_path, left_s=100.0):
    data = ("--data-path", "text", "--split", "1,0,0", "--tokenizer-type", "NullTokenizer")
    return Workshop(
        machine=there,
        runner=runner,
        directory=tmp_path,
        ends_s=time.monotonic() + left_s,
        data=data,
    )


def results_of(names, there, runner, tmp_path, **options):
    chosen = [check for check in CHECKS if check.name in names]
    return examine(workshop(there, runner, tmp_path, **options), chosen, lambda _result: None)


def run_of(*losses, norm=1.0):
    steps = range(1, len(losses) + 1)
    return Trained(
        losses=dict(zip(steps, losses, strict=True)),
        grad_norms=dict.fromkeys(steps, norm),
        elapsed_s={},
        directory=None,
    )


@pytest.mark.parametrize(
    ("mine", "theirs", "tolerance", "status"),
    [
        (run_of(5.0, 4.0), run_of(5.0, 4.0), EXACT, Status.PASS),
        (run_of(5.0, 4.00001), run_of(5.0, 4.0), EXACT, Status.PASS),
        (run_of(5.0, 4.001), run_of(5.0, 4.0), EXACT, Status.FAIL),
        (run_of(5.0, 4.001), run_of(5.0, 4.0), WITHIN_ROUNDING, Status.PASS),
        (run_of(5.0, 4.1), run_of(5.0, 4.0), WITHIN_ROUNDING, Status.FAIL),
        (run_of(5.0, norm=1.001), run_of(5.0), EXACT, Status.FAIL),
        (run_of(float("nan"), 4.0), run_of(5.0, 4.0), WITHIN_ROUNDING, Status.FAIL),
        (run_of(), run_of(5.0), EXACT, Status.FAIL),
        (run_of(5.0, 4.0, 3.0), run_of(5.0, 4.0), EXACT, Status.FAIL),
        (run_of(5.0), run_of(5.0, 4.0), EXACT, Status.FAIL),
    ],
)
def test_what_is_as_close_as_stock(mine, theirs, tolerance, status):
    assert compared(mine, theirs, tolerance).status == status


def test_all_plans_can_be_executed():
    for case in CASES:
        refuse_unsupported(case.plan)
    for case in (
        TimedCase(layers=3, micro_batches=2, parameters="per_pass", in_host=True),
        TimedCase(layers=3, micro_batches=2, ranks=4, parameters="resident"),
        TimedCase(layers=3, micro_batches=2),
    ):
        refuse_unsupported(case.plan)


def test_no_check_stops_the_others():
    def raises(error):
        def run(_workshop):
            raise error

        return run

    checks = [
        Check(name="a", title="A", run=raises(KeyError("peaks"))),
        Check(
            name="b",
            title="B",
            run=raises(
                RankFailure("No", [Problem(where="w", found="f", expected="e", remedy="r")])
            ),
        ),
        Check(name="c", title="C", run=lambda _workshop: passed("well", seconds=1.5)),
    ]
    results = examine(workshop(machine(), Answering(), None), checks, lambda _result: None)
    assert [r.finding.status for r in results] == [Status.FAIL, Status.FAIL, Status.PASS]
    assert "KeyError: 'peaks'" in results[0].finding.said
    assert "found f; expected e" in results[1].finding.said


def test_a_check_without_time_fails(tmp_path):
    runner = Answering({"training": [(5.0, 1.0)]})
    (*_, last) = results_of(["plans"], machine(A100), runner, tmp_path, left_s=0.5)
    assert last.finding.status == Status.FAIL
    assert "no time left" in last.finding.said and runner.jobs == []


def test_a_reference_that_fails_is_not_trained_again(tmp_path):
    name = f"stock {' '.join(CASES[0].flags)}"
    runner = Answering({"training": [(5.0, 1.0)] * 4}, {name: "no memory"})
    plans = results_of(["plans"], machine(A100), runner, tmp_path)
    assert [job.name for job in runner.jobs].count(name) == 1
    failures = [result for result in plans if "no memory" in result.finding.said]
    assert len(failures) == 2 * sum(case.flags == CASES[0].flags for case in CASES)
    assert {result.finding.status for result in failures} == {Status.FAIL}


def test_ranks_that_share_a_gpu_are_told_so(tmp_path):
    runner = Answering({"training": [(5.0, 1.0)] * 4})
    for gpus, shared in (((A100,), True), ((A100,) * 8, False)):
        runner.jobs.clear()
        (first, *plans) = results_of(
            ["communicators", "plans"], machine(*gpus), runner, tmp_path / str(len(gpus))
        )
        assert first.finding.status == Status.PASS, first.finding.said
        assert ("that share GPUs" in first.finding.said) == shared
        assert all(result.finding.status == Status.PASS for result in plans)
        asked = {
            job.environment.get("ZORSE_SHARE_GPUS") for job in runner.jobs if job.world_size > 1
        }
        assert asked == ({"1"} if shared else {None})
        queues = [job.environment.get("CUDA_DEVICE_MAX_CONNECTIONS") for job in runner.jobs]
        assert queues.count("1") == queues.count("8") == len(CASES)


TAKEN = [
    {"use": "world", "ranks": [0, 1, 2, 3, 4], "rank": 0, "channels": None, "num_bytes": 10**8},
    {"use": "link", "ranks": [0, 2], "rank": 0, "channels": 3, "num_bytes": 7 * 10**6},
    {"use": "link", "ranks": [2, 0], "rank": 0, "channels": 3, "num_bytes": 31 * 10**6},
    {"use": "link", "ranks": [0, 2], "rank": 2, "channels": 3, "num_bytes": 33 * 10**6},
]


def test_communicators_are_those_of_a_plan_and_are_compared_with_what_the_planner_takes(tmp_path):
    """A link takes 2 MiB a channel from who sends, 10 MiB from who receives."""
    runner = Answering()
    (result,) = results_of(["communicators"], machine(*[A100] * 8), runner, tmp_path)
    (job,) = runner.jobs
    plan = load_plan(job.arguments[1])
    assert job.world_size == plan.world_size == 5 and plan == CASES[0].plan
    figures = result.finding.figures
    assert (figures["link_per_rank"], figures["world_per_rank"]) == (2, 1)
    assert (figures["link_bytes"], figures["world_bytes"]) == (33 * 10**6, 10**8)
    assert figures["link_priced_bytes"] == 3 * 10 * 2**20
    assert "link 33 MB (priced 31)" in result.finding.said


def test_groups_in_bf16_need_units_for_it(tmp_path):
    plans = results_of(["plans"], machine(T4), Answering(FIVE_STEPS), tmp_path)
    reasons = [r.finding.said for r in plans if r.finding.status == Status.NOT_POSSIBLE]
    assert reasons == ["no units for bf16 on Tesla T4"] * 2
    assert [r.finding.status for r in plans].count(Status.PASS) == 2 * (len(CASES) - 1)


def test_each_rank_that_shares_is_another_host_to_nccl():
    environments = [{"RANK": str(rank), "ZORSE_SHARE_GPUS": "1"} for rank in range(3)]
    for each in environments:
        share_gpus(each)
    assert len({each["NCCL_HOSTID"] for each in environments}) == 3
    untouched = {"RANK": "1"}
    share_gpus(untouched)
    assert untouched == {"RANK": "1"}


def test_where_nccl_refuses_to_share_ranks_talk_through_host_memory(tmp_path):
    words = "Traceback\nncclInvalidUsage: Duplicate GPU detected : rank 1 and rank 0\nbye"
    runner = Answering({"training": [(5.0, 1.0)] * 4}, {"communicators": words})
    (first, *plans) = results_of(["communicators", "plans"], machine(A100), runner, tmp_path)
    assert first.finding.status == Status.NOT_POSSIBLE
    assert "Duplicate GPU detected" in first.finding.said and "gloo" in first.finding.said
    assert {result.finding.status for result in plans} == {Status.PASS}
    trained = [job for job in runner.jobs if "--zorse-metrics" in job.arguments]
    assert {job.world_size > 1 for job in trained} == {True, False}
    assert all((job.entry == STAGED) == (job.world_size > 1) for job in trained)
    # So it is where nobody asked for the communicators: they are tried once, before the first plan.
    runner.jobs.clear()
    plans = results_of(["plans"], machine(A100), runner, tmp_path / "plans alone")
    assert {result.finding.status for result in plans} == {Status.PASS}
    assert [job.name for job in runner.jobs].count("communicators") == 1
    trained = [job for job in runner.jobs if "--zorse-metrics" in job.arguments]
    assert all((job.entry == STAGED) == (job.world_size > 1) for job in trained)
    # With a GPU for each it is a failure.
    (first,) = results_of(["communicators"], machine(*[A100] * 8), runner, tmp_path / "eight")
    assert first.finding.status == Status.FAIL


def kernel_answer(share=0.9, reason=None, disagrees=None):
    row = {
        "kernel": "pack",
        "num_bytes": 64_000_000,
        "share_of_copy": share,
        "copy_bytes_per_s": 1e12,
        "disagrees": disagrees,
    }
    return {"in_plain_torch_because": reason, "rows": [row]}


@pytest.mark.parametrize(
    ("answer", "gpu", "status", "said"),
    [
        (kernel_answer(), A100, Status.PASS, "at least 90%"),
        (kernel_answer(share=0.5), A100, Status.FAIL, "pack (64 MB) 50%"),
        (kernel_answer(disagrees="off by one"), A100, Status.FAIL, "off by one"),
        (kernel_answer(reason="no module triton"), T4, Status.FAIL, "no module triton"),
        (
            kernel_answer(reason="compute capability 6.0"),
            dataclasses.replace(A100, capability=(6, 0)),
            Status.NOT_POSSIBLE,
            "compute capability 6.0",
        ),
    ],
)
def test_kernels(answer, gpu, status, said, tmp_path):
    (result,) = results_of(["kernels"], machine(gpu), Answering({"kernels": answer}), tmp_path)
    assert result.finding.status == status and said in result.finding.said


FIVE_STEPS = {"training": [(5.0, 1.0)] * 5}


@pytest.mark.parametrize(
    ("offloaded_s", "status"), [(2.0, Status.PASS), (2.19, Status.PASS), (2.4, Status.FAIL)]
)
def test_offload_may_cost_its_copies_and_a_little_more(offloaded_s, status, tmp_path):
    """201 million parameters, 12 bytes each, at 20 GB/s: 0.12 s; and 5 % of 2 s."""
    times_s = {"resident": 2.0, "offloaded": offloaded_s}
    runner = Answering(FIVE_STEPS, times_s=times_s)
    (result,) = results_of(["offload"], machine(A100), runner, tmp_path)
    assert result.finding.status == status
    assert result.finding.figures["state_copies_s"] == pytest.approx(0.1208, rel=1e-3)


def test_what_is_offloaded_trains_in_less_memory_than_its_state_takes(tmp_path):
    runner = Answering(FIVE_STEPS)
    (result,) = results_of(["offload"], machine(A100), runner, tmp_path)
    resident, offloaded = (job for job in runner.jobs if "--zorse-metrics" in job.arguments)
    assert "--zorse-memory-limit" not in resident.arguments
    limit_gb = offloaded.arguments[offloaded.arguments.index("--zorse-memory-limit") + 1]
    (tmp_path / "cluster.yaml").write_text(cluster_of(A100))
    case = TimedCase(layers=4, micro_batches=64, parameters="per_pass", in_host=True)
    flags = machine(A100).layer_flags
    _, peak_bytes = predicted(case, flags, tmp_path / "cluster.yaml", PROFILE)
    state_bytes = 4 * PARAMETERS_PER_LAYER * (2 + 4 + 4 + 8)
    assert 1.2 * peak_bytes < float(limit_gb) * 1e9 < 0.7 * state_bytes
    assert result.finding.figures["offloaded_within_bytes"] == float(limit_gb) * 1e9


@pytest.mark.parametrize(("gathered_s", "hidden"), [(1.0, 1.0), (1.75, 0.5), (2.5, 0.0)])
def test_gathers_are_hidden_where_they_add_nothing(gathered_s, hidden, tmp_path):
    """Each takes 0.25 s alone. Without its 4 after the step, what is unsharded takes 1 s; per pass
    there are 6: the first and the last of 4 chunks are gathered once.
    """
    times_s = {"unsharded": 2.0, "gathered per pass": gathered_s}
    runner = Answering(FIVE_STEPS | {"gather": 0.25}, times_s=times_s)
    (result,) = results_of(["gathers"], machine(A100, A100), runner, tmp_path)
    (gather,) = (job for job in runner.jobs if job.name == "gather")
    assert gather.world_size == 2 and int(gather.arguments[1]) == 2 * PARAMETERS_PER_LAYER
    assert result.finding.figures["hidden_share"] == pytest.approx(hidden)
    (alone,) = results_of(["gathers"], machine(A100), runner, tmp_path / "one")
    assert alone.finding.status == Status.NOT_POSSIBLE


def test_offload_that_trains_something_else_fails(tmp_path):
    runner = Answering({**FIVE_STEPS, "offloaded": [(5.1, 1.0)] * 5})
    (result,) = results_of(["offload"], machine(A100), runner, tmp_path)
    assert result.finding.status == Status.FAIL and "offloaded:" in result.finding.said


@pytest.mark.parametrize(
    ("time_off", "peak_off", "status"),
    [(1.05, 1.05, Status.PASS), (1.2, 1.0, Status.FAIL), (1.0, 1.1, Status.FAIL)],
)
def test_the_simulator_is_compared_with_a_model_that_fills_the_gpu(
    time_off, peak_off, status, tmp_path
):
    (tmp_path / "cluster.yaml").write_text(cluster_of(A100))
    expected = {
        layers: predicted(
            TimedCase(layers=layers, micro_batches=8),
            machine(A100).layer_flags,
            tmp_path / "cluster.yaml",
            PROFILE,
        )
        for layers in (4, 5)
    }
    # fp32 weight, gradient and moments, and the 16-bit weight, of each layer.
    added = expected[5][1] - expected[4][1]
    assert 18 * PARAMETERS_PER_LAYER < added < 1.2 * 18 * PARAMETERS_PER_LAYER
    filled = next(
        layers
        for layers in range(40, 1, -1)
        if peak_of(layers, tmp_path) <= 0.85 * A100.total_bytes
    )
    iteration_s, peak_bytes = predicted(
        TimedCase(layers=filled, micro_batches=8),
        machine(A100).layer_flags,
        tmp_path / "cluster.yaml",
        PROFILE,
    )
    runner = Answering(
        FIVE_STEPS,
        times_s={"filled": iteration_s * time_off},
        peak_bytes=round(peak_bytes * peak_off),
    )
    (result,) = results_of(["prediction"], machine(A100), runner, tmp_path)
    assert result.finding.status == status, result.finding.said
    assert result.finding.figures["layers"] == filled


def peak_of(layers, directory):
    case = TimedCase(layers=layers, micro_batches=8)
    return predicted(case, machine(A100).layer_flags, directory / "cluster.yaml", PROFILE)[1]


def test_kinds_that_are_not_well_known_are_described():
    assert parse_cluster(cluster_of(A100).encode()).gpu_kinds == ("A100-40",)
    other = dataclasses.replace(A100, name="NVIDIA Z100")
    cluster = parse_cluster(cluster_of(other).encode())
    assert cluster.gpu_kinds == ("NVIDIA Z100",)
    assert cluster.kinds["NVIDIA Z100"].memory_bytes == 42 * 10**9


def test_what_is_over_its_time_is_ended(tmp_path):
    """With everything in its session: a server would wait forever."""
    job = RankJob(name="x", entry="http.server", arguments=("0",), world_size=2,
                  directory=tmp_path, limit_s=1.0)  # fmt: skip
    started_s = time.monotonic()
    with pytest.raises(RankFailure) as raised:
        SpawnedRanks().run(job)
    assert time.monotonic() - started_s < 30
    assert [problem.found for problem in raised.value.problems] == ["no end in 1 s"] * 2
    assert _ranks_in(tmp_path) == []


@pytest.mark.parametrize(("number", "status"), [(signal.SIGTERM, 143), (signal.SIGKILL, -9)])
def test_no_rank_survives_its_doctor(number, status, tmp_path):
    """SIGINT is Python's own."""
    code = (
        "from pathlib import Path\n"
        "from zorse_megatron.doctor.end_on_signal import exits_on_signals\n"
        "from zorse_megatron.doctor.rank_jobs import RankJob, SpawnedRanks\n"
        "job = RankJob(name='x', entry='http.server', arguments=('0',), world_size=2,\n"
        f"    directory=Path({str(tmp_path)!r}), limit_s=60.0)\n"
        "with exits_on_signals():\n"
        "    SpawnedRanks().run(job)\n"
    )
    with subprocess.Popen([sys.executable, "-c", code]) as doctor:
        _until(lambda: len(_ranks_in(tmp_path)) == 2)
        doctor.send_signal(number)
        assert doctor.wait(60) == status
    try:
        _until(lambda: not _ranks_in(tmp_path))
    finally:
        for pid in _ranks_in(tmp_path):
            os.kill(int(pid), signal.SIGKILL)


def _until(holds, limit_s=60.0):
    until_s = time.monotonic() + limit_s
    while not holds():
        assert time.monotonic() < until_s
        time.sleep(0.1)


def _ranks_in(directory):
    return [pid for pid in os.listdir("/proc") if pid.isdigit() and _runs_in(pid, directory)]


def _runs_in(pid, directory):
    try:
        return os.readlink(f"/proc/{pid}/cwd") == str(directory)
    except OSError:
        return False


@pytest.mark.parametrize("ended", [(0, 1), (1,)])
def test_forked_ranks_that_had_to_be_ended_have_failed(ended, tmp_path, monkeypatch):
    class Client:
        def __init__(self, module):
            pass

        def run(self, job):
            for rank in range(2):
                (tmp_path / f"rank_{rank}.txt").write_text("waits")
            statuses = tuple(-9 if rank in ended else 0 for rank in range(2))
            return ForkedEnd(statuses=statuses, had_to_be_ended=ended, timed_out=True, wall_s=3.0)

    monkeypatch.setattr(rank_jobs, "ForkClient", Client)
    job = RankJob(name="x", arguments=(), world_size=2, directory=tmp_path, limit_s=3.0)
    with pytest.raises(RankFailure) as raised:
        ForkedRanks().run(job)
    assert [problem.found for problem in raised.value.problems] == ["no end in 3 s"] * len(ended)


def test_what_fails_says_its_last_lines(tmp_path):
    job = RankJob(name="x", entry="no_such_module", arguments=(), world_size=1,
                  directory=tmp_path, limit_s=20.0)  # fmt: skip
    with pytest.raises(RankFailure, match="No module named no_such_module"):
        SpawnedRanks().run(job)
    SpawnedRanks().run(dataclasses.replace(job, entry="this"))
    assert "Beautiful is better than ugly" in (tmp_path / "rank_0.txt").read_text()


def report_of(*findings):
    results = tuple(
        CheckResult(name="c", title="<A & B>", finding=finding, duration_s=1.0)
        for finding in findings
    )
    return Report(machine=machine(A100, T4), results=results, version="1")


def test_the_report(tmp_path):
    report = report_of(passed("well", bytes=3), failed("no <tag>"), not_possible("no CUDA device"))
    assert report.has_failed and report.summary == "1 pass, 1 fail, 1 not possible here"
    values, page = report.save(tmp_path / "there")
    found = json.loads(values.read_text())
    assert not found["ok"]
    assert [check["status"] for check in found["checks"]] == ["pass", "fail", "not possible here"]
    assert found["checks"][0]["figures"] == {"bytes": 3}
    text = page.read_text()
    assert "&lt;A &amp; B&gt;" in text and "no &lt;tag&gt;" in text and "NVIDIA A100" in text
    assert not report_of(passed("well"), not_possible("no CUDA device")).has_failed


@pytest.mark.parametrize(("finding", "status"), [(passed("well"), 0), (failed("badly"), 1)])
def test_the_command_ends_with_the_status_of_its_checks(finding, status, tmp_path, monkeypatch):
    from zorse_megatron.cli.commands import zorse_doctor

    asked = []

    def report(checks, ends_s, *, quiet):
        asked.append(checks)
        return report_of(finding)

    monkeypatch.setattr(zorse_doctor, "_report", report)
    words = ["doctor", "--out", str(tmp_path), "--check", "plans", "--check", "resume"]
    result = CliRunner().invoke(app, words)
    assert result.exit_code == status
    assert {check.name for check in asked[0]} == {"plans", "resume"}
    assert (tmp_path / "doctor.json").is_file() and (tmp_path / "doctor.html").is_file()


def test_an_unknown_check_is_named():
    result = CliRunner().invoke(app, ["doctor", "--check", "plan"])
    assert result.exit_code == 1
    assert f"expected one of {', '.join(check_list.NAMES)}" in result.output
