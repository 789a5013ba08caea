"""Files are written in full, to regular files only, through symbolic links; or not at all."""

import os
import resource
import stat
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from zorse_megatron.errors import OutputError
from zorse_megatron.files.read_write import NotWritten, append_line, write_bytes, write_text
from zorse_megatron.files.writable import (
    disk_problem,
    folder_problems,
    refuse_unwritable,
    unwritable_problems,
)

NAMES = st.sampled_from(["a", "b", "c"])
MODES = st.sampled_from([0o600, 0o640, 0o644, 0o664, 0o755])
PLACES = st.one_of(
    st.tuples(st.just("nothing"), NAMES),
    st.tuples(st.just("file"), NAMES, MODES),
    st.tuples(st.just("directory"), NAMES),
    st.tuples(st.just("FIFO"), NAMES),
    st.tuples(st.just("link"), NAMES, NAMES),
    st.tuples(st.just("outside"), NAMES),
)


def made(directory, places):
    """Put things into a directory; of several with one name the first."""
    for what, name, *more in places:
        path = directory / name
        if path.is_symlink() or path.exists():
            continue
        if what == "file":
            path.write_bytes(b"old")
            path.chmod(more[0])
        elif what == "directory":
            path.mkdir()
        elif what == "FIFO":
            os.mkfifo(path)
        elif what == "link":
            path.symlink_to(more[0])
        elif what == "outside":
            path.symlink_to("no/such/place")


def states(directory):
    """Name -> what is there, links not followed."""
    return {
        path.name: (
            path.lstat().st_mode,
            os.readlink(path) if path.is_symlink() else None,
            path.read_bytes() if stat.S_ISREG(path.lstat().st_mode) else None,
        )
        for path in directory.iterdir()
    }


def end_of(path):
    """Where a chain of links leads, by walking it; None where it goes in circles."""
    for _ in range(50):
        if not path.is_symlink():
            return path
        path = path.parent / os.readlink(path)
    return None


@given(places=st.lists(PLACES, max_size=5), name=NAMES, data=st.binary(max_size=20))
def test_a_file_is_written_through_links_or_nothing_is_changed(places, name, data):
    with tempfile.TemporaryDirectory() as text:
        directory = Path(text)
        made(directory, places)
        path, before = directory / name, states(directory)
        target = end_of(path)
        takes = (
            target is not None
            and target.parent == directory
            and (not target.exists() or target.is_file())
        )
        told = list(unwritable_problems({"--out": path}))
        assert states(directory) == before  # asking changes nothing
        assert bool(told) == (not takes)
        if not takes:
            with pytest.raises(NotWritten) as caught:
                write_bytes(path, data)
            assert states(directory) == before
            assert caught.value.kept.read_bytes() == data
            caught.value.kept.unlink()
            return
        write_bytes(path, data)
        after = states(directory)
        umask = os.umask(0)
        os.umask(umask)
        old = before.pop(target.name, (stat.S_IFREG | (0o666 & ~umask), None, None))
        assert after.pop(target.name) == (old[0], None, data)
        assert after == before


@given(places=st.lists(PLACES, max_size=5), name=NAMES, data=st.binary(max_size=20))
def test_a_file_takes_the_place_of_a_link_where_links_are_not_followed(places, name, data):
    with tempfile.TemporaryDirectory() as text:
        directory = Path(text)
        made(directory, places)
        path, before = directory / name, states(directory)
        takes = path.is_symlink() or path.is_file() or not path.exists()
        try:
            write_bytes(path, data, follows_link=False)
        except NotWritten as error:
            error.kept.unlink()
            assert not takes
        else:
            assert takes and not path.is_symlink() and path.read_bytes() == data
            before.pop(name, None)
        after = states(directory)
        assert {each: after[each] for each in before} == before
        assert after.keys() - before.keys() <= {name}


@pytest.mark.slow
@given(
    places=st.lists(PLACES, max_size=4), first=NAMES, second=NAMES, dot=st.sampled_from(["", "./"])
)
def test_two_outputs_to_one_file_are_refused(places, first, second, dot):
    with tempfile.TemporaryDirectory() as text:
        directory = Path(text)
        made(directory, places)
        one, other = Path(f"{text}/{first}"), Path(f"{text}/{dot}{second}")
        if any(list(unwritable_problems({"--out": path})) for path in (one, other)):
            return
        found = list(unwritable_problems({"--one": one, "--other": other}))
        assert bool(found) == (end_of(one) == end_of(other))
        assert all("the file of --one" in problem.found for problem in found)


def test_inputs_are_not_replaced(tmp_path):
    (tmp_path / "in").write_text("x")
    (tmp_path / "link").symlink_to("in")
    os.link(tmp_path / "in", tmp_path / "hard")
    for name in ("in", "link", "hard"):
        with pytest.raises(OutputError, match="a file that this command reads"):
            refuse_unwritable({"--out": tmp_path / name}, inputs=[tmp_path / "in"])


