"""A folder of checkpoints has one writer, on one host or several; what is left behind is taken."""

import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from zorse_megatron.errors import CheckpointError
from zorse_megatron.live import one_writer
from zorse_megatron.live.one_writer import WRITER_NAME, OneWriter, Writer

BEAT_S = 0.1


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, seconds in (("_BEAT_S", BEAT_S), ("_SILENT_S", 8 * BEAT_S), ("_LOOK_S", BEAT_S / 2)):
        monkeypatch.setattr(one_writer, name, seconds)


@pytest.fixture
def told() -> list[str]:
    return []


@pytest.fixture
def first(tmp_path: Path, told: list[str]) -> Iterator[OneWriter]:
    found = OneWriter(tmp_path / "checkpoints", "", tell=told.append)
    yield found
    found.release()


def left_by(writer: Writer, folder: Path) -> None:
    folder.mkdir(exist_ok=True)
    (folder / WRITER_NAME).write_text(json.dumps(asdict(writer)))


def elsewhere(writer: Writer) -> Writer:
    """The same on another host, where numbers of processes are others."""
    return replace(writer, host="other", place="another start", token="other")


def test_a_second_job_is_refused_by_name(first: OneWriter, told: list[str]) -> None:
    with pytest.raises(CheckpointError, match=rf"process {os.getpid()} on .*since 20\d\d-"):
        OneWriter(first.path.parent, "", tell=told.append)
    first.check()
    assert not told
    first.release()
    assert not first.path.exists()
    OneWriter(first.path.parent, "", tell=told.append).release()


def test_a_job_on_another_host_is_known_by_its_signs(
    first: OneWriter, told: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(one_writer, "_SILENT_S", 30.0)  # the first sign ends it
    mine = first._me
    # The other one's file, which it touches.
    first._me = elsewhere(mine)
    left_by(first._me, first.path.parent)
    with pytest.raises(CheckpointError, match=f"process {os.getpid()} on other"):
        OneWriter(first.path.parent, "", tell=told.append)
    assert "for a sign of who has" in told[0]


@pytest.mark.parametrize("where", ["here", "elsewhere", "of this run", "half"])
def test_what_is_left_behind_is_told_and_taken(where: str, tmp_path: Path, told: list[str]) -> None:
    ended = subprocess.Popen([sys.executable, "-c", ""])
    dead = replace(Writer.of_this_process("run"), process=ended.pid, token="dead")
    if where == "here":  # not waited for: it is a zombie
        os.waitid(os.P_PID, ended.pid, os.WEXITED | os.WNOWAIT)
        dead = replace(dead, ticks=_ticks_of_zombie(ended.pid))
    elif where == "half":
        (tmp_path / WRITER_NAME).write_text('{"host": "oth')
    else:
        dead = elsewhere(dead)
    if where != "half":
        left_by(dead, tmp_path)
    run = "run" if where == "of this run" else ""
    now = OneWriter(tmp_path, run, tell=told.append)
    ended.wait()
    who = "nobody known" if where == "half" else f"process {ended.pid} on {dead.host}, since"
    assert who in told[-1] and "which is gone" in told[-1]
    assert len(told) == (2 if where in ("elsewhere", "half") else 1)
    now.check()
    now.release()


def test_a_process_of_the_same_run_may_take_its_time_to_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(one_writer, "_SILENT_S", 30.0)  # its end ends it
    waits = [sys.executable, "-c", "import sys; sys.stdin.read()"]
    ending = subprocess.Popen(waits, stdin=subprocess.PIPE)
    other = replace(Writer.of_this_process("run"), process=ending.pid, token="ending")
    left_by(replace(other, ticks=_ticks_of_zombie(ending.pid)), tmp_path)
    with pytest.raises(CheckpointError, match=f"process {ending.pid} on"):
        OneWriter(tmp_path, "another run", tell=str)
    threading.Timer(3 * BEAT_S, ending.communicate).start()
    OneWriter(tmp_path, "run", tell=str).release()
    assert ending.wait() == 0


def _ticks_of_zombie(process: int) -> int:
    return int(Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[19])


def test_a_number_that_is_used_again_is_another_process(tmp_path: Path, told: list[str]) -> None:
    other = replace(Writer.of_this_process(""), ticks=1, token="other")
    left_by(other, tmp_path)
    OneWriter(tmp_path, "", tell=told.append).release()
    assert "which is gone" in told[0]


def test_who_was_silent_saves_no_more(first: OneWriter) -> None:
    """As a process that was stopped for long, whose folder another job has taken."""
    left_by(elsewhere(first._me), first.path.parent)
    with pytest.raises(CheckpointError, match=r"on other, since .* writing there"):
        first.check()
    first.release()
    assert first.path.exists(), "it is the other one's"


def test_of_many_at_a_time_one_gets_the_folder(tmp_path: Path) -> None:
    left_by(replace(Writer.of_this_process(""), ticks=1, token="dead"), tmp_path)
    got: list[OneWriter] = []
    refused: list[CheckpointError] = []

    def take() -> None:
        try:
            got.append(OneWriter(tmp_path, "", tell=lambda _: None))
        except CheckpointError as error:
            refused.append(error)

    threads = [threading.Thread(target=take) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    owners = [each for each in got if each._taken_by is None and each._there() == each._me]
    assert len(owners) == 1
    for each in got:
        if each not in owners:
            with pytest.raises(CheckpointError):
                each.check()
        each.release()
    assert len(got) + len(refused) == 8
