"""No damage to a checkpoint goes unseen, and training resumes from the newest that is whole."""

import json
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import islice
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.unit.checkpoint_folders import flip, save, shards, steps_of_save
from zorse_megatron.errors import CheckpointError
from zorse_megatron.live.checkpoint_check import Look, State, look_at, read_through, shares
from zorse_megatron.live.checkpoint_choice import Chooser, Load
from zorse_megatron.live.checkpoint_files import (
    MANIFEST,
    STOCK_MANIFEST,
    TRACKER,
    Checkpoint,
    checkpoints_in,
    file_record,
    read_tracker,
)

FILES = (*shards(1), ".metadata", "metadata.json")
# Each example waits for several files to be on disk; in memory they are at once.
IN_MEMORY = next((path for path in (Path("/dev/shm"),) if path.is_dir()), None)
GARBAGE = st.sampled_from(
    [b"", b"  \n", b"-4", b"\xff\x00", b"4 6", b"1e3", b"iter_4", b"4" * 5000]
)


@contextmanager
def new_folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(dir=IN_MEMORY) as name:
        yield Path(name)


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def verified(checkpoint: Checkpoint) -> Look:
    return read_through(look_at(checkpoint))


@pytest.mark.slow
@given(
    name=st.sampled_from([*FILES, MANIFEST]),
    how=st.sampled_from(["flip", "cut", "grow", "delete", "zeros"]),
    position=st.integers(0, 2000),
    bit=st.integers(0, 7),
)
def test_any_damage_to_a_file_is_seen(name: str, how: str, position: int, bit: int) -> None:
    with new_folder() as root:
        checkpoint = save(root, 3)
        before = contents(checkpoint.folder)
        assert verified(checkpoint).state is State.WHOLE
        path = checkpoint.folder / name
        data = before[name]
        if how == "flip":
            flip(path, position, bit)
        elif how == "cut":
            path.write_bytes(data[: position % len(data)])
        elif how == "grow":
            path.write_bytes(data + b"\0" * (1 + position % 9))
        elif how == "zeros":
            path.write_bytes(bytes(len(data)))
        else:
            path.unlink()
        look = verified(checkpoint)
        if name == MANIFEST:
            # What it says may be the same, or be gone as in a checkpoint of stock's: then it is
            # whole in fact. It never makes a whole one of anything else.
            assert look.state in (State.WHOLE, State.UNVERIFIED, State.DAMAGED)
        else:
            assert look.state is State.DAMAGED, contents(checkpoint.folder)[name]
        assert (look.state is State.DAMAGED) == bool(look.problems)
        for problem in look.problems:
            assert name in problem.where and problem.found and problem.expected and problem.remedy


@pytest.mark.slow
@given(name=st.sampled_from(list(FILES)), cut=st.one_of(st.none(), st.integers(0, 2000)))
def test_without_a_manifest_missing_bytes_are_seen(name: str, cut: int | None) -> None:
    """As in checkpoints of stock's: the metadata says where the last tensor of a file ends."""
    with new_folder() as root:
        checkpoint = save(root, 3)
        (checkpoint.folder / MANIFEST).unlink()
        look = verified(checkpoint)
        assert look.state is State.UNVERIFIED and look.num_bytes > 0
        path = checkpoint.folder / name
        data = path.read_bytes()
        if cut is None:
            path.unlink()
        else:
            path.write_bytes(data[: cut % len(data)])
        assert verified(checkpoint).state in (State.DAMAGED, State.CUT_SHORT)


def test_the_manifest_of_stock_is_read() -> None:
    with new_folder() as root:
        checkpoint = save(root, 3)
        (checkpoint.folder / MANIFEST).unlink()
        sums = {
            name: file_record(checkpoint.folder / name, "sha256").checksum
            for name in contents(checkpoint.folder)
        }
        (checkpoint.folder / STOCK_MANIFEST).write_text(
            json.dumps({"algorithm": "sha256", "files": sums})
        )
        assert verified(checkpoint).state is State.WHOLE
        flip(checkpoint.folder / FILES[0])
        (problem,) = verified(checkpoint).problems
        assert FILES[0] in problem.where and "sha256" in problem.found


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "{}",
        "[" * 100_000,
        '{"version": 2, "algorithm": "xxh3_128", "files": {}}',
        '{"version": 1, "algorithm": "xxh3_128", "files": {}, "checksum_of_files": ""}',
        '{"version": 1, "algorithm": "crc", "files": {"a": {"bytes": 1, "checksum": "0"}}}',
        '{"version": 1, "algorithm": "xxh3_128", "files": {"../a": {"bytes": 1, "checksum": "0"}}}',
        '{"version": 1, "algorithm": "xxh3_128", "files": {"a": {"bytes": "1", "checksum": "0"}}}',
        '{"version": 1, "algorithm": "xxh3_128", "files": {"a": 1}}',
    ],
)
def test_a_manifest_that_is_none(text: str, tmp_path: Path) -> None:
    checkpoint = save(tmp_path, 3)
    (checkpoint.folder / MANIFEST).write_text(text)
    (problem,) = look_at(checkpoint).problems
    assert MANIFEST in problem.where and "manifest" in problem.found


