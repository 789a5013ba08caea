"""The recording entry on nodes that see the tracker file late: on rank 1 it says `6` all the time,
and the last rank does not see it at all.
"""

import io
import os
from typing import Any

from tests.megatron.recording_entry import record
from zorse_megatron.adapter import cpu_mode
from zorse_megatron.live.checkpoint_files import TRACKER


class Instead:
    """An object with some other attributes."""

    def __init__(self, target: Any, **others: Any) -> None:
        self._target = target
        vars(self).update(others)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._target, name)


def see_late(checkpointing: Any) -> None:
    storage = checkpointing.maybe_msc

    def open_late(path: Any, *args: Any, **kwargs: Any) -> Any:
        is_tracker = os.path.basename(path) == TRACKER
        return io.StringIO("6") if is_tracker else storage.open(path, *args, **kwargs)

    def is_file(path: Any) -> bool:
        return os.path.basename(path) != TRACKER and os.path.isfile(path)

    if os.environ["RANK"] == "1":
        checkpointing.maybe_msc = Instead(storage, open=open_late)
    elif int(os.environ["RANK"]) == int(os.environ["WORLD_SIZE"]) - 1:
        seen = Instead(os, path=Instead(os.path, isfile=is_file))
        checkpointing.maybe_msc = Instead(storage, os=seen)


if __name__ == "__main__":
    if cpu_mode.needed():
        cpu_mode.enable()
    from megatron.training import checkpointing

    see_late(checkpointing)
    record()
