"""What `zorse follow` makes of the files that it finds, from look to look."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.unit.test_cli_follow import RunDirectory, present
from zorse_megatron.cli.follow_loop import FollowLoop
from zorse_megatron.cli.following import _free_number
from zorse_megatron.schema.cluster.cluster_yaml import load_cluster
from zorse_megatron.schema.status.status import RUNNING_PLAN_NAME, STATUS_NAME


class Follower:
    """Sees what it is shown."""

    def __init__(self) -> None:
        self.seen: list[int] = []

    def look(self, status: Any, plan: Any) -> None:
        self.seen.append(status.iteration)


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    found = RunDirectory(tmp_path)
    found.write(present(), (1.0, 1.0, 1.0), iterations=5)
    return found


def looks(run: RunDirectory, *before: Callable[[], None], began_s: float = 0.0) -> Follower:
    """One look after each of these."""
    follower: Any = Follower()
    loop = FollowLoop(
        follower=follower,
        directory=run.directory,
        cluster=load_cluster(run.cluster),
        source=run.cluster,
        log=run.directory / "log.jsonl",
        as_json=False,
    )
    for each in before:
        each()
        loop._has_ended(began_s)
    found: Follower = follower
    return found


def test_a_run_on_a_node_whose_clock_is_late_is_followed(
    run: RunDirectory, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its status is of second 1: older than the look, until it is another one."""
    status = run.directory / STATUS_NAME

    def writes() -> None:
        status.write_text(status.read_text().replace('"written_s": 1.0', '"written_s": 2.0'))

    follower = looks(run, lambda: None, lambda: None, writes, began_s=1e9)
    assert follower.seen == [5]
    assert capsys.readouterr().out.count("waits for another one") == 1


def test_a_status_that_cannot_be_read_is_waited_for_and_said_once(
    run: RunDirectory, capsys: pytest.CaptureFixture[str]
) -> None:
    status = run.directory / STATUS_NAME
    whole = status.read_text()
    cuts = [lambda end=end: status.write_text(whole[:end]) for end in (0, 1, 50, 500, -9, -3)]
    assert looks(run, *cuts, lambda: status.write_text(whole)).seen == [5]  # type: ignore[arg-type]
    assert capsys.readouterr().out.count("waits for a run that can be followed") == 1


@pytest.mark.parametrize(
    ("old", "new"), [('"rank": 2', '"rank": 3'), ('"group": 2', '"group": 1'), ('"rank": 0', "9")]
)
def test_a_status_of_other_ranks_is_refused(run: RunDirectory, old: str, new: str) -> None:
    status = run.directory / STATUS_NAME
    text = status.read_text()
    assert old in text
    status.write_text(text.replace(old, new))
    assert looks(run, lambda: None).seen == []
    run.follow(code=1)


def test_a_full_disk_does_not_end_it(run: RunDirectory, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Follower, "look", lambda *_: (_ for _ in ()).throw(OSError(28, "No space")))
        looks(run, lambda: None, lambda: None)
    assert capsys.readouterr().out.count("No space") == 1


def test_a_run_that_goes_away_is_waited_for(run: RunDirectory) -> None:
    plan = run.directory / RUNNING_PLAN_NAME
    assert looks(run, plan.unlink).seen == []


def test_files_of_two_who_follow_a_run_are_not_mixed(tmp_path: Path) -> None:
    (tmp_path / "cluster-1.yaml").touch()
    assert [_free_number(tmp_path) for _ in range(3)] == [2, 3, 4]