def load(root: Path, **more: object) -> tuple[Look | None, list[str]]:
    """What a job does: choose, read, reject, choose again."""
    chooser = Chooser(Load(root=root, **more))  # type: ignore[arg-type]
    for _ in range(100):
        look = chooser.choose()
        if look is None:
            return None, chooser.notes
        look = read_through(look)
        if look.is_usable:
            return look, chooser.notes
        chooser.reject(look.checkpoint, look.problems)
    raise AssertionError("does not end")


STATES = ("whole", "flipped", "cut", "no shard", "cut short")


def spoil(checkpoint: Checkpoint, how: str) -> None:
    shard = checkpoint.folder / FILES[0]
    if how == "flipped":
        flip(shard)
    elif how == "cut":
        shard.write_bytes(shard.read_bytes()[:-1])
    elif how == "no shard":
        shard.unlink()
    elif how == "cut short":
        (checkpoint.folder / MANIFEST).unlink()
        (checkpoint.folder / "metadata.json").unlink()


@pytest.mark.slow
@given(
    states=st.dictionaries(st.integers(1, 12), st.sampled_from(STATES), max_size=5),
    tracker=st.one_of(st.none(), GARBAGE, st.integers(1, 13)),
    skips=st.booleans(),
)
def test_the_newest_whole_checkpoint_is_taken(
    states: dict[int, str], tracker: bytes | int | None, skips: bool
) -> None:
    with new_folder() as root:
        for iteration, how in states.items():
            spoil(save(root, iteration), how)
        if tracker is None:
            (root / TRACKER).unlink(missing_ok=True)
        else:
            text = tracker if isinstance(tracker, bytes) else str(tracker).encode()
            (root / TRACKER).write_bytes(text)
        before = {each: contents(each.folder) for each in checkpoints_in(root)}
        whole = [n for n, how in states.items() if how == "whole"]
        complete = [n for n, how in states.items() if how in ("whole", "flipped")]
        if isinstance(tracker, int):
            whole = [n for n in whole if n <= tracker]
        follows = isinstance(tracker, int) and states.get(tracker) == "whole"
        if tracker is None and not complete:
            assert load(root, skips_damaged=skips)[0] is None
        elif follows or (skips and whole):
            look, notes = load(root, skips_damaged=skips)
            assert look is not None and look.checkpoint.iteration == max(whole)
            assert read_tracker(root).names == look.checkpoint
            assert bool(notes) == (not follows)
        else:
            with pytest.raises(CheckpointError):
                load(root, skips_damaged=skips)
            if not skips and tracker is not None:
                assert (root / TRACKER).read_bytes() == text
        # Nothing but the tracker is written, and nothing is removed.
        assert {each: contents(each.folder) for each in checkpoints_in(root)} == before


NUM_STEPS = 13


@pytest.mark.parametrize("again", [False, True], ids=["new folder", "over an old one"])
@pytest.mark.parametrize("num_steps", range(NUM_STEPS + 1))
def test_a_crash_at_any_moment_of_a_save(num_steps: int, again: bool, tmp_path: Path) -> None:
    """One checkpoint is left to go on from: the one before, or, once its manifest is there, it."""
    save(tmp_path, 4)
    if again:
        save(tmp_path, 6)
        (tmp_path / TRACKER).write_text("4")
    done = list(islice(steps_of_save(tmp_path, 6), num_steps))
    look, _ = load(tmp_path, skips_damaged=True)
    assert look is not None
    its_own = any("tracker" in step for step in done)
    assert look.checkpoint.iteration == (6 if its_own else 4)
    assert look.state is State.WHOLE


def test_all_steps_of_a_save_are_tried(tmp_path: Path) -> None:
    assert len(list(steps_of_save(tmp_path, 6))) == NUM_STEPS


def test_a_first_save_that_was_cut_short_is_said(tmp_path: Path) -> None:
    for step in steps_of_save(tmp_path, 6):
        if step == ".metadata":
            break
    look, notes = load(tmp_path, skips_damaged=True)
    assert look is None
    assert "cut short" in notes[0] and "6" in notes[0]


