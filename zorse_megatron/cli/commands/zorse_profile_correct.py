"""`zorse profile correct`: a profile that knows what a run took, by kind or by GPU."""

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import typer

from zorse_megatron.cli.console import CommandError, print_json, print_plain, reported_errors
from zorse_megatron.cli.options import AsJson
from zorse_megatron.costs.own_speeds import GpuSpeed, with_own_speeds
from zorse_megatron.errors import Problem
from zorse_megatron.files.writable import refuse_unwritable
from zorse_megatron.files.write import write_text
from zorse_megatron.schema.cluster.cluster_yaml import CLUSTER_FILE, parse_cluster
from zorse_megatron.schema.profile.profile_correct import corrected
from zorse_megatron.schema.profile.profile_json import load_profile, save_profile
from zorse_megatron.schema.status.status import Status
from zorse_megatron.schema.status.status_json import load_status
from zorse_megatron.schema.text.strict import read_file


def correct(  # noqa: PLR0917
    path: Annotated[Path, typer.Argument(metavar="PROFILE", help="What the plan was made from.")],
    directory: Annotated[
        Path, typer.Argument(metavar="DIR", help="What the run has as --zorse-status.")
    ],
    out: Annotated[Path, typer.Option(metavar="PROFILE", help="Write the profile here.")],
    cluster: Annotated[
        Path | None,
        typer.Option(
            metavar="YAML",
            help="The cluster file: a GPU that differs from the others of its kind becomes a kind "
            "of its own. Needs --cluster-out.",
        ),
    ] = None,
    cluster_out: Annotated[
        Path | None, typer.Option(metavar="YAML", help="Write the cluster file with such kinds.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Scale the times of a kind of GPU, or of single GPUs, by what a run took."""
    with reported_errors(as_json=as_json):
        problems = list(_problems(cluster, cluster_out))
        if problems:
            raise CommandError("the command cannot be run", problems)
        inputs = [path, directory, *([cluster] if cluster else [])]
        refuse_unwritable({"--out": out, "--cluster-out": cluster_out}, inputs=inputs)
        status = load_status(directory)
        origin = f"{path}, scaled by iteration {status.iteration} of a run of plan {status.plan}"
        if cluster is None or cluster_out is None:
            found = corrected(load_profile(path), status, origin=origin)
            save_profile(found.profile, out)
            answer: dict[str, Any] = {"factors": dict(found.factors), "notes": list(found.notes)}
        else:
            answer = _by_gpu(path, status, cluster, out=out, cluster_out=cluster_out, origin=origin)
    if as_json:
        print_json({"ok": True, "profile": str(out), **answer})
        return
    said = ", ".join(f"{kind} times {factor:.3g}" for kind, factor in answer["factors"].items())
    print_plain(f"{out}: {said or 'nothing to correct'}")
    for note in answer["notes"]:
        print_plain(f"note: {note}")


def _by_gpu(
    path: Path, status: Status, cluster: Path, *, out: Path, cluster_out: Path, origin: str
) -> dict[str, Any]:
    """Write both files; return what has been found."""
    data, profile = read_file(cluster, CLUSTER_FILE), load_profile(path)
    problems = list(_other_cluster(status, parse_cluster(data, source=str(cluster)).gpu_kinds))
    if problems:
        raise CommandError(f"{cluster} cannot be corrected by this run", problems)
    corrected(profile, status, origin=origin)  # for what it refuses
    speeds = [
        GpuSpeed(factor=each.slowdown, noise=each.noise or 0.0)
        if each.slowdown and each.planned_micro_batch_s
        else None
        for each in status.ranks
    ]
    found = with_own_speeds(data, profile, speeds, origin=origin, source=str(cluster))
    assert found.profile is not None
    save_profile(found.profile, out)
    write_text(cluster_out, found.cluster)
    ranks = [f"rank {rank} is {kind}" for rank, kind in enumerate(found.kinds)]
    return {
        "cluster": str(cluster_out),
        "factors": {kind: factor for kind, (_, factor) in found.factors.items()},
        "notes": [
            each for each, kind in zip(ranks, found.kinds, strict=True) if kind in found.factors
        ],
    }


def _problems(cluster: Path | None, cluster_out: Path | None) -> Iterator[Problem]:
    if (cluster is None) != (cluster_out is None):
        yield Problem(
            where="--cluster, --cluster-out",
            found="one of the two",
            expected="both or neither",
            remedy="Give the cluster file and where to write the one with kinds of their own.",
        )


def _other_cluster(status: Status, kinds: tuple[str, ...]) -> Iterator[Problem]:
    theirs = tuple(each.kind for each in status.ranks)
    if theirs != kinds:
        yield Problem(
            where="gpu_kinds of the ranks",
            found=", ".join(kinds),
            expected=", ".join(each or "unknown" for each in theirs),
            remedy="Give the cluster file that the run's plan was made for.",
        )
