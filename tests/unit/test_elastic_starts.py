"""When a run of torchrun that does not get further is given up."""

import json
from pathlib import Path

import pytest

from tests.unit.checkpoint_folders import save
from zorse_megatron.launch.rank_environment import OUTCOME, note_outcome
from zorse_megatron.launch.replan import GivenUp, Starts
from zorse_megatron.live.checkpoint_files import Checkpoint, set_tracker

NODES = ("a", "b")


@pytest.fixture
def starts(tmp_path: Path) -> Starts:
    folder = tmp_path / "checkpoints"
    return Starts(directory=tmp_path / "plans", run="run", save=str(folder), max_failures=3)


def saves(starts: Starts, iteration: int) -> None:
    root = Path(str(starts.save))
    root.mkdir(exist_ok=True)
    save(root, iteration)
    set_tracker(Checkpoint(root=root, iteration=iteration))


def begin(starts: Starts, *, times: int = 1, nodes: tuple[str, ...] = NODES) -> None:
    for _ in range(times):
        starts.begin(nodes, is_first=False)


def test_failures_in_a_row_without_a_new_checkpoint(starts: Starts) -> None:
    starts.begin(NODES, is_first=True)
    begin(starts, times=2)
    saves(starts, 5)
    begin(starts, times=4)
    with pytest.raises(GivenUp, match="found 4 failures in a row without a new checkpoint"):
        begin(starts)
    assert starts.outcome.read_text() == "2"  # so that the batch script does not start it again
    with pytest.raises(GivenUp, match="The checkpoint of iteration 5 is complete"):
        begin(starts)
    # The user has mended something, and started torchrun again.
    starts.begin(NODES, is_first=True)
    begin(starts, times=3)
    entries = [json.loads(line) for line in (starts.directory / "run.jsonl").open()]
    assert [(entry["nodes"], entry["latest"]) for entry in entries] == [(["a", "b"], "5")] * 4


def test_bad_input_is_final_unless_other_nodes_are_there(starts: Starts) -> None:
    environment = {OUTCOME: str(starts.outcome), "RANK": "1"}
    starts.begin(NODES, is_first=True)
    note_outcome(environment, 2)
    begin(starts, nodes=("a",))
    note_outcome(environment, 2)
    with pytest.raises(GivenUp, match="found bad input"):
        begin(starts, nodes=("a",))
    starts.begin(("a",), is_first=True)


def test_what_is_done_is_noted_by_rank_0(starts: Starts) -> None:
    begin(starts)
    note_outcome({OUTCOME: str(starts.outcome), "RANK": "1"}, 0)
    assert not starts.outcome.exists()
    note_outcome({OUTCOME: str(starts.outcome), "RANK": "0"}, 0)
    assert starts.outcome.read_text() == "0"
    begin(starts)  # a node has come
    assert not starts.outcome.exists()
    note_outcome({"RANK": "0"}, 0)  # no elastic job


@pytest.mark.parametrize("text", [b'{"nodes": ["a\xff', b"[1]\n{}\n", b""])
def test_a_damaged_log_counts_for_nothing(starts: Starts, text: bytes) -> None:
    begin(starts, times=3)
    (starts.directory / "run.jsonl").write_bytes(text)
    starts.outcome.write_text("2")
    begin(starts)
