"""`tests.ranks.harness.run_ranks` in a process that has Megatron imported already.

Importing Megatron takes seconds and CPU mode is for good, so neither happens in the test process:
the server of `launch` forks a process for each call, and that one forks the ranks.
"""

import pickle
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.megatron.launch import run_ranks as run_entry
from tests.ranks.harness import RanksFailed, run_ranks

# What the process needs beyond a job's own timeout: to stop the ranks.
MARGIN_S = 60.0


def run_megatron_ranks(
    world_size: int, fn: Callable[..., Any], *args: Any, timeout_s: float = 60
) -> list[Any]:
    """As `run_ranks`; `fn`, `args` and the results must pickle without Megatron's classes."""
    with tempfile.TemporaryDirectory(prefix="zorse-ranks-") as directory:
        call, answer = Path(directory, "call"), Path(directory, "answer")
        call.write_bytes(pickle.dumps((world_size, fn, args, timeout_s)))
        run_entry(
            [str(call), str(answer)], 1, entry=__name__, timeout_s=timeout_s + MARGIN_S
        ).check()
        succeeded, result = pickle.loads(answer.read_bytes())
    if not succeeded:
        raise RanksFailed(result)
    return list(result)


def _run(call: Path, answer: Path) -> None:
    world_size, fn, args, timeout_s = pickle.loads(call.read_bytes())
    try:
        result = (True, run_ranks(world_size, fn, *args, timeout_s=timeout_s))
    except RanksFailed as failure:
        result = (False, str(failure))
    answer.write_bytes(pickle.dumps(result))


if __name__ == "__main__":
    _run(Path(sys.argv[1]), Path(sys.argv[2]))
