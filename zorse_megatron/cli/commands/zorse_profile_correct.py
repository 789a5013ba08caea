"""`zorse profile correct`: a profile and a cluster file that know how fast a run's GPUs are."""

from pathlib import Path
from typing import Annotated

import typer

from zorse_megatron.cli.after_dashes import training_flags
from zorse_megatron.cli.console import print_json, print_plain, reported_errors
from zorse_megatron.cli.from_status import observed_run
from zorse_megatron.cli.options import AsJson, ClusterFile, DtypeName, Model, SeqLength
from zorse_megatron.cli.workload import workload_of
from zorse_megatron.files.writable import refuse_unwritable
from zorse_megatron.files.write import write_text
from zorse_megatron.schema.cluster.cluster_yaml import CLUSTER_FILE, dump_cluster, parse_cluster
from zorse_megatron.schema.plan.plan_json import load_plan
from zorse_megatron.schema.profile.profile_json import save_profile
from zorse_megatron.schema.status.status import RUNNING_PLAN_NAME
from zorse_megatron.schema.text.strict import read_file


def correct(  # noqa: PLR0917
    context: typer.Context,
    path: Annotated[Path, typer.Argument(metavar="PROFILE", help="What the plan was made from.")],
    directory: Annotated[
        Path, typer.Argument(metavar="DIR", help="What the run has as --zorse-status.")
    ],
    cluster: ClusterFile,
    out: Annotated[Path, typer.Option(metavar="PROFILE", help="Write the profile here.")],
    cluster_out: Annotated[
        Path, typer.Option(metavar="YAML", help="Write the cluster file with such kinds here.")
    ],
    model: Model = None,
    seq_length: SeqLength = None,
    dtype: DtypeName = None,
    as_json: AsJson = False,
) -> None:
    """Scale the times of GPUs by what a run took: one that differs becomes a kind of its own.

    The run is compared with its plan as the profile has it, as by zorse plan --from-status.
    """
    with reported_errors(as_json=as_json):
        refuse_unwritable(
            {"--out": out, "--cluster-out": cluster_out}, inputs=[path, directory, cluster]
        )
        run = observed_run(
            directory,
            read_file(cluster, CLUSTER_FILE),
            workload_of(
                model=model,
                flags=training_flags(context),
                seq_length=seq_length,
                dtype=dtype,
                plan=load_plan(directory / RUNNING_PLAN_NAME),
            ),
            [path],
            margin=0.0,
            source=str(cluster),
        )
        text = dump_cluster(run.speeds.cluster, header=run.origin)
        parse_cluster(text.encode(), source="the cluster file that was to be written")
        assert run.speeds.profile is not None
        save_profile(run.speeds.profile, out)
        write_text(cluster_out, text)
    slower = list(run.slower_ranks())
    if as_json:
        answer = {"profile": str(out), "cluster": str(cluster_out), "kinds": run.speeds.kinds}
        print_json({"ok": True, **answer, "factors": run.factors})
        return
    print_plain(f"{out}, {cluster_out}: {', '.join(slower) or 'nothing to correct'}")
