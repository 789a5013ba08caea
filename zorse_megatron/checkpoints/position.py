"""How far the newest checkpoint of a folder is, by what little can be read of it in no time."""

from pathlib import Path

from zorse_megatron.checkpoints.choice import Chooser, Load
from zorse_megatron.checkpoints.folder import Checkpoint, read_tracker
from zorse_megatron.errors import ZorseError

UNKNOWN = float("inf")
NONE = -1.0


def position_at_a_look(root: Path) -> float:
    """Return the iteration of the checkpoint that training would resume from, by names and sizes.

    Of a damaged one it is the iteration that it has by its name: state that is newer needs none of
    it. `NONE`: there is none, or one that was released; `UNKNOWN`: the folder does not say.
    """
    try:
        found = Chooser(Load(root=root)).choose()
        return NONE if found is None else _of(found.checkpoint)
    except (ZorseError, OSError):
        return _named(root)


def _named(root: Path) -> float:
    try:
        named = read_tracker(root).names
    except OSError:
        return UNKNOWN
    return UNKNOWN if named is None else _of(named)


def _of(checkpoint: Checkpoint) -> float:
    return NONE if checkpoint.is_release else checkpoint.iteration
