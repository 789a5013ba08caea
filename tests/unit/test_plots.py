"""Figures and traces of what was recorded or simulated, and what they cannot show."""

import dataclasses
import json
from collections import defaultdict
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings

from tests.examples import examples
from tests.unit.fake_costs import FakeComm, FakeMemory
from tests.unit.made_plans import even_plan
from tests.unit.simulation import run, traces_of, transfers_of
from tests.unit.test_simulate_memory import priced_with_options
from tests.unit.test_simulate_times import run_case
from zorse_megatron.doctor.plans import UNEVEN_PLAN
from zorse_megatron.plots import gantt
from zorse_megatron.plots.figures import LossCurve, draw_curves, draw_memory, rows_of
from zorse_megatron.plots.gantt import draw_timeline
from zorse_megatron.schedule.actions import COMPUTE, SENDS, Kind, from_norm, parse_action
from zorse_megatron.schedule.lower import lower_plan
from zorse_megatron.simulate.chrome_trace import chrome_trace, save_chrome_trace
from zorse_megatron.simulate.memory_ledger import Category

PLAN = UNEVEN_PLAN


def curve(losses):
    return LossCurve(label="a run", losses=dict(enumerate(losses)))


def colours_of(path):
    """The colours of the figure's pixels, each as (red, green, blue) from 0 to 255."""
    from matplotlib import image

    pixels = (image.imread(path)[..., :3] * 255).round().astype(int)
    # As one number each: to sort rows of three takes seconds.
    packed = np.unique(pixels @ (1 << 16, 1 << 8, 1))
    return {(each >> 16, each >> 8 & 255, each & 255) for each in packed.tolist()}


def rgb(text):
    return tuple(int(text[i : i + 2], 16) for i in (1, 3, 5))


@pytest.mark.slow
def test_the_timeline_shows_work_and_waiting(tmp_path):
    path = draw_timeline(tmp_path / "a" / "t.png", plan=PLAN, result=run(PLAN), title="t")
    assert {rgb("#56B4E9"), rgb("#E69F00"), rgb("#E8E8E8")} <= colours_of(path)


def test_the_timeline_draws_the_bars_of_a_row_at_once(tmp_path, monkeypatch):
    """An artist for each bar takes minutes where there are thousands; every bar is drawn still."""
    from matplotlib.path import Path as MatplotlibPath

    figures = []
    monkeypatch.setattr(gantt, "save_figure", lambda figure, path: figures.append(figure) or path)
    result = run(PLAN)
    draw_timeline(tmp_path / "t.png", plan=PLAN, result=result, title="t")
    (axes,) = figures[0].axes
    drawn = [patch.get_path() for patch in axes.patches]
    rectangles = sum(int((path.codes == MatplotlibPath.MOVETO).sum()) for path in drawn)
    of_ranks = [span for of_rank in traces_of(result).values() for span in of_rank]
    assert rectangles == len(of_ranks) + sum(span.waited_s > 0 for span in of_ranks)
    looks = 1 + len({look for look in gantt._LOOKS.values()})
    assert len(axes.patches) + len(axes.collections) <= looks * PLAN.world_size


@pytest.mark.slow
def test_equal_figures_are_equal_files(tmp_path):
    for name in ("a.png", "b.png"):
        draw_timeline(tmp_path / name, plan=PLAN, result=run(PLAN), title="t")
    assert (tmp_path / "a.png").read_bytes() == (tmp_path / "b.png").read_bytes()


@pytest.mark.slow
def test_curves_are_drawn(tmp_path):
    path = draw_curves(
        tmp_path / "loss.png",
        first=curve([5.0, 4.0, 3.0]),
        second=curve([5.0, 4.000001, 3.0]),
        title="t",
        tolerance=2e-5,
        unit="nats",
    )
    assert rgb("#0072B2") in colours_of(path)


# Of the simulator.

GIB = 2**30
MEMORY = FakeMemory(
    layer_count=GIB // 16, saved={"none": GIB // 8}, boundary=GIB // 8, head=GIB // 4
)


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


# The Chrome trace.

NEEDED = {
    "X": {"name", "cat", "pid", "tid", "ts", "dur"},
    "M": {"name", "pid", "tid", "args"},
    "C": {"name", "pid", "ts", "args"},
    "s": {"name", "cat", "id", "pid", "tid", "ts"},
    "f": {"name", "cat", "id", "pid", "tid", "ts", "bp"},
}


