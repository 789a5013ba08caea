"""The cluster file and the plan for the nodes that are left; each set is planned once.

The search is `zorse plan` in a process of its own: it may be stopped, and nothing of it stays in
the process that watches over a job.
"""

import contextlib
import hashlib
import json
import subprocess
import sys
import time
from collections.abc import Collection, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from zorse_megatron import __version__
from zorse_megatron.errors import LaunchError, PlanError, Problem
from zorse_megatron.files.read_write import NotWritten, append_line, write_text
from zorse_megatron.inputs.cluster import Cluster, Node
from zorse_megatron.inputs.cluster_yaml import dump_cluster, load_cluster, with_gpus
from zorse_megatron.live.checkpoint_choice import newest_saved, what_is_saved
from zorse_megatron.live.checkpoint_files import read_tracker
from zorse_megatron.log import say
from zorse_megatron.plan.plan_file import load_plan
from zorse_megatron.schedule.lower import refuse_unsupported

# Which nodes of a cluster a job goes on with when others are lost.


@dataclass(frozen=True, kw_only=True)
class NodesLeft:
    """Nodes to train on, and those that are not there or cannot take part."""

    nodes: tuple[Node, ...]
    """In the order of the cluster file, with their ranks in the whole cluster."""
    lost: tuple[str, ...]
    """Names of nodes that are not there."""
    cut_off: tuple[str, ...]
    """Names of nodes that are there, in regions without a link to the others that are left."""

    @property
    def ranks(self) -> tuple[int, ...]:
        """Ranks of their GPUs in the whole cluster."""
        return tuple(rank for node in self.nodes for rank in node.ranks)

    @property
    def names(self) -> tuple[str, ...]:
        """What they are called."""
        return tuple(node.name for node in self.nodes)


def nodes_left(cluster: Cluster, present: Collection[str]) -> NodesLeft:
    """Return the nodes to go on with, of those that are `present` (names of the cluster file).

    Where regions were joined only by way of one that is lost, it is the part with most GPUs, and
    of equal parts the first one in the file. There may be none.
    """
    there = [node for node in cluster.nodes if node.name in present]
    parts = list(_joined_parts(cluster, there))
    chosen = max(parts, key=lambda part: sum(len(n.gpu_kinds) for n in part), default=[])
    return NodesLeft(
        nodes=tuple(chosen),
        lost=tuple(node.name for node in cluster.nodes if node.name not in present),
        cut_off=tuple(node.name for node in there if node not in chosen),
    )


def refuse_too_few(
    cluster: Cluster, left: NodesLeft, *, min_gpus: int, saved: int | None, source: str
) -> None:
    """Raise LaunchError if the nodes left have fewer GPUs than the job is to have at least.

    `saved`: iteration of the newest checkpoint to resume from; None: there is none.
    """
    if len(left.ranks) >= max(1, min_gpus):
        return
    lacking = [f"without {', '.join(left.lost)}"] if left.lost else []
    if left.cut_off:
        lacking.append(f"with {', '.join(left.cut_off)} cut off")
    raise LaunchError.of(
        "too few GPUs are left",
        where=source,
        found=f"{len(left.ranks)} of {cluster.world_size} GPUs ({', '.join(lacking)})",
        expected=f"at least {max(1, min_gpus)} (--min-gpus)",
        remedy=f"{what_is_saved(saved)} Submit the job again when more nodes are there, or with a "
        "smaller --min-gpus.",
    )


