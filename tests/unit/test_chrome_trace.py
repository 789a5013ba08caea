"""The Chrome trace: what the format asks for, and nothing of the simulation lost."""

import json
from collections import defaultdict
from itertools import pairwise

import pytest
from hypothesis import given, settings

from tests.examples import examples
from tests.unit.fake_costs import FakeComm, FakeMemory
from tests.unit.simulation import run
from tests.unit.test_schedules import even_plan
from tests.unit.test_simulate_memory import priced_with_options
from tests.unit.test_simulate_times import run_case
from zorse_megatron.doctor.plans import UNEVEN_PLAN
from zorse_megatron.schedule.actions import COMPUTE, SENDS, Kind, from_norm, parse_action
from zorse_megatron.schedule.lower import lower_plan
from zorse_megatron.simulate.chrome_trace import chrome_trace, save_chrome_trace
from zorse_megatron.simulate.memory_ledger import Category

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
    assert len(tails) == len(events["s"]) == len(events["f"]) == len(result.transfers())
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
    assert [name for name, *_ in on_last[:2]] == ["1STEP", "1GATHER"]
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
    from zorse_megatron.trace import Trace, load_trace

    plan = UNEVEN_PLAN
    result = run(plan)
    for rank, expected in result.traces.items():
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
