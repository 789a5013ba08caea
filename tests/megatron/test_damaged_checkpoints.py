"""A checkpoint that is not whole stops every rank with status 2, or an older one is taken."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.megatron.comparison import BASE_FLAGS, Recorded, plan_run, stock_run
from tests.megatron.launch import RunResult, run_ranks
from tests.megatron.plans import LAYOUTS
from tests.megatron.small_run import TOKENIZER_FLAGS
from zorse_megatron.live.checkpoint_check import State, look_at
from zorse_megatron.live.checkpoint_files import (
    MANIFEST,
    STOCK_MANIFEST,
    TRACKER,
    Checkpoint,
    file_record,
    read_tracker,
)
from zorse_megatron.live.watched_rank import BAD_INPUT
from zorse_megatron.plan.plan_file import save_plan

PLAN = LAYOUTS["2|1"]
STEPS, INTERVAL = 6, 2
FLAGS = (
    *BASE_FLAGS,
    *("--train-iters", str(STEPS), "--mock-data", "--split", "90,5,5", *TOKENIZER_FLAGS),
    *("--save-interval", str(INTERVAL)),
)
SKIP = ("--zorse-damaged-checkpoint", "skip")


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Recorded]:
    """A run that has saved after every second step, and its folder."""
    root = tmp_path_factory.mktemp("whole")
    return root, plan_run(PLAN, [*FLAGS, "--save", str(root)])


@pytest.fixture
def saved(uninterrupted: tuple[Path, Recorded], tmp_path: Path) -> Path:
    """A copy of its folder, to be damaged."""
    return Path(shutil.copytree(uninterrupted[0], tmp_path / "saved"))


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def refused(root: Path, *flags: str, tmp_path: Path) -> str:
    """What rank 0 says to a command that every rank must refuse."""
    save_plan(PLAN, tmp_path / "plan.json")
    words = [*FLAGS, "--load", str(root), *flags, "--zorse-plan", str(tmp_path / "plan.json")]
    # Rank 0 keeps the job's store for a while after an error.
    result: RunResult = run_ranks(words, PLAN.world_size, timeout_s=90, grace_after_failure_s=40)
    assert result.returncodes == (BAD_INPUT,) * PLAN.world_size, result.outputs
    assert "The checkpoint cannot be loaded" in result.outputs[0], result.outputs[0]
    return result.outputs[0]


def test_every_save_has_a_manifest_of_its_files(uninterrupted: tuple[Path, Recorded]) -> None:
    root, _ = uninterrupted
    for iteration in range(INTERVAL, STEPS + 1, INTERVAL):
        look = look_at(Checkpoint(root=root, iteration=iteration))
        assert look.state is State.WHOLE and look.manifest is not None
        folder = look.checkpoint.folder
        on_disk = {path.name for path in folder.iterdir()} - {MANIFEST}
        assert set(look.manifest.files) == on_disk
        for name, record in look.manifest.files.items():
            assert record == file_record(folder / name), name


def test_a_flipped_byte_is_skipped_for_an_older_checkpoint(
    uninterrupted: tuple[Path, Recorded], saved: Path
) -> None:
    """On all ranks, two of which do not see that the tracker file has been set back."""
    _, whole = uninterrupted
    flip(saved / "iter_0000006" / "__1_0.distcp")
    (saved / "iter_0000004" / "__2_0.distcp").unlink()
    command = [*FLAGS, "--save", str(saved), "--load", str(saved), *SKIP]
    resumed = plan_run(PLAN, command, entry="tests.megatron.stale_tracker_entry")
    assert resumed.steps == whole.steps[2:]
    for name, copies in whole.final.items():
        for mine, theirs in zip(resumed.final[name], copies, strict=True):
            assert mine.equal(theirs), name
    said = resumed.outputs[0]
    assert "__1_0.distcp" in said and "__2_0.distcp" in said and "goes back to iteration 2" in said
    # It has trained on, and saved what it had skipped again.
    last = Checkpoint(root=saved, iteration=STEPS)
    assert read_tracker(saved).names == last
    assert look_at(last).state is State.WHOLE


def empty_tracker(root: Path) -> str:
    (root / TRACKER).write_text("")
    return TRACKER


def truncated_without_manifest(root: Path) -> str:
    (root / "iter_0000006" / MANIFEST).unlink()
    shard = root / "iter_0000006" / "__0_0.distcp"
    shard.write_bytes(shard.read_bytes()[:-1])
    return "__0_0.distcp"


@pytest.mark.parametrize("damage", [empty_tracker, truncated_without_manifest])
def test_damage_stops_every_rank(
    damage: Callable[[Path], str], saved: Path, tmp_path: Path
) -> None:
    name = damage(saved)
    said = refused(saved, tmp_path=tmp_path)
    assert name in said and "iteration" in said
    assert "Traceback" not in said


def test_what_only_reading_finds_ends_the_job_for_good(saved: Path, tmp_path: Path) -> None:
    """Without a manifest, damage inside of a shard is found by torch while it loads."""
    folder = saved / "iter_0000006"
    (folder / MANIFEST).unlink()
    shard = folder / "__1_0.distcp"
    shard.write_bytes(bytes(len(shard.read_bytes())))
    assert "CheckpointException" in refused(saved, tmp_path=tmp_path)


def test_another_schedule_than_the_saved_one(saved: Path, tmp_path: Path) -> None:
    """All that differs is told at once, and what to add; what is added decides, as in stock."""
    more = ("--weight-decay", "0.2", "--train-iters", str(STEPS + 1), "--lr-decay-iters", "50")
    said = refused(saved, *more, tmp_path=tmp_path)
    (line,) = [line for line in said.splitlines() if "--override-opt-param-scheduler" in line]
    found, _, expected = line.partition("; expected ")
    for name, old, new in (
        ("total number of iterations", "40", "50"),
        ("total number of weight decay iterations", str(STEPS), str(STEPS + 1)),
        ("start weight decay", "0.1", "0.2"),
    ):
        assert f"{name} {old}" in found and f"{name} {new}" in expected, line
    assert "--use-checkpoint-opt-param-scheduler" in line and "Traceback" not in said
    command = [*FLAGS, *more, "--load", str(saved), "--override-opt-param-scheduler"]
    assert [step["iteration"] for step in plan_run(PLAN, command).steps] == [STEPS + 1]


def test_a_checkpoint_that_must_be_there(tmp_path: Path) -> None:
    said = refused(tmp_path / "none", "--exit-on-missing-checkpoint", tmp_path=tmp_path)
    assert "--exit-on-missing-checkpoint" in said


def test_stock_and_ours_read_each_other(saved: Path, tmp_path: Path) -> None:
    """Stock goes on from ours, and ours from stock's, which says that it is not verified."""
    theirs_are_in = tmp_path / "stock"
    flags = (*FLAGS, "--load", str(saved), "--ckpt-step", "4", "--save", str(theirs_are_in))
    theirs = stock_run((*flags, "--save-interval", "1"))
    assert [step["iteration"] for step in theirs.steps] == [5, 6]
    assert not (theirs_are_in / "iter_0000005" / MANIFEST).exists()
    ours = plan_run(PLAN, [*FLAGS, "--load", str(theirs_are_in), "--ckpt-step", "5"])
    assert [step["iteration"] for step in ours.steps] == [6]
    assert "not verified beyond that" in ours.outputs[0]


def test_a_save_into_an_old_folder_is_not_whole_before_its_end(saved: Path) -> None:
    """What it writes over is no checkpoint any more from its first moment on."""
    from zorse_megatron.adapter.checkpoint.saving import _open_again

    folder = saved / "iter_0000006"
    json.loads((folder / MANIFEST).read_bytes())
    last = (folder / "metadata.json").read_bytes()
    (folder / STOCK_MANIFEST).write_text('{"algorithm": "sha256", "files": {".metadata": "0"}}')
    _open_again(folder)
    assert look_at(Checkpoint(root=saved, iteration=6)).state is State.CUT_SHORT
    # Killed after stock's last file: nothing is left to take that for damaged.
    (folder / "metadata.json").write_bytes(last)
    assert look_at(Checkpoint(root=saved, iteration=6)).state is State.UNVERIFIED
