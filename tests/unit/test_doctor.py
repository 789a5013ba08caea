"""What `zorse doctor` concludes from jobs that went well, badly, or not at all."""

import dataclasses
import json
import shutil
import time
from pathlib import Path

import pytest
from typer.testing import CliRunner

from zorse_megatron.cli.main import app
from zorse_megatron.doctor.checks import CHECKS, Check, examine
from zorse_megatron.doctor.doctor_run import DoctorRun, Trained, compared, machine_here
from zorse_megatron.doctor.plans import CASES, EXACT, UNEVEN_PLAN, WITHIN_ROUNDING
from zorse_megatron.doctor.report import (
    Gpu,
    Machine,
    Report,
    Status,
    failed,
    no_time,
    not_possible,
    passed,
)
from zorse_megatron.doctor.timed import (
    TimedSize,
    cluster_of,
    offload_plans,
    predicted,
    size_for,
    sized_flags,
    speed_plan,
    step_copies_s,
    timed_plan,
)
from zorse_megatron.emulate.rank_jobs import RankJob, RanksEnd
from zorse_megatron.errors import Problem, RankFailure
from zorse_megatron.flags.torch_builds import StartError
from zorse_megatron.gpus.known_gpus import CAPABILITIES, GPU_KINDS
from zorse_megatron.inputs import status as run_status
from zorse_megatron.inputs.cluster_yaml import parse_cluster
from zorse_megatron.live.move import take_request
from zorse_megatron.plan.plan_file import load_plan, parse_plan
from zorse_megatron.schedule.lower import refuse_unsupported

# Of other models: times of this one come from published figures.
PROFILE = Path(__file__).parents[2] / "examples" / "mini-profile.json"
A100 = Gpu(name="NVIDIA A100-SXM4-40GB", capability=(8, 0), total_bytes=42 * 10**9)
T4 = dataclasses.replace(A100, name="Tesla T4", capability=(7, 5))
P100 = dataclasses.replace(A100, name="Tesla P100-PCIE-16GB", capability=(6, 0))
FLAGS = ("--bf16", "--transformer-impl", "local", "--no-masked-softmax-fusion")
NAMES = tuple(dict.fromkeys(check.name for check in CHECKS))
QUICK = {"plans", "kernels", "speed"}
OF_A100 = TimedSize(hidden=4096, micro_batch=2)

TAKEN = [
    {"use": use, "ranks": ranks, "rank": rank, "num_bytes": taken, "priced_bytes": priced}
    for use, ranks, rank, taken, priced in (
        ("world", [0, 1, 2, 3, 4], 0, 10**8, 144 * 2**20),
        ("link", [0, 2], 0, 7 * 10**6, 6 * 2**20),
        ("link", [2, 0], 0, 31 * 10**6, 30 * 2**20),
        ("link", [0, 2], 2, 33 * 10**6, 30 * 2**20),
    )
]


def kernel_answer(share=0.9, reason=None, disagrees=None):
    rows = {"pack": {"share_of_copy": share, "disagrees": disagrees}}
    return {
        "in_plain_torch_because": reason,
        "num_bytes": 10**9,
        "copy_bytes_per_s": 1e12,
        "kernels": rows,
    }


