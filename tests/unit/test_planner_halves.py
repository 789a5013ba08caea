"""A search in two halves: what it finds does not depend on the number of processors."""

import sys

import pytest

from tests.unit.test_planner_search import lab
from zorse_megatron.planner import halves
from zorse_megatron.planner.effort import Effort
from zorse_megatron.planner.halves import Found, Task, search
from zorse_megatron.schema.load import dump_plan

CLUSTER = """
name: lab
nodes:
  - {name: new, gpus: 2 x A100-40, link: NVSwitch 220 GB/s, nics: 100 Gb/s}
  - {name: old, count: 3, gpus: 2 x T4, link: PCIe 6 GB/s, nics: 25 Gb/s}
"""
EFFORT = Effort(listed=20, priced=4, widened=2, finalists=4, computations=4000)


@pytest.fixture(autouse=True)
def in_halves(monkeypatch):
    monkeypatch.setattr(halves, "_TOGETHER_UP_TO", 0)
    monkeypatch.setattr(Effort, "of", lambda inputs: EFFORT)


def found_with(monkeypatch, *, processors: int) -> Found:
    monkeypatch.setattr(halves, "num_processors", lambda: processors)
    return search(lab(CLUSTER), lambda progress: None)


def test_one_processor_finds_what_two_find(monkeypatch):
    one, two = (found_with(monkeypatch, processors=number) for number in (1, 2))
    assert one.considered == two.considered
    assert len(one.verdicts) > 2
    for a, b in zip(one.verdicts, two.verdicts, strict=True):
        assert dump_plan(a.plan) == dump_plan(b.plan)
        assert (a.iteration_s, a.peaks_bytes) == (b.iteration_s, b.peaks_bytes)
    plans = [(v.plan.groups, v.plan.chunks, v.plan.schedule) for v in two.verdicts]
    assert all(plans.count(plan) == 1 for plan in plans)


def test_both_halves_count(monkeypatch):
    found = found_with(monkeypatch, processors=1)
    alone = [
        Task(inputs=lab(CLUSTER), effort=effort, sources=(source,)).run(lambda progress: None)
        for source, effort in (
            ("lines", EFFORT.halved(computations=EFFORT.computations)),
            ("groupings", EFFORT.halved(computations=EFFORT.computations // 2)),
        )
    ]
    best_s = min(half.verdicts[0].iteration_s for half in alone)
    assert found.verdicts[0].iteration_s == best_s
    assert found.considered.estimated == sum(half.considered.estimated for half in alone)
    assert {half.verdicts[0].plan.groups for half in alone} <= {
        verdict.plan.groups for verdict in found.verdicts
    }


def test_a_second_process_that_fails_is_told(monkeypatch):
    monkeypatch.setattr(halves, "num_processors", lambda: 2)
    monkeypatch.setattr(sys, "executable", "/bin/false")
    with pytest.raises(RuntimeError, match="second process ended with status 1"):
        search(lab(CLUSTER), lambda progress: None)
