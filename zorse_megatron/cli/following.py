"""What `zorse follow` knows of a run's cluster and model, and what it writes."""

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from zorse_megatron.cli.simulated import simulated
from zorse_megatron.cli.workload import Workload
from zorse_megatron.cli.workload_costs import WorkloadCosts, costs_on
from zorse_megatron.costs.own_speeds import GpuSpeed, with_own_speeds
from zorse_megatron.files.write import write_text
from zorse_megatron.follow.move_costs import MoveCost, move_cost
from zorse_megatron.migration.request import REQUEST_NAME, make_request
from zorse_megatron.schema.cluster.cluster import Cluster
from zorse_megatron.schema.cluster.cluster_yaml import parse_cluster
from zorse_megatron.schema.plan.plan import Plan
from zorse_megatron.schema.plan.plan_json import load_plan
from zorse_megatron.schema.profile.profile import Profile
from zorse_megatron.schema.profile.profile_json import joined, load_profile, save_profile


@dataclass(frozen=True, kw_only=True)
class FollowedRun:
    """The directory of its status."""

    directory: Path

    def ask(self, plan: Plan) -> None:
        """For it to go on under a plan."""
        make_request(self.directory, plan)

    def take_back(self) -> None:
        """What was asked for last."""
        (self.directory / REQUEST_NAME).unlink(missing_ok=True)


@dataclass(frozen=True, kw_only=True)
class Search:
    """How to plan again."""

    training: tuple[str, ...]
    options: tuple[str, ...]
    """Of `zorse plan`."""
    limit_s: float
    nice: int
    """What is added to the priority's number; 19: whatever else runs comes first."""
    directory: Path
    """Where its files are kept."""


@dataclass(frozen=True, kw_only=True)
class RunCosts:
    """The run's cluster and model, as its files have them."""

    cluster_data: bytes
    cluster: Cluster
    profiles: tuple[Path, ...]
    workload: Workload
    search: Search
    margin: float
    rebuild_s: float

    def micro_batch_s(self, plan: Plan) -> tuple[float, ...]:
        """Rank -> seconds of one of its micro-batches, as the profile has it."""
        from zorse_megatron.planner.evaluate.simulate_plan import planned_micro_batch_times

        costs = costs_on(plan, self.cluster, self.workload, self.profiles, margin=self.margin)
        return planned_micro_batch_times(costs.inputs, plan)

    def at_speeds(self, speeds: Sequence[GpuSpeed | None]) -> "CorrectedCosts":
        """The same cluster at other speeds; writes its files."""
        directory = self.search.directory
        directory.mkdir(parents=True, exist_ok=True)
        number = _free_number(directory)
        profile = self._profile()
        found = with_own_speeds(
            self.cluster_data, profile, speeds, origin="As zorse follow has found it in a run."
        )
        cluster, out = directory / f"cluster-{number}.yaml", directory / f"profile-{number}.json"
        write_text(cluster, found.cluster)
        if found.profile is not None:
            save_profile(found.profile, out)
        return CorrectedCosts(
            base=self,
            cluster_file=cluster,
            cluster=parse_cluster(found.cluster.encode(), source=str(cluster)),
            profiles=() if found.profile is None else (out,),
            factors=tuple(found.factors.get(kind, ("", 1.0))[1] for kind in found.kinds),
            plan=directory / f"plan-{number}.json",
        )

    def _profile(self) -> Profile | None:
        return joined([load_profile(path) for path in self.profiles]) if self.profiles else None


@dataclass(frozen=True, kw_only=True)
class CorrectedCosts:
    """The cluster at the speeds that its GPUs were found to have."""

    base: RunCosts
    cluster_file: Path
    cluster: Cluster
    profiles: tuple[Path, ...]
    factors: tuple[float, ...]
    plan: Path
    """Where the search is to write."""

    def iteration_s(self, plan: Plan) -> float:
        """Simulated."""
        return simulated(plan, self._costs(plan), source="the run's plan").iteration_s

    def search(self) -> Plan | str:
        """A plan for it, or why there is none.

        Its GPUs are named by the kinds that they are, which a job compares with what it finds.
        """
        search = self.base.search
        command = [sys.executable, "-m", "zorse_megatron", "plan", "--json"]
        command += ["--cluster", str(self.cluster_file), "--out", str(self.plan)]
        command += [word for path in self.profiles for word in ("--profile", str(path))]
        try:
            done = subprocess.run(
                [*command, *search.options, "--", *search.training],
                check=False,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                timeout=search.limit_s,
                preexec_fn=partial(os.nice, search.nice),
            )
        except subprocess.TimeoutExpired:
            return f"none after {search.limit_s:g} s"
        if done.returncode:
            return _why(done.stdout)
        return replace(load_plan(self.plan), cluster=self.base.cluster.fingerprint())

    def move_cost(self, before: Plan, after: Plan) -> MoveCost:
        """Of a move."""
        model, base = self.base.workload.model, self.base
        return move_cost(before, after, model, base.cluster, rebuild_s=base.rebuild_s)

    def _costs(self, plan: Plan) -> WorkloadCosts:
        base = self.base
        return costs_on(plan, self.cluster, base.workload, self.profiles, margin=base.margin)


def _free_number(directory: Path) -> int:
    """Of files that nobody has, not even somebody else who follows the same run."""
    number = sum(1 for _ in directory.glob("cluster-*.yaml"))
    while True:
        try:
            (directory / f"cluster-{number}.yaml").touch(exist_ok=False)
        except FileExistsError:
            number += 1
        else:
            return number


def _why(answer: bytes) -> str:
    """What `zorse plan --json` says is wrong, in a few words."""
    try:
        problem = json.loads(answer)["problems"][0]
        return f"{problem['where']}: found {problem['found']}"
    except (ValueError, KeyError, IndexError, TypeError):
        return (answer.decode(errors="replace").strip().splitlines() or ["it failed"])[-1]
