"""A rank without torch, watched: does as its rank's word in `ZORSE_TEST_DEATHS` says, `1:kill`.

Ranks meet through the file `ZORSE_TEST_HUB`. What a rank does then it does as long as the job runs.
"""

import ctypes
import os
import signal
import sys
import time
from pathlib import Path

from zorse_megatron.errors import FlagError, Problem
from zorse_megatron.live.root_cause import Timeouts
from zorse_megatron.live.start_watch import watched
from zorse_megatron.live.watched_rank import WatchedRank

RANK = int(os.environ["RANK"])
HUB = Path(os.environ["ZORSE_TEST_HUB"])
DEATHS = dict(word.split(":") for word in os.environ["ZORSE_TEST_DEATHS"].split())
DEATH = DEATHS.get(str(RANK), DEATHS.get("others", "wait"))
FOREVER_S = 60.0
SIGNALS = {"kill": 9, "abort": 6, "segv": 11, "term": 15, "int": 2, "stop": signal.SIGSTOP}


def meet(rank: WatchedRank, hub: str) -> None:
    if hub:
        HUB.with_suffix(".new").write_text(f"127.0.0.1 {hub}")
        HUB.with_suffix(".new").rename(HUB)
    while not HUB.exists():
        time.sleep(0.02)
    rank.join(HUB.read_text())
    HUB.with_suffix(f".{RANK}").touch()
    while len(list(HUB.parent.glob(f"{HUB.name}.[0-9]*"))) < int(os.environ["WORLD_SIZE"]):
        time.sleep(0.02)


def die() -> None:
    if DEATH == "wait":
        time.sleep(FOREVER_S)
    if DEATH in SIGNALS:
        os.kill(os.getpid(), SIGNALS[DEATH])
        time.sleep(FOREVER_S)
    if DEATH in ("kill-watcher", "stop-watcher"):
        os.kill(os.getppid(), signal.SIGKILL if DEATH == "kill-watcher" else signal.SIGSTOP)
        time.sleep(FOREVER_S)
    if DEATH == "kill-agent":
        about = Path(f"/proc/{os.getppid()}/stat").read_text()
        os.kill(int(about.rpartition(")")[2].split()[1]), signal.SIGKILL)
        time.sleep(FOREVER_S)
    if DEATH == "save-and-end":  # as by --exit-signal-handler
        signal.signal(signal.SIGTERM, lambda *_: sys.exit())
        os.kill(os.getppid(), signal.SIGTERM)
        wait_for_signal()
    if DEATH == "raise":
        raise ValueError("a fault\nwith details")
    if DEATH == "refuse":
        problem = Problem(where="--flag", found="1", expected="2", remedy="Write 2.")
        raise FlagError("wrong", [problem])
    if DEATH == "exit":
        sys.exit(7)
    if DEATH == "leave":
        os._exit(7)
    if DEATH == "lose":
        raise RuntimeError("[gloo/transport/tcp/pair.cc:1] Connection closed by peer [10.0.0.2]:5")
    if DEATH == "wait-4":
        time.sleep(4)
    if DEATH == "hold":  # Python's lock, in a call of C's
        ctypes.PyDLL(None).sleep(4)


def wait_for_signal() -> None:
    """Not in one sleep: Python's handler of a signal that comes just before does not end it."""
    until_s = time.monotonic() + FOREVER_S
    while time.monotonic() < until_s:
        time.sleep(0.02)


def main() -> None:
    timeouts = Timeouts(
        silence_s=float(os.environ["ZORSE_TEST_SILENCE_S"]),
        stopped_s=float(os.environ["ZORSE_TEST_STOPPED_S"]),
        meeting_s=float(os.environ["ZORSE_TEST_MEETING_S"]),
    )
    rank, hub = watched(
        os.environ,
        describe=lambda number: f"rank {number}",
        host="here",
        timeouts=timeouts,
        saved=lambda: "Iteration 4 is saved.",
    )
    with rank.last_words():
        meet(rank, hub)
        time.sleep(0.7)  # watchers look every 0.1 s
        rank.enter("in iteration 5")
        die()


if __name__ == "__main__":
    main()