class Ranks:
    """Ranks that do nothing but write these answers, or fail."""

    def __init__(self, answers=None, failure=None, times_s=None, peak_bytes=0):
        usual = {
            "communicators": TAKEN,
            "kernels": kernel_answer(),
            "copies": 20e9,
            "training": dict.fromkeys(range(1, 6), (5.0, 1.0)),
            "resumed": {3: (5.0, 1.0)},
            "refused": None,
        }
        small = (
            "stock",
            "2|1|2",
            "tensor-parallel",
            "sums",
            "the same",
            "interleaved",
            "breadth-first",
            "bf16",
            "moved",
            "experts",
        )
        self.three = {name: dict.fromkeys(range(1, 4), (5.0, 1.0)) for name in small}
        self.answers = usual | (answers or {})
        self.failure, self.jobs = failure or {}, []
        self.times_s, self.peak_bytes = times_s or {}, peak_bytes

    def __call__(self, job):
        self.jobs.append(job)
        if job.name in self.failure:
            problem = Problem(where="", found="", expected="", remedy=self.failure[job.name])
            raise RankFailure("The job failed", [problem])
        words = job.arguments
        if job.name == "profile":
            shutil.copy(PROFILE, words[words.index("--out") + 1])
        elif "--zorse-metrics" in words:
            self._train(job)
        else:
            (job.directory / "answer.json").write_text(json.dumps(self.answers[job.name]))

    def _train(self, job):
        if "--zorse-status" in job.arguments:
            self._answer_requests(Path(job.arguments[job.arguments.index("--zorse-status") + 1]))
        if "--zorse-memory" in job.arguments:
            directory = Path(job.arguments[job.arguments.index("--zorse-memory") + 1])
            peaks = {"peaks": {"total": {"num_bytes": self.peak_bytes}}}
            (directory / "memory-rank0.json").write_text(json.dumps(peaks))
        default = next(
            (steps for name, steps in self.three.items() if job.name.startswith(name)),
            self.answers["training"],
        )
        with open(job.arguments[job.arguments.index("--zorse-metrics") + 1], "w") as metrics:
            for step, (loss, norm) in self.answers.get(job.name, default).items():
                line = {"iteration": step, "lm loss": loss, "grad_norm": norm}
                line["elapsed_s"] = self.times_s.get(job.name, 1.0) if step > 1 else None
                metrics.write(json.dumps(line) + "\n")

    def _answer_requests(self, directory):
        """Drop what is there at the start, as a run does, and answer what comes then."""
        assert take_request(directory), "nothing was asked for before the run"
        ends_s = time.monotonic() + 10
        while (request := take_request(directory)) is None:
            assert time.monotonic() < ends_s, "not asked for again"
        parse_plan(request, source="the request")
        move = run_status.Move(iteration=2, refused=self.answers["refused"])
        status = run_status.Status(
            schema_version=1, plan="", iteration=3, written_s=1.0, moves=(move,), ranks=()
        )
        (directory / run_status.STATUS_NAME).write_text(run_status.dump_status(status))

    def of_training(self):
        return [job for job in self.jobs if "--zorse-metrics" in job.arguments]


def machine(*gpus, engine=None):
    return Machine(
        gpus=gpus,
        torch="2.13.0",
        nccl="2.29",
        transformer_engine=engine,
        driver="580.65.06",
        num_processors=16,
    )


def findings_of(names, there, ranks, directory):
    checks = [each for each in CHECKS if each.name in names]
    return made(checks, there, ranks, directory)


def made(checks, there, ranks, directory):
    run = DoctorRun(
        machine=there,
        run_job=ranks,
        directory=directory,
        ends_s=time.monotonic() + 100,
        data=("--data-path", "text"),
    )
    return examine(run, checks, lambda _finding: None)


