"""`zorse replan`: the cluster file and the plan for the nodes that are left."""

import typer

from zorse_megatron.cli.after_dashes import training_flags
from zorse_megatron.cli.console import CommandError, print_json, print_plain, reported_errors
from zorse_megatron.cli.elastic_options import (
    DEFAULT_PLAN_LIMIT_S,
    DEFAULT_PLANS,
    MinGpus,
    PlanLimit,
    PlanOptions,
    PlansDirectory,
    Without,
    plan_options_of,
    plan_options_problems,
)
from zorse_megatron.cli.options import AsJson, ClusterFile
from zorse_megatron.errors import ClusterError, Problem
from zorse_megatron.files.writable import folder_problems
from zorse_megatron.flags.scan import last_values
from zorse_megatron.launch.elastic.replan import JobFiles, Replanner
from zorse_megatron.schema.cluster.cluster_yaml import load_cluster
from zorse_megatron.schema.cluster.fewer_gpus import nodes_without


def replan(  # noqa: PLR0917
    context: typer.Context,
    cluster: ClusterFile,
    without: Without = None,
    plans: PlansDirectory = DEFAULT_PLANS,
    min_gpus: MinGpus = 1,
    plan_options: PlanOptions = "",
    plan_limit: PlanLimit = DEFAULT_PLAN_LIMIT_S,
    as_json: AsJson = False,
) -> None:
    """Plan for the nodes that are left, and write their cluster file. Each set is planned once."""
    with reported_errors(as_json=as_json):
        given = training_flags(context) or ()
        problems = [*plan_options_problems(plan_options), *folder_problems("--plans", plans)]
        if not given:
            problems.append(_no_command())
        lost = without or []
        try:
            whole = load_cluster(cluster)
            nodes_without(whole, lost, source=str(cluster))
        except ClusterError as error:
            problems += error.problems
        if problems:
            raise CommandError("the command cannot be run", problems)
        replanner = Replanner(
            plan=None,
            cluster=cluster,
            directory=plans,
            training=given,
            options=plan_options_of(plan_options),
            min_gpus=min_gpus,
            save=last_values(given, ["--save"]).get("--save"),
            limit_s=plan_limit,
        )
        files = replanner.files_for({node.name for node in whole.nodes} - set(lost))
    if as_json:
        print_json({"ok": True, **_as_json(files)})
    else:
        _print(files)


def _as_json(files: JobFiles) -> dict[str, object]:
    return {
        "plan": str(files.plan),
        "cluster": str(files.cluster),
        "nodes": list(files.left.names),
        "gpus": len(files.left.ranks),
        "lost": list(files.left.lost),
        "cut_off": list(files.left.cut_off),
        "is_new": files.is_new,
    }


def _print(files: JobFiles) -> None:
    left = files.left
    print_plain(f"nodes that are left: {', '.join(left.names)} ({len(left.ranks)} GPUs)")
    if left.cut_off:
        print_plain(f"without a link to them: {', '.join(left.cut_off)}")
    print_plain(f"cluster: {files.cluster}")
    print_plain(f"plan: {files.plan} ({'searched for now' if files.is_new else 'as before'})")


def _no_command() -> Problem:
    return Problem(
        where="--",
        found="no training command",
        expected="one after --, as in zorse launch",
        remedy="Such as: -- pretrain_gpt.py --num-layers 32",
    )