def test_a_step_that_is_asked_for_is_never_another_one(tmp_path: Path) -> None:
    save(tmp_path, 4)
    spoil(save(tmp_path, 6), "flipped")
    with pytest.raises(CheckpointError, match="--ckpt-step 4"):
        load(tmp_path, step=6, skips_damaged=True)
    look, _ = load(tmp_path, step=4)
    assert look is not None and look.checkpoint.iteration == 4
    with pytest.raises(CheckpointError, match="no such folder"):
        load(tmp_path, step=5)
    # Stock reads the tracker in any case.
    (tmp_path / TRACKER).write_text("")
    with pytest.raises(CheckpointError, match="nothing in it"):
        load(tmp_path, step=4)


def test_the_message_says_how_to_go_on(tmp_path: Path) -> None:
    save(tmp_path, 4)
    spoil(save(tmp_path, 6), "cut")
    with pytest.raises(CheckpointError) as caught:
        load(tmp_path)
    (problem,) = caught.value.problems
    assert problem.where.endswith(f"iter_0000006/{FILES[0]}")
    assert (problem.found, problem.expected[:9]) == ("699 bytes", "700 bytes")
    assert f"echo 4 > {tmp_path / TRACKER}" in problem.remedy
    shutil.rmtree(tmp_path / "iter_0000004")
    with pytest.raises(CheckpointError, match="restore one from a copy"):
        load(tmp_path, skips_damaged=True)


@pytest.mark.parametrize("same_sizes", [False, True])
def test_a_manifest_of_an_earlier_save_is_told_from_damage(
    same_sizes: bool, tmp_path: Path
) -> None:
    """Stock leaves our manifest where it saves the same iteration again."""
    checkpoint = save(tmp_path, 6)
    manifest = checkpoint.folder / MANIFEST
    for name, content in shards(7).items():
        (checkpoint.folder / name).write_bytes(content[: None if same_sizes else -10])
    with pytest.raises(CheckpointError) as caught:
        load(tmp_path)
    assert "older than" not in caught.value.problems[-1].remedy, "these files were not saved again"
    saved_ns = manifest.stat().st_mtime_ns + 10**9
    os.utime(checkpoint.folder / "metadata.json", ns=(saved_ns, saved_ns))
    with pytest.raises(CheckpointError) as caught:
        load(tmp_path)
    *others, last = caught.value.problems
    assert others and not any("older than" in problem.remedy for problem in others)
    assert f"{MANIFEST} is older than metadata.json" in last.remedy
    assert f"remove {manifest};" in last.remedy
    if same_sizes:
        manifest.unlink()
        look, _ = load(tmp_path)
        assert look is not None and look.state is State.UNVERIFIED


def test_pretrained_weights(tmp_path: Path) -> None:
    """They are used where nothing was saved yet, and not where what was saved is lost."""
    own, pretrained = tmp_path / "own", tmp_path / "pretrained"
    checkpoint = save(pretrained, 9)
    look, _ = load(own, pretrained=pretrained)
    assert look is not None and look.checkpoint == checkpoint
    earlier = save(pretrained, 5)
    (pretrained / TRACKER).write_text("9")
    look, _ = load(own, pretrained=pretrained, step=5)
    assert look is not None and look.checkpoint == earlier, "as stock does"
    save(own, 2)
    look, _ = load(own, pretrained=pretrained)
    assert look is not None and look.checkpoint.root == own
    (own / TRACKER).unlink()
    with pytest.raises(CheckpointError, match="no such file"):
        load(own, pretrained=pretrained)
    shutil.rmtree(own)
    spoil(checkpoint, "cut")
    with pytest.raises(CheckpointError):
        load(own, pretrained=pretrained, skips_damaged=True)


def test_a_checkpoint_that_must_be_there(tmp_path: Path) -> None:
    assert load(tmp_path / "none")[0] is None
    with pytest.raises(CheckpointError, match="exit-on-missing-checkpoint"):
        load(tmp_path / "none", is_needed=True)


def test_the_old_format_is_refused(tmp_path: Path) -> None:
    (tmp_path / "iter_0000002" / "mp_rank_00").mkdir(parents=True)
    (tmp_path / TRACKER).write_text("2")
    with pytest.raises(CheckpointError, match="ckpt-convert-format"):
        load(tmp_path)


@given(
    sizes=st.dictionaries(st.text("abc", min_size=1, max_size=4), st.integers(0, 10**12)),
    count=st.integers(1, 9),
)
def test_ranks_share_the_reading(sizes: dict[str, int], count: int) -> None:
    dealt = shares(sizes, count)
    assert sorted(name for each in dealt for name in each) == sorted(sizes)
    loads = [sum(sizes[name] for name in each) for each in dealt]
    # The bound of longest-processing-time-first (Graham 1969), against a lower bound of the best.
    best = max(sum(sizes.values()) / count, max(sizes.values(), default=0))
    assert max(loads) <= (4 / 3) * best + max(sizes.values(), default=0)
