"""What a job that has failed leaves behind."""

from pathlib import Path

from zorse_megatron.live.checkpoint_check import State, look_at
from zorse_megatron.live.checkpoint_files import Checkpoint, file_record, read_tracker


def assert_latest(root: Path, iteration: int) -> None:
    """The latest checkpoint is this one, and each of its files is the one that was saved."""
    latest = Checkpoint(root=root, iteration=iteration)
    assert read_tracker(root).names == latest
    look = look_at(latest)
    assert look.state is State.WHOLE and look.manifest is not None, look.problems
    for name, record in look.manifest.files.items():
        assert record == file_record(latest.folder / name), name
