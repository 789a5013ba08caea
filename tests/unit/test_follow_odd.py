"""A run that is followed and does not go as foreseen: restarts, slow searches, others that act."""

from collections.abc import Sequence

import pytest

from tests.unit.test_follow import Run, Truth, iteration_s, slow
from zorse_megatron.costs.own_speeds import GpuSpeed
from zorse_megatron.follow.follower import Settings
from zorse_megatron.follow.lasting import Lasting
from zorse_megatron.follow.observed import Observed
from zorse_megatron.follow.weighed import Weighed
from zorse_megatron.rebalance.iteration_times import IterationTimes
from zorse_megatron.rebalance.run_status import RunStatus
from zorse_megatron.schema.plan.plan import Plan

SLOW = slow(0, 1.6, 20)


@pytest.mark.parametrize("back", [20, 0])
def test_a_run_that_is_under_its_first_plan_again_is_moved_again(back: int) -> None:
    """Restarted from a checkpoint, or moved by hand; the GPU is as slow as it was."""
    run = Run(factors=SLOW, seed=1)
    first = run.plan
    run.train(60)
    moved = run.plan
    assert moved != first
    run.iteration -= back
    run._begin(first, [])
    run.train(70)
    assert len(run.asked_at) == 2 and iteration_s(run.plan, SLOW(60)) < iteration_s(first, SLOW(60))


class SlowSearch(Run):
    """Iterations go on while a plan is searched for; the run answers a while after it is asked."""

    def at_speeds(self, speeds: Sequence[GpuSpeed | None]) -> Truth:
        for _ in range(30):
            self._iterate()
        return super().at_speeds(speeds)

    def ask(self, plan: Plan) -> None:
        super().ask(plan)
        self.asked_at[-1] += 9


def test_a_search_that_takes_long_is_no_lack_of_an_answer() -> None:
    run = SlowSearch(factors=SLOW, seed=1)
    assert run.train(60)[:2] == ["moves", "moved"]


def test_a_move_is_compared_with_iterations_at_the_same_speeds() -> None:
    """With little patience most of the iterations before a move were those of a fast GPU."""
    run = Run(factors=SLOW, seed=1, settings=Settings(patience=3))
    assert run.train(60) == ["moves", "moved"]


def test_a_plan_is_not_blamed_for_a_gpu_that_is_slow_for_a_while() -> None:
    run = Run(factors=SLOW, seed=1)

    def factors(now: int) -> Sequence[float]:
        passing = run.first > 0 and run.first + 5 <= now < run.first + 17
        return [*SLOW(now)[:3], 1.8 if passing else 1.0]

    run.factors = factors
    assert run.train(80) == ["moves", "moved", "kept"]


def test_two_who_follow_a_run_move_it_as_one() -> None:
    run = Run(factors=slow(0, 1.6, 20, 90), seed=1)
    second = type(run.follower)(run.settings, run, run)
    train = run._iterate

    def iterate() -> None:
        train()
        if run.iteration % 4 == 0:
            second.look(run.status.now(written_s=run.now_s), run.plan)

    run._iterate = iterate  # type: ignore[method-assign]
    first = run.plan
    run.train(160)
    assert run.plan == first and len(run.asked_at) <= 4


def test_the_last_status_keeps_its_iteration_where_counts_have_just_changed() -> None:
    run = Run(factors=SLOW, seed=1)
    status = RunStatus(plan=run.plan, tokens_per_iteration=1, first_iteration=100)
    for number in range(5):
        one = IterationTimes(
            number=number,
            micro_batch_s=1.0,
            compute_s=1.0,
            waited_s=0.0,
            update_s=0.0,
            iteration_s=1.0,
        )
        status.take((one,) * 4)
    status.change(5, status.counts)
    assert status.now(written_s=1.0).iteration == 105


def seen(iteration: int, factor: float, *, counts_since: int = 0) -> Observed:
    """One rank, whose level began with iteration 5 by the mean of its last iterations."""
    return Observed(
        iteration=iteration,
        plan=Run(factors=SLOW, seed=1).plan,
        speeds=(GpuSpeed(factor=factor, noise=0.01),),
        since=(5,),
        counts_since=counts_since,
    )


def test_a_speed_has_lasted_only_since_it_was_last_as_known() -> None:
    lasting = Lasting(patience=10, memory=1000)
    looks = {18: 1.5, 20: 1.02, 24: 1.5, 29: 1.5, 30: 1.5}
    found = [lasting.changed(seen(iteration, factor)) for iteration, factor in looks.items()]
    assert found == [(0,), (), (), (), (0,)]


def test_counts_have_to_have_been_in_force_for_a_while() -> None:
    lasting = Lasting(patience=10, memory=1000)
    assert lasting.changed(seen(30, 1.5, counts_since=27)) == ()
    assert lasting.changed(seen(31, 1.5, counts_since=27)) == (0,)


def test_nothing_pays_after_the_last_iteration() -> None:
    assert Weighed(present_s=2.0, next_s=1.0, move_s=5.0, iterations=0).gain < 0


def test_a_plan_that_was_left_is_gone_back_to_without_a_search() -> None:
    run = Run(factors=slow(0, 1.6, 20, 60), seed=1)
    first = run.plan
    run.train(60)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Truth, "search", lambda self: "none after 600 s")
        run.train(60)
    assert run.plan == first and len(run.asked_at) == 2
