"""A search by two workers, and the device orders that it looks along."""

import os
import pickle
import random
import subprocess
import sys
from dataclasses import replace
from functools import partial
from itertools import chain
from types import SimpleNamespace

import pytest

from tests.unit.conftest import LITTLE_EFFORT as EFFORT
from tests.unit.test_planner_search import lab
from zorse_megatron.plan.plan_file import dump_plan
from zorse_megatron.planner.closed_form.device_groups import DeviceGroup, GpuClass
from zorse_megatron.planner.closed_form.estimator import Estimator
from zorse_megatron.planner.outcome import SearchStats
from zorse_megatron.planner.search import workers as module
from zorse_megatron.planner.search.device_orders import (
    COARSE,
    FINE,
    DeviceOrderSearch,
    device_orders,
)
from zorse_megatron.planner.search.effort import Effort
from zorse_megatron.planner.search.workers import SearchWorker, Workers, workers_for
from zorse_megatron.planner.search.zorse_search import SearchResult, search

CLUSTER = """
name: lab
nodes:
  - {name: new, gpus: 2 x A100-40, link: NVSwitch 220 GB/s, nics: 100 Gb/s}
  - {name: old, count: 2, gpus: 2 x T4, link: PCIe 6 GB/s, nics: 25 Gb/s}
"""


def nothing(progress):
    """Where progress goes."""


@pytest.fixture(autouse=True)
def two_workers(monkeypatch):
    monkeypatch.setattr(module, "_ALONE_UP_TO", 0)
    monkeypatch.setattr(Effort, "of", lambda inputs: EFFORT)


def found_with(monkeypatch, *, processors: int) -> SearchResult:
    monkeypatch.setattr(module, "num_processors", lambda: processors)
    return search(lab(CLUSTER), nothing)


@pytest.mark.slow
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


@pytest.mark.slow
@pytest.mark.parametrize("batch", [3, 64])
def test_no_plan_is_found_twice(monkeypatch, batch):
    """With few samples several estimates come to the same plan."""
    monkeypatch.setattr(module, "num_processors", lambda: 1)
    evaluations = search(lab(CLUSTER, batch=batch), nothing).evaluations
    plans = [(v.plan.groups, v.plan.chunks, v.plan.schedule) for v in evaluations]
    assert len(plans) > 1 and all(plans.count(plan) == 1 for plan in plans)


@pytest.mark.slow
def test_the_second_process_imports_nothing_from_where_it_starts(monkeypatch, tmp_path):
    (tmp_path / "random.py").write_text("raise SystemExit('the wrong module')\n")
    monkeypatch.chdir(tmp_path)
    assert found_with(monkeypatch, processors=2).evaluations


@pytest.mark.slow
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
    tasks = [partial(SearchWorker.cost, sources=(each,)) for each in ("device orders", "groupings")]
    with workers_for(inputs, EFFORT, nothing) as workers:
        together = workers.do(tasks)
        assert workers.spent == spent
    assert [[each.iteration_s for each in found] for found in together] == [
        [each.iteration_s for each in found] for found in alone
    ]


@pytest.mark.slow
def test_more_tasks_than_workers_are_refused(monkeypatch):
    monkeypatch.setattr(module, "num_processors", lambda: 1)
    with workers_for(lab(CLUSTER), EFFORT, nothing) as workers:
        assert isinstance(workers, Workers)
        with pytest.raises(AssertionError, match="more tasks than workers"):
            workers.do([partial(SearchWorker.cost, sources=("device orders",))] * 3)


@pytest.mark.slow
def test_a_second_process_that_fails_is_told(monkeypatch):
    monkeypatch.setattr(module, "num_processors", lambda: 2)
    monkeypatch.setattr(sys, "executable", "/bin/false")
    with pytest.raises(RuntimeError, match="second process ended with status 1"):
        search(lab(CLUSTER), nothing)


@pytest.mark.timeout(20)
def test_a_second_process_whose_answer_cannot_be_read_is_ended():
    program = "import time; print('no answer', flush=True); time.sleep(60)"
    with (
        subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE) as process,
        pytest.raises(RuntimeError, match="ended with status -9"),
    ):
        module._RemoteWorker(process).answer()


@pytest.mark.slow
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


# Keys.

