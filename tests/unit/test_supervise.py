"""Attempts on nodes that come and go: with whom, under which plan, and when it is over."""

import json
import signal
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from tests.unit.checkpoint_folders import save
from tests.unit.cli_samples import FLAGS
from tests.unit.test_migration_request import plan_of
from zorse_megatron.checkpoints.folder import Checkpoint, set_tracker
from zorse_megatron.errors import LaunchError, Problem
from zorse_megatron.launch.elastic import attempt
from zorse_megatron.launch.elastic.attempt import Ended, run_attempt
from zorse_megatron.launch.elastic.replan import JobFiles, Replanner
from zorse_megatron.launch.elastic.supervise import Limits, Outcome, Supervisor, Wish, Wishes
from zorse_megatron.schema.cluster.cluster_yaml import load_cluster
from zorse_megatron.schema.plan.plan_json import dump_plan

LAB = """
nodes:
  - {name: a, gpus: 1 x L4, nics: 10 Gb/s}
  - {name: b, gpus: 1 x L4, nics: 10 Gb/s}
  - {name: c, gpus: 1 x T4, nics: 10 Gb/s}
"""
LOST = 3
KEPT = dump_plan(plan_of(1.0, 1.0))


@dataclass
class FakeRun:
    """Has ended with a status; None: never does."""

    node: str
    status: int | None

    def poll(self) -> int | None:
        return self.status

    def abandon(self) -> None:
        assert self.status is None


@dataclass
class FakeMachines:
    """Each attempt of the script: node -> status, and what happens when it ends."""

    present: set[str]
    attempts: Iterable[tuple[dict[str, int | None], Callable[[], None]]]
    started: list[tuple[tuple[str, ...], str]] = field(default_factory=list)
    runs: list[FakeRun] = field(default_factory=list)
    told: list[str] = field(default_factory=list)

    def answering(self) -> frozenset[str]:
        return frozenset(self.present)

    def start(self, files: JobFiles, number: int) -> Sequence[FakeRun]:
        assert number == len(self.started)
        statuses, happens = next(iter(self.attempts))
        self.started.append((files.left.names, files.plan.name))
        happens()
        self.runs = [FakeRun(name, statuses.get(name, 0)) for name in files.left.names]
        return self.runs

    def ask_to_save(self) -> None:
        self.told.append("save")
        for run in self.runs:
            run.status = 0

    def kill(self) -> None:
        self.told.append("kill")


