"""The result of a search: the plan, its quality, what was rejected; or why there is none."""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from zorse_megatron.errors import Problem, ZorseError
from zorse_megatron.files.wording import number_of
from zorse_megatron.log import Progress
from zorse_megatron.plan.memory_settings import MemorySettings, settings_in
from zorse_megatron.plan.plan import Group, Plan, Replica
from zorse_megatron.simulate.result import SimulationResult

Strategy = Literal["zorse", "stock", "zorse-paper", "cephalo"]
STRATEGIES: tuple[Strategy, ...] = ("zorse", "stock", "zorse-paper", "cephalo")


@dataclass(frozen=True, kw_only=True)
class SearchProgress(Progress):
    """How far a search is, and what it has found."""

    best: object = None
    """The `Evaluation` of a plan that fits, where one has just been found."""


OnProgress = Callable[[SearchProgress], None]


@dataclass(frozen=True, kw_only=True)
class Rejected:
    """A plan that was considered and not taken."""

    what: str
    """The plan in a few words: groups, layers, recomputation, schedule."""
    why: str
    """For people: slower by so much, or what does not fit."""
    iteration_s: float | None
    """Simulated or estimated; None where it does not fit."""


@dataclass(frozen=True, kw_only=True)
class SearchStats:
    """How many plans each phase looked at."""

    groupings: int = 0
    """Ways to group the GPUs."""
    estimated: int = 0
    """Plans costed in closed form."""
    simulated: int = 0
    """Plans that were simulated."""
    computations: int = 0
    """Forwards and backwards of these simulations."""

    def __add__(self, other: "SearchStats") -> "SearchStats":
        """The sum of both."""
        return SearchStats(**{k: n + getattr(other, k) for k, n in vars(self).items()})

    def __sub__(self, before: "SearchStats") -> "SearchStats":
        """What has been done since."""
        return SearchStats(**{k: n - getattr(before, k) for k, n in vars(self).items()})


@dataclass(frozen=True, kw_only=True)
class LinkBound:
    """No plan is faster than this."""

    bound_s: float
    link: str | None
    """The link that counts most, in words; None: none takes longer than computing does."""


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """The best plan that a strategy found."""

    strategy: Strategy
    plan: Plan
    """With predictions, and the fingerprints of model and cluster."""
    simulation: SimulationResult
    """Simulation of the plan, or of a smaller batch if `extrapolated`."""
    iteration_s: float
    tokens_per_s: float
    bound_s: float
    """No plan that fits can be faster than this."""
    recomputing_bound_s: float
    """No plan that recomputes every layer can be faster than this."""
    link_bound: LinkBound
    """The same as `bound_s`, counting what must cross the busiest link."""
    peak_memory_fraction: float
    """Highest peak of any rank over what its GPU may be filled to."""
    extrapolated: bool
    """Whether iteration_s was extrapolated from a shorter batch."""
    rejected: tuple[Rejected, ...]
    """The best of each other structure (schedule, groups, chunks) that fits, fastest first."""
    considered: SearchStats
    plan_time_s: float
    """How long the search took, by the clock; nothing else depends on it."""
    margin: float
    """Share of every GPU's memory reserved for fragmentation and what is not counted."""
    notes: tuple[str, ...]
    """For people: assumptions, and what the costs rest on."""
    was_cut_short: bool = False
    """Whether the search was interrupted; then the plan is the fastest of those found so far."""

    @property
    def efficiency(self) -> float:
        """bound_s / iteration_s: the share of a rate that no plan exceeds; 1 at most."""
        return self.bound_s / self.iteration_s


CUT_SHORT = "the search was cut short: the plan is the fastest of those found so far"


class SearchCutShort(KeyboardInterrupt):
    """An interrupt of a search that had found plans."""

    def __init__(self, outcome: Outcome) -> None:
        super().__init__(CUT_SHORT)
        self.outcome = outcome
        """With the fastest of them."""


# Why there is no plan.


