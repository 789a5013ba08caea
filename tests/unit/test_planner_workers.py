"""A search by two workers: what it finds does not depend on where they are."""

import sys
from dataclasses import replace

import pytest

from tests.unit.test_planner_search import lab
from zorse_megatron.plan.plan_file import dump_plan
from zorse_megatron.planner.outcome import SearchStats
from zorse_megatron.planner.search import workers as module
from zorse_megatron.planner.search.effort import Effort
from zorse_megatron.planner.search.workers import CostTask, SearchWorker, Workers, workers_for
from zorse_megatron.planner.search.zorse_search import SearchResult, search

pytestmark = pytest.mark.slow

CLUSTER = """
name: lab
nodes:
  - {name: new, gpus: 2 x A100-40, link: NVSwitch 220 GB/s, nics: 100 Gb/s}
  - {name: old, count: 2, gpus: 2 x T4, link: PCIe 6 GB/s, nics: 25 Gb/s}
"""
EFFORT = Effort(listed=20, costed=4, widened=2, finalists=4, computations=4000)


def nothing(progress):
    """Where progress goes."""


@pytest.fixture(autouse=True)
def two_workers(monkeypatch):
    monkeypatch.setattr(module, "_ALONE_UP_TO", 0)
    monkeypatch.setattr(Effort, "of", lambda inputs: EFFORT)


def found_with(monkeypatch, *, processors: int) -> SearchResult:
    monkeypatch.setattr(module, "num_processors", lambda: processors)
    return search(lab(CLUSTER), nothing)


def test_one_processor_finds_what_two_find(monkeypatch):
    one, two = (found_with(monkeypatch, processors=number) for number in (1, 2))
    assert one.considered == two.considered
    assert len(one.evaluations) > 2
    for a, b in zip(one.evaluations, two.evaluations, strict=True):
        assert dump_plan(a.plan) == dump_plan(b.plan)
        assert (a.iteration_s, a.peaks_bytes) == (b.iteration_s, b.peaks_bytes)
    for found in (one, two):
        result = found.evaluations[0].result
        assert result is not None and result.iteration_s == found.evaluations[0].iteration_s
        assert all(other.result is None for other in found.evaluations[1:])


@pytest.mark.parametrize("batch", [3, 64])
def test_no_plan_is_found_twice(monkeypatch, batch):
    """With few samples several estimates come to the same plan."""
    monkeypatch.setattr(module, "num_processors", lambda: 1)
    evaluations = search(lab(CLUSTER, batch=batch), nothing).evaluations
    plans = [(v.plan.groups, v.plan.chunks, v.plan.schedule) for v in evaluations]
    assert len(plans) > 1 and all(plans.count(plan) == 1 for plan in plans)


def test_the_second_process_imports_nothing_from_where_it_starts(monkeypatch, tmp_path):
    (tmp_path / "random.py").write_text("raise SystemExit('the wrong module')\n")
    monkeypatch.chdir(tmp_path)
    assert found_with(monkeypatch, processors=2).evaluations


@pytest.mark.parametrize("processors", [1, 2])
def test_each_worker_does_its_task(monkeypatch, processors):
    monkeypatch.setattr(module, "num_processors", lambda: processors)
    inputs = lab(CLUSTER)
    alone, spent = [], SearchStats()
    for source in ("device orders", "groupings"):
        worker = SearchWorker(inputs, EFFORT, nothing)
        alone.append(worker.cost((source,)))
        spent += worker.spent
    assert spent.groupings and spent.estimated and not spent.simulated
    with workers_for(inputs, EFFORT, nothing) as workers:
        together = workers.do([CostTask(("device orders",)), CostTask(("groupings",))])
        assert workers.spent == spent
    assert [[each.iteration_s for each in found] for found in together] == [
        [each.iteration_s for each in found] for found in alone
    ]


def test_more_tasks_than_workers_are_refused(monkeypatch):
    monkeypatch.setattr(module, "num_processors", lambda: 1)
    with workers_for(lab(CLUSTER), EFFORT, nothing) as workers:
        assert isinstance(workers, Workers)
        with pytest.raises(AssertionError, match="more tasks than workers"):
            workers.do([CostTask(("device orders",))] * 3)


def test_a_second_process_that_fails_is_told(monkeypatch):
    monkeypatch.setattr(module, "num_processors", lambda: 2)
    monkeypatch.setattr(sys, "executable", "/bin/false")
    with pytest.raises(RuntimeError, match="second process ended with status 1"):
        search(lab(CLUSTER), nothing)


def test_what_does_not_fit_gets_other_settings_at_once(monkeypatch):
    """Although the closed form takes much more to be free than there is."""
    worker = SearchWorker(lab(CLUSTER), EFFORT, nothing)
    start = next(
        each
        for each in worker.cost(("groupings",))
        if each.candidate.schedule == "1f1b"
        and all(own.mode == "none" for cost in each.costs for own in cost.settings)
        and each.costs[0].free_bytes > 2**30
        and len(each.candidate.device_groups[0].gpu_classes) == 1
    )
    tried = []
    evaluate = worker.evaluator.evaluate

    def simulated(estimate):
        evaluation = evaluate(estimate)
        tried.append(estimate)
        if estimate.costs[0].settings != start.costs[0].settings:
            return evaluation
        overflow = (2**20, *(-1 for _ in evaluation.overflow_bytes[1:]))
        return replace(evaluation, overflow_bytes=overflow)

    monkeypatch.setattr(worker.evaluator, "evaluate", simulated)
    monkeypatch.setattr(worker.evaluator, "preview", lambda estimate: None)
    fitted = worker.fit(start, float("inf"), refits=1)
    assert fitted is not None and len(tried) == 2
    assert fitted.estimate.costs[0].settings != start.costs[0].settings
    assert [s.settings for s in fitted.estimate.costs[1:]] == [s.settings for s in start.costs[1:]]
