"""The loop: look at a run, find out what has changed for good, plan again, weigh, ask, wait."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

from zorse_megatron.costs.own_speeds import GpuSpeed
from zorse_megatron.follow.lasting import Lasting
from zorse_megatron.follow.move_costs import MoveCost
from zorse_megatron.follow.observed import Observed, observed
from zorse_megatron.follow.promise import Promise, measured_before
from zorse_megatron.follow.told import stood_still_s, told_speeds
from zorse_megatron.follow.weighed import Weighed
from zorse_megatron.schema.plan.plan import Plan
from zorse_megatron.schema.plan.plan_json import fingerprint
from zorse_megatron.schema.status.status import Status

# Iterations after which a request that nobody has answered is taken back.
_ANSWERED_AFTER = 20
# A plan that was refused so often is not asked for any more.
_REFUSALS = 3


class Truth(Protocol):
    """The cluster at the speeds that its GPUs were found to have."""

    @property
    def factors(self) -> tuple[float, ...]:
        """Rank -> how many times as long it takes as the profile says."""

    def iteration_s(self, plan: Plan) -> float:
        """Simulated."""

    def search(self) -> Plan | str:
        """A plan for it, or why there is none."""

    def move_cost(self, before: Plan, after: Plan) -> MoveCost:
        """Of a move."""


class Costs(Protocol):
    """What is known of the run's cluster and model."""

    def micro_batch_s(self, plan: Plan) -> Sequence[float]:
        """Rank -> seconds of one of its micro-batches, as the profile has it."""

    def at_speeds(self, speeds: Sequence[GpuSpeed | None]) -> Truth:
        """The same cluster at other speeds."""


class Run(Protocol):
    """The run that is followed."""

    def ask(self, plan: Plan) -> None:
        """For it to go on under a plan."""

    def take_back(self) -> None:
        """What was asked for last."""


@dataclass(frozen=True, kw_only=True)
class Decision:
    """One line of the log."""

    iteration: int
    what: str
    """moves, stays, moved, kept, goes back, refused, unanswered."""
    line: str
    """For people."""
    facts: Mapping[str, object] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Settings:
    """When to move."""

    gain: float = 0.05
    patience: int = 10
    horizon: int = 1000
    last_iteration: int | None = None
    """Of the training; None: it is not known."""


@dataclass(frozen=True, kw_only=True)
class _Asked:
    plan: str
    iteration: int
    known: tuple[GpuSpeed | None, ...]
    """What was decided on before: a refusal brings it back."""
    promise: Promise | None = None
    """What it is to bring."""
    looked: int | None = None
    """Iteration at the first look since: searches take long, and iterations go on meanwhile."""


