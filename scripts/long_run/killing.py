"""Kill emulated ranks while they train."""

import os
import signal
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

_POLL_S = 0.05


@dataclass(kw_only=True)
class Killing:
    """Kills ranks of a job, with SIGKILL, as soon as it has trained some iterations."""

    ranks: Sequence[int]
    after_iterations: int
    """How many the job has trained by then."""
    limit_s: float = 3600.0
    killed: list[int] = field(default_factory=list)
    """Process numbers, those of processes that the ranks had started too."""

    def __call__(self, directory: Path) -> None:
        """Wait for the iteration, and kill. For a thread."""
        metrics, deadline_s = directory / "metrics.jsonl", time.monotonic() + self.limit_s
        while time.monotonic() < deadline_s and _lines(metrics) < self.after_iterations:
            time.sleep(_POLL_S)
        for rank in self.ranks:
            for pid in _writers(directory / f"rank_{rank}.txt"):
                os.kill(pid, signal.SIGKILL)
                self.killed.append(pid)


def _lines(path: Path) -> int:
    return path.read_bytes().count(b"\n") if path.exists() else 0


def _writers(path: Path) -> Iterator[int]:
    """Processes whose standard output goes to this file."""
    for output in Path("/proc").glob("[0-9]*/fd/1"):
        try:
            target = output.readlink()
        except OSError:
            continue
        if target == path:
            yield int(output.parts[2])
