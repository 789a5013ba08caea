"""A worker in a process of its own: tasks on standard input, answers on standard output."""

import os
import pickle
import signal
import sys

from zorse_megatron.planner.evaluate import gc_paused
from zorse_megatron.planner.search.workers import SearchWorker


def main() -> None:
    """Do what comes, until nothing comes any more."""
    # An interrupt from the keyboard reaches both processes; the first one ends this one.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    inputs, effort = pickle.load(sys.stdin.buffer)
    worker = SearchWorker(inputs, effort, lambda progress: None)
    while True:
        try:
            task = pickle.load(sys.stdin.buffer)
        except EOFError:
            return
        try:
            with gc_paused():
                answer = task(worker)
                pickle.dump((answer, worker.spent), sys.stdout.buffer)
            sys.stdout.buffer.flush()
        except BrokenPipeError:
            os._exit(1)  # nobody waits for it any more


if __name__ == "__main__":
    main()
