"""Lets this process clean up when it is told to end."""

import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import NoReturn

_SIGNALS = (signal.SIGTERM, signal.SIGHUP)


@contextmanager
def exits_on_signals() -> Iterator[None]:
    """Within the block SIGTERM and SIGHUP raise SystemExit, as SIGINT raises KeyboardInterrupt.

    So what has been started is ended. The status is a shell's, 128 and the signal's number. Main
    thread only. A signal that is ignored (`nohup`) stays so.
    """
    before = {number: signal.getsignal(number) for number in _SIGNALS}
    for number, handler in before.items():
        if handler is not signal.SIG_IGN:
            signal.signal(number, _exit)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _exit(number: int, _: FrameType | None) -> NoReturn:
    sys.exit(128 + number)
