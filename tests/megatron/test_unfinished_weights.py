"""Imports and exports that fail, are stopped or killed: nothing that is left passes for whole."""

import json
import os
import signal
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from tests.megatron.small_models import made_models
from tests.megatron.test_weights import assert_same_model
from zorse_megatron.cli.main import app
from zorse_megatron.errors import OutputError
from zorse_megatron.live.checkpoint_check import State, look_at
from zorse_megatron.live.checkpoint_files import TRACKER, read_tracker
from zorse_megatron.weights import convert
from zorse_megatron.weights.convert import export_model, import_model


@pytest.fixture(scope="module")
def models() -> Path:
    return made_models()


def test_a_failed_write_is_told_in_one_line(
    models: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What torch wraps in a traceback; and nothing stays."""

    def fail(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(convert.ModelFiles, "read", fail)
    with pytest.raises(OutputError) as caught:
        import_model(models / "llama", tmp_path / "full")
    assert "No space left" in str(caught.value) and "Traceback" not in str(caught.value)
    assert not (tmp_path / "full").exists()


def test_a_stopped_import_leaves_nothing(
    models: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SIGTERM in the middle of the tensors, as of a scheduler."""
    monkeypatch.setattr(convert.ModelFiles, "read", lambda *_: signal.raise_signal(signal.SIGTERM))
    words = ["import-hf", str(models / "llama"), str(tmp_path / "stopped")]
    assert CliRunner().invoke(app, words).exit_code == 128 + signal.SIGTERM
    assert not (tmp_path / "stopped").exists()


def _killed_at(step: int, folder: Path, run: Callable[[], Any]) -> bool:
    """Fork, and kill the child before one of the steps that make, write or rename a file there.

    Temporary files are written within a step.
    """
    left = step

    def count(event: str, args: tuple[Any, ...]) -> None:
        nonlocal left
        path = Path(str(args[0])) if event in ("open", "os.mkdir", "os.rename") else Path()
        writes = event != "open" or (args[2] & os.O_ACCMODE and not path.name.startswith(".zorse-"))
        if path.is_relative_to(folder) and writes:
            left -= 1
            if left < 0:
                os.kill(os.getpid(), signal.SIGKILL)

    child = os.fork()
    if child == 0:
        sys.addaudithook(count)
        try:
            run()
        finally:
            os._exit(0)
    return os.WIFSIGNALED(os.waitpid(child, 0)[1])


@pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork:DeprecationWarning")
def test_sigkill_leaves_nothing_that_passes_for_whole(models: Path, tmp_path: Path) -> None:
    """At any step: what is left is refused by those who load it, and by a second try."""
    whole = tmp_path / "whole"
    import_model(models / "llama", whole)

    def import_to(folder: Path) -> None:
        import_model(models / "llama", folder)

    def export_to(folder: Path) -> None:
        export_model(whole, folder, source=models / "llama", shard_bytes=400_000)

    for run, last in ((import_to, TRACKER), (export_to, "config.json")):
        step, refused = 0, 0
        while _killed_at(step, folder := tmp_path / f"{last}-{step}", partial(run, folder)):
            step += 1
            assert not _is_finished(folder, models / "llama")
            if folder.exists() and any(folder.iterdir()):
                with pytest.raises(OutputError, match=f"was killed.*: rm -r {folder}"):
                    run(folder)
                refused += 1
        assert _is_finished(folder, models / "llama") and refused > 4, last


def _is_finished(folder: Path, source: Path) -> bool:
    """Whether Megatron or transformers would load it; then it must be whole."""
    latest = read_tracker(folder).names
    if latest is not None:
        assert look_at(latest).state is State.WHOLE
        return True
    try:
        json.loads((folder / "config.json").read_text())
    except (OSError, ValueError):
        return False
    assert_same_model(folder, source)
    return True


def test_what_cannot_be_written_leaves_nothing(
    models: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither where files are already, nor half a checkpoint."""
    used = tmp_path / "used"
    used.mkdir()
    (used / "mine").touch()
    with pytest.raises(OutputError, match="not empty"):
        import_model(models / "llama", used)
    assert [each.name for each in used.iterdir()] == ["mine"]

    def fail(*_: Any, **__: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(convert, "write_manifest", fail)
    with pytest.raises(OutputError, match="No space left"):
        import_model(models / "llama", tmp_path / "new/full")
    assert not (tmp_path / "new").exists()
