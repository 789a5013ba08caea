"""Work beside a training: one at a time, waited for, its errors not lost."""

import threading

import pytest

from zorse_megatron.adapter.moving.beside import Beside


def test_what_is_under_way_is_waited_for_and_its_error_told_once() -> None:
    beside, may_go, done = Beside(), threading.Event(), []
    beside.wait()

    def work() -> None:
        may_go.wait(10)
        done.append(1)
        raise OSError("no room")

    beside.start(work)
    assert not done
    with pytest.raises(AssertionError, match="not been waited for"):
        beside.start(work)
    may_go.set()
    with pytest.raises(OSError, match="no room"):
        beside.wait()
    beside.wait()
    beside.start(lambda: done.append(2))
    beside.wait()
    assert done == [1, 2]
