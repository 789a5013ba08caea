"""`zorse follow` between two parts of the emulated run: what it asks for, and what that costs."""

from dataclasses import dataclass, field, replace
from pathlib import Path

from scripts.long_run.machines import FLAGS, PROFILE, WORKLOAD, Machines
from zorse_megatron.cli.following import RunCosts, Search
from zorse_megatron.cli.options import DEFAULT_MARGIN
from zorse_megatron.costs.own_speeds import GpuSpeed
from zorse_megatron.follow.follower import Follower, Settings
from zorse_megatron.schema.cluster.cluster_yaml import parse_cluster
from zorse_megatron.schema.plan.plan import Plan
from zorse_megatron.schema.plan.plan_json import fingerprint
from zorse_megatron.schema.status.status import STATUS_NAME
from zorse_megatron.schema.status.status_json import load_status


@dataclass(kw_only=True)
class _Asked:
    """Takes the place of the run."""

    plan: Plan | None = None

    def ask(self, plan: Plan) -> None:
        """Note it."""
        self.plan = plan

    def take_back(self) -> None:
        """Forget it."""
        self.plan = None


@dataclass(frozen=True, kw_only=True)
class Answer:
    """What is to happen next."""

    plan: Plan
    pause_s: float
    """For the move; 0: the run stays."""
    said: str


@dataclass(kw_only=True)
class Following:
    """One `zorse follow`, over several parts."""

    machines: Machines
    directory: Path
    iterations: int
    """Of the whole training."""
    rebuild_s: float
    _run: _Asked = field(default_factory=_Asked)
    _follower: Follower | None = None

    def look(self, status: Path, plan: Plan) -> Answer:
        """Decide by the status that a part has left, which ran under `plan`."""
        # The run's own plan file is that of the tiny model.
        seen = replace(
            load_status(status / STATUS_NAME), plan=fingerprint(plan), ended=False, moves=()
        )
        if self._run.plan is not None:  # hears that the run has moved
            self._made().look(replace(seen, iteration=seen.iteration - 1), plan)
        self._run.plan = None
        decision = self._made().look(seen, plan)
        if decision is None:
            return Answer(plan=plan, pause_s=0.0, said="nothing has changed for good")
        if self._run.plan is None:
            return Answer(plan=plan, pause_s=0.0, said=decision.line)
        pause_s = decision.facts["move_s"]
        assert isinstance(pause_s, float)
        return Answer(plan=self._run.plan, pause_s=pause_s, said=decision.line)

    def oracle(self, slow_ranks: dict[int, float]) -> Plan:
        """The plan of somebody who knows how slow these ranks are."""
        speeds = [
            GpuSpeed(factor=slow_ranks.get(rank, 1.0), noise=0.0)
            for rank in range(self.machines.plan.world_size)
        ]
        found = self._costs().at_speeds(speeds).search()
        if isinstance(found, str):
            raise RuntimeError(f"no plan: {found}")
        return found

    def _made(self) -> Follower:
        if self._follower is None:
            settings = Settings(last_iteration=self.iterations)
            self._follower = Follower(settings, self._costs(), self._run)
        return self._follower

    def _costs(self) -> RunCosts:
        return RunCosts(
            cluster_data=self.machines.cluster,
            cluster=parse_cluster(self.machines.cluster),
            profiles=(PROFILE,),
            workload=WORKLOAD,
            search=Search(
                training=FLAGS,
                options=(),
                nice=0,
                limit_s=600.0,
                directory=self.directory,
            ),
            margin=DEFAULT_MARGIN,
            rebuild_s=self.rebuild_s,
        )
