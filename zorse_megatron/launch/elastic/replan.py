"""The cluster file and the plan for the nodes that are left, kept so that each set is planned once.

The search is `zorse plan` in a process of its own: it may be stopped, and nothing of it stays in
the process that watches over a job.
"""

import hashlib
import json
import subprocess
import sys
from collections.abc import Collection
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from zorse_megatron import __version__
from zorse_megatron.errors import LaunchError, PlanError, Problem
from zorse_megatron.files.write import write_text
from zorse_megatron.launch.elastic.nodes_left import (
    NodesLeft,
    nodes_left,
    refuse_too_few,
    what_is_saved,
)
from zorse_megatron.launch.elastic.saved import newest_saved
from zorse_megatron.schedules.refusals import refuse_unsupported
from zorse_megatron.schema.cluster.cluster_yaml import dump_cluster, load_cluster
from zorse_megatron.schema.cluster.fewer_gpus import with_gpus
from zorse_megatron.schema.plan.plan_json import load_plan

DEFAULT_LIMIT_S = 600.0


@dataclass(frozen=True, kw_only=True)
class JobFiles:
    """What the ranks of the next attempt read."""

    plan: Path
    cluster: Path
    left: NodesLeft
    is_new: bool
    """Whether the plan has just been searched for."""


@dataclass(frozen=True, kw_only=True)
class Replanner:
    """Plans a training command for whatever nodes of a cluster are there."""

    plan: Path | None
    """For all nodes; None: it is searched for as for fewer of them."""
    cluster: Path
    directory: Path
    """Where the files for fewer nodes are kept; all nodes have to see it."""
    training: tuple[str, ...]
    """What follows `--`, without our flags for one plan."""
    options: tuple[str, ...] = ()
    """Of `zorse plan`, such as --profile."""
    min_gpus: int = 1
    save: str | None = None
    """The folder of checkpoints, to say what is saved."""
    limit_s: float = DEFAULT_LIMIT_S
    """How long a search may take."""
    python: str = sys.executable

    def files_for(self, present: Collection[str]) -> JobFiles:
        """Return plan and cluster file for the nodes with these names, searching if need be.

        Raises LaunchError where too few GPUs are left, nothing fits, or the search takes too long;
        it says which checkpoint training can go on from. Raises PlanError for a plan that this
        version cannot train.
        """
        whole = load_cluster(self.cluster)
        left = nodes_left(whole, present)
        saved = newest_saved(self.save)
        refuse_too_few(
            whole, left, min_gpus=self.min_gpus, saved=saved, source=f"nodes of {self.cluster}"
        )
        if left.nodes == whole.nodes and self.plan is not None:
            return JobFiles(plan=self.plan, cluster=self.cluster, left=left, is_new=False)
        cluster_left = with_gpus(whole, left.ranks, source=str(self.cluster))
        text = dump_cluster(cluster_left, _header(left))
        name = self._name(text)
        cluster, plan = self.directory / f"{name}.yaml", self.directory / f"{name}.json"
        is_new = not _is_whole(cluster, plan, text)
        if is_new:
            write_text(cluster, text, parents=True)
            self._search(cluster, plan, saved)
        return JobFiles(plan=plan, cluster=cluster, left=left, is_new=is_new)

    def _name(self, cluster_text: str) -> str:
        """The same for the same search: its cluster, command, options, and the files in these."""
        key = hashlib.sha256()
        for part in (__version__, cluster_text, *self.training, "--", *self.options):
            key.update(f"{len(part)}:{part}".encode("utf-8", "surrogateescape"))
        for option in self.options:
            with suppress(OSError):  # not a file's name; or the search says that it cannot read it
                key.update(Path(option.partition("=")[2] or option).read_bytes())
        return f"left-{key.hexdigest()[:16]}"

    def _search(self, cluster: Path, plan: Path, saved: int | None) -> None:
        command = [self.python, "-m", "zorse_megatron", "plan", "--json"]
        command += ["--cluster", str(cluster), "--out", str(plan), "--use-all", *self.options]
        try:
            done = subprocess.run(
                [*command, "--", *self.training],
                check=False,
                stdout=subprocess.PIPE,
                timeout=self.limit_s,
            )
        except subprocess.TimeoutExpired:
            problem = Problem(
                where=str(cluster),
                found=f"no plan after {self.limit_s:g} s of searching",
                expected="one by then",
                remedy=f"{what_is_saved(saved)} Allow more time (--plan-limit), or search with "
                "fewer possibilities, such as --max-tp 1.",
            )
            raise LaunchError("no plan for the nodes that are left", [problem]) from None
        except OSError as error:
            problem = Problem(
                where=self.python,
                found=error.strerror or str(error),
                expected="a Python that can run zorse plan here",
                remedy=f"{what_is_saved(saved)} Look at --python, and at the limits of this node.",
            )
            raise LaunchError("no plan for the nodes that are left", [problem]) from error
        if done.returncode:
            found = _problems(done.stdout, cluster, done.returncode)
            raise LaunchError(f"no plan for the nodes that are left. {what_is_saved(saved)}", found)
        try:
            refuse_unsupported(load_plan(plan), str(plan))
        except PlanError:
            plan.unlink(missing_ok=True)
            raise


def _is_whole(cluster: Path, plan: Path, text: str) -> bool:
    """Whether both files are there as they were written: by hand or by a full disk they may not."""
    try:
        load_plan(plan)
        return cluster.read_bytes() == text.encode("utf-8", "surrogateescape")
    except (OSError, PlanError):
        return False


def _header(left: NodesLeft) -> str:
    gone = ", ".join((*left.lost, *left.cut_off)) or "none of its nodes"
    return f"The cluster without {gone}."


def _problems(answer: bytes, cluster: Path, status: int) -> list[Problem]:
    """What `zorse plan --json` says is wrong."""
    try:
        return [Problem(**each) for each in json.loads(answer)["problems"]]
    except (ValueError, KeyError, TypeError):
        return [
            Problem(
                where=f"zorse plan --cluster {cluster}",
                found=f"exit status {status}",
                expected="a plan",
                remedy="Run it by hand with the same options.",
            )
        ]
