"""Spans of a device that the host runs ahead of: marked at once, read when it has come there."""

import json

from zorse_megatron.trace import Span, Trace, load_trace


class LateClock:
    """Marks are numbered; when each was is known only when somebody asks."""

    def __init__(self) -> None:
        self.num_marks = self.num_read = 0
        self.now = 100

    def mark(self) -> int:
        self.num_marks += 1
        return self.num_marks

    def has_come(self, mark: int) -> bool:
        return mark <= self.now

    def seconds(self, mark: int) -> float:
        assert self.has_come(mark), "a test would wait forever"
        self.num_read += 1
        return 10.0 * mark


def test_marks_are_read_when_spans_are_asked_for(tmp_path):
    clock = LateClock()
    trace = Trace(clock=clock)
    with trace.record(0, "1F0"), trace.waiting():
        pass
    with trace.record(0, "1B0"):
        pass
    assert (clock.num_marks, clock.num_read) == (6, 0)
    expected = [
        Span(step=0, action="1F0", start_s=10.0, end_s=40.0, waited_s=10.0),
        Span(step=0, action="1B0", start_s=50.0, end_s=60.0),
    ]
    assert trace.spans == expected
    assert trace.spans == expected, "they are read once"
    with trace.record(1, "STEP"):
        pass
    path = trace.save(tmp_path, rank=3)
    assert load_trace(path) == (3, (*expected, Span(step=1, action="STEP", start_s=70, end_s=80)))
    assert json.loads(path.read_text())["rank"] == 3


def test_a_rank_that_fails_does_not_wait_for_its_device(tmp_path):
    """It may wait for messages of ranks that wait for this one to end."""
    clock = LateClock()
    trace = Trace(clock=clock)
    for action in ("1F0", "1B0", "STEP"):
        with trace.record(0, action):
            pass
    clock.now = 3  # it has begun with the second
    _, spans = load_trace(trace.save(tmp_path, rank=0, waits=False))
    assert [span.action for span in spans] == ["1F0"]


def test_nothing_is_marked_in_steps_that_nobody_asked_for():
    clock = LateClock()
    trace = Trace(first_step=1, num_steps=1, clock=clock)
    for step in (0, 1, 2):
        with trace.record(step, "1F0"), trace.waiting():
            pass
    assert clock.num_marks == 4
    assert [span.step for span in trace.spans] == [1]


def test_the_host_waits_in_its_own_time():
    trace = Trace()
    with trace.record(0, "1F0"), trace.waiting():
        pass
    (span,) = trace.spans
    assert 0 <= span.waited_s <= span.end_s - span.start_s
