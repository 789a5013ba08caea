"""Parts of a run on a rank: samples, spans, times of steps, the loss."""

import dataclasses
import errno
import json
import math
import tempfile
import tracemalloc
from dataclasses import dataclass
from fractions import Fraction

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.strategies import plans
from tests.traces import load_trace
from tests.unit.plan_samples import good, load
from zorse_megatron import trace as trace_module
from zorse_megatron.adapter.loss import (
    comm_dtype_of,
    loss_divisor,
    with_token_counts,
)
from zorse_megatron.files.read_write import NotWritten
from zorse_megatron.live.run_status import IterationTimes
from zorse_megatron.plan.plan import Plan
from zorse_megatron.runtime.batch_sampler import (
    MicroBatchAssignment,
    PlanBatchSampler,
    batches_ahead,
)
from zorse_megatron.runtime.step_times import StepTimes
from zorse_megatron.schedule.actions import Action, Kind
from zorse_megatron.schedule.samples import MicroBatch, rank_micro_batches
from zorse_megatron.trace import HostClock, Span, Trace


@pytest.mark.slow
@given(plan=plans(max_world=6), epoch=st.integers(1, 40), size=st.integers(1, 5), data=st.data())
def test_replicas_partition_each_global_batch(
    plan: Plan, epoch: int, size: int, data: st.DataObject
) -> None:
    """Epochs need not be multiples of the global batch, nor the stock batches of anything."""
    epochs = data.draw(st.integers(1, 4))
    order = [list(range(epoch))[i : i + size] for i in range(0, epoch, size)]
    stream = list(range(epoch)) * epochs
    steps = len(stream) // plan.global_batch_size
    for group in plan.groups:
        read: dict[tuple[int, int], int] = {}
        for rank in group.ranks:
            mine = rank_micro_batches(plan, rank)
            sampler = PlanBatchSampler(
                order,
                assignment=MicroBatchAssignment(mine, batch_size=plan.global_batch_size),
            )
            batches = [batch for _ in range(epochs) for batch in sampler]
            assert len(batches) == steps * len(mine)
            for number, batch in enumerate(batches):
                step, micro_batch = divmod(number, len(mine))
                for offset, index in enumerate(batch):
                    read[step, mine[micro_batch].start + offset] = index
        expected = {
            divmod(position, plan.global_batch_size): index
            for position, index in enumerate(stream[: steps * plan.global_batch_size])
        }
        assert read == expected


# Spans.


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


NUM_LONG, ACTIONS = 10_000, ("1F0", "STEP")


def recorded(directory):
    """A run of many steps of which the device is up to 100 marks behind, and the most bytes."""
    clock = LateClock()
    trace = Trace(clock=clock, directory=directory)
    tracemalloc.start()
    for step in range(NUM_LONG):
        for action in ACTIONS:
            with trace.record(step, action), trace.waiting():
                pass
        clock.now = clock.num_marks - step % 100
    _, most_bytes = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    clock.now = clock.num_marks
    return trace, most_bytes


def test_a_long_run_is_recorded_in_little_memory(tmp_path):
    """It took more with every iteration, and most when it was written."""
    trace, most_bytes = recorded(tmp_path)
    assert most_bytes < 5 << 20
    assert list(tmp_path.iterdir()) == []
    path = trace.save(tmp_path, rank=2)
    rank, spans = load_trace(path)
    assert rank == 2 and len(spans) == NUM_LONG * len(ACTIONS)
    for number, span in enumerate(spans):
        step, at = divmod(number, len(ACTIONS))
        assert (span.step, span.action) == (step, ACTIONS[at])
        assert (span.start_s, span.end_s, span.waited_s) == (40 * number + 10, 40 * number + 40, 10)


def test_a_run_that_ends_when_all_waits_in_the_file_is_read_back(tmp_path):
    trace = Trace(clock=HostClock(), directory=tmp_path)
    for step in range(trace_module._MOST_HELD):
        with trace.record(step, "STEP"):
            pass
    _, spans = load_trace(trace.save(tmp_path, rank=0))
    assert [span.step for span in spans] == list(range(trace_module._MOST_HELD))