class Lab:
    """A supervisor over a script of attempts."""

    def __init__(self, directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.directory = directory
        (directory / "cluster.yaml").write_text(LAB)
        (directory / "plan.json").touch()
        monkeypatch.setattr(attempt, "_POLL_S", 0.001)
        monkeypatch.setattr(attempt, "_KILL_WAIT_S", 0.02)
        # What a plan says does not matter here: each set of nodes has one.
        monkeypatch.setattr(
            Replanner, "_search", lambda self, cluster, plan, saved: plan.write_text(KEPT)
        )

    def run(
        self, *attempts: Any, min_gpus: int = 1, **options: Any
    ) -> tuple[Outcome, FakeMachines]:
        machines = FakeMachines({"a", "b", "c"}, iter([each(self) for each in attempts]))
        self.machines = machines
        supervisor = Supervisor(
            machines=machines,
            replanner=Replanner(
                plan=self.directory / "plan.json",
                cluster=self.directory / "cluster.yaml",
                directory=self.directory / "plans",
                training=tuple(FLAGS),
                min_gpus=min_gpus,
                save=str(self.directory / "checkpoints"),
            ),
            limits=options.pop("limits", Limits(max_failures=3, grace_s=0.02)),
            log=self.directory / "attempts.jsonl",
            **options,
        )
        return supervisor.run(), machines

    def saves(self, iteration: int) -> None:
        root = self.directory / "checkpoints"
        root.mkdir(exist_ok=True)
        save(root, iteration)
        set_tracker(Checkpoint(root=root, iteration=iteration))


Attempt = tuple[dict[str, int | None], Callable[[], None]]


def dies(*lost: str, saved: int | None = None, back: str = "") -> Callable[[Lab], Attempt]:
    """The ranks of all nodes end; those that are lost never do, and answer no more."""

    def of(lab: Lab) -> Attempt:
        def happens() -> None:
            if saved is not None:
                lab.saves(saved)
            lab.machines.present -= set(lost)
            lab.machines.present |= set(back)

        return {name: None if name in lost else LOST for name in "abc"}, happens

    return of


def ends(status: int = 0) -> Callable[[Lab], Attempt]:
    return lambda lab: (dict.fromkeys("abc", status), lambda: None)


@pytest.fixture
def lab(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Lab:
    return Lab(tmp_path, monkeypatch)


def test_goes_on_without_lost_nodes_and_with_those_that_are_back(
    lab: Lab, capsys: pytest.CaptureFixture[str]
) -> None:
    outcome, machines = lab.run(
        dies("b", saved=10), dies(), dies(saved=20, back="b"), dies("a", "c"), ends()
    )
    assert outcome == Outcome(status=0)
    nodes = [names for names, _ in machines.started]
    assert nodes == [("a", "b", "c"), ("a", "c"), ("a", "c"), ("a", "b", "c"), ("b",)]
    plans = [plan for _, plan in machines.started]
    assert plans[0] == plans[3] == "plan.json"
    assert plans[1] == plans[2] != plans[4]
    for (names, plan), entry in zip(
        machines.started,
        map(json.loads, (lab.directory / "attempts.jsonl").read_text().splitlines()),
        strict=True,
    ):
        assert (tuple(entry["nodes"]), Path(entry["plan"]).name) == (names, plan)
        cluster = (
            load_cluster(Path(entry["plan"]).with_suffix(".yaml")) if plan != "plan.json" else None
        )
        assert cluster is None or tuple(node.name for node in cluster.nodes) == names
    said = capsys.readouterr().out
    assert "b did not end): looking for nodes, to go on from iteration 10" in said
    assert "2 GPUs on a, c, without b" in said


def test_ranks_that_do_not_end_are_ended(lab: Lab) -> None:
    _, machines = lab.run(dies("b"), ends())
    assert machines.told == ["kill"]


def test_ends_clearly_when_too_few_are_left(lab: Lab, capsys: pytest.CaptureFixture[str]) -> None:
    outcome, machines = lab.run(dies("b", "c", saved=20), min_gpus=2)
    assert (outcome.status, outcome.needs_nodes, len(machines.started)) == (1, True, 1)
    said = capsys.readouterr().out
    assert "found 1 of 3 GPUs (without b, c); expected at least 2 (--min-gpus)" in said
    assert "The checkpoint of iteration 20 is complete." in said


def test_a_job_that_always_fails_ends(lab: Lab) -> None:
    outcome, machines = lab.run(*[dies()] * 9)
    assert outcome.status == LOST and len(machines.started) == 4
    # Each new checkpoint starts the count again.
    lab.directory.joinpath("attempts.jsonl").unlink()
    outcome, machines = lab.run(*[dies(saved=each) for each in range(1, 8)], *[dies()] * 9)
    assert outcome.status == LOST and len(machines.started) == 7 + 3


def test_bad_input_is_final_unless_a_node_is_gone(lab: Lab) -> None:
    outcome, machines = lab.run(ends(2), ends())
    assert (outcome.status, len(machines.started)) == (2, 1)

    def refuses_without_gpu(lab: Lab) -> Attempt:
        return {"a": LOST, "b": LOST, "c": 2}, lambda: lab.machines.present.discard("c")

    outcome, machines = lab.run(refuses_without_gpu, ends())
    assert (outcome.status, [len(names) for names, _ in machines.started]) == (0, [3, 2])


@pytest.mark.parametrize("only_after_save", [False, True])
def test_saves_and_ends_for_nodes_that_have_come(lab: Lab, only_after_save: bool) -> None:
    asked: list[tuple[str, ...]] = []

    def more(files: JobFiles) -> bool:
        asked.append(files.left.names)
        if len(asked) == 1 and only_after_save:
            assert (lab.directory / "checkpoints").exists()
        return True

    def runs_on(lab: Lab) -> Attempt:
        statuses: dict[str, int | None] = dict.fromkeys("abc")
        return statuses, lambda: lab.saves(5)

    wishes = Wishes(looks_for_nodes=more, look_every_s=0, only_after_save=only_after_save)
    outcome, machines = lab.run(runs_on, wishes=wishes)
    assert outcome == Outcome(status=0, wish=Wish.GROW, has_saved=True)
    assert machines.told == ["save"] and asked == [("a", "b", "c")]


def test_the_time_limit_comes_before_more_nodes(lab: Lab) -> None:
    """A signal may come while Slurm is asked for nodes, which takes up to a minute."""
    wishes = Wishes(look_every_s=0)

    def looks(files: JobFiles) -> bool:
        wishes.must_stop = True
        return True

    wishes.looks_for_nodes = looks
    assert lab.run(dies("a", "b", "c"), wishes=wishes)[0].wish is Wish.STOP


def test_no_ranks_are_started_once_the_time_limit_is_near(lab: Lab) -> None:
    wishes = Wishes()

    def plans(self: Replanner, cluster: Path, plan: Path, saved: int | None) -> None:
        wishes.must_stop = bool(plan.write_text(KEPT))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Replanner, "_search", plans)
        outcome, machines = lab.run(dies("b", saved=20), ends(), wishes=wishes)
    assert outcome == Outcome(status=1, wish=Wish.STOP, has_saved=True)
    assert len(machines.started) == 1


def test_ranks_that_cannot_be_started_are_a_failure_like_others(
    lab: Lab, capsys: pytest.CaptureFixture[str]
) -> None:
    start, calls = FakeMachines.start, []

    def fails_first(self: FakeMachines, files: JobFiles, number: int) -> Sequence[FakeRun]:
        calls.append(number)
        if number < 2:
            problem = Problem(where="srun", found="no", expected="a step", remedy="Look.")
            raise LaunchError("the ranks cannot be started", [problem])
        return start(self, files, number - 2)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(FakeMachines, "start", fails_first)
        outcome, _ = lab.run(ends())
        assert (outcome.status, calls) == (0, [0, 1, 2])
        assert "error: the ranks cannot be started" in capsys.readouterr().out
        assert lab.run(limits=Limits(max_failures=1))[0].status == 1


def test_waits_for_a_save_before_it_asks(lab: Lab) -> None:
    looked: list[str] = []
    wishes = Wishes(
        looks_for_nodes=lambda files: bool(looked.append("x")), look_every_s=0, only_after_save=True
    )
    outcome, _ = lab.run(dies("b"), ends(), wishes=wishes)  # b's ranks are waited for
    assert (outcome.status, looked) == (0, [])


def test_status_of_an_attempt(lab: Lab) -> None:
    def of(*statuses: int | None) -> Ended:
        names = "abc"[: len(statuses)]
        lab.machines = FakeMachines(
            set(names), iter([(dict(zip(names, statuses, strict=True)), lambda: None)])
        )
        files: Any = type(
            "Files", (), {"left": type("L", (), {"names": tuple(names)}), "plan": Path("p")}
        )
        return run_attempt(lab.machines, files, 0, grace_s=0.01, should_stop=lambda: False)

    assert of(0, 0).status == 0
    assert of(3, 137).status == 137
    assert of(2, 137).status == 2
    assert of(0, None).status == 137  # a node that is gone has not ended well
    assert of(0, None).silent == ("b",)
    assert of(-signal.SIGTERM, 0).status == signal.SIGTERM
    started_s = time.time()
    assert of(3, 3).first_end >= started_s
