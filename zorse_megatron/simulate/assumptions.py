"""What a simulation assumes beyond a plan: the framework's ways, perturbed machines; its errors."""

import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from zorse_megatron.schedule.transfer_windows import RECEIVES_AHEAD, SENDS_BEHIND


@dataclass(frozen=True, kw_only=True)
class Framework:
    """Habits of the program that trains. The defaults are those of this project's runtime."""

    state: Literal["sharded", "replicated"] = "sharded"
    """sharded: each rank owns its part of the optimizer state, gradients are reduce-scattered and
    parameters gathered. replicated: each rank owns all of it and gradients are all-reduced."""
    receives_ahead: int = RECEIVES_AHEAD
    """How many computations before its place in the list a receive may begin; where transfers
    block, none."""
    sends_behind: int = SENDS_BEHIND
    """How many computations after its place in the list a send may be on its way; where transfers
    block, none."""
    blocking_transfers: bool = False
    """Whether a rank stops at each send and each receive until it is done, as with `send` and
    `recv` of torch.distributed on the stream that computes."""
    interleaves_as_megatron: bool = False
    """Whether transfers are posted and waited for as by Megatron's interleaved schedule: a rank
    stops at each send of an activation, though not at others (`transfers`)."""
    paired_transfers: bool = False
    """Whether, where transfers block, a receive is started just before the computation that it is
    for, together with the send of the other direction before it, as in Megatron's
    `send_forward_recv_backward`."""
    expert_parallel: int = 1
    """Ranks that stock spreads the experts of each layer over, of the replicas of a group one after
    the other (`--expert-model-parallel-size`); of single ranks only."""
    split_transfers: bool = True
    """Whether each rank of a tensor-parallel group sends its part of an activation. If not, each
    sends all of it to its counterpart unless ranks have parts of the sequence, as in Megatron's
    `get_tensor_shapes`."""
    rebuild_bytes_per_s: float | None = None
    """How fast the receiver makes a tensor out of what arrived, before it can compute; None: no
    such work."""
    gathers_ahead: bool = True
    """Whether a chunk's gather behind its step starts there; if not, with its first forward, as by
    Megatron's forward hooks (--overlap-param-gather)."""
    sums_at_scale: int = 1
    """How often all ranks sum something small before the gradients are scaled: whether anybody
    wants the step to be run again (`RerunStateMachine.should_run_forward_backward`), and in our
    runtime with it the tokens, and what norm and overflow are made of."""
    sums_at_norm: int = 0
    """How often they do for norm and overflow."""
    broadcasts_tokens: bool = False
    """Whether the tokens do not go with it, but are broadcast along each pipeline and then summed
    over the replicas of each stage (`finalize_model_grads`)."""
    sums_after_step: int = 0
    """The same after the step, over all ranks of a pipeline: whether it was made and the norm
    (`train_step`), and the learning rate (`training_log`). Under a plan each rank knows these."""


RUNTIME = Framework()
_STOCK = Framework(
    sums_at_norm=1,  # and one more for overflows where there is a loss scale
    split_transfers=False,
    gathers_ahead=False,
    broadcasts_tokens=True,
    sums_after_step=3,
)
STOCK_1F1B = replace(_STOCK, blocking_transfers=True, paired_transfers=True)
"""Megatron's own 1F1B with a distributed optimizer."""
STOCK_INTERLEAVED = replace(_STOCK, interleaves_as_megatron=True)
"""Its interleaved schedule with `--overlap-p2p-communication-warmup-flush`. The rank stops until an
activation has left, whose memory is freed (`pp_post_forward`, deallocate_pipeline_outputs)."""

# Perturbations of the cost models: jitter, a mis-profiled rank or kind, a slow link.


