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
        except ZorseError:  # the run has not written yet, or is writing
            return False
        if status.written_s < began_s:  # of a run before
            return False
        try:
            self._refuse_other_cluster(plan)
            decision = self.follower.look(status, plan)
        except ZorseError as error:
            if str(error) not in self._complained:
                say(f"error: {error}")
            self._complained.add(str(error))
            decision = None
        if decision is not None:
            self._tell(decision)
        return status.ended

    def _read(self) -> tuple[Status, Plan]:
        """The status, and the plan that it is of. Raises ZorseError."""
        status, plan = load_status(self.directory), load_plan(self.directory / RUNNING_PLAN_NAME)
        if fingerprint(plan) == status.plan:
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
