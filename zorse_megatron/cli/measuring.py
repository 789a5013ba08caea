"""What the measuring commands share: they run as the ranks of a job."""

import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Annotated

import typer

from zorse_megatron.cli.console import reported_errors
from zorse_megatron.cli.progress_display import OnProgress, progress_bar
from zorse_megatron.extras import refuse_without
from zorse_megatron.launch.rank_environment import LaunchedRank, launched_rank

Again = Annotated[
    bool, typer.Option("--again", help="Measure again even what the files already have.")
]


@contextmanager
def as_ranks(
    title: str, *, messages_on_gpu: bool, as_json: bool
) -> Iterator[tuple[LaunchedRank, OnProgress]]:
    """Run the block on every rank of the job; yields this rank, and what shows progress.

    Errors end every rank with its message and exit code 1, or 3 where another rank is gone.
    """
    # One answer for programs: the other ranks complain in words.
    is_first = os.environ.get("RANK", os.environ.get("SLURM_PROCID", "0")) == "0"
    with reported_errors(as_json=as_json and is_first):
        refuse_without("train", what=f"measuring ({title})")
        launched = launched_rank(os.environ, socket.gethostname())
        # Here and not above: other commands start without torch.
        from zorse_megatron.measure.on_ranks.ranks import measuring_job

        with (
            # This one first: it forks, and the progress bar has a thread.
            measuring_job(launched, messages_on_gpu=messages_on_gpu),
            progress_bar(wanted=launched.rank == 0, title=title) as show,
        ):
            yield launched, show or (lambda _progress: None)
