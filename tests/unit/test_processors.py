"""The number of processors, also where the system does not tell which ones a process may use."""

import os

import pytest

from zorse_megatron.processes import num_processors


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="the system cannot restrict it")
def test_only_those_that_this_process_may_use_count():
    before = os.sched_getaffinity(0)
    try:
        os.sched_setaffinity(0, {min(before)})
        assert num_processors() == 1
    finally:
        os.sched_setaffinity(0, before)


@pytest.mark.parametrize(("there", "expected"), [(6, 6), (None, 1)])
def test_elsewhere_all_of_them_count(there, expected, monkeypatch):
    monkeypatch.delattr(os, "sched_getaffinity", raising=False)
    monkeypatch.setattr(os, "cpu_count", lambda: there)
    assert num_processors() == expected
