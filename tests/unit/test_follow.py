"""When a run moves: over simulated iterations, with noise, of GPUs that slow down and recover.

The plans are of two groups of two GPUs each. How long they take is a formula here, and the search
tries all of them, so that hundreds of iterations take no time; the real search and the simulator
are in `test_cli_follow.py`.
"""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import pytest

from zorse_megatron.costs.own_speeds import GpuSpeed, alike_factors
from zorse_megatron.follow.follower import Decision, Follower, Settings
from zorse_megatron.follow.move_costs import MoveCost
from zorse_megatron.rebalance.balancer import Balancer, with_counts, workers_of
from zorse_megatron.rebalance.counts import ReplicaTime, best_counts
from zorse_megatron.rebalance.iteration_times import IterationTimes
from zorse_megatron.rebalance.run_status import RunStatus
from zorse_megatron.schema.plan.plan import (
    Chunk,
    ClusterFingerprint,
    Group,
    ModelFingerprint,
    Plan,
    Replica,
    Schedule,
)
from zorse_megatron.schema.plan.plan_json import fingerprint
from zorse_megatron.schema.status.status import Move

LAYERS, BATCH, SIZE = 24, 64, 2
LAYER_S = (0.010, 0.010, 0.014, 0.014)
"""Of a micro-batch, by rank."""
KINDS = ("A", "A", "B", "B")
JITTER = 0.1
LOOKS_EVERY = 3
Factors = Callable[[int], Sequence[float]]
"""Iteration -> how many times as long each rank takes."""


def plan_of(layers: int, factors: Sequence[float]) -> Plan:
    """The first group has so many layers, and replicas what they can do at these speeds."""
    groups, chunks = [], []
    for number, stop in enumerate((layers, LAYERS)):
        ranks = (2 * number, 2 * number + 1)
        counts = best_counts(
            [
                ReplicaTime(
                    micro_batch_size=SIZE,
                    num_microbatches=BATCH // SIZE // 2,
                    seconds=LAYER_S[rank] * factors[rank],
                )
                for rank in ranks
            ]
        )
        replicas = tuple(
            Replica(ranks=(rank,), micro_batch_size=SIZE, num_microbatches=count, shard_weight=1.0)
            for rank, count in zip(ranks, counts, strict=True)
        )
        groups.append(Group(replicas=replicas))
        chunks.append(Chunk(group=number, layers=(number * layers, stop)))
    return Plan(
        schema_version=1,
        global_batch_size=BATCH,
        model=ModelFingerprint(num_layers=LAYERS),
        groups=tuple(groups),
        chunks=tuple(chunks),
        schedule=Schedule(name="1f1b"),
        cluster=ClusterFingerprint(gpu_kinds=KINDS),
    )


def micro_batch_s(plan: Plan) -> tuple[float, ...]:
    first, stop = plan.chunks[0].layers
    layers = stop - first
    return tuple(
        each * (layers if rank < 2 else LAYERS - layers) for rank, each in enumerate(LAYER_S)
    )


def iteration_s(plan: Plan, factors: Sequence[float]) -> float:
    times = micro_batch_s(plan)
    return max(
        replica.num_microbatches * times[replica.ranks[0]] * factors[replica.ranks[0]]
        for group in plan.groups
        for replica in group.replicas
    )


def best_plan(factors: Sequence[float]) -> Plan:
    return min(
        (plan_of(layers, factors) for layers in range(1, LAYERS)),
        key=lambda plan: iteration_s(plan, factors),
    )


@dataclass(frozen=True, kw_only=True)
class Truth:
    factors: tuple[float, ...]
    move_s: float

    def iteration_s(self, plan: Plan) -> float:
        return iteration_s(plan, self.factors)

    def search(self) -> Plan | str:
        return best_plan(self.factors)

    def move_cost(self, before: Plan, after: Plan) -> MoveCost:
        return MoveCost(sent_bytes=0, between_nodes_bytes=0, seconds=self.move_s)