class PlannerInputError(ZorseError):
    """Cluster, model and profile do not go together."""


class NoPlanError(ZorseError):
    """Nothing in the search space fits; each problem states the smallest missing amount."""

    missing_bytes: int = 0
    """How much more memory makes a plan possible, in all; 0 where memory is not what is missing."""
    bytes_per_gpu: int = 0
    """How much each GPU of `gpu_kinds` lacks."""
    gpu_kinds: tuple[str, ...] = ()
    """The kinds that need it."""

    @property
    def facts(self) -> Mapping[str, object]:  # type: ignore[override]
        """The missing amount in bytes, where memory is what is missing."""
        if not self.missing_bytes:
            return {}
        return {
            "missing_bytes": self.missing_bytes,
            "bytes_per_gpu": self.bytes_per_gpu,
            "gpu_kinds": list(self.gpu_kinds),
        }

    def with_problem(self, problem: Problem) -> "NoPlanError":
        """The same error with one more thing to say."""
        error = NoPlanError(self.title, [*self.problems, problem])
        error.missing_bytes = self.missing_bytes
        error.bytes_per_gpu = self.bytes_per_gpu
        error.gpu_kinds = self.gpu_kinds
        return error


# Plans in a few words.


def describe_plan(plan: Plan, kinds: Sequence[str]) -> str:
    """The plan's groups in model order, with what they do to fit."""
    parts = []
    for number, group in enumerate(plan.groups):
        layers = plan.num_layers_of_group(number)
        chunks = len(plan.chunks_of_group(number))
        split = f" in {chunks} chunks" if chunks > 1 else ""
        parts.append(
            f"{members(group, kinds)}: {number_of(layers, 'layer')}{split}{_settings(group, kinds)}"
            + (", hierarchical" if group.hierarchical else "")
        )
    return f"{plan.schedule.name}; " + "; ".join(parts)


def structure(plan: Plan, kinds: Sequence[str]) -> tuple[object, ...]:
    """Equal for plans that differ in layers, sizes, recomputation or shares alone."""
    chunks = Counter(chunk.group for chunk in plan.chunks)
    groups = [(members(group, kinds), chunks[number]) for number, group in enumerate(plan.groups)]
    return plan.schedule.name, *groups


def members(group: Group, kinds: Sequence[str]) -> str:
    """How many GPUs of which kinds a group has, those in TP groups with their number of ranks."""
    counts = Counter(_of(replica, kinds) for replica in group.replicas)
    return " + ".join(f"{count}{said}" for said, count in sorted(counts.items()))


def _of(replica: Replica, kinds: Sequence[str]) -> str:
    """What comes after the number of replicas like this one."""
    if len(replica.ranks) == 1:
        return f" {kinds[replica.ranks[0]]}"
    inside = Counter(kinds[rank] for rank in replica.ranks)
    shared = replica.expert_parallel
    share = f" that share experts{', overlapped' if shared.overlap else ''}" if shared else ""
    return f" x ({' + '.join(f'{count} {kind}' for kind, count in sorted(inside.items()))}{share})"


def _settings(group: Group, kinds: Sequence[str]) -> str:
    """What the group does to fit; where its replicas differ, which of them do what."""
    found: dict[str, list[Replica]] = {}
    for replica in group.replicas:
        found.setdefault(_said(settings_in(group, replica)), []).append(replica)
    if len(found) == 1:
        return "".join(f", {said}" for said in found if said)
    return "".join(
        f", {said} on {members(replace(group, replicas=tuple(replicas)), kinds)}"
        for said, replicas in found.items()
        if said
    )


def _said(settings: MemorySettings) -> str:
    said, recompute = [], settings.recompute
    if recompute is not None and recompute.mode != "none":
        number = f" {recompute.num_layers}" if recompute.num_layers else ""
        said.append(f"recompute {recompute.mode}{number}")
    if settings.offload.said:
        said.append("offload " + " and ".join(settings.offload.said))
    return ", ".join(said)
