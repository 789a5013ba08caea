"""Copies in shared memory: what is left of them when a rank is killed while it writes."""

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from zorse_megatron.errors import OutputError
from zorse_megatron.migration.mirror.choice import Copy
from zorse_megatron.migration.mirror.files import MirrorFolder

TRAINING = ("--num-layers 4", "/checkpoints")


def folder(root: Path, *training: str) -> MirrorFolder:
    return MirrorFolder(training or TRAINING, node="a", root=root)


def copy(iteration: int, rank: int = 0, start: str = "s") -> Copy:
    return Copy(iteration=iteration, world_size=2, start=start, rank=rank, node="a")


def content(iteration: int) -> list[bytes]:
    return [f"{iteration}\n".encode() * 1000, bytes(range(256))]


def test_two_versions_of_each_rank_are_kept_as_written(tmp_path: Path) -> None:
    here = folder(tmp_path)
    for iteration in (8, 9, 10, 11):
        for rank in (0, 1):
            here.write(copy(iteration, rank), content(iteration))
    expected = {copy(iteration, rank) for iteration in (10, 11) for rank in (0, 1)}
    assert set(folder(tmp_path).copies()) == expected
    for each in expected:
        assert folder(tmp_path).read(each) == b"".join(content(each.iteration))
    assert here.read(copy(9)) is None
    assert len(list(here.path.iterdir())) == len(expected)


def test_a_killed_writer_leaves_the_versions_before(tmp_path: Path) -> None:
    here = folder(tmp_path)
    for iteration in (1, 2):
        here.write(copy(iteration), content(iteration))

    def killed_half_way() -> Iterator[bytes]:
        yield content(3)[0]
        os.kill(os.getpid(), signal.SIGKILL)

    writer = os.fork()
    if writer == 0:
        here.write(copy(3), killed_half_way())
        os._exit(0)
    assert os.WTERMSIG(os.waitpid(writer, 0)[1]) == signal.SIGKILL
    assert list(here.copies()) == [copy(2)]
    assert here.read(copy(2)) == b"".join(content(2))
    assert len(list(here.path.iterdir())) == 2
    here.clear_unfinished()
    assert len(list(here.path.iterdir())) == 1
    here.clear()
    assert not here.path.exists()


def test_another_training_sees_nothing_of_it(tmp_path: Path) -> None:
    folder(tmp_path).write(copy(1), content(1))
    assert not list(folder(tmp_path, "--num-layers 4", "/others").copies())
    folder(tmp_path, "--num-layers 4", "/others").clear()
    assert list(folder(tmp_path).copies()) == [copy(1)]


def test_copies_of_the_start_before_stay_until_they_are_let_go(tmp_path: Path) -> None:
    here = folder(tmp_path)
    for each in (copy(1), copy(2), copy(2, start="t"), copy(3, start="t")):
        here.write(each, content(each.iteration))
    assert len(list(here.copies())) == 4
    here.keep_only("s", 2)
    assert list(here.copies()) == [copy(2)]
    here.keep_only("t")
    assert not list(here.copies())


def test_memory_that_is_full_is_named() -> None:
    full = Path("/dev/full")
    with pytest.raises(OutputError, match="could not be mirrored"):
        folder(full).write(copy(1), content(1))


def test_a_folder_that_another_user_made_is_not_touched(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    here = folder(tmp_path)
    here.write(copy(1), content(1))
    user = os.getuid()
    monkeypatch.setattr(os, "getuid", lambda: user + 1)
    assert_refused(here)
    monkeypatch.undo()
    assert list(here.copies()) == [copy(1)]


def test_a_link_is_not_followed(tmp_path: Path) -> None:
    here, other = folder(tmp_path), folder(tmp_path, "other")
    here.write(copy(1), content(1))
    other.path.symlink_to(here.path)
    assert_refused(other)
    assert list(here.copies()) == [copy(1)]


def test_two_ranks_of_a_node_may_clear_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    here = folder(tmp_path)
    here.write(copy(1), content(1))

    def after_another_rank(self: MirrorFolder) -> bool:
        monkeypatch.undo()
        folder(tmp_path).clear()
        return True

    monkeypatch.setattr(MirrorFolder, "_is_own", after_another_rank)
    here.clear()
    assert not here.path.exists()


def test_what_is_no_copy_is_passed_over(tmp_path: Path) -> None:
    here = folder(tmp_path)
    here.write(copy(1), content(1))
    (here.path / "iter-directory").mkdir()
    (here.path / "iter-cut").write_bytes(b'zorse-mirror 1\n{"iteration": 9, ')
    assert list(here.copies()) == [copy(1)]


def test_one_copy_is_let_go_and_others_cannot_be_read_by_others(tmp_path: Path) -> None:
    here = folder(tmp_path)
    kept, path = copy(1, rank=1), here.write(copy(1), content(1))
    assert here.write(kept, content(1)).stat().st_mode & 0o777 == 0o600
    # A file of the right name, but of another version.
    path.write_bytes(path.read_bytes().replace(b'"iteration": 1', b'"iteration": 2'))
    assert here.read(copy(1)) is None
    path.write_bytes(path.read_bytes().replace(b'"iteration": 2', b'"iteration": 1'))
    here.drop(copy(1))
    assert list(here.copies()) == [kept]


def assert_refused(found: MirrorFolder) -> None:
    assert not list(found.copies())
    assert found.read(copy(1)) is None
    found.clear()
    with pytest.raises(OutputError, match="another user, or a link"):
        found.write(copy(2), content(2))
