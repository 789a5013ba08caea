"""`zorse follow` from look to look: what it reads, says and keeps."""

import json
import signal
import time
from dataclasses import dataclass, field
from pathlib import Path

from zorse_megatron.cli.console import CommandError, print_json
from zorse_megatron.errors import Problem, ZorseError
from zorse_megatron.files.write import NotWritten, append_line
from zorse_megatron.follow.follower import Decision, Follower
from zorse_megatron.log import say
from zorse_megatron.schema.cluster.cluster import Cluster
from zorse_megatron.schema.cluster.rank_placement import cluster_problems
from zorse_megatron.schema.plan.plan import Plan
from zorse_megatron.schema.plan.plan_json import fingerprint, load_plan
from zorse_megatron.schema.status.status import RUNNING_PLAN_NAME, STATUS_NAME, Status
from zorse_megatron.schema.status.status_json import load_status

# Looks after which it is said that there is nothing to read, and different errors that are said.
_UNREAD = 3
_COMPLAINTS = 100


@dataclass(kw_only=True)
class FollowLoop:
    """Looks at one run."""

    follower: Follower
    directory: Path
    cluster: Cluster
    source: Path
    """The cluster's file."""
    log: Path
    as_json: bool
    _complained: set[str] = field(default_factory=set)
    _unread: int = 0
    """Looks in a row at which there was nothing to read."""
    _first_s: float | None = None
    """When the first status that was seen was written, by the run's clock."""

    def look(self) -> None:
        """Once, at whatever is there. Raises ZorseError."""
        status, plan = self._read()
        self._refuse_other_cluster(plan)
        decision = self.follower.look(status, plan)
        if decision is not None:
            self._tell(decision)
        elif self.as_json:
            print_json({"ok": True, "decision": None})
        else:
            say(f"iteration {status.iteration}: nothing has changed for good")

    def follow(self, every_s: float) -> None:
        """Look until the training has ended, or somebody ends this."""
        signal.signal(signal.SIGTERM, signal.default_int_handler)
        began_s = time.time()
        if not self.as_json:
            say(f"follows the run in {self.directory}")
        try:
            while not self._has_ended(began_s):
                time.sleep(every_s)
        except KeyboardInterrupt:
            return

    def _has_ended(self, began_s: float) -> bool:
        """Look once; nothing that goes wrong here is a reason to leave the run alone."""
        try:
            status, plan = self._read()
        except ZorseError as error:  # the run has not written yet, or is writing
            self._unread += 1
            if self._unread == _UNREAD:
                say(f"waits for a run that can be followed: {error}")
            return False
        self._unread = 0
        if self._is_of_run_before(status, began_s):
            return False
        try:
            self._refuse_other_cluster(plan)
            decision = self.follower.look(status, plan)
        except (ZorseError, OSError) as error:
            if str(error) not in self._complained and len(self._complained) < _COMPLAINTS:
                say(f"error: {error}")
                self._complained.add(str(error))
            decision = None
        if decision is not None:
            self._tell(decision)
        return status.ended

    def _is_of_run_before(self, status: Status, began_s: float) -> bool:
        """Whether it has been there from the start: a run that goes on writes another one.

        Its time alone does not say so, as the clock of the run's node may be late.
        """
        if self._first_s is None:
            self._first_s = status.written_s
            if status.written_s < began_s:
                what = "a training that has ended" if status.ended else "an earlier time"
                say(f"the status that is there is of {what}: waits for another one")
        return status.written_s < began_s and status.written_s == self._first_s

    def _read(self) -> tuple[Status, Plan]:
        """The status, and the plan that it is of. Raises ZorseError."""
        status, plan = load_status(self.directory), load_plan(self.directory / RUNNING_PLAN_NAME)
        if fingerprint(plan) == status.plan:
            _refuse_other_ranks(status, plan, self.directory)
            return status, plan
        problem = Problem(
            where=str(self.directory / RUNNING_PLAN_NAME),
            found=f"plan {fingerprint(plan)}",
            expected=f"plan {status.plan}, of which {STATUS_NAME} is",
            remedy="Look again: the run is about to change its plan.",
        )
        raise CommandError("the run cannot be followed", [problem])

    def _refuse_other_cluster(self, plan: Plan) -> None:
        problems = list(cluster_problems(plan, self.cluster, "the run's plan"))
        if problems:
            raise CommandError(f"the run is not on the cluster of {self.source}", problems)

    def _tell(self, decision: Decision) -> None:
        """Say what has been decided, and keep it."""
        entry = {
            "time_s": round(time.time(), 3),
            "iteration": decision.iteration,
            "decision": decision.what,
            **decision.facts,
        }
        if self.as_json:
            print_json({"ok": True, **entry})
        else:
            say(f"iteration {decision.iteration}: {decision.line}")
        try:
            append_line(self.log, json.dumps(entry))
        except NotWritten as error:
            say(f"note: {error}")


def _refuse_other_ranks(status: Status, plan: Plan, directory: Path) -> None:
    """Raise CommandError for a status whose ranks are not those of the plan that it names."""
    found = [(each.rank, each.group, each.replica) for each in status.ranks]
    expected = [(rank, *plan.replica_of_rank(rank)) for rank in range(plan.world_size)]
    if found == expected:
        return
    problem = Problem(
        where=f"{directory / STATUS_NAME}: ranks",
        found=f"{len(found)} ranks, which are not those of plan {status.plan}",
        expected=f"its {plan.world_size} ranks in their order, each in its group and replica",
        remedy="Look again: the run writes the file anew every few seconds.",
    )
    raise CommandError("the run cannot be followed", [problem])