EIGHT = machine(*[A100] * 8, engine="2.9")
ALL_WELL = {"kernels", "communicators", "plans", "resume", "move", "engine", "offload", "speed"}
# Check, machine, what is wrong there, how the last finding of the check ends, and its words.
FAULTS = [
    ("communicators", EIGHT, {"failure": {"communicators": "NCCL WARN x"}}, "fail", "NCCL WARN x"),
    ("kernels", EIGHT, {"answers": {"kernels": kernel_answer(0.5)}}, "fail", "pack 50%"),
    ("kernels", EIGHT, {"answers": {"kernels": kernel_answer(disagrees="off")}}, "fail", "off"),
    ("kernels", EIGHT, {"answers": {"kernels": kernel_answer(reason="no triton")}}, "fail", "no t"),
    ("kernels", machine(P100), {"answers": {"kernels": kernel_answer(reason="compute capability")}},
     "not possible here", "compute capability"),
    ("plans", EIGHT, {"answers": {CASES[-1].name: {3: (5.1, 1.0)}}}, "fail", "relative_loss diff"),
    ("plans", machine(T4), {}, "not possible here", "no units for bf16 on Tesla T4"),
    ("resume", EIGHT, {"answers": {"resumed": {1: (5.0, 1.0)}}}, "fail", "trained iterations [1]"),
    ("resume", EIGHT, {"answers": {"resumed": {3: (5.001, 1.0)}}}, "fail", "abs_loss differs"),
    ("move", EIGHT, {"answers": {"refused": "rank 1: no room"}}, "fail", "plan: rank 1: no room"),
    ("move", EIGHT, {"answers": {"moved": dict.fromkeys((1, 2, 3), (5.001, 1.0))}}, "fail",
     "abs_loss differs"),
    ("move", machine(A100), {"failure": {"communicators": "NCCL WARN x"}}, "not possible here",
     "NCCL runs no two ranks"),
    ("engine", EIGHT, {"answers": {"the same with split_backward": {3: (5.0, 1.001)}}}, "fail",
     "relative_grad_norm differs"),
    ("engine", machine(A100), {}, "not possible here", "not installed"),
    ("speed", EIGHT, {"answers": {"timed plan 1": dict.fromkeys(range(1, 6), (5.1, 1.0))}}, "fail",
     "relative_loss"),
    ("speed", EIGHT, {"times_s": {"timed plan 2": 1.03}}, "fail", "expected at most +1%"),
    ("offload", EIGHT, {"answers": {"offloaded": dict.fromkeys(range(1, 6), (5.1, 1.0))}}, "fail",
     "offloaded: relative_loss"),
    ("offload", EIGHT, {"times_s": {"resident": 2.0, "offloaded": 3.1}}, "fail", "at most 5%"),
    ("prediction", EIGHT, {"peak_bytes": 10**9}, "fail", "expected within 10% in time and 8%"),
]  # fmt: skip


def test_gpus_that_torch_cannot_use_are_no_reason_for_a_dry_run(tmp_path):
    there = dataclasses.replace(machine(), unusable_gpus="2 NVIDIA GPU(s) with driver 470")

    def write(job):
        Path(job.arguments[-1]).write_text(json.dumps(dataclasses.asdict(there)))

    with pytest.raises(StartError, match=r"2 NVIDIA GPU.* with torch 2\.13"):
        machine_here(write, tmp_path)


@pytest.mark.parametrize(("check", "there", "wrong", "status", "said"), FAULTS)
def test_what_is_wrong_is_found(check, there, wrong, status, said, tmp_path):  # noqa: PLR0917
    finding = findings_of([check], there, Ranks(**wrong), tmp_path)[-1]
    assert (finding.status, said in finding.said) == (status, True), finding.said
    assert bool(finding.remedy) == (finding.status == Status.FAIL)
    assert {check for check, _, _, status, _ in FAULTS if status == "fail"} == set(NAMES)


def test_where_all_is_well_all_pass(tmp_path):
    findings = findings_of(ALL_WELL, EIGHT, Ranks(), tmp_path)
    assert {each.check: each.said for each in findings if each.status != Status.PASS} == {}
    assert {each.check for each in findings} == ALL_WELL


def run_of(*losses, norm=1.0):
    steps = range(1, len(losses) + 1)
    return Trained(
        losses=dict(zip(steps, losses, strict=True)),
        grad_norms=dict.fromkeys(steps, norm),
        elapsed_s={},
        directory=None,
    )


