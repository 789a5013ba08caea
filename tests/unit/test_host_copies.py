"""Copies between an emulated GPU and its host, against durations known in closed form."""

import torch

from zorse_megatron.emulate.on_ranks.host_copies import HostCopies


class Clock:
    """Stands in for `RankClock`."""

    is_running = True
    now_s = 0.0

    def until(self, moment_s):
        self.now_s = max(self.now_s, moment_s)


def bytes_of(num_bytes):
    return torch.empty(num_bytes, dtype=torch.uint8)


def link():
    clock = Clock()
    return clock, HostCopies(clock, None, [], bytes_per_s=10.0)


def test_copies_of_one_direction_follow_each_other():
    clock, host = link()
    first, second = (host.start(bytes_of(20), to_host=True) for _ in range(2))
    back = host.start(bytes_of(30), to_host=False)
    assert (first.end_s, second.end_s, back.end_s) == (2.0, 4.0, 3.0)
    host.hold_back(first)
    assert clock.now_s == 2.0
    clock.now_s = 7.0  # the link had nothing to do since 4 s
    assert host.start(bytes_of(10), to_host=True).end_s == 8.0
    host.hold_back(second)
    assert clock.now_s == 7.0


def test_nothing_takes_time_before_the_clock_runs():
    clock, host = link()
    clock.is_running = False
    assert host.start(bytes_of(20), to_host=True) is None
