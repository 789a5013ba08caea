"""What the commands that measure have in common: they run as the ranks of a job."""

import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Annotated

import typer

from zorse_megatron.cli.console import reported_errors
from zorse_megatron.cli.progress import OnProgress, progress_bar
from zorse_megatron.extras import refuse_without
from zorse_megatron.measure.ranks_env import RankPlace, rank_place

Again = Annotated[
    bool, typer.Option("--again", help="Measure once more what was measured already.")
]
RankTimeout = Annotated[
    float,
    typer.Option(
        min=1.0, help="A rank that is silent for half of so many seconds stops all ranks."
    ),
]
DEFAULT_RANK_TIMEOUT_S = 60.0


@contextmanager
def as_ranks(
    rank_timeout_s: float, title: str, *, messages_on_gpu: bool, as_json: bool
) -> Iterator[tuple[RankPlace, OnProgress]]:
    """Run the block on every rank of the job; yields this rank, and what shows progress.

    Errors end every rank with its message and exit code 1, or 3 where another rank is gone.
    """
    # One answer for programs: the other ranks complain in words.
    is_first = os.environ.get("RANK", os.environ.get("SLURM_PROCID", "0")) == "0"
    with reported_errors(as_json=as_json and is_first):
        refuse_without("train", what=f"measuring ({title})")
        place = rank_place(os.environ, socket.gethostname())
        # Here and not above: other commands start without torch.
        from zorse_megatron.measure.job import measuring_job

        with (
            progress_bar(wanted=place.rank == 0, title=title) as show,
            measuring_job(place, timeout_s=rank_timeout_s, messages_on_gpu=messages_on_gpu),
        ):
            yield place, show or (lambda _progress: None)
