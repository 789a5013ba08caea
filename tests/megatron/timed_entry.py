"""`zorse_megatron.pretrain`, noting this rank's CPU and wall time when each step begins.

Writes `$ZORSE_TIMES/rank<R>.json`: a pair of seconds for each step, and one for the end.
"""

import json
import os
import time
from pathlib import Path
from typing import Any

from zorse_megatron.adapter.cpu import cpu_mode
from zorse_megatron.pretrain import main


def run() -> None:
    """Train, with stock's `train_step` wrapped."""
    if cpu_mode.needed():
        cpu_mode.enable()
    from megatron.training import training

    stock, times = training.train_step, []

    def train_step(*args: Any, **kwargs: Any) -> Any:
        times.append((time.process_time(), time.perf_counter()))
        return stock(*args, **kwargs)

    training.train_step = train_step
    main()
    times.append((time.process_time(), time.perf_counter()))
    path = Path(os.environ["ZORSE_TIMES"], f"rank{os.environ['RANK']}.json")
    path.write_text(json.dumps(times))


if __name__ == "__main__":
    run()
