"""Half of a search in a process of its own: a `Task` on standard input, what it found on output."""

import pickle
import signal
import sys

from zorse_megatron.planner.halves import Task


def main() -> None:
    """Read, search, write."""
    # An interrupt from the keyboard reaches both processes; the first one ends this one.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    task = pickle.load(sys.stdin.buffer)
    assert isinstance(task, Task), type(task)
    pickle.dump(task.run(lambda progress: None), sys.stdout.buffer)


if __name__ == "__main__":
    main()
