"""`zorse checkpoint verify`: for people, for programs, and its exit codes."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from tests.unit.checkpoint_folders import flip, save
from zorse_megatron.cli.main import app
from zorse_megatron.live.checkpoint_files import TRACKER


def verify(folder: Path, *options: str) -> tuple[int, str]:
    result = CliRunner().invoke(app, ["checkpoint", "verify", str(folder), *options])
    return result.exit_code, result.output


def states(folder: Path, *options: str) -> dict[int, tuple[str, bool]]:
    _, output = verify(folder, "--json", *options)
    listed = json.loads(output)["checkpoints"]
    return {each["iteration"]: (each["state"], each["read"]) for each in listed}


def test_reads_until_one_is_whole(tmp_path: Path) -> None:
    for iteration in (2, 4, 6):
        save(tmp_path, iteration)
    assert verify(tmp_path)[0] == 0
    flip(tmp_path / "iter_0000006" / "__0_0.distcp")
    code, output = verify(tmp_path)
    assert code == 1
    assert "iter_0000006 (latest)" in output and "damaged" in output
    assert "the newest to resume from is iteration 4" in output
    assert states(tmp_path) == {
        6: ("damaged", False),
        4: ("whole", True),
        2: ("whole", False),
    }
    assert states(tmp_path, "--all")[2] == ("whole", True)
    assert states(tmp_path, "--sizes")[6] == ("whole", False), "a flipped byte has no size"
    answer = json.loads(verify(tmp_path, "--json")[1])
    assert (answer["ok"], answer["latest"], answer["newest_usable"]) == (False, 6, 4)
    assert "__0_0.distcp" in answer["problems"][0]["where"]


@pytest.mark.parametrize("text", ["", "x", None])
def test_says_what_is_wrong_with_the_tracker(text: str | None, tmp_path: Path) -> None:
    save(tmp_path, 4)
    if text is None:
        (tmp_path / TRACKER).unlink()
    else:
        (tmp_path / TRACKER).write_text(text)
    code, output = verify(tmp_path)
    assert code == 1 and TRACKER in output and "iteration 4" in output


def test_the_latest_may_not_be_there(tmp_path: Path) -> None:
    (tmp_path / TRACKER).write_text("7")
    code, output = verify(tmp_path)
    assert code == 1 and "iter_0000007" in output