def test_devices_stay_devices():
    for name in ("/dev/null", "/dev/full"):
        before = os.lstat(name)
        with pytest.raises(NotWritten, match="found a device") as caught:
            write_text(name, "x")
        caught.value.kept.unlink()
        assert os.lstat(name).st_mode == before.st_mode


def test_a_folder_that_is_not_there_is_no_full_disk(tmp_path):
    assert disk_problem(tmp_path / "nowhere") is None


def test_a_directory_that_takes_no_file_is_found_before_the_work():
    with pytest.raises(OutputError, match="a directory that takes no file"):
        refuse_unwritable({"--out": Path("/proc/plan.json")})  # nobody may, root neither


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_permissions_are_heeded(tmp_path):
    (tmp_path / "file").touch(mode=0o444)
    (tmp_path / "directory").mkdir(mode=0o555)
    for name in ("file", "directory/new"):
        with pytest.raises(OutputError):
            refuse_unwritable({"--out": tmp_path / name})
        with pytest.raises(NotWritten):
            write_text(tmp_path / name, "x")


def test_folders_are_made_and_their_files_checked(tmp_path):
    (tmp_path / "here" / "a").mkdir(parents=True)
    found = list(folder_problems("--trace", tmp_path / "here", ["a", "b"]))
    assert [problem.found for problem in found] == ["a directory"]
    assert list(folder_problems("--trace", tmp_path / "new" / "one", ["a"])) == []
    assert (tmp_path / "new" / "one").is_dir()
    (tmp_path / "file").touch()
    for place in ("file", "file/under"):
        assert list(folder_problems("--trace", tmp_path / place))
    assert "takes no file" in next(folder_problems("--trace", Path("/proc"))).found


def python(code, **options):
    return subprocess.run(
        [sys.executable, "-c", code], check=False, capture_output=True, timeout=60, **options
    )


STREAM = """
from pathlib import Path
from zorse_megatron.files.read_write import write_text
print("before", end=" ")
write_text(PATH, "text")
print(" after", end="")
"""


@pytest.mark.parametrize("path", ["/dev/stdout", "/dev/fd/1", "/proc/self/fd/1", "link"])
def test_stdout_is_written_to_and_not_replaced(path, tmp_path):
    (tmp_path / "link").symlink_to("/dev/stdout")
    code = STREAM.replace("PATH", repr(path))
    assert python(code, cwd=tmp_path).stdout == b"before text after"
    with (tmp_path / "log").open("wb") as log:  # stdout is a regular file: not replaced either
        subprocess.run([sys.executable, "-c", code], stdout=log, cwd=tmp_path, check=True)
    assert (tmp_path / "log").read_bytes() == b"before text after"
    assert os.path.islink("/dev/stdout")


def test_a_stream_of_which_nothing_can_be_read_back_is_told():
    with pytest.raises(OutputError, match="nothing can be read back"):
        refuse_unwritable({"--output": Path("/dev/stdout")}, may_be_stream=False)


SMALL_FILES = """
import resource
from zorse_megatron.files.read_write import NotWritten, append_line, write_text
from pathlib import Path
resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))
LOG = Path("log")
for write in (
    lambda: write_text("plan.json", "x" * 5000),
    lambda: [append_line(LOG, "y" * 300) for _ in range(9)],
):
    try:
        write()
    except NotWritten as error:
        print(error.kept, error)
"""


def test_a_limit_on_the_size_of_files_leaves_what_was_there(tmp_path):
    assert resource.getrlimit(resource.RLIMIT_FSIZE)[0] != 0
    (tmp_path / "plan.json").write_text("old")
    done = python(SMALL_FILES, cwd=tmp_path, env={**os.environ, "TMPDIR": str(tmp_path)})
    assert done.stderr == b""
    assert done.stdout.count(b"None ") == 2
    assert done.stdout.count(b"ulimit -f") == 2
    # Nothing half, empty or temporary is left; the log has whole lines.
    assert sorted(each.name for each in tmp_path.iterdir()) == ["log", "plan.json"]
    assert (tmp_path / "plan.json").read_text() == "old"
    assert (tmp_path / "log").read_text() == ("y" * 300 + "\n") * 3


def test_the_longest_name_is_possible(tmp_path):
    write_text(tmp_path / ("n" * 255), "x")
    with pytest.raises(NotWritten) as caught:
        write_text(tmp_path / ("n" * 256), "x")
    caught.value.kept.unlink()


def test_lines_are_appended(tmp_path):
    (tmp_path / "link").symlink_to("log")
    for line in ("a", "b"):
        append_line(tmp_path / "link", line)
    assert (tmp_path / "log").read_text() == "a\nb\n"
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(NotWritten, match="found a FIFO"):
        append_line(tmp_path / "pipe", "a")