class Follower:
    """Follows one run."""

    def __init__(self, settings: Settings, costs: Costs, run: Run) -> None:
        self.settings, self.costs, self.run = settings, costs, run
        self.lasting = Lasting(patience=settings.patience, memory=settings.horizon)
        self.plans: dict[str, Plan] = {}
        """Fingerprint -> what the run has been under."""
        self.refusals: dict[str, int] = {}
        """Fingerprint -> how often the run has refused it."""
        self._refused_in_a_row = 0
        self._asked: _Asked | None = None
        self._promise: Promise | None = None
        """Of the last move, until it is known whether it was kept."""
        self._modelled: tuple[str, Sequence[float]] | None = None
        """Plan, and what the profile says of its micro-batches."""
        self._last: Status | None = None
        self._stood_still_s: float | None = None
        """What the last move took; None: there was none."""

    def look(self, status: Status, plan: Plan) -> Decision | None:
        """Decide by the run's status and the plan that it is under; None: nothing has happened."""
        before = self._last
        if before is not None and status.iteration == before.iteration:
            return None
        if before is not None:
            self._notice_others(before, status)
        self._last = status
        self.plans.setdefault(status.plan, plan)
        if self._asked is not None:
            return self._answer(self._asked, status, before)
        if status.ended:
            return None
        if self._modelled is None or self._modelled[0] != status.plan:
            self._modelled = status.plan, self.costs.micro_batch_s(plan)
        seen = observed(status, plan, self._modelled[1])
        changed = self.lasting.changed(seen)
        if not changed:
            return self._judge(status, seen)
        self._promise = None  # of other speeds
        return self._decide(status, seen, changed)

    def _notice_others(self, before: Status, status: Status) -> None:
        """The run has been started again, or somebody else has moved it: decide anew."""
        asked = None if self._asked is None else self._asked.plan
        if status.iteration < before.iteration:
            self.lasting.restarted(status.iteration)
        elif status.plan not in (before.plan, asked):
            self.lasting.moved(status.iteration)
        else:
            return
        self.lasting.decided(())
        self._asked = self._promise = None

    def _judge(self, status: Status, seen: Observed) -> Decision | None:
        """Whether the last move has brought anything, once that can be told."""
        promise, measured_s = self._promise, status.iteration_s
        if promise is None or promise.plan != status.plan or measured_s is None:
            return None
        if not promise.can_be_told(seen, self.lasting.differing(seen), self.settings.patience):
            return None
        self._promise = None
        facts = {"plan": promise.plan, "measured_s": measured_s, "before_s": promise.left_s}
        line = promise.told(measured_s)
        if not promise.is_broken(measured_s):
            return Decision(iteration=status.iteration, what="kept", line=line, facts=facts)
        self.refusals[promise.plan] = _REFUSALS
        self._asked = _Asked(
            plan=promise.left, iteration=status.iteration, known=self.lasting.known
        )
        self.run.ask(self.plans[promise.left])
        line += f": asked the run to go back to plan {promise.left}"
        return Decision(iteration=status.iteration, what="goes back", line=line, facts=facts)

    def _decide(self, status: Status, seen: Observed, changed: tuple[int, ...]) -> Decision:
        truth = self.costs.at_speeds(seen.speeds)
        known = self.lasting.known
        self.lasting.decided(seen.speeds)
        present_s = truth.iteration_s(seen.plan)
        found = truth.search()
        told = told_speeds(seen, changed)
        facts: dict[str, object] = {
            "ranks": list(changed),
            "factors": [round(each, 3) for each in truth.factors],
            "present_s": present_s,
            "measured_s": status.iteration_s,
        }
        candidates = dict(self.plans) | (
            {} if isinstance(found, str) else {fingerprint(found): found}
        )
        if isinstance(found, str):
            facts["no_plan"] = found
            told += f"; no new plan ({found})"
        weighed = {
            name: self._weighed(truth, seen, present_s, each)
            for name, each in candidates.items()
            if name != status.plan and self.refusals.get(name, 0) < _REFUSALS
        }
        if not weighed:
            line = f"{told}; its plan is the best that is known: the run stays"
            return Decision(iteration=seen.iteration, what="stays", line=line, facts=facts)
        name, best = max(weighed.items(), key=lambda each: each[1].gain)
        facts |= {"plan": name, "next_s": best.next_s, "move_s": best.move_s, "gain": best.gain}
        told += (
            f"; an iteration takes {present_s:.4g} s now and {best.next_s:.4g} s under plan "
            f"{name}, to which it is {best.move_s:.3g} s: {100 * best.gain:.1f} % of "
            f"{best.iterations} iterations"
        )
        if best.gain <= self.settings.gain:
            line = f"{told}: the run stays"
            return Decision(iteration=seen.iteration, what="stays", line=line, facts=facts)
        promise, left_s = None, measured_before(status, seen, changed)
        if left_s is not None:
            promise = Promise(
                plan=name,
                left=status.plan,
                left_s=left_s,
                simulated_s=best.next_s,
                iteration=seen.iteration,
            )
        self._asked = _Asked(plan=name, iteration=seen.iteration, known=known, promise=promise)
        self.run.ask(candidates[name])
        return Decision(
            iteration=seen.iteration,
            what="moves",
            line=f"{told}: asked the run to move",
            facts=facts,
        )

    def _weighed(self, truth: Truth, seen: Observed, present_s: float, plan: Plan) -> Weighed:
        left = self.settings.horizon
        if self.settings.last_iteration is not None:
            left = min(left, self.settings.last_iteration - seen.iteration)
        move_s = self._stood_still_s
        return Weighed(
            present_s=present_s,
            next_s=truth.iteration_s(plan),
            move_s=truth.move_cost(seen.plan, plan).seconds if move_s is None else move_s,
            iterations=left,
        )

    def _answer(self, asked: _Asked, status: Status, before: Status | None) -> Decision | None:
        """What has become of the request."""
        answers = [
            each
            for each in status.moves
            if each.plan == asked.plan and each.iteration >= asked.iteration
        ]
        facts: dict[str, object] = {"plan": asked.plan}
        if status.plan == asked.plan:
            self._asked, self._refused_in_a_row = None, 0
            if asked.promise is not None:
                self._promise = replace(asked.promise, iteration=status.iteration)
            self.lasting.moved(status.iteration)
            line = f"the run is under plan {asked.plan}"
            if before is not None:
                self._stood_still_s = stood_still_s(before, status)
                facts["stood_still_s"] = self._stood_still_s
                line += f"; it has stood still for about {self._stood_still_s:.0f} s"
            return Decision(iteration=status.iteration, what="moved", line=line, facts=facts)
        if answers and answers[-1].refused is not None:
            why = answers[-1].refused
            line = f"the run has refused plan {asked.plan}: {why}"
            return self._no(status, "refused", line, facts | {"why": why})
        if asked.looked is None:
            self._asked = replace(asked, looked=status.iteration)
        elif status.iteration - asked.looked > _ANSWERED_AFTER:
            self.run.take_back()
            line = f"the run has not answered for {_ANSWERED_AFTER} iterations: taken back"
            return self._no(status, "unanswered", line, facts)
        return None

    def _no(self, status: Status, what: str, line: str, facts: Mapping[str, object]) -> Decision:
        assert self._asked is not None
        name = self._asked.plan
        self.lasting.known, self._asked = self._asked.known, None
        self.refusals[name] = self.refusals.get(name, 0) + 1
        self._refused_in_a_row += 1
        self.lasting.refused(status.iteration, self._refused_in_a_row)
        return Decision(iteration=status.iteration, what=what, line=line, facts=facts)
