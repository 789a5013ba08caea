"""Times of micro-batches that a rank measures, where some run in halves."""

import pytest

from zorse_megatron.plan.plan import Halved, Replica
from zorse_megatron.runtime.step_times import StepTimes
from zorse_megatron.schedule.actions import Action, Kind


class Clock:
    """Says what it is told."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def mark(self) -> float:
        return self.now_s

    def seconds(self, mark: float) -> float:
        return mark


@pytest.mark.parametrize(("first", "last"), [(0, 0), (1, 0), (0, 1), (1, 1), (2, 1), (2, 2)])
def test_two_halves_are_one_micro_batch(first: int, last: int) -> None:
    """A sample takes a second: whatever is halved, a micro-batch of 4 takes 4 s."""
    replica = Replica(
        ranks=(0,),
        micro_batch_size=4,
        num_microbatches=4,
        shard_weight=1.0,
        halved=Halved(first=first, last=last),
    )
    clock = Clock()
    times = StepTimes(clock, halved=(first, last))
    times.begin(0)
    for at, size in enumerate(replica.sizes):
        with times.marking(Action(kind=Kind.FORWARD, chunk=0, micro_batch=at)):
            clock.now_s += size
    times.end()
    found = times.read()
    assert found is not None
    assert (found.micro_batch_s, found.compute_s) == (4.0, 16.0)


@pytest.mark.parametrize("count", range(6))
def test_as_many_are_halved_as_there_are(count: int) -> None:
    replica = Replica(
        ranks=(0,),
        micro_batch_size=2,
        num_microbatches=4,
        shard_weight=1.0,
        halved=Halved(first=2, last=2),
    )
    halved = replica.with_count(count).halved
    if not count:
        assert halved is None
        return
    assert halved is not None and halved.num_whole == min(count, 4)
    assert halved.first == min(count, 2)