def _joined_parts(cluster: Cluster, nodes: list[Node]) -> Iterator[list[Node]]:
    """The nodes by regions that links join, in the order of their first nodes."""
    regions = dict.fromkeys(node.region for node in nodes)
    for part in cluster.joined_regions(regions):
        yield [node for node in nodes if node.region in part]


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

    plan: Path
    """For all nodes."""
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
        if left.nodes == whole.nodes:
            return JobFiles(plan=self.plan, cluster=self.cluster, left=left, is_new=False)
        cluster_left = with_gpus(whole, left.ranks, source=str(self.cluster))
        gone = ", ".join((*left.lost, *left.cut_off))
        text = dump_cluster(cluster_left, f"The cluster without {gone}.")
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
            raise LaunchError.of(
                "no plan for the nodes that are left",
                where=str(cluster),
                found=f"no plan after {self.limit_s:g} s of searching",
                expected="one by then",
                remedy=f"{what_is_saved(saved)} Allow more time (--plan-limit), or search with "
                "fewer possibilities, such as --max-tp 1.",
            ) from None
        except OSError as error:
            raise LaunchError.of(
                "no plan for the nodes that are left",
                where=self.python,
                found=error.strerror or str(error),
                expected="a Python that can run zorse plan here",
                remedy=f"{what_is_saved(saved)} Look at --python, and at the limits of this node.",
            ) from error
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


def latest_named(save: str | None) -> str:
    """Return what the tracker file says, which changes with every save; "" if there is none."""
    if save is None:
        return ""
    try:
        return read_tracker(Path(save)).text
    except OSError:
        return ""


# How the starts of one run went, so that it ends once another start would change nothing.
#
# torchrun itself only counts failures: those after new checkpoints, and those of bad input too.


BAD_INPUT = "2"


class GivenUp(LaunchError):
    """Another start would not help."""


@dataclass(frozen=True, kw_only=True)
class Starts:
    """A line of JSON for each start, in the directory of `--plans`, and how the last one ended."""

    directory: Path
    run: str
    """As torchrun calls it (`--rdzv-id`)."""
    save: str | None
    max_failures: int
    """In a row without a new checkpoint."""

    @property
    def outcome(self) -> Path:
        """Where ranks note an end that torchrun cannot tell from others; see `note_outcome`."""
        return self.directory / f"{self.run}.outcome"

    def begin(self, nodes: Sequence[str], *, is_first: bool) -> None:
        """Note a start on these nodes; `is_first`: what there is of this run is of an older job.

        Raises GivenUp where it was bad input on the same nodes, or too many starts have failed; the
        batch script finds that in `outcome`, too.
        """
        log = self.directory / f"{self.run}.jsonl"
        if is_first:
            with contextlib.suppress(OSError):
                log.unlink()
        before, ended = _lines(log), self._take_outcome()
        latest = latest_named(self.save)
        failures = 0
        for start in reversed(before):
            if start.get("latest") != latest:
                break
            failures += 1
        if ended == BAD_INPUT and before and not is_first and before[-1].get("nodes") == [*nodes]:
            self._give_up("bad input, which the last start has said", "other input")
        if failures > self.max_failures:
            found = f"{failures} failures in a row without a new checkpoint"
            self._give_up(found, f"at most {self.max_failures} (MAX_RESTARTS)")
        entry = {"time_s": round(time.time(), 3), "nodes": [*nodes], "latest": latest}
        try:
            append_line(log, json.dumps(entry))
        except NotWritten as error:
            say(f"note: {error}")

    def _take_outcome(self) -> str:
        try:
            found = self.outcome.read_text(encoding="utf-8")
            self.outcome.unlink()
        except OSError:
            return ""
        return found

    def _give_up(self, found: str, expected: str) -> None:
        with contextlib.suppress(OSError):
            self.outcome.write_text(BAD_INPUT, encoding="utf-8")
        raise GivenUp.of(
            "the job ends",
            where=self.run,
            found=found,
            expected=expected,
            remedy=f"{what_is_saved(newest_saved(self.save))} Start the job again once what ended "
            "it is mended.",
        )


def _lines(log: Path) -> list[dict[str, object]]:
    try:
        found = [json.loads(line) for line in log.read_text(encoding="utf-8").splitlines()]
    except (OSError, ValueError):
        return []
    return [start for start in found if isinstance(start, dict)]
