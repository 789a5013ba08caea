"""`zorse plan --from-status`: a plan at the speeds of a run's GPUs, and what a move to it gains."""

import math
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from zorse_megatron.cli.console import refusal, refuse
from zorse_megatron.cli.simulated import simulated
from zorse_megatron.cli.workload import Workload
from zorse_megatron.cli.workload_costs import WorkloadCosts, costs_on, workload_problems
from zorse_megatron.costs.own_speeds import GpuSpeed, OwnSpeeds, with_own_speeds
from zorse_megatron.errors import Problem
from zorse_megatron.inputs.cluster import Cluster
from zorse_megatron.inputs.cluster_yaml import parse_cluster
from zorse_megatron.inputs.profile import Profile
from zorse_megatron.inputs.rank_placement import cluster_problems
from zorse_megatron.inputs.status import RUNNING_PLAN_NAME, Status, load_status
from zorse_megatron.live.move import move_s
from zorse_megatron.live.rebalance import with_counts
from zorse_megatron.plan.plan import Plan
from zorse_megatron.plan.plan_file import fingerprint, load_plan
from zorse_megatron.plan.spans import spans_of, spell

if TYPE_CHECKING:
    from zorse_megatron.planner.outcome import Outcome

# To build groups, model and data of another plan; nobody has measured it on GPUs.
_REBUILD_S = 60.0


@dataclass(frozen=True, kw_only=True)
class ObservedRun:
    """A run, and the cluster at the speeds that its GPUs were found to have."""

    directory: Path
    status: Status
    plan: Plan
    """With the counts of micro-batches that are in force."""
    cluster: Cluster
    """As its file has it."""
    speeds: OwnSpeeds
    costs: WorkloadCosts
    """Of the run's plan, at these speeds."""

    @property
    def origin(self) -> str:
        """Of the figures of GPUs at these speeds."""
        return _origin(self.status)

    @property
    def factors(self) -> list[float]:
        """Rank -> how many times as long as expected it computes."""
        return [self.speeds.factors.get(each, ("", 1.0))[1] for each in self.speeds.kinds]

    @property
    def profiles(self) -> tuple[Profile, ...]:
        """Of GPUs at these speeds."""
        return () if self.speeds.profile is None else (self.speeds.profile,)

    def named(self, outcome: "Outcome") -> "Outcome":
        """The same with GPUs named by the kinds that they are, which ranks compare with theirs."""
        return replace(outcome, plan=replace(outcome.plan, cluster=self.cluster.fingerprint()))

    def move_to(self, outcome: "Outcome", written: Path | None) -> dict[str, Any]:
        """What a move to a plan gains. `written`: the file of the plan; None: there is none."""
        model = self.costs.workload.model
        seconds = move_s(self.plan, outcome.plan, model, self.cluster, rebuild_s=_REBUILD_S)
        present_s = simulated(self.plan, self.costs, source="the run's plan").iteration_s
        gain_s = present_s - outcome.iteration_s
        moves = gain_s > 0 and written is not None and not self.status.ended
        words = ["zorse", "move", str(self.directory), str(written)]
        return {
            "iteration": self.status.iteration,
            "ended": self.status.ended,
            "factors": self.factors,
            "present_s": present_s,
            "next_s": outcome.iteration_s,
            "move_s": seconds,
            "pays_after_iterations": math.ceil(seconds / gain_s) if gain_s > 0 else None,
            "command": shlex.join(words) if moves else None,
        }

    def lines(self, move: dict[str, Any]) -> Iterator[str]:
        """Yield lines for people."""
        said = ", ".join(self.slower_ranks()) or "all GPUs compute as fast as expected"
        yield f"iteration {self.status.iteration} of the run in {self.directory}: {said}"
        present_s, next_s, after = move["present_s"], move["next_s"], move["pays_after_iterations"]
        if after is None:
            yield f"at these speeds the run's plan takes {present_s:.4g} s: a move gains nothing"
            return
        yield (
            f"at these speeds the run's plan takes {present_s:.4g} s, this one {next_s:.4g} s: "
            f"{100 * (1 - next_s / present_s):.1f} % less"
        )
        yield (
            f"a move takes {move['move_s']:.3g} s, {_REBUILD_S:g} s of them assumed for building "
            f"the plan, and pays after {after} iterations"
        )
        if self.status.ended:
            yield "the run has ended: start the next job under this plan"
        else:
            yield f"to move: {move['command'] or 'write the plan with --out'}"

    def slower_ranks(self) -> Iterator[str]:
        """Yield who computes slower or faster than expected."""
        for name, (kind, factor) in self.speeds.factors.items():
            ranks = [rank for rank, each in enumerate(self.speeds.kinds) if each == name]
            who = f"ranks {spell(spans_of(ranks))} ({kind}) take"
            who = who if len(ranks) > 1 else f"rank {ranks[0]} ({kind}) takes"
            yield f"{who} {factor:g} times as long as expected"


