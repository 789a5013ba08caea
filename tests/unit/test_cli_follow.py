"""`zorse follow` beside a run: its status, the real search, the request, and the answer."""

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from tests.unit.cli_samples import FLAGS
from zorse_megatron.cli.main import app
from zorse_megatron.cli.workload import workload_of
from zorse_megatron.cli.workload_costs import costs_on
from zorse_megatron.migration.request import REQUEST_NAME
from zorse_megatron.planner.evaluate.simulate_plan import planned_micro_batch_times
from zorse_megatron.rebalance.iteration_times import IterationTimes
from zorse_megatron.rebalance.run_status import RunStatus
from zorse_megatron.schema.cluster.cluster_yaml import load_cluster, parse_cluster
from zorse_megatron.schema.plan.plan import Chunk, Group, Plan, Replica, Schedule
from zorse_megatron.schema.plan.plan_json import dump_plan, fingerprint, load_plan
from zorse_megatron.schema.status.status import RUNNING_PLAN_NAME, STATUS_NAME
from zorse_megatron.schema.status.status_json import dump_status

CLUSTER = "nodes: [{name: a, gpus: 2 x T4, nics: 100 Gb/s}, {name: b, gpus: T4, nics: 100 Gb/s}]\n"
WORKLOAD = workload_of(model=None, flags=FLAGS)


def present() -> Plan:
    """Three stages of about as many layers, which is right for equal GPUs."""
    bounds = ((0, 3), (3, 6), (6, 8))
    return Plan(
        schema_version=1,
        global_batch_size=16,
        model=WORKLOAD.model.fingerprint(),
        groups=tuple(
            Group(
                replicas=(
                    Replica(
                        ranks=(rank,), micro_batch_size=2, num_microbatches=8, shard_weight=1.0
                    ),
                )
            )
            for rank in range(3)
        ),
        chunks=tuple(Chunk(group=rank, layers=each) for rank, each in enumerate(bounds)),
        schedule=Schedule(name="1f1b"),
        cluster=parse_cluster(CLUSTER.encode()).fingerprint(),
    )


class RunDirectory:
    """What a run would keep there."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory / "status"
        self.cluster = directory / "cluster.yaml"
        self.directory.mkdir()
        self.cluster.write_text(CLUSTER)

    def write(self, plan: Plan, factors: tuple[float, ...], iterations: int = 30) -> None:
        """Iterations at these speeds."""
        costs = costs_on(plan, load_cluster(self.cluster), WORKLOAD, [])
        modelled = planned_micro_batch_times(costs.inputs, plan)
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
        (self.directory / RUNNING_PLAN_NAME).write_text(dump_plan(plan))
        (self.directory / STATUS_NAME).write_text(dump_status(status.now(written_s=1.0)))

    def follow(self, *options: str, code: int = 0) -> dict[str, Any]:
        """What it decides in one look."""
        words = ["follow", str(self.directory), "--cluster", str(self.cluster), "--once", "--json"]
        words += ["--nice", "0"]
        more = ["--plan-options", "--max-tp 1", *options, "--", "pretrain_gpt.py", *FLAGS]
        result = CliRunner().invoke(app, [*words, *more])
        assert result.exit_code == code, result.output
        answer: dict[str, Any] = json.loads(result.stdout)
        return answer


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    return RunDirectory(tmp_path)


@pytest.mark.slow
def test_asks_for_a_plan_in_which_the_slow_gpu_has_less(run: RunDirectory) -> None:
    run.write(present(), (1.0, 1.0, 2.5))
    answer = run.follow("--rebuild", "1")
    assert answer["decision"] == "moves" and answer["ranks"] == [2]
    assert answer["factors"] == [1.0, 1.0, 2.5]
    asked = load_plan(run.directory / REQUEST_NAME)
    assert answer["plan"] == fingerprint(asked)
    assert asked.cluster == present().cluster  # its GPU is still a T4
    kept = run.directory / "follow"
    assert (kept / "cluster-0.yaml").exists()
    (line,) = (kept / "decisions.jsonl").read_text().splitlines()
    assert json.loads(line)["gain"] == answer["gain"] > 0.05
    # On the GPUs as they are the new plan is what was promised.
    corrected = load_cluster(kept / "cluster-0.yaml")
    assert corrected.gpu_kinds == ("T4", "T4", "T4-x2.5")
    words = ["simulate", str(kept / "plan-0.json"), "--cluster", str(kept / "cluster-0.yaml")]
    shown = CliRunner().invoke(app, [*words, "--json", "--", "pretrain_gpt.py", *FLAGS])
    assert json.loads(shown.stdout)["iteration_s"] == pytest.approx(answer["next_s"])
    assert answer["next_s"] < answer["present_s"]


def test_does_nothing_where_nothing_has_changed(run: RunDirectory) -> None:
    run.write(present(), (1.0, 1.02, 0.99))
    assert run.follow()["decision"] is None
    assert not (run.directory / REQUEST_NAME).exists()


@pytest.mark.slow
def test_says_why_no_plan_is_found(run: RunDirectory) -> None:
    run.write(present(), (1.0, 1.0, 2.5))
    answer = run.follow("--plan-options", "--strategy nonesuch")
    assert answer["decision"] == "stays" and "--strategy" in answer["no_plan"]


def test_options_that_are_its_own_are_not_given_to_the_search(run: RunDirectory) -> None:
    run.write(present(), (1.0, 1.0, 1.0))
    (problem,) = run.follow("--plan-options", "--profile p.json", code=1)["problems"]
    assert problem["found"] == "--profile in it"


def test_a_run_on_another_cluster_is_not_followed(run: RunDirectory) -> None:
    run.write(present(), (1.0, 1.0, 2.5))
    run.cluster.write_text(CLUSTER.replace("gpus: T4", "gpus: L4"))
    (problem,) = run.follow(code=1)["problems"]
    assert "rank 2 on T4, which is L4 in the cluster" in problem["found"]


def test_a_status_of_another_plan_is_not_mixed_up(run: RunDirectory) -> None:
    """While a run moves it writes one file after the other."""
    run.write(present(), (1.0, 1.0, 2.5))
    other = dump_plan(present()).replace('"1f1b"', '"interleaved"')
    (run.directory / RUNNING_PLAN_NAME).write_text(other)
    (problem,) = run.follow(code=1)["problems"]
    assert "the run is about to change its plan" in problem["remedy"]


def test_all_that_it_will_need_is_asked_for_before_it_waits(run: RunDirectory) -> None:
    """Without a profile that can be read, hours might pass until the first search."""
    profile = run.directory / "profile.json"
    profile.write_text("{")
    options = ("--profile", str(profile), "--files", str(run.cluster), "--plan-options", "'")
    found = run.follow(*options, code=1)["problems"]
    assert [each["where"] for each in found][:2] == ["--plan-options", f"--files {run.cluster}"]
    assert found[2]["where"].startswith(str(profile)) and len(found) == 3


@pytest.mark.parametrize("option", ["--every", "--rebuild", "--plan-limit"])
def test_no_time_is_endless(run: RunDirectory, option: str) -> None:
    words = ["follow", str(run.directory), "--cluster", str(run.cluster), option, "inf"]
    assert CliRunner().invoke(app, [*words, "--", *FLAGS]).exit_code == 2