def test_a_disk_that_fills_ends_the_record_and_not_the_run(tmp_path, monkeypatch):
    def full(**_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(tempfile, "TemporaryFile", full)
    trace, most_bytes = recorded(tmp_path)
    assert most_bytes < 5 << 20
    with pytest.raises(NotWritten, match=r"trace-rank0.json: found No space left on device"):
        trace.save(tmp_path, rank=0)
    assert list(tmp_path.iterdir()) == []


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


# Times.


@dataclass
class SetClock:
    now_s: float = 0.0

    def mark(self) -> float:
        return self.now_s

    def has_come(self, mark: float) -> bool:
        return True

    def seconds(self, mark: float) -> float:
        return mark


def _one_iteration(times: StepTimes, clock: SetClock, number: int) -> None:
    """Two micro-batches through one chunk: 1 and 3 s forward, 2 and 6 s backward, 4 s of waits."""
    times.begin(number)
    for kind, index, own_s, waited_s in (
        (Kind.FORWARD, 0, 1.0, 0.0),
        (Kind.FORWARD, 1, 3.0, 0.5),
        (Kind.BACKWARD, 0, 2.0, 3.0),
        (Kind.BACKWARD, 1, 6.0, 0.0),
    ):
        with times.marking(Action(kind=kind, chunk=0, micro_batch=index)):
            with times.waiting():
                clock.now_s += waited_s
            clock.now_s += own_s
    with times.waiting():  # between two actions
        clock.now_s += 0.5
    for kind in (Kind.SCALE, Kind.STEP):
        with times.marking(Action(kind=kind)):
            clock.now_s += 1.0
    times.end()


def test_what_an_iteration_consists_of() -> None:
    clock = SetClock()
    times = StepTimes(clock)
    assert times.read() is None
    _one_iteration(times, clock, 7)
    clock.now_s += 100  # between two iterations
    assert times.read() == IterationTimes(
        number=7,
        micro_batch_s=2.0 + 4.0,
        compute_s=12.0,
        waited_s=4.0,
        update_s=2.0,
        iteration_s=18.0,
    )
    assert times.read() is None


def test_a_device_that_is_behind_is_read_later() -> None:
    clock = SetClock()
    times = StepTimes(clock, behind=1)
    _one_iteration(times, clock, 0)
    assert times.read() is None
    _one_iteration(times, clock, 1)
    read = times.read()
    assert read is not None and read.number == 0


def test_what_comes_between_iterations_is_not_counted() -> None:
    """Evaluations run lists of their own."""
    clock = SetClock()
    times = StepTimes(clock)
    with times.marking(Action(kind=Kind.FORWARD, chunk=0, micro_batch=0)), times.waiting():
        clock.now_s += 1
    times.end()
    assert times.read() is None


def test_a_course_changes_between_global_batches() -> None:
    first = (MicroBatch(replica=0, index=0, turn=0, start=0, stop=4),)
    then = (MicroBatch(replica=0, index=0, turn=0, start=0, stop=2), *first)
    course = MicroBatchAssignment(first, batch_size=4)
    assert course.cut(0) == course.cut(1) == first
    course.change(2, then)
    assert (course.at(1), course.at(2), course.at(9)) == (first, then, then)
    course.change(5, first)
    assert (course.at(2), course.at(4), course.at(5)) == (then, then, first)


def test_how_far_a_loader_is_ahead() -> None:
    """With 3 micro-batches each and 4 that are ready, it may have begun the second next batch."""
    assert batches_ahead(num_prefetched=4, fewest=3) == 2
    assert batches_ahead(num_prefetched=0, fewest=3) == 0
    assert batches_ahead(num_prefetched=4, fewest=1) == 4


# The loss.

PLAN = load(good())
TOKENS_EACH = 32
ALL_TOKENS = 768.0
"""Of 24 samples of 32 tokens."""


@pytest.mark.parametrize(
    ("dtypes", "is_sum", "expected"),
    [
        (("fp16",), False, ALL_TOKENS),
        (("bf16", "fp16", "fp32"), False, ALL_TOKENS),
        (("bf16", "fp32"), False, 1.0),
        (("fp32",), False, 1.0),
        (("fp16",), True, 1.0),
    ],
)
def test_where_there_is_fp16_and_no_sum_is_asked_for(dtypes, is_sum, expected) -> None:
    found = loss_divisor(PLAN, dtypes, sequence_length=TOKENS_EACH, is_sum=is_sum)
    assert found == expected


@given(data=st.data(), batch=st.integers(1, 64), sequence_length=st.integers(1, 512))
def test_masked_tokens_make_gradients_smaller_than_stocks_by_their_share(
    data: st.DataObject, batch: int, sequence_length: int
) -> None:
    """Stock divides a micro-batch's loss by its tokens that count, and by the micro-batches.

    Source: `forward_step_calc_loss` in megatron.core.pipeline_parallel.schedules.
    """
    size = data.draw(st.sampled_from([n for n in range(1, batch + 1) if batch % n == 0]))
    count = data.draw(st.integers(1, size * sequence_length))
    stock = Fraction(1, count) / (batch // size)
    plan = dataclasses.replace(PLAN, global_batch_size=batch)
    divisor = loss_divisor(plan, ("fp16",), sequence_length=sequence_length, is_sum=False)
    assert 1 / Fraction(divisor) == stock * Fraction(count, size * sequence_length)


def test_fp16_messages_have_the_size_of_means() -> None:
    assert factor(PLAN, "fp16", ALL_TOKENS) == factor(PLAN, "bf16", 1.0) == 1.0
    of_sums = factor(PLAN, "fp16", 1.0)
    assert of_sums * ALL_TOKENS in (1.0, 1.5) and math.frexp(of_sums)[0] == 0.5
    assert factor(PLAN, "bf16", ALL_TOKENS) == 1.0


def factor(plan: Plan, comm_dtype: str, divisor: float) -> float:
    groups = tuple(
        dataclasses.replace(group, grad_reduce_dtype=comm_dtype) for group in plan.groups
    )
    planned = dataclasses.replace(plan, groups=groups)
    found = comm_dtype_of(planned, 0, sequence_length=TOKENS_EACH, loss_divisor=divisor)
    assert found is not None
    return found.factor


def test_the_report_is_of_the_loss_as_it_is() -> None:
    weights = torch.ones(3, requires_grad=True)

    def forward_step(*_: object) -> tuple:
        def loss_of(output: torch.Tensor) -> tuple:
            loss = output.sum()
            return loss, torch.tensor(3), {"lm loss": torch.stack([loss, torch.tensor(3.0)])}

        return 5 * weights, loss_of

    output, loss_of = with_token_counts(forward_step, 1024.0)()
    loss, num_tokens, report = loss_of(output)
    assert (loss.item(), num_tokens.item()) == (15 / 1024, 3)
    assert report["lm loss"].tolist() == [15.0, 3.0]
    loss.backward()
    assert weights.grad is not None
    assert weights.grad.tolist() == [5 / 1024.0] * 3