def observed_run(
    directory: Path,
    cluster_data: bytes,
    workload: Workload,
    profiles: Sequence[Path],
    *,
    margin: float,
    source: str,
) -> ObservedRun:
    """Compare a run with its cluster file (`source`) and profiles. Raises ZorseError."""
    from zorse_megatron.simulate.iteration import micro_batch_times

    cluster = parse_cluster(cluster_data, source=source)
    status, plan = _read(directory)
    name = str(directory / RUNNING_PLAN_NAME)
    problems = [
        *cluster_problems(plan, cluster, name),
        *workload_problems(plan, workload, name),
        *_adapter_problems(plan, workload, name),
    ]
    refuse(problems, f"the run in {directory} is of something else")
    costs = costs_on(plan, cluster, workload, profiles, margin=margin)
    # Not the times that the plan predicts: those may be of corrected speeds already.
    expected_s = micro_batch_times(plan, costs.inputs)
    found = [
        GpuSpeed(factor=each.micro_batch_s / expected, noise=each.noise or 0.0)
        if each.micro_batch_s and expected
        else None
        for each, expected in zip(status.ranks, expected_s, strict=True)
    ]
    speeds = with_own_speeds(cluster, costs.profile, found, origin=_origin(status))
    known = () if speeds.profile is None else (speeds.profile,)
    return ObservedRun(
        directory=directory,
        status=status,
        plan=plan,
        cluster=cluster,
        speeds=speeds,
        costs=costs_on(plan, speeds.cluster, workload, known, margin=margin),
    )


def _adapter_problems(plan: Plan, workload: Workload, name: str) -> Iterator[Problem]:
    """A run goes on with what it trains, also where nothing is said of it."""
    if workload.computing.lora is None and plan.model.lora is not None:
        yield Problem(
            where=f"{name}: model.lora",
            found=f"{plan.model.lora}, and none is to be trained",
            expected="the same in both",
            remedy="Give the run's own command, or --lora as it has it.",
        )


def _origin(status: Status) -> str:
    return f"Scaled by iteration {status.iteration} of a run of plan {status.plan}."


def _read(directory: Path) -> tuple[Status, Plan]:
    """The status, and the plan that it is of with its present counts. Raises ZorseError."""
    status, plan = load_status(directory), load_plan(directory / RUNNING_PLAN_NAME)
    ranks = [(rank, *plan.replica_of_rank(rank)) for rank in range(plan.world_size)]
    if fingerprint(plan) != status.plan or ranks != [
        (each.rank, each.group, each.replica) for each in status.ranks
    ]:
        raise refusal(
            str(directory),
            f"plan {fingerprint(plan)} of {plan.world_size} ranks, beside the status of plan "
            f"{status.plan} with {len(status.ranks)}",
            "both of one plan",
            "Try again: the run is about to change its plan.",
            what="the run's speeds cannot be read",
        )
    if not any(each.micro_batch_s for each in status.ranks):
        raise refusal(
            str(directory),
            "no rank with times of its micro-batches",
            "the status of a run that has trained",
            "Let the run make four iterations or more.",
            what="the run's speeds are not known",
        )
    counts = [[0] * len(group.replicas) for group in plan.groups]
    for each in status.ranks:
        counts[each.group][each.replica] = each.num_microbatches
    return status, with_counts(plan, tuple(map(tuple, counts)))