@dataclass(kw_only=True)
class Run:
    """Trains, rebalances, and does what it is asked: the costs and the run of a follower."""

    factors: Factors
    seed: int
    settings: Settings = field(default_factory=Settings)
    refuses: bool = False
    move_s: float = 5.0
    surprise: Callable[[Plan], float] = lambda plan: 1.0
    """How many times as long as in the simulator iterations under a plan take."""
    takes_s: float = 5.0
    """What a move really takes."""
    now_s: float = 1e9
    decisions: list[Decision] = field(default_factory=list)
    asked_at: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.rng = random.Random(self.seed)
        self.follower = Follower(self.settings, self, self)
        self.iteration, self.asked = 0, None
        self._begin(best_plan((1.0,) * 4), [])

    def micro_batch_s(self, plan: Plan) -> Sequence[float]:
        return micro_batch_s(plan)

    def at_speeds(self, speeds: Sequence[GpuSpeed | None]) -> Truth:
        return Truth(factors=alike_factors(KINDS, speeds), move_s=self.move_s)

    def ask(self, plan: Plan) -> None:
        self.asked_at.append(self.iteration)
        self.asked: Plan | None = plan

    def take_back(self) -> None:
        self.asked = None

    def _begin(self, plan: Plan, moves: list[Move]) -> None:
        self.plan, self.balancer = plan, Balancer(plan=plan)
        self.first = self.iteration
        self.status = RunStatus(
            plan=plan, tokens_per_iteration=1, first_iteration=self.first, moves=moves
        )

    def train(self, iterations: int) -> list[str]:
        """What the follower has decided."""
        for _ in range(iterations):
            self._iterate()
            if self.iteration % LOOKS_EVERY:
                continue
            now = self.status.now(written_s=self.now_s)
            decision = self.follower.look(now, self.plan)
            if decision is not None:
                self.decisions.append(decision)
        return [each.what for each in self.decisions]

    def _iterate(self) -> None:
        if self.asked is not None and self.iteration > self.asked_at[-1] + 1:
            asked, self.asked = self.asked, None
            refused = "no room" if self.refuses else None
            moves = [
                *self.status.moves,
                Move(iteration=self.iteration, plan=fingerprint(asked), refused=refused),
            ]
            if self.refuses:
                self.status.moves = moves
            else:
                self.now_s += self.takes_s
                self._begin(asked, moves)
        number = self.iteration - self.first
        if self.balancer.wish is not None:
            self.status.change(number, self.balancer.wish)
            self.balancer.change_to(with_counts(self.plan, self.balancer.wish))
        seconds, factors = self._seconds(), self.factors(self.iteration)
        took_s = iteration_s(self.balancer.plan, factors) * self.surprise(self.plan)
        self.now_s += took_s
        times = tuple(
            IterationTimes(
                number=number,
                micro_batch_s=each,
                compute_s=each,
                waited_s=0.0,
                update_s=0.0,
                iteration_s=took_s,
            )
            for each in seconds
        )
        self.status.take(times)
        if number:
            of = {worker: seconds[2 * worker[0] + worker[1]] for worker in workers_of(self.plan)}
            self.balancer.add(number, of)
        self.iteration += 1

    def _seconds(self) -> list[float]:
        """Medians of a rank's forwards and backwards, each 10 % more or less."""
        found = []
        for rank, (level, factor) in enumerate(
            zip(micro_batch_s(self.plan), self.factors(self.iteration), strict=True)
        ):
            count = self.balancer.plan.groups[rank // 2].replicas[rank % 2].num_microbatches
            middles = (
                sorted(self.rng.lognormvariate(0, JITTER) for _ in range(count))[count // 2]
                for _ in "FB"
            )
            found.append(
                level * factor * sum(w * m for w, m in zip((1, 2), middles, strict=True)) / 3
            )
        return found


def slow(rank: int, factor: float, start: int, stop: float = float("inf")) -> Factors:
    return lambda now: [
        factor if each == rank and start <= now < stop else 1.0 for each in range(4)
    ]


@pytest.mark.parametrize("seed", range(2))
def test_noise_alone_moves_nothing(seed: int) -> None:
    run = Run(factors=slow(0, 1.0, 0), seed=seed)
    assert "moves" not in run.train(200) and not run.asked_at


@pytest.mark.slow
@pytest.mark.parametrize("rank", range(4))
def test_moves_once_and_once_back(rank: int) -> None:
    """A GPU takes 1.6 times as long from iteration 40 on, and is itself again from 120 on."""
    run = Run(factors=slow(rank, 1.6, 40, 120), seed=rank)
    first = run.plan
    run.train(120)
    what = [each.what for each in run.decisions if each.what != "stays"]
    assert what == ["moves", "moved", "kept"]
    (asked,) = run.asked_at
    assert 40 + run.settings.patience < asked < 75
    slowed = run.factors(100)
    least = best_plan(slowed)
    assert iteration_s(run.plan, slowed) < 1.05 * iteration_s(least, slowed)
    assert iteration_s(first, slowed) > 1.05 * iteration_s(run.plan, slowed)
    run.train(80)
    assert len(run.asked_at) == 2 and run.plan == first


@pytest.mark.slow
@pytest.mark.parametrize("half", [12, 25, 60])
def test_a_gpu_that_comes_and_goes_moves_the_run_less_and_less(half: int) -> None:
    """In 400 iterations: a move takes twice the patience of the one before."""
    run = Run(
        factors=lambda now: (1.6 if now // half % 2 else 1.0, 1.0, 1.0, 1.0),
        seed=half,
    )
    run.train(400)
    assert 2 ** (len(run.asked_at) - 1) * run.settings.patience <= 2 * half
    assert len(run.asked_at) <= 4


def test_a_run_that_refuses_is_asked_less_and_less_and_then_no_more() -> None:
    run = Run(factors=slow(0, 1.6, 20), seed=1, refuses=True)
    run.train(300)
    assert len(run.asked_at) == 3
    first, second, third = run.asked_at
    assert second - first >= 20 and third - second >= 40
    refused = [each for each in run.decisions if each.what == "refused"]
    assert len(refused) == 3 and "no room" in refused[0].line


def test_a_run_that_does_not_answer_is_let_be() -> None:
    run = Run(factors=slow(0, 1.6, 20), seed=1)
    run.ask = lambda plan: run.asked_at.append(run.iteration)  # type: ignore[method-assign]
    taken_back: list[int] = []
    run.take_back = lambda: taken_back.append(run.iteration)  # type: ignore[method-assign]
    run.train(70)
    assert len(taken_back) == 1 and taken_back[0] > run.asked_at[0] + 20
    assert [each.what for each in run.decisions][:2] == ["moves", "unanswered"]


@pytest.mark.parametrize(
    ("settings", "move_s"),
    [
        pytest.param(Settings(gain=0.4), 5.0, id="gains too little"),
        pytest.param(Settings(horizon=20), 60.0, id="does not pay in time"),
        pytest.param(Settings(last_iteration=60), 5.0, id="the training is about to end"),
    ],
)
def test_stays_where_it_does_not_pay(settings: Settings, move_s: float) -> None:
    run = Run(factors=slow(0, 1.6, 20), seed=2, settings=settings, move_s=move_s)
    assert set(run.train(60)) == {"stays"} and not run.asked_at


def test_the_second_move_is_weighed_by_what_the_first_one_took() -> None:
    """One that takes half an hour is not made a second time."""
    run = Run(factors=slow(0, 1.6, 20, 80), seed=1, takes_s=1800.0)
    run.train(160)
    (moved,) = [each for each in run.decisions if each.what == "moved"]
    assert moved.facts["stood_still_s"] == pytest.approx(1800.0, abs=3 * LOOKS_EVERY)
    assert len(run.asked_at) == 1
    assert run.decisions[-1].what == "stays" and run.decisions[-1].facts["move_s"] > 1700


def test_a_plan_that_is_slower_than_it_should_be_is_left_for_good() -> None:
    """What the simulator does not know: whatever is not the first plan takes twice as long."""
    first = best_plan((1.0,) * 4)
    run = Run(
        factors=slow(0, 1.6, 20),
        seed=1,
        surprise=lambda plan: 1.0 if plan == first else 2.0,
    )
    what = run.train(300)
    assert [each for each in what if each != "stays"] == ["moves", "moved", "goes back", "moved"]
    assert run.plan == first and len(run.asked_at) == 2


def test_what_has_been_found_is_told() -> None:
    run = Run(factors=slow(3, 1.6, 20), seed=3)
    run.train(60)
    (asks,) = [each for each in run.decisions if each.what == "moves"]
    assert asks.facts["ranks"] == [3]
    assert asks.facts["factors"] == pytest.approx([1.0, 1.0, 1.0, 1.6], rel=0.06)
    assert "rank 3 (B) takes 1.6" in asks.line
    assert asks.facts["plan"] == fingerprint(run.plan)
    assert replace(run.plan, predictions=None) == run.plan