FRESH = """DeviceGroup((GpuClass(
    kind="T4", capacity_bytes=16, host_bytes=None, host_link_bytes_per_s=1e9, ranks=(0, 2)
),))"""
# Looks up there what was made here, and prints what it finds.
THERE = f"""
import pickle, sys
from zorse_megatron.planner.closed_form.device_groups import GpuClass, DeviceGroup
found, fresh = pickle.load(sys.stdin.buffer), {FRESH}
print(found == fresh, {{fresh: "there"}}.get(found), {{found: "there"}}.get(fresh), hash(found))
"""


@pytest.mark.slow
def test_a_device_group_from_another_process_is_found_as_a_key():
    device_group = eval(FRESH, {"DeviceGroup": DeviceGroup, "GpuClass": GpuClass})
    here = hash(device_group)  # kept from now on
    other_seed = "2" if os.environ.get("PYTHONHASHSEED") == "1" else "1"
    done = subprocess.run(
        [sys.executable, "-c", THERE],
        input=pickle.dumps(device_group),
        env={**os.environ, "PYTHONHASHSEED": other_seed},
        stdout=subprocess.PIPE,
        check=True,
    )
    *answers, there = done.stdout.decode().split()
    assert answers == ["True", "there", "there"]
    assert int(there) != here, "both processes hash alike, so nothing was shown"


# Device orders.

KINDS = ("T4", "L4", "A100-40", "V100-16", "A6000")
# What it has -> kinds, regions, different orders of pools.
CLUSTERS = {
    "four pools": (4, 1, 24),
    "four pools in two regions": (4, 2, 8),
    "five pools": (5, 1, 4),
    "five pools in two regions": (5, 2, 8),
}


def inputs_of(name: str):
    num_kinds, regions, _ = CLUSTERS[name]
    nodes = [
        f"  - {{name: {kind}, count: {at + 1}, gpus: 4 x {kind}, link: PCIe 6 GB/s, nics: 25 Gb/s, "
        f"region: r{at % regions}}}"
        for at, kind in enumerate(KINDS[:num_kinds])
    ]
    between = "between_regions: [{bandwidth: 5 Gb/s, latency: 10 ms}]" if regions > 1 else ""
    return lab("\n".join(["nodes:", *nodes, between, ""]))


def ranks_of(device_order):
    """All ranks along a device order, whatever its units."""
    return tuple(chain(*device_order))


@pytest.mark.parametrize("halved", [False, True])
@pytest.mark.parametrize("name", CLUSTERS)
def test_fine_and_coarse_device_orders_have_the_same_orders(name, halved):
    inputs = inputs_of(name)
    fine, coarse = (
        device_orders(inputs, most_units=most, halved=halved) for most in (FINE, COARSE)
    )
    assert list(map(ranks_of, fine)) == list(map(ranks_of, coarse))
    assert len(set(map(ranks_of, fine))) == len(fine) == CLUSTERS[name][2]
    assert all(len(one) > len(other) for one, other in zip(fine, coarse, strict=True))


@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize("name", CLUSTERS)
def test_of_many_device_orders_the_six_that_are_best_in_coarse_units_are_searched(
    name, nested, monkeypatch
):
    inputs = inputs_of(name)
    fine, coarse = (
        device_orders(inputs, most_units=most, halved=nested) for most in (FINE, COARSE)
    )
    values: list[int | None] = random.Random(7).sample(range(100), len(coarse))
    values[2] = None  # nothing fits along it
    value_of = dict(zip(coarse, values, strict=True))
    search = DeviceOrderSearch(Estimator(inputs), nested=nested, most_groups=8)

    def look(device_order, _sizes):
        value_s = value_of[device_order]
        if value_s is None:
            return None
        search.found.append(SimpleNamespace(partition=SimpleNamespace(value_s=value_s)))
        return search.found[-1]

    monkeypatch.setattr(search, "_try_sizes", look)
    found = search._promising_orders()
    assert not search.found, "partitions along coarse units are not proposed"
    if len(coarse) <= 6:
        assert found == fine
        return
    ranked = sorted(
        (value, ranks_of(device_order))
        for device_order, value in value_of.items()
        if value is not None
    )
    assert list(map(ranks_of, found)) == [ranks for _, ranks in ranked[:6]]
    assert set(found) <= set(fine)
