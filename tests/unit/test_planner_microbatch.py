"""The exact split of a batch against trying everything."""

from itertools import product

from hypothesis import given, settings
from hypothesis import strategies as st

from tests.examples import examples
from zorse_megatron.planner.closed_form.device_groups import ReplicaClass, best_split, rate_bound_s


@st.composite
def worker_classes(draw):
    def one():
        fixed, per_sample = draw(st.integers(0, 5)), draw(st.integers(1, 9))
        most = draw(st.integers(1, 4))
        times = {size: float(fixed + per_sample * size) for size in range(1, most + 1)}
        return ReplicaClass(count=draw(st.integers(1, 2)), times_s=times)

    return [one() for _ in range(draw(st.integers(1, 2)))]


def least_time_by_trying(batch, classes):
    """Over all (size, count) of all replicas."""
    workers = [each.times_s for each in classes for _ in range(each.count)]
    best = {0: 0.0}  # samples -> least time of the slowest so far
    for times in workers:
        options = [(0, 0.0)] + [
            (size * count, count * time_s)
            for size, time_s in times.items()
            for count in range(1, batch // size + 1)
        ]
        found: dict[int, float] = {}
        for (done, slowest), (samples, time_s) in product(best.items(), options):
            if done + samples <= batch:
                reached = max(slowest, time_s)
                found[done + samples] = min(found.get(done + samples, float("inf")), reached)
        best = found
    return best[batch]


@settings(max_examples=examples(150), deadline=None)
@given(st.integers(1, 24), worker_classes())
def test_no_split_is_faster(batch, classes):
    split = best_split(batch, classes)
    assert split is not None
    assert abs(split.time_s - least_time_by_trying(batch, classes)) < 1e-9
    assert sum(share.num_samples for row in split.shares for share in row) == batch
    for each, row in zip(classes, split.shares, strict=True):
        assert len(row) == each.count
        for share in row:
            assert share.num_microbatches == 0 or share.micro_batch_size in each.times_s
    assert split.time_s >= rate_bound_s(batch, classes) - 1e-9


def test_equal_replicas_get_equal_work_where_it_divides():
    split = best_split(1024, [ReplicaClass(count=8, times_s={1: 1.0, 2: 1.5, 4: 2.8})])
    assert split is not None
    assert {(share.micro_batch_size, share.num_microbatches) for share in split.shares[0]} == {
        (4, 32)
    }


def test_a_slow_replica_may_get_nothing():
    fast = ReplicaClass(count=1, times_s={1: 1.0})
    slow = ReplicaClass(count=1, times_s={1: 100.0})
    split = best_split(3, [fast, slow])
    assert split is not None
    assert split.shares[1][0].num_microbatches == 0
    assert split.time_s == 3.0


def test_nobody_may_run_anything():
    assert best_split(4, [ReplicaClass(count=2, times_s={})]) is None