@pytest.mark.parametrize(
    ("mine", "theirs", "limits", "status"),
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
def test_what_is_as_close_as_stock(mine, theirs, limits, status):
    assert compared(mine, theirs, limits).status == status


def test_all_plans_can_be_executed():
    timed = (*offload_plans(OF_A100), speed_plan(OF_A100))
    for plan in (*(case.plan for case in CASES), *timed):
        refuse_unsupported(plan)
    replicas = [replica for group in UNEVEN_PLAN.groups for replica in group.replicas]
    for what in ("micro_batch_size", "num_microbatches", "shard_weight"):
        assert len({getattr(replica, what) for replica in replicas}) > 2
    assert len({chunk.layers[1] - chunk.layers[0] for chunk in UNEVEN_PLAN.chunks}) == 3


def test_no_check_stops_the_others(tmp_path):
    def raises(error):
        def run(_run):
            raise error

        return run

    problem = Problem(where="w", found="f", expected="e", remedy="r")
    runs = (
        raises(KeyError("peaks")),
        raises(RankFailure("No", [problem])),
        lambda _: passed("well"),
    )
    checks = [Check(name="a", title="A", run=run, remedy="Look.", needs_gpu=False) for run in runs]
    first, second, third = made(checks, machine(), Ranks(), tmp_path)
    assert (first.status, first.said) == (Status.FAIL, "KeyError: 'peaks'")
    assert "found f; expected e" in second.said
    assert str(second).endswith("Look.") and str(third) == "pass: A: well"


@pytest.mark.parametrize(
    ("statuses", "status", "said"),
    [((None, None), Status.NO_TIME, "not checked"), ((1, None), Status.FAIL, "exit status 1")],
)
def test_what_the_end_cuts_off_has_not_failed(statuses, status, said, tmp_path):
    """Nor has what it leaves no time for; ranks that had failed before have."""

    def until_the_end(run):
        run.ends_s = time.monotonic()
        job = RankJob(name="", arguments=(), world_size=2, directory=tmp_path, limit_s=9)
        RanksEnd(job=job, statuses=statuses, wall_s=9.0).check()

    for rank in range(2):
        (tmp_path / f"rank_{rank}.txt").touch()
    cut_off = Check(name="a", title="A", run=until_the_end, remedy="Look.", needs_gpu=False)
    ranks = Ranks()
    checks = [CHECKS[0], cut_off, *CHECKS[1:]]
    before, found, *after = made(checks, EIGHT, ranks, tmp_path)
    assert before.status == Status.PASS and len(ranks.jobs) == 1
    assert found.status == status and said in found.said
    assert {each.status for each in after} == {Status.NO_TIME}
    words = f"{after[0].title}: not checked. Give it more with --time-limit"
    assert str(after[0]).startswith(f"no time left: {words}")


def test_a_check_that_takes_too_long_fails_and_the_others_are_made(tmp_path):
    slow = dataclasses.replace(CHECKS[0], limit_s=0.5)
    first, second = made([slow, CHECKS[-1]], EIGHT, Ranks(), tmp_path)
    assert first.status == Status.FAIL and "no time left for this check" in first.said
    assert second.status == Status.PASS


def test_a_reference_that_fails_is_not_trained_again(tmp_path):
    name = f"stock {' '.join(CASES[0].flags)}"
    ranks = Ranks(failure={name: "no memory"})
    findings = findings_of(["plans"], EIGHT, ranks, tmp_path)
    assert [job.name for job in ranks.jobs].count(name) == 1
    statuses = [each.status for each in findings if "no memory" in each.said]
    assert statuses == [Status.FAIL] * sum(case.flags == CASES[0].flags for case in CASES)


@pytest.mark.parametrize(("gpus", "shared"), [(1, True), (8, False)])
def test_ranks_that_share_a_gpu_are_told_so(gpus, shared, tmp_path):
    ranks = Ranks()
    names = ["communicators", "plans"]
    first, *plans = findings_of(names, machine(*[A100] * gpus), ranks, tmp_path)
    assert first.status == Status.PASS and ("that share GPUs" in first.said) == shared
    assert {each.status for each in plans} == {Status.PASS}
    asked = {job.environment.get("ZORSE_SHARE_GPUS") for job in ranks.jobs if job.world_size > 1}
    assert asked == ({"1"} if shared else {None})
    queues = [job.environment.get("CUDA_DEVICE_MAX_CONNECTIONS") for job in ranks.jobs]
    assert (queues.count("32"), queues.count("1")) == (len(CASES) - 1, 1)


@pytest.mark.parametrize("names", [["communicators", "plans"], ["plans"]])
def test_where_nccl_refuses_to_share_plans_of_more_ranks_are_not_possible(names, tmp_path):
    """Also where nobody asked for the communicators: they are tried once, before the first plan."""
    words = "Traceback\nncclInvalidUsage: Duplicate GPU detected : rank 1 and rank 0\nbye"
    ranks = Ranks(failure={"communicators": words})
    findings = findings_of(names, machine(A100), ranks, tmp_path)
    assert {each.status for each in findings} == {Status.NOT_POSSIBLE}
    said = "NCCL runs no two ranks on one GPU here (ncclInvalidUsage: Duplicate GPU detected"
    assert all(each.said.startswith(said) for each in findings)
    assert [job.name for job in ranks.jobs].count("communicators") == 1


def test_communicators_are_those_of_a_plan_and_are_compared_with_what_the_planner_takes(tmp_path):
    ranks = Ranks()
    (finding,) = findings_of(["communicators"], EIGHT, ranks, tmp_path)
    (job,) = ranks.jobs
    assert job.world_size == 5 and load_plan(job.arguments[2]) == UNEVEN_PLAN
    figures = finding.figures
    assert (figures["link_per_rank"], figures["world_per_rank"]) == (2, 1)
    assert (figures["link_bytes"], figures["world_bytes"]) == (33 * 10**6, 10**8)
    assert figures["link_priced_bytes"] == 30 * 2**20
    assert "link 33 MB (priced 31)" in finding.said


SIZES = {
    "H200": (4096, 8),
    "A100-40": (4096, 2),
    "T4": (2048, 2),
    "V100-16": (2048, 4),
    "B200": (8192, 4),
    "A2000-6": (2048, 2),
}


def one(kind):
    capability, memory_bytes = CAPABILITIES[kind], GPU_KINDS[kind].memory_bytes
    return machine(Gpu(name=kind, capability=capability, total_bytes=memory_bytes))


@pytest.mark.parametrize("kind", SIZES)
def test_the_faster_the_gpu_the_more_it_computes_within_its_memory(kind):
    here = one(kind)
    (gpu,), size = here.gpus, size_for(here)
    assert (size.hidden, size.micro_batch) == SIZES[kind]
    # 96 h^2 operations a token and layer, against 10 ms of launches, at a third of the peak.
    work_s = 96 * size.hidden**2 * 1024 * size.micro_batch / GPU_KINDS[kind].peak.of("float16")
    assert 3 * work_s > 0.02
    times_s, peaks = zip(
        *(
            predicted(plan, gpu, sized_flags(plan, size, here.layer_flags), PROFILE)
            for plan in (*offload_plans(size), speed_plan(size))
        ),
        strict=True,
    )
    (resident_s, offloaded_s, _), (_, offloaded_bytes, _) = times_s, peaks
    assert max(peaks) < 0.85 * gpu.total_bytes
    # What unfused layers keep (Korthikanti et al., 2022, without sequence parallelism), parameters
    # and gradients of two chunks, inputs of all micro-batches; and what the simulator says.
    samples, heads, weights = size.micro_batch, size.hidden // 128, 12 * size.hidden**2
    kept = 1024 * samples * (34 * size.hidden + 5 * heads * 1024)
    inputs = 24 * 1024 * samples * 2 * size.hidden
    limit_bytes = 0.6 * 4 * 18 * weights
    assert kept + 2 * weights * (2 + 4) + inputs < limit_bytes
    assert 1.2 * offloaded_bytes < limit_bytes
    copies_s = step_copies_s(here, GPU_KINDS[kind].host_link_bytes_per_s)
    assert (offloaded_s - copies_s) / resident_s < 1.04


@pytest.mark.parametrize(
    ("gpus", "hidden", "micro_batch"),
    [
        # As the fastest of its capability, or of the last one before.
        ([("NVIDIA Z100", (9, 0), 100)], 4096, 8),
        ([("NVIDIA B300", (10, 3), 288)], 8192, 4),
        # A slice, and a smaller GPU beside: what their memory has room for.
        ([("NVIDIA A100-SXM4-40GB MIG 1g.5gb", (8, 0), 5)], 2048, 2),
        ([("NVIDIA A100-SXM4-40GB MIG 2g.10gb", (8, 0), 10)], 2048, 4),
        ([("NVIDIA H200", (9, 0), 150), ("Tesla T4", (7, 5), 16)], 2048, 4),
    ],
)
def test_sizes_for_other_gpus(gpus, hidden, micro_batch):
    listed = [Gpu(name=n, capability=c, total_bytes=gb * 10**9) for n, c, gb in gpus]
    assert size_for(machine(*listed)) == TimedSize(hidden=hidden, micro_batch=micro_batch)


def test_offload_may_cost_its_copies_and_a_little_more_within_less_than_the_state(tmp_path):
    """805 million parameters, 22 bytes each, at 20 GB/s: 0.89 s; and 5 % of 4 s."""
    ranks = Ranks(times_s={"resident": 4.0, "offloaded": 5.07})
    (finding,) = findings_of(["offload"], machine(A100), ranks, tmp_path)
    assert finding.status == Status.PASS
    assert finding.figures["step_copies_s"] == pytest.approx(0.8858, rel=1e-3)
    assert (finding.figures["hidden_size"], finding.figures["micro_batch_size"]) == (4096, 2)
    resident, offloaded = ranks.of_training()
    assert "--zorse-memory-limit" not in resident.arguments
    limit_gb = offloaded.arguments[offloaded.arguments.index("--zorse-memory-limit") + 1]
    assert float(limit_gb) == pytest.approx(0.6 * 4 * 12 * 4096**2 * 18 / 1e9)


@pytest.mark.parametrize(("plan_s", "status"), [(2.01, Status.PASS), (2.05, Status.FAIL)])
def test_a_plan_of_one_rank_is_timed_against_stock_in_turns(plan_s, status, tmp_path):
    """Here the GPU gets slower from run to run: that is nobody's fault."""
    times_s = {"timed stock 1": 1.98, "timed plan 1": plan_s - 0.01}
    times_s |= {"timed plan 2": plan_s + 0.01, "timed stock 2": 2.02}
    ranks = Ranks(times_s=times_s)
    (finding,) = findings_of(["speed"], machine(A100), ranks, tmp_path)
    assert finding.status == status
    assert [job.name for job in ranks.jobs] == [*times_s]
    plan, stock = ranks.jobs[1], ranks.jobs[0]
    assert load_plan(plan.directory / "plan.json") == speed_plan(OF_A100)
    assert {job.world_size for job in ranks.jobs} == {1}
    own = ("--zorse-plan", str(plan.directory / "plan.json"))
    metrics = {str(job.directory / "metrics.jsonl") for job in (plan, stock)}
    of_plan, of_stock = (
        [word for word in job.arguments if word not in {*own, *metrics}] for job in (plan, stock)
    )
    assert of_plan == of_stock and not any("recompute" in word for word in of_stock)
    figures = finding.figures
    assert figures["ratio"] == pytest.approx(plan_s / 2.0)
    assert figures["stock_spread"] == pytest.approx(2.02 / 1.98 - 1)


@pytest.mark.parametrize(
    ("time_off", "peak_off", "status"),
    [(1.05, 1.05, Status.PASS), (1.2, 1.0, Status.FAIL), (1.0, 1.1, Status.FAIL)],
)
def test_the_simulator_is_compared_with_a_model_that_fills_the_gpu(
    time_off, peak_off, status, tmp_path
):
    def simulated(layers):
        plan = timed_plan(OF_A100, layers, recomputes=True)
        return predicted(plan, A100, sized_flags(plan, OF_A100, FLAGS), PROFILE)

    # fp32 weight, gradient and moments, and the 16-bit weight, of each layer.
    added = simulated(5)[1] - simulated(4)[1]
    assert 1 < added / (18 * 12 * 4096**2) < 1.2
    filled = next(n for n in range(40, 1, -1) if simulated(n)[1] <= 0.85 * A100.total_bytes)
    iteration_s, peak_bytes = simulated(filled)
    times_s = {"filled": iteration_s * time_off}
    ranks = Ranks(times_s=times_s, peak_bytes=round(peak_bytes * peak_off))
    (finding,) = findings_of(["prediction"], machine(A100), ranks, tmp_path)
    assert finding.status == status, finding.said
    assert finding.figures["layers"] == filled


def test_kinds_that_are_not_well_known_are_described():
    assert parse_cluster(cluster_of(A100).encode()).gpu_kinds == ("A100-40",)
    other = dataclasses.replace(A100, name="NVIDIA Z100")
    cluster = parse_cluster(cluster_of(other).encode())
    assert cluster.gpu_kinds == ("NVIDIA Z100",)
    assert cluster.kinds["NVIDIA Z100"].memory_bytes == 42 * 10**9


@pytest.mark.parametrize(
    ("findings", "status", "summary"),
    [
        ((passed("well", bytes=3), not_possible("no CUDA device")), 0, "1 pass, 1 not possible"),
        ((passed("well", bytes=3), failed("badly")), 1, "1 pass, 1 fail"),
        ((passed("well", bytes=3), no_time()), 1, "1 pass, 1 no time left"),
    ],
)
def test_the_command_writes_what_was_found_and_ends_with_its_status(
    findings, status, summary, tmp_path, monkeypatch
):
    from zorse_megatron.cli.commands import measure

    asked = []

    def report(checks, ends_s, *, quiet):
        asked.extend(checks)
        return Report(
            machine=machine(A100, T4),
            checks=findings,
            version="1",
            date="2026-11-26T06:00:00+00:00",
        )

    monkeypatch.setattr(measure, "_report", report)
    words = ["doctor", "--out", str(tmp_path), "--check", "plans", "--check", "resume"]
    result = CliRunner().invoke(app, words)
    assert result.exit_code == status and result.output.startswith(summary)
    assert {check.name for check in asked} == {"plans", "resume"}
    found = json.loads((tmp_path / "doctor.json").read_text())
    assert found["checks"][0]["figures"] == {"bytes": 3}
    assert [check["status"] for check in found["checks"]] == [str(f.status) for f in findings]
    there = found["machine"]
    assert [gpu["name"] for gpu in there["gpus"]] == [A100.name, T4.name]
    assert (there["driver"], there["num_processors"]) == ("580.65.06", 16)
    assert found["date"] == "2026-11-26T06:00:00+00:00"


def test_quick_makes_few_checks(tmp_path):
    from zorse_megatron.cli.commands.measure import _checks

    def titles(names):
        return [check.title for check in _checks(names, tmp_path, quick=True)]

    plans = [f"Plan {case.name} against stock" for case in CASES[:2]]
    assert titles(["plans"]) == plans
    assert {check.name for check in CHECKS if check.title in titles([])} == QUICK
    assert titles([])[:2] == plans and len(titles([])) == 4


def test_time_and_memory_are_predicted_as_soon_as_two_plans_are_known_to_be_right():
    """With little of a GPU's time, it is what matters most."""
    order = [check.name for check in CHECKS]
    assert order[:5] == ["communicators", "plans", "plans", "prediction", "plans"]


@pytest.mark.parametrize(
    ("words", "known"),
    [(["--check", "plan"], NAMES), (["--quick", "--check", "offload"], sorted(QUICK))],
)
def test_an_unknown_check_is_named(words, known, tmp_path):
    result = CliRunner().invoke(app, ["doctor", "--out", str(tmp_path / "new"), *words])
    assert result.exit_code == 1
    line = next(line for line in result.output.splitlines() if "expected one of" in line)
    assert all(name in line for name in known)
    assert not (tmp_path / "new").exists()
