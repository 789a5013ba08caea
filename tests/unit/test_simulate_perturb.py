"""Perturbations: jitter, ranks and kinds that are slower than thought, slow links."""

from statistics import mean, stdev

import pytest

from tests.unit.fake_costs import FakeComm, FakeMemory, node_links
from tests.unit.made_plans import even_plan, one_group
from tests.unit.simulation import run, traces_of, transfers_of
from zorse_megatron.simulate.assumptions import Perturbation, SimulationError, SlowSpell


def test_a_slow_rank_is_the_slowest_stage():
    """Stage 1 of 2 takes twice as long: it never waits between its first and its last."""
    result = run(even_plan(2, 1, 8), perturbation=Perturbation(rank_factors={1: 2.0}))
    assert result.iteration_s == 1 + 8 * 2 * 3 + 2


def test_a_kind_is_slow_wherever_it_is():
    plan = one_group((1, 2), (1, 2))
    slow = Perturbation(kind_factors={"y": 3.0}, rank_factors={1: 2.0})
    assert run(plan, kinds=["x", "y"], perturbation=slow).iteration_s == 6 * 6
    assert run(plan, kinds=["y", "x"], perturbation=slow).iteration_s == 6 * 3


@pytest.mark.parametrize("factor", [0.5, 0.1])
def test_a_slow_link_slows_what_crosses_it(factor):
    comm = FakeComm(bytes_per_s=8.0, links=node_links(1, 8.0))
    slow = Perturbation(link_factors={"nic0>": factor})
    result = run(even_plan(2, 1, 1), memory=FakeMemory(boundary=8), comm=comm, perturbation=slow)
    there, back = (t.end_s - t.start_s for t in transfers_of(result))
    assert there == pytest.approx(1 / factor)
    assert back == 1.0


def test_a_slow_link_that_nobody_uses_is_refused():
    with pytest.raises(SimulationError, match="nic7"):
        run(even_plan(2, 1, 1), perturbation=Perturbation(link_factors={"nic7": 0.5}))


def test_jitter_has_the_mean_and_deviation_that_were_asked_for():
    jitter = Perturbation(jitter=0.2, seed=5).jitter_of(3)
    drawn = [jitter.draw() for _ in range(20_000)]
    assert mean(drawn) == pytest.approx(1.0, abs=0.01)
    assert stdev(drawn) == pytest.approx(0.2, abs=0.01)


def test_jitter_depends_on_the_seed_alone():
    plan = even_plan(3, 2, 4)

    def times(seed, kinds=None):
        return traces_of(run(plan, kinds=kinds, perturbation=Perturbation(jitter=0.1, seed=seed)))

    assert times(1) == times(1)
    assert times(1) != times(2)


def test_jitter_makes_a_pipeline_slower():
    """A pipeline waits for the slowest at every step, so noise of mean 1 costs time."""
    plan = even_plan(4, 1, 16)
    noisy = [run(plan, perturbation=Perturbation(jitter=0.3, seed=s)) for s in range(20)]
    assert mean(r.iteration_s for r in noisy) > 1.05 * run(plan).iteration_s


@pytest.mark.parametrize(
    "wrong",
    [
        {"jitter": -0.1},
        {"jitter": float("nan")},
        {"rank_factors": {0: 0.0}},
        {"kind_factors": {"x": float("inf")}},
        {"link_factors": {"nic": -1.0}},
    ],
)
def test_absurd_perturbations_are_refused(wrong):
    with pytest.raises(ValueError, match="expected"):
        Perturbation(**wrong)


def test_a_spell_slows_its_iterations_alone():
    spells = (
        SlowSpell(rank=1, factor=1.5, first_iteration=3, last_iteration=4),
        SlowSpell(rank=1, factor=2.0, first_iteration=4, last_iteration=None),
    )
    slow = Perturbation(spells=spells, kind_factors={"y": 3.0})
    factors = [slow.factor_in(iteration, 1, "y") for iteration in range(1, 7)]
    assert factors == [3.0, 3.0, 4.5, 9.0, 6.0, 6.0]
    assert slow.factor_in(4, 0, "x") == 1.0


def test_a_simulation_has_no_spells():
    spell = SlowSpell(rank=0, factor=1.5, first_iteration=3, last_iteration=None)
    with pytest.raises(SimulationError, match="one iteration"):
        run(even_plan(2, 1, 1), perturbation=Perturbation(spells=(spell,)))
