"""`zorse discover`: measure a cluster, and write its cluster file."""

import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from zorse_megatron.cli.console import (
    OnProgress,
    print_answer,
    progress_bar,
    reported_errors,
)
from zorse_megatron.cli.options import AsJson
from zorse_megatron.extras import refuse_without
from zorse_megatron.files.writable import refuse_unwritable
from zorse_megatron.launch.rank_environment import LaunchedRank, launched_rank
from zorse_megatron.schema.text.counted import number_of

if TYPE_CHECKING:
    from zorse_megatron.measure.on_ranks.cluster_discovery import Discovered


_LARGEST_MB = 64.0
_TIME_LIMIT_S = 2.0
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


def discover(  # noqa: PLR0917
    output: Annotated[
        Path, typer.Option("--out", metavar="YAML", help="Write the cluster file here.")
    ] = Path("cluster.yaml"),
    profile: Annotated[
        Path | None,
        typer.Option(
            "--profile",
            metavar="JSON",
            help="Write measured transfer times here. Default: profile.json beside the cluster "
            "file.",
        ),
    ] = None,
    name: Annotated[str | None, typer.Option(help="Name of the cluster.")] = None,
    largest_mb: Annotated[
        float, typer.Option(min=0.001, max=4096, help="Largest message, in MB (10^6 bytes).")
    ] = _LARGEST_MB,
    time_limit: Annotated[
        float,
        typer.Option(min=0, help="Stop growing messages once one takes this many seconds."),
    ] = _TIME_LIMIT_S,
    again: Again = False,
    as_json: AsJson = False,
) -> None:
    """Measure the devices and links of the nodes it runs on, with one rank per GPU.

    Start it with srun or torchrun. On nodes without GPUs it measures CPU ranks.
    """
    profile = profile or output.with_name("profile.json")
    with reported_errors(as_json=as_json):
        # Both are read back, by this command or a later run of it.
        refuse_unwritable({"--out": output, "--profile": profile}, may_be_stream=False)
    with as_ranks("discover", messages_on_gpu=True, as_json=as_json) as (launched, show):
        from zorse_megatron.measure.on_ranks.cluster_discovery import Discovery
        from zorse_megatron.measure.on_ranks.cluster_discovery import discover as measure

        wanted = Discovery(
            cluster=output,
            profile=profile,
            again=again,
            largest_bytes=round(1e6 * largest_mb),
            time_limit_s=time_limit,
            name=name,
        )
        found = measure(launched, wanted, show)
    if launched.rank == 0:
        _say(output, profile, found, as_json=as_json)


def _say(output: Path, profile: Path, found: "Discovered", *, as_json: bool) -> None:
    ranks = sum(len(node.ranks) for node in found.nodes)
    kinds = list(dict.fromkeys(node.kind for node in found.nodes))
    values = {
        "cluster": str(output),
        "profile": str(profile),
        "nodes": len(found.nodes),
        "ranks": ranks,
        "node_kinds": kinds,
        "measured": found.num_measured,
        "known": found.num_known,
    }
    shown = [
        f"{output}: {number_of(len(found.nodes), 'node')} with {number_of(ranks, 'rank')}, "
        f"{number_of(found.num_measured, 'measurement')}",
        *(f"  {sum(node.kind == kind for node in found.nodes)} x [{kind}]" for kind in kinds),
    ]
    if not found.num_measured:
        shown.append("nothing left to measure; --again repeats the measurements")
    print_answer(values, shown, notes=found.notes, as_json=as_json)
