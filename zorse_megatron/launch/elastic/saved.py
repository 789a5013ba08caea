"""What a job has saved, for those who decide how it goes on."""

from pathlib import Path

from zorse_megatron.checkpoints.check import look_at
from zorse_megatron.checkpoints.folder import checkpoints_in, read_tracker


def newest_saved(save: str | None) -> int | None:
    """Return the iteration of the newest checkpoint that is complete by names and sizes.

    `save`: the folder of `--save`. None: there is none, or the folder cannot be read.
    """
    if save is None:
        return None
    try:
        for checkpoint in checkpoints_in(Path(save)):
            if look_at(checkpoint).is_usable:
                return checkpoint.iteration
    except OSError:
        pass
    return None


def latest_named(save: str | None) -> str:
    """Return what the tracker file says, which changes with every save; "" if there is none."""
    if save is None:
        return ""
    try:
        return read_tracker(Path(save)).text
    except OSError:
        return ""