@dataclass(frozen=True, kw_only=True)
class SlowSpell:
    """Iterations in which a rank is slow. For emulated runs: a simulation is of one iteration."""

    rank: int
    """Global rank."""
    factor: float
    """Its computations take this many times as long."""
    first_iteration: int
    """Counted from 1."""
    last_iteration: int | None
    """None: it stays slow."""

    def __post_init__(self) -> None:
        if not (math.isfinite(self.factor) and self.factor > 0):
            raise ValueError(f"found factor {self.factor}; expected it positive")

    def covers(self, rank: int, iteration: int) -> bool:
        """Whether the rank is slow in this iteration."""
        ends = math.inf if self.last_iteration is None else self.last_iteration
        return rank == self.rank and self.first_iteration <= iteration <= ends


@dataclass(frozen=True, kw_only=True)
class Perturbation:
    """How far the machines are from what the cost models say of them.

    `jitter`: standard deviation of each computation's duration over its mean. The factors are
    log-normal with mean 1, so that they are positive and add no time on average. They are drawn
    for each rank on its own, in the order of its list, so the same seed gives the same factors
    whatever the other ranks do.
    """

    jitter: float = 0.0
    seed: int = 0
    rank_factors: Mapping[int, float] = field(default_factory=dict)
    """Global rank -> its computations take this many times as long."""
    kind_factors: Mapping[str, float] = field(default_factory=dict)
    """GPU kind -> the same for all of its ranks."""
    link_factors: Mapping[str, float] = field(default_factory=dict)
    """Name of a shared link -> its bandwidth is this many times what it was."""
    spells: tuple[SlowSpell, ...] = ()
    """Beside the rest."""

    def __post_init__(self) -> None:
        if not (math.isfinite(self.jitter) and self.jitter >= 0):
            raise ValueError(f"found jitter {self.jitter}; expected a number of 0 or more")
        for name in ("rank_factors", "kind_factors", "link_factors"):
            for key, factor in getattr(self, name).items():
                if not (math.isfinite(factor) and factor > 0):
                    raise ValueError(f"found {name}[{key!r}] = {factor}; expected it positive")

    def rank_factor(self, rank: int, kind: str) -> float:
        """How many times as long each computation of the rank takes, jitter left out."""
        return self.rank_factors.get(rank, 1.0) * self.kind_factors.get(kind, 1.0)

    def factor_in(self, iteration: int, rank: int, kind: str) -> float:
        """The same in one iteration of an emulated run, counted from 1."""
        slow = (spell.factor for spell in self.spells if spell.covers(rank, iteration))
        return self.rank_factor(rank, kind) * math.prod(slow)

    def jitter_of(self, rank: int, factor: float = 1.0) -> "Pace":
        """The factors of one rank's computations, in the order of its list, times `factor`."""
        return Pace(self, rank, factor)

    @property
    def treats_kinds_alike(self) -> bool:
        """Whether ranks of one kind stay equal."""
        return not (self.jitter or self.rank_factors or self.link_factors or self.spells)


class Pace:
    """How many times as long each computation of one rank takes, one after the other."""

    def __init__(self, perturbation: Perturbation, rank: int, factor: float) -> None:
        self._factor = factor
        variance = math.log1p(perturbation.jitter**2)  # of the logarithm
        self._mean, self._deviation = -variance / 2, math.sqrt(variance)
        self._random = random.Random(f"{perturbation.seed}/{rank}") if self._deviation else None

    def draw(self) -> float:
        """Of the next one."""
        if self._random is None:
            return self._factor
        return self._factor * self._random.lognormvariate(self._mean, self._deviation)


NO_PERTURBATION = Perturbation()

# Errors of a simulation.


class SimulationError(Exception):
    """Action lists that cannot be executed, or inputs that do not fit the plan."""


class UnknownLinkError(SimulationError):
    """Links to be slowed down that are on no route. `known`: those that the plan uses."""

    def __init__(self, unknown: Sequence[str], known: Sequence[str]) -> None:
        self.unknown, self.known = tuple(unknown), tuple(known)
        super().__init__(
            f"found links {list(unknown)} to be slowed down; expected links that the plan uses: "
            f"{list(known)}"
        )
