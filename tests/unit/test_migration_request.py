"""`zorse move`: what a run is asked, and what it is not asked."""

import json
import os
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from zorse_megatron.cli.main import app
from zorse_megatron.inputs.status import STATUS_NAME, dump_status
from zorse_megatron.live import move as request_module
from zorse_megatron.live.move import REQUEST_NAME, make_request, take_request
from zorse_megatron.live.run_status import RunStatus
from zorse_megatron.plan.plan import Chunk, Group, ModelFingerprint, Plan, Replica, Schedule
from zorse_megatron.plan.plan_file import fingerprint, parse_plan, save_plan


def plan_of(*weights: float) -> Plan:
    replicas = tuple(
        Replica(ranks=(rank,), micro_batch_size=1, num_microbatches=4, shard_weight=weight)
        for rank, weight in enumerate(weights)
    )
    return Plan(
        schema_version=1,
        global_batch_size=4 * len(weights),
        model=ModelFingerprint(num_layers=1),
        groups=(Group(replicas=replicas),),
        chunks=(Chunk(group=0, layers=(0, 1)),),
        schedule=Schedule(name="1f1b"),
    )


RUNS = plan_of(1.0, 1.0)


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """The directory of a run's status."""
    directory = tmp_path / "status"
    directory.mkdir()
    status = RunStatus(plan=RUNS, tokens_per_iteration=1, first_iteration=0)
    (directory / STATUS_NAME).write_text(dump_status(status.now(written_s=1.0)))
    return directory


def asked(directory: Path, plan: Plan, *more: str) -> Result:
    path = directory.parent / "next.json"
    save_plan(plan, path)
    return CliRunner().invoke(app, ["move", str(directory), str(path), *more])


def test_a_request_is_the_plan_and_is_taken_once(run: Path) -> None:
    other = plan_of(3.0, 1.0)
    result = asked(run, other, "--json")
    assert json.loads(result.stdout)["plan"] == fingerprint(other), result.output
    data = take_request(run)
    assert data is not None and parse_plan(data) == other
    assert take_request(run) is None


def test_a_run_that_has_not_looked_yet_gets_the_last_request(run: Path) -> None:
    for weight in (2.0, 5.0):
        assert asked(run, plan_of(weight, 1.0)).exit_code == 0
    data = take_request(run)
    assert data is not None and parse_plan(data) == plan_of(5.0, 1.0)


@pytest.mark.parametrize(
    ("plan", "words"),
    [
        pytest.param(RUNS, "under which the run is", id="the same"),
        pytest.param(plan_of(1.0, 1.0, 1.0), "a plan of 3 ranks; expected 2", id="other ranks"),
    ],
)
def test_what_the_run_cannot_do_is_not_asked(plan: Plan, words: str, run: Path) -> None:
    result = asked(run, plan)
    assert result.exit_code == 1
    assert words in " ".join(result.output.split())
    assert not (run / REQUEST_NAME).exists()


def test_a_directory_without_a_status_is_no_run(tmp_path: Path) -> None:
    result = asked(tmp_path / "nowhere", RUNS)
    assert result.exit_code == 1
    assert "nowhere" in result.output


def test_a_request_that_comes_while_another_is_read_is_not_lost(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = plan_of(2.0, 1.0), plan_of(5.0, 1.0)
    make_request(run, first)
    read = request_module.read_input

    def read_slowly(path: Path) -> bytes:
        data = read(path)
        make_request(run, second)
        return data

    with monkeypatch.context() as slow:
        slow.setattr(request_module, "read_input", read_slowly)
        data = take_request(run)
    assert data is not None and parse_plan(data) == first
    data = take_request(run)
    assert data is not None and parse_plan(data) == second
    assert take_request(run) is None


def test_a_request_that_cannot_be_read_is_answered_once(run: Path) -> None:
    os.mkfifo(run / REQUEST_NAME)
    assert take_request(run) == b""
    assert take_request(run) is None
