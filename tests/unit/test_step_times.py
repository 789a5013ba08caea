"""What an iteration consists of, with a clock whose time is set."""

from dataclasses import dataclass

from zorse_megatron.live.run_status import IterationTimes
from zorse_megatron.runtime.batch_sampler import Course, batches_ahead
from zorse_megatron.runtime.step_times import StepTimes
from zorse_megatron.schedule.actions import Action, Kind
from zorse_megatron.schedule.samples import MicroBatch


@dataclass
class SetClock:
    now_s: float = 0.0

    def mark(self) -> float:
        return self.now_s

    def has_come(self, mark: float) -> bool:
        return True

    def seconds(self, mark: float) -> float:
        return mark


def _run(times: StepTimes, clock: SetClock, number: int) -> None:
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
    _run(times, clock, 7)
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
    _run(times, clock, 0)
    assert times.read() is None
    _run(times, clock, 1)
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
    course = Course(first)
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