def by_phase(events):
    found = defaultdict(list)
    for event in events:
        found[event["ph"]].append(event)
    return found


@pytest.mark.slow
@given(case=priced_with_options())
@settings(max_examples=examples(40))
def test_structure(case):
    plan = case[0]
    result = run_case(case)
    events = by_phase(chrome_trace(result)["traceEvents"])
    for phase, of_phase in events.items():
        assert all(event.keys() - {"ph"} == NEEDED[phase] for event in of_phase)
    # One slice for each action that takes part of a stream, and for each transfer at its sender.
    lists = lower_plan(plan)
    for rank, actions in enumerate(lists.ranks):
        words = [e["name"] for e in events["X"] if e["pid"] == rank]
        for action in actions:
            if action.kind in SENDS or action.kind in COMPUTE or action.kind is Kind.STEP:
                assert words.count(str(action)) == 1
    # Slices of a thread follow each other: viewers stack those that overlap.
    threads = defaultdict(list)
    for event in events["X"]:
        assert event["ts"] >= 0 and event["dur"] >= 0
        threads[event["pid"], event["tid"]].append((event["ts"], event["ts"] + event["dur"]))
    for slices in threads.values():
        slices.sort()
        for (_, stop), (start, _) in pairwise(slices):
            assert start >= stop - 1e-3 * max(1.0, stop * 1e-6)
    # Each arrow has one tail and one head, and does not go back in time.
    tails, heads = ({e["id"]: e for e in events[phase]} for phase in "sf")
    assert tails.keys() == heads.keys()
    assert len(tails) == len(events["s"]) == len(events["f"]) == len(transfers_of(result))
    for number, tail in tails.items():
        assert tail["ts"] <= heads[number]["ts"]
    # Everything is named.
    named = {(e["pid"], e["tid"]) for e in events["M"] if e["name"] == "thread_name"}
    assert threads.keys() <= named
    assert {e["pid"] for e in events["M"] if e["name"] == "process_name"} == set(
        range(plan.world_size)
    )


def test_times_are_microseconds_and_waits_are_told_apart():
    result = run(even_plan(2, 1, 1), comm=FakeComm(latency_s=0.5))
    events = by_phase(chrome_trace(result)["traceEvents"])["X"]
    on_last = [(e["name"], e["cat"], e["ts"], e["dur"]) for e in events if e["pid"] == 1]
    assert [name for name, *_ in on_last[:2]] == ["1STEP", "1UNSHARD"]
    assert on_last[2:4] == [("wait", "wait", 0.0, 1.5e6), ("1F0", "work", 1.5e6, 1e6)]


def test_the_memory_counter_reaches_the_peak():
    result = run(even_plan(2, 1, 3), memory=FakeMemory(head=7))
    events = by_phase(chrome_trace(result)["traceEvents"])["C"]
    assert {tuple(event["args"]) for event in events} == {tuple(c.label for c in Category)}
    for rank in range(2):
        totals = [sum(e["args"].values()) for e in events if e["pid"] == rank]
        assert max(totals) == result.memory[rank].total_bytes


def test_the_file_is_json_and_may_show_some_ranks_only(tmp_path):
    plan = UNEVEN_PLAN
    path = save_chrome_trace(tmp_path / "a" / "trace.json", run(plan), ranks=[0, 2])
    data = json.loads(path.read_text())
    assert {event["pid"] for event in data["traceEvents"]} == {0, 2}
    events = by_phase(data["traceEvents"])
    assert {e["id"] for e in events["s"]} == {e["id"] for e in events["f"]}


def test_saved_traces_are_those_of_a_run(tmp_path):
    from tests.traces import load_trace
    from zorse_megatron.trace import Trace

    plan = UNEVEN_PLAN
    result = run(plan)
    for rank, expected in traces_of(result).items():
        trace = Trace()
        trace.add(expected)
        found, spans = load_trace(trace.save(tmp_path, rank=rank))
        assert found == rank
        assert spans == result.spans(rank)
        assert [parse_action(s.action) for s in spans] == list(
            from_norm(lower_plan(plan).ranks[rank])
        )


def test_a_rank_that_was_merged_away_has_no_spans():
    result = run(even_plan(2, 2, 1), merge_equal_ranks=True)
    with pytest.raises(ValueError, match="stands in"):
        result.spans(1)
