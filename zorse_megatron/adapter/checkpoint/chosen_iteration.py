"""All ranks load the checkpoint that rank 0 has chosen, whatever the tracker file says to each.

Stock lets every rank read the tracker file, and takes the highest iteration that one of them finds.
Where rank 0 has just set the tracker back, another node may still see it as it was (NFS keeps what
it has read for a while), and all ranks would load what was found to be damaged.
"""

from argparse import Namespace
from collections.abc import Callable
from functools import partial
from typing import Any

from zorse_megatron.adapter.patches import checkpoints
from zorse_megatron.adapter.patches.rebind import Replacements
from zorse_megatron.checkpoints.choice import Load
from zorse_megatron.checkpoints.folder import Checkpoint


def same_on_all(args: Namespace, load: Load | None, chosen: Checkpoint | None) -> Replacements:
    """Set `--ckpt-step`, and return what keeps ranks from reading tracker files.

    `chosen`: the same on all ranks; None: there is nothing to load.
    """
    if load is None or chosen is None:
        return {}
    if not chosen.is_release and args.ckpt_step is None:
        args.ckpt_step = chosen.iteration  # also where this rank sees no tracker file
    tracker = chosen.iteration, chosen.is_release
    return {checkpoints.READ_TRACKER: partial(_always, tracker)}


def _always(answer: Any, _stock: Callable[..., Any]) -> Callable[..., Any]:
    def known(*_args: Any, **_kwargs: Any) -> Any:
        return answer

    return known
