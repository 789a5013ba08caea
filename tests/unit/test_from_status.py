"""What is planned and kept by the speeds of a run's GPUs, and what a move would gain."""

import json
import shlex
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from tests.unit.cli_samples import EXAMPLES, FLAGS
from tests.unit.made_plans import plan_of, replica
from zorse_megatron.cli.main import app
from zorse_megatron.cli.observed_run import observed_run
from zorse_megatron.cli.workload import workload_of
from zorse_megatron.cli.workload_costs import costs_on
from zorse_megatron.inputs.cluster_yaml import load_cluster, parse_cluster
from zorse_megatron.inputs.profile import Profile, load_profile
from zorse_megatron.inputs.status import RUNNING_PLAN_NAME, STATUS_NAME, dump_status
from zorse_megatron.live.move import REQUEST_NAME
from zorse_megatron.live.rebalance import with_counts
from zorse_megatron.live.run_status import IterationTimes, RunStatus
from zorse_megatron.plan.plan import Chunk, Plan, Predictions, Schedule
from zorse_megatron.plan.plan_file import dump_plan, fingerprint, load_plan
from zorse_megatron.planner.simulate_plan import simulate_plan
from zorse_megatron.simulate.assumptions import Perturbation
from zorse_megatron.simulate.iteration import micro_batch_times

CLUSTER = "nodes: [{name: a, gpus: 2 x T4, nics: 100 Gb/s}, {name: b, gpus: T4, nics: 100 Gb/s}]\n"
WORKLOAD = workload_of(model=None, flags=FLAGS)
SLOW = (1.0, 1.0, 2.5)


def present() -> Plan:
    """Two stages: two replicas, and a GPU that is as fast as either."""
    plan = plan_of(
        [replica(rank, size=2, count=4) for rank in (0, 1)],
        [replica(2, size=2, count=8)],
        cluster=parse_cluster(CLUSTER.encode()).fingerprint(),
    )
    chunks = (Chunk(group=0, layers=(0, 5)), Chunk(group=1, layers=(5, 8)))
    return replace(plan, model=WORKLOAD.model.fingerprint(), chunks=chunks)


def costs_of(plan: Plan, *profiles: Profile) -> Any:
    return costs_on(plan, parse_cluster(CLUSTER.encode()), WORKLOAD, profiles).inputs


