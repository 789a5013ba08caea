"""All ranks load the checkpoint that rank 0 has chosen, whatever the tracker file says to each.

Stock lets every rank read the tracker file, and takes the highest iteration that one of them finds.
Where rank 0 has just set the tracker back, another node may still see it as it was (NFS keeps what
it has read for a while), and all ranks would load what was found to be damaged.
"""

from argparse import Namespace
from collections.abc import Callable
from typing import Any

from zorse_megatron.adapter.rebind import Rebinding
from zorse_megatron.adapter.versions import MEGATRON_VERSIONS
from zorse_megatron.checkpoints.choice import Load
from zorse_megatron.checkpoints.folder import Checkpoint

_TEST = "tests/megatron/test_damaged_checkpoints.py"


def same_on_all(args: Namespace, load: Load | None, chosen: Checkpoint | None) -> list[Rebinding]:
    """Set `--ckpt-step`, and return what keeps ranks from reading tracker files.

    `chosen`: the same on all ranks; None: there is nothing to load.
    """
    if load is None or chosen is None:
        return []
    is_persistent = chosen.root != load.non_persistent
    if is_persistent and not chosen.is_release and args.ckpt_step is None:
        args.ckpt_step = chosen.iteration  # also where this rank sees no tracker file
    records = [_tracker_record(chosen)]
    if load.non_persistent is not None:
        records.append(_non_persistent_record(-1 if is_persistent else chosen.iteration))
    return records


def _tracker_record(chosen: Checkpoint) -> Rebinding:
    def make(_stock: Callable[..., Any]) -> Callable[..., Any]:
        def read_metadata(tracker_filename: Any) -> tuple[int, bool]:
            return chosen.iteration, chosen.is_release

        return read_metadata

    return Rebinding(
        target="megatron.training.checkpointing:read_metadata",
        make=make,
        parameters=("tracker_filename",),
        why="of what ranks read stock takes the highest iteration; a node that still sees the "
        "tracker file as it was would have all ranks load a damaged checkpoint",
        versions=MEGATRON_VERSIONS,
        test=_TEST,
        delete_when="rank 0 reads the tracker file for all",
    )


def _non_persistent_record(iteration: int) -> Rebinding:
    """`iteration`: of the checkpoint to load; -1: it is none of these."""

    def make(_stock: Callable[..., Any]) -> Callable[..., Any]:
        def get_iteration(*_args: Any, **_kwargs: Any) -> int:
            return iteration

        return get_iteration

    return Rebinding(
        target="megatron.training.checkpointing:_get_non_persistent_iteration",
        make=make,
        parameters=("non_persistent_global_dir", "args", "checkpointing_context"),
        why="the same of the folder of --non-persistent-save-interval",
        versions=MEGATRON_VERSIONS,
        test=_TEST,
        delete_when="rank 0 reads the tracker file for all",
    )
