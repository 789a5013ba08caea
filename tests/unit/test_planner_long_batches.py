"""A long batch is planned no worse than a part of it."""

from dataclasses import replace

import pytest

from tests.unit.planner_cases import fits, simulated
from tests.unit.test_planner_search import lab
from zorse_megatron.planner.evaluate import Evaluation, Evaluator
from zorse_megatron.planner.find_plan import find_plan
from zorse_megatron.planner.inputs.search_inputs import Inputs
from zorse_megatron.planner.outcome import SearchStats
from zorse_megatron.planner.search import finish_plan
from zorse_megatron.planner.search.finish_plan import (
    lengthened,
    shortened_by,
    with_plans_of_shorter,
)
from zorse_megatron.planner.search.zorse_search import SearchResult

NONE = SearchResult(evaluations=[], considered=SearchStats())


@pytest.mark.parametrize(
    ("samples", "by"), [(2048, 1), (2050, 2), (4096, 2), (6144, 3), (8192, 4), (2053, 1)]
)
def test_a_long_batch_is_divided_into_whole_parts(samples: int, by: int) -> None:
    """2053 is a prime number."""
    assert shortened_by(replace(lab(), global_batch_size=samples)) == by


def test_a_search_that_finds_nothing_has_the_plans_of_a_part(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Thrice the micro-batches of the part's best plan, which fits and takes what it says."""
    monkeypatch.setattr(finish_plan, "_LONG", 24)
    inputs, searched = lab(batch=72), []
    outcome = find_plan(lab(batch=24), strategy="cephalo")

    def search(part: Inputs) -> SearchResult:
        searched.append(part.global_batch_size)
        evaluation = Evaluation(
            estimate=None,
            plan=outcome.plan,
            result=None,
            iteration_s=outcome.iteration_s,
            peaks_bytes=(),
            overflow_bytes=(0,),
        )
        return replace(NONE, evaluations=[evaluation])

    evaluator = Evaluator(inputs)
    (found,) = with_plans_of_shorter(NONE, evaluator, search).evaluations
    assert searched == [24]
    whole = simulated(inputs, lengthened(outcome.plan, 3))
    assert found.iteration_s == pytest.approx(whole.iteration_s, rel=1e-9)
    assert fits(inputs, whole)
    for group in found.plan.groups:
        assert sum(r.micro_batch_size * r.num_microbatches for r in group.replicas) == 72


def test_a_short_batch_is_searched_once() -> None:
    evaluator = Evaluator(lab())
    assert with_plans_of_shorter(NONE, evaluator, lambda part: 1 / 0) is NONE  # type: ignore