class RunDirectory:
    """What a run would keep there."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory / "my run"
        self.cluster = directory / "cluster.yaml"
        self.plan = directory / "next.json"
        self.directory.mkdir()
        self.cluster.write_text(CLUSTER)

    def write(
        self,
        plan: Plan,
        factors: tuple[float, ...],
        *profiles: Profile,
        ended: bool = False,
        iterations: int = 30,
    ) -> None:
        """The status after some iterations at these speeds."""
        modelled = micro_batch_times(plan, costs_of(plan, *profiles))
        status = RunStatus(plan=plan, tokens_per_iteration=1, first_iteration=0)
        for number in range(iterations):
            status.take(
                tuple(
                    IterationTimes(
                        number=number,
                        micro_batch_s=seconds * factor,
                        compute_s=1.0,
                        waited_s=0.0,
                        update_s=0.0,
                        iteration_s=1.0,
                    )
                    for seconds, factor in zip(modelled, factors, strict=True)
                )
            )
        self.keep(plan, dump_status(replace(status.now(written_s=1.0), ended=ended)))

    def keep(self, plan: Plan, status: str) -> None:
        (self.directory / RUNNING_PLAN_NAME).write_text(dump_plan(plan))
        (self.directory / STATUS_NAME).write_text(status)

    def invoke(self, *options: str) -> Any:
        words = ["plan", "--from-status", str(self.directory), "--cluster", str(self.cluster)]
        return CliRunner().invoke(app, [*words, "--max-tp", "1", *options, "--", *FLAGS])

    def plans(self, *options: str, code: int = 0) -> dict[str, Any]:
        result = self.invoke("--json", *options)
        assert result.exit_code == code, result.output
        answer: dict[str, Any] = json.loads(result.stdout)
        return answer


@pytest.fixture
def run(tmp_path: Path, little_effort: object, few_layouts: object) -> RunDirectory:
    return RunDirectory(tmp_path)


@pytest.mark.slow
def test_a_slow_gpu_gets_less_and_the_run_can_move(run: RunDirectory) -> None:
    run.write(present(), SLOW)
    answer = run.plans("--out", str(run.plan))
    found, move = load_plan(run.plan), answer["run"]
    assert move["factors"] == list(SLOW) and move["iteration"] == 30
    assert found.cluster == present().cluster  # its GPU is still a T4
    # The simulator says the same of the cluster as it is, told how slow the rank is.
    slow = Perturbation(rank_factors={2: SLOW[2]})
    for plan, key in ((present(), "present_s"), (found, "next_s")):
        expected_s = simulate_plan(costs_of(plan), plan, perturbation=slow).iteration_s
        assert move[key] == pytest.approx(expected_s)
    gain_s = move["present_s"] - move["next_s"]
    assert gain_s > 0 and 60 < move["move_s"] < 65
    after = move["pays_after_iterations"]
    assert gain_s * (after - 1) < move["move_s"] <= gain_s * after
    moved = CliRunner().invoke(app, shlex.split(move["command"])[1:])
    assert moved.exit_code == 0, moved.output
    assert fingerprint(load_plan(run.directory / REQUEST_NAME)) == fingerprint(found)


def test_the_present_plan_has_its_present_counts(run: RunDirectory) -> None:
    """What rebalancing has come to is what a move is compared with."""
    plan = present()
    run.write(with_counts(plan, ((1, 7), (8,))), (1.0, 1.0, 1.0))
    status = json.loads((run.directory / STATUS_NAME).read_text())
    run.keep(plan, json.dumps(status | {"plan": fingerprint(plan)}))
    uneven = with_counts(plan, ((1, 7), (8,)))
    expected_s = simulate_plan(costs_of(uneven), uneven).iteration_s
    assert expected_s != pytest.approx(simulate_plan(costs_of(plan), plan).iteration_s, rel=1e-5)
    assert run.plans()["run"]["present_s"] == pytest.approx(expected_s, rel=1e-9)


@pytest.mark.slow
def test_a_gpu_is_as_slow_after_a_move_as_before(run: RunDirectory) -> None:
    """The new plan predicts the slow GPU; the next look is beside the profile nevertheless."""
    run.write(present(), SLOW)
    run.plans("--out", str(run.plan))
    found = load_plan(run.plan)
    assert found.predictions is not None and found.predictions.micro_batch_s is not None
    run.write(found, SLOW)
    again = run.plans("--out", str(run.plan))["run"]
    assert again["factors"] == list(SLOW)
    assert again["pays_after_iterations"] is None and again["command"] is None
    assert again["present_s"] == pytest.approx(again["next_s"])


def corrected(run: RunDirectory) -> Any:
    """What `zorse profile correct` answers."""
    profile, out = EXAMPLES / "mini-profile.json", run.cluster.parent / "new"
    words = ["profile", "correct", str(profile), str(run.directory), "--cluster", str(run.cluster)]
    words += ["--out", f"{out}.json", "--cluster-out", f"{out}.yaml", "--json", "--"]
    result = CliRunner().invoke(app, [*words, *FLAGS])
    return json.loads(result.stdout)


def test_corrected_files_know_a_slow_gpu_also_after_a_move(run: RunDirectory) -> None:
    """A plan that expects it to be slow changes nothing: what counts is the profile."""
    profile = load_profile(EXAMPLES / "mini-profile.json")
    costs = costs_of(present(), profile)
    slow_s = [
        seconds * factor
        for seconds, factor in zip(micro_batch_times(present(), costs), SLOW, strict=True)
    ]
    moved = replace(
        present(), predictions=Predictions(iteration_s=1.0, micro_batch_s=tuple(slow_s))
    )
    for plan in (present(), moved):
        run.write(plan, SLOW, profile)
        answer = corrected(run)
        assert answer["ok"], answer
        assert answer["kinds"] == ["T4", "T4", "T4-x2.5"]
        assert answer["factors"] == list(SLOW)
    cluster, kept = load_cluster(answer["cluster"]), load_profile(answer["profile"])
    after = costs_on(
        replace(present(), cluster=cluster.fingerprint()), cluster, WORKLOAD, [kept]
    ).inputs
    assert micro_batch_times(present(), after) == pytest.approx(slow_s)


def test_what_has_no_times_is_not_corrected(run: RunDirectory) -> None:
    run.write(present(), SLOW, iterations=1)
    (problem,) = corrected(run)["problems"]
    assert problem["found"] == "no rank with times of its micro-batches"
    assert run.plans(code=1)["problems"] == [problem]


MOVE = {"present_s": 4.0, "next_s": 3.0, "move_s": 60.5, "pays_after_iterations": 61}


@pytest.mark.parametrize(
    ("factors", "move", "ended", "lines"),
    [
        (SLOW, MOVE | {"command": "zorse move d p"}, False, ["rank 2 (T4) takes 2.5 times", "d p"]),
        (SLOW, MOVE | {"command": None}, False, ["25.0 % less", "write the plan with --out"]),
        ((2.0, 2.0, 1.0), MOVE, True, ["ranks 0 to 1 (T4) take 2 times", "start the next job"]),
        ((1.0, 1.02, 1.0), MOVE | {"pays_after_iterations": None}, False, ["as fast as expected"]),
    ],
)
def test_what_is_said(
    factors: tuple[float, ...],
    move: dict[str, Any],
    ended: bool,
    lines: list[str],
    run: RunDirectory,
) -> None:
    run.write(present(), factors, ended=ended)
    found = observed_run(
        run.directory, CLUSTER.encode(), WORKLOAD, [], margin=0.05, source="cluster.yaml"
    )
    told = list(found.lines(move))
    for line in lines:
        assert any(line in each for each in told), told
    assert ("a move gains nothing" in told[-1]) == (move["pays_after_iterations"] is None)


@pytest.mark.slow
def test_a_plan_that_is_no_faster_is_not_worth_a_move(run: RunDirectory) -> None:
    run.write(present(), (1.0, 1.0, 1.0))
    run.plans("--out", str(run.plan))
    run.write(load_plan(run.plan), (1.0, 1.02, 0.99))
    result = run.invoke("--out", str(run.plan))
    assert "all GPUs compute as fast as expected" in result.stdout
    assert "a move gains nothing" in result.stdout and "zorse move" not in result.stdout


def test_a_run_of_something_else_is_refused(run: RunDirectory) -> None:
    run.write(present(), SLOW)
    run.cluster.write_text(CLUSTER.replace("gpus: T4", "gpus: L4"))
    (problem,) = run.plans(code=1)["problems"]
    assert "rank 2 on T4, which is L4 in the cluster" in problem["found"]
    run.cluster.write_text(CLUSTER)
    words = ["plan", "--from-status", str(run.directory), "--cluster", str(run.cluster), "--json"]
    other = [*FLAGS, "--global-batch-size", "32"]
    (problem,) = json.loads(CliRunner().invoke(app, [*words, "--", *other]).stdout)["problems"]
    assert "global_batch_size" in problem["where"]


@pytest.mark.parametrize("change", ["plan", "ranks"])
def test_a_status_of_another_plan_is_not_mixed_up(change: str, run: RunDirectory) -> None:
    """While a run moves it writes one file after the other."""
    run.write(present(), SLOW)
    plan, status = present(), json.loads((run.directory / STATUS_NAME).read_text())
    if change == "plan":
        plan = replace(plan, schedule=Schedule(name="interleaved"))
    else:
        status["ranks"][1]["group"] = 1
    run.keep(plan, json.dumps(status))
    (problem,) = run.plans(code=1)["problems"]
    assert problem["where"] == str(run.directory)
    assert "the run is about to change its plan" in problem["remedy"]
