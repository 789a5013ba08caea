"""Figures of simulated iterations."""

import dataclasses

import pytest

from tests.unit.fake_costs import FakeMemory
from tests.unit.simulation import run
from tests.unit.test_plots import colours_of, rgb
from tests.unit.test_schedules import even_plan
from zorse_megatron.doctor.plans import UNEVEN_PLAN
from zorse_megatron.plots.figures import draw_memory
from zorse_megatron.plots.gantt import draw_timeline
from zorse_megatron.plots.shown import rows_of

GIB = 2**30
MEMORY = FakeMemory(
    layer_count=GIB // 16, kept={"none": GIB // 8}, boundary=GIB // 8, head=GIB // 4
)


@pytest.mark.slow
def test_a_timeline_is_drawn_as_of_an_executed_run(tmp_path):
    plan = UNEVEN_PLAN
    path = draw_timeline(tmp_path / "t.png", plan=plan, result=run(plan), title="t")
    assert {rgb("#56B4E9"), rgb("#E69F00"), rgb("#E8E8E8")} <= colours_of(path)


@pytest.mark.slow
@pytest.mark.parametrize("merged", [False, True])
def test_large_plans_show_one_of_several_equal_ranks(tmp_path, merged):
    plan = even_plan(2, 8, 3)
    result = run(plan, memory=MEMORY, merge_equal_ranks=merged)
    whole = draw_timeline(tmp_path / "a.png", plan=plan, result=result, title="t", max_rows=99)
    some = draw_timeline(tmp_path / "b.png", plan=plan, result=result, title="t", max_rows=4)
    capacity = [8 * GIB] * 16
    few, all_rows = (
        draw_memory(
            tmp_path / f"{most}.png",
            plan=plan,
            result=result,
            capacity_bytes=capacity,
            title="t",
            max_rows=most,
        )
        for most in (4, 99)
    )
    assert few.stat().st_size < all_rows.stat().st_size
    assert (some.stat().st_size < whole.stat().st_size) or merged


@pytest.mark.slow
def test_memory_bars_show_every_category(tmp_path):
    plan = UNEVEN_PLAN
    result = run(plan, memory=MEMORY, fixed_bytes=[GIB] * 5)
    path = draw_memory(
        tmp_path / "m.png", plan=plan, result=result, capacity_bytes=[30 * GIB] * 5, title="t"
    )
    colours = colours_of(path)
    for colour in ("#0072B2", "#CC79A7", "#8C2D04", "#56B4E9", "#009E73", "#F0E442", "#B0B0B0"):
        assert rgb(colour) in colours
    assert rgb("#D55E00") not in colours
    tight = draw_memory(
        tmp_path / "n.png", plan=plan, result=result, capacity_bytes=[GIB] * 5, title="t"
    )
    assert rgb("#D55E00") in colours_of(tight)


def test_every_rank_needs_a_capacity(tmp_path):
    plan = UNEVEN_PLAN
    with pytest.raises(ValueError, match="capacities of 1 GPUs"):
        draw_memory(
            tmp_path / "m.png", plan=plan, result=run(plan), capacity_bytes=[GIB], title="t"
        )


def test_rows_are_ranks_while_they_fit():
    plan = even_plan(2, 3, 1)
    rows = rows_of(plan, look=lambda rank: 0, weight=lambda rank: 0, most=6)
    assert [row.label for row in rows] == [f"rank {rank}" for rank in range(6)]
    rows = rows_of(plan, look=lambda rank: rank == 4, weight=lambda rank: 0, most=5)
    assert [row.label for row in rows] == [
        "ranks 0 to 2 (3 alike)",
        "ranks 3, 5 (2 alike)",
        "rank 4",
    ]


def test_of_too_many_rows_the_heaviest_are_kept_in_order():
    plan = even_plan(1, 9, 1)
    rows = rows_of(plan, look=lambda rank: rank, weight=lambda rank: -abs(rank - 4), most=3)
    assert [row.rank for row in rows] == [3, 4, 5]


def test_a_group_of_several_chunks_is_named_once(tmp_path):
    """The chart's rows are ranks, however many chunks they hold."""
    plan = even_plan(2, 1, 1)
    chunks = (plan.chunks[0], plan.chunks[1], dataclasses.replace(plan.chunks[0], layers=(2, 3)))
    model = dataclasses.replace(plan.model, num_layers=3)
    several = dataclasses.replace(plan, chunks=chunks, model=model)
    result = run(plan)
    assert draw_timeline(tmp_path / "t.png", plan=several, result=result, title="t").exists()
