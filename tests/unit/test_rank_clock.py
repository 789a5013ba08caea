"""One rank's clock, and how it keeps pace with this machine's."""

import threading
from multiprocessing import Pipe

import pytest

from tests.unit.fake_costs import FakeComm
from zorse_megatron.emulate.conductor import Conductor, call, conducted
from zorse_megatron.emulate.emulated_job import SelfTest, expected_s
from zorse_megatron.emulate.link_clock import LinkModel
from zorse_megatron.emulate.messages import Transfer
from zorse_megatron.emulate.rank_clock import EmulationFailed, Pace, RankClock


def test_deadlines_are_absolute():
    """A sleep that ends late does not move the deadlines after it."""
    now, slept = [100.0], []

    def sleep(seconds):
        slept.append(round(seconds, 6))
        now[0] += seconds + 0.5  # each sleep ends half a second late

    pace = Pace(10.0, clock=lambda: now[0], sleep=sleep)
    for deadline_s in (1.0, 2.0, 2.01):
        pace.until(deadline_s)
    assert slept == [10.0, 9.5]
    assert pace.late_s == pytest.approx(0.04)  # at 2.01 s it is 0.4 s late, of 10 for one
    assert pace.elapsed_s() == pytest.approx(2.05)


def test_two_ranks_over_real_connections():
    """Rank 0 computes 2 s and sends 30 bytes over 10 bytes/s; rank 1 waits from 0 s on."""
    found = {}

    def rank_0(clock):
        clock.compute(2.0)
        clock.post(("line",), Transfer(source=0, target=1, num_bytes=30))

    def rank_1(clock):
        name = clock.post(("line",), Transfer(source=0, target=1, num_bytes=None), receives=True)
        clock.wait(name)
        assert clock.now_s == 5.0

    def run(number, work, address):
        clock = RankClock(call(address, number), world_size=2)
        clock.start()
        work(clock)
        clock.finish()
        found[number] = clock.now_s

    with conducted(LinkModel(FakeComm(bytes_per_s=10.0), range(2))) as address:
        threads = [
            threading.Thread(target=run, args=(number, work, address))
            for number, work in enumerate((rank_0, rank_1))
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(20)
    assert found == {0: 2.0, 1: 5.0}


def test_time_stands_still_until_the_clock_is_started():
    clock = RankClock(Pipe()[0], world_size=1)
    clock.compute(5.0)
    assert clock.now_s == 0.0


def test_a_conductor_that_ends_is_an_error():
    ours, theirs = Pipe()
    clock = RankClock(ours, world_size=1)
    clock.start()
    threading.Timer(0.05, theirs.close).start()
    with pytest.raises(EmulationFailed, match="the conductor has ended"):
        clock.wait((("line",), 0))


def test_ranks_that_never_call_do_not_hold_up_the_end():
    with conducted(LinkModel(FakeComm(), range(2))) as address:
        call(address, 0).close()


def test_closed_form_of_the_self_test():
    """3 ranks, 5 ms a message, ways of 1 s (+ 0.4 s and 26214.4 s for the bytes), a sum of 7 s."""
    comm = FakeComm(latency_s=1.0, bytes_per_s=10.0, statistic_s=7.0)
    number_s = min(7.0, 2 * 2 / 3 * 6 / 10)  # parts of 2 bytes: 4 bytes do not split into 3
    pipeline_s = 3 * 0.005 + 2 * 1.4 + 3 * 1.4
    assert expected_s(comm, (0, 1, 2)) == pytest.approx(pipeline_s + number_s + 2 * 26215.4)


def test_what_a_self_test_says():
    off = SelfTest(expected_s=1.0, found_s=1.04)
    assert not off.is_valid
    assert str(off) == (
        "self-test: 1040.000 ms for a schedule of 1000.000 ms, off by 4 % (NOT VALID, the limit "
        "is 3 %)"
    )
    assert SelfTest(expected_s=1.0, found_s=0.98).is_valid


def test_a_conductor_has_a_rank_for_each_gpu():
    assert len(Conductor(LinkModel(FakeComm(), (5, 7))).ranks) == 2
