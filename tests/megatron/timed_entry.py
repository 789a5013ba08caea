"""`zorse_megatron.pretrain` in turns with another job, noting what each step of this rank takes.

Waits before each step for its turn on the board of `$ZORSE_TURNS`, as job `$ZORSE_JOB` (see
`turns`). Writes `$ZORSE_TIMES/rank<R>.json`: for each step but the last one the CPU time of this
process and of its main thread, and the wall clock's, up to the next step's beginning.
"""

import json
import os
import time
from pathlib import Path
from typing import Any

from tests.megatron.turns import Board
from zorse_megatron.adapter import cpu_mode
from zorse_megatron.pretrain import main


def _now() -> dict[str, float]:
    return {
        "cpu_s": time.process_time(),
        "main_cpu_s": time.thread_time(),
        "wall_s": time.perf_counter(),
    }


def run() -> None:
    """Train, with stock's `train_step` wrapped."""
    if cpu_mode.needed():
        cpu_mode.enable()
    from megatron.training import training

    job, rank, ranks = (int(os.environ[name]) for name in ("ZORSE_JOB", "RANK", "WORLD_SIZE"))
    board = Board(Path(os.environ["ZORSE_TURNS"]), jobs=2, ranks=ranks)
    stock = training.train_step
    begins: list[dict[str, float]] = []
    ends: list[dict[str, float]] = []

    def train_step(*args: Any, **kwargs: Any) -> Any:
        if begins:
            ends.append(_now())
        board.wait_for_turn(job, rank)
        begins.append(_now())
        return stock(*args, **kwargs)

    training.train_step = train_step
    main()
    taken = [
        {name: end[name] - begin[name] for name in end}
        for begin, end in zip(begins, ends, strict=False)
    ]
    Path(os.environ["ZORSE_TIMES"], f"rank{rank}.json").write_text(json.dumps(taken))


if __name__ == "__main__":
    run()
