"""`zorse_megatron.pretrain`, noting this rank's CPU and wall time when each step begins.

Writes `$ZORSE_TIMES/rank<R>.json`: for each step, and for the end, the seconds of CPU time of this
process, of its main thread and of everything on this machine (Linux only), and the wall clock's.
`$ZORSE_IDLE_GROUPS`: how many process groups it makes beside those that it needs.
"""

import json
import os
import time
from pathlib import Path
from typing import Any

from zorse_megatron.adapter.cpu import cpu_mode
from zorse_megatron.pretrain import main

NAMES = ("cpu_s", "main_cpu_s", "machine_cpu_s", "wall_s")
_BUSY = ("user", "nice", "system", "irq", "softirq")
_FIELDS = ("user", "nice", "system", "idle", "iowait", "irq", "softirq")


def machine_cpu_s() -> float:
    """CPU time of all that has run on this machine, on all cores."""
    with open("/proc/stat", encoding="ascii") as file:
        ticks = dict(zip(_FIELDS, map(int, file.readline().split()[1:]), strict=False))
    return sum(ticks[name] for name in _BUSY) / os.sysconf("SC_CLK_TCK")


def _now() -> dict[str, float]:
    times = time.process_time(), time.thread_time(), machine_cpu_s(), time.perf_counter()
    return dict(zip(NAMES, times, strict=True))


def run() -> None:
    """Train, with stock's `train_step` wrapped."""
    if cpu_mode.needed():
        cpu_mode.enable()
    import torch.distributed as dist
    from megatron.training import training

    stock, times, idle = training.train_step, [], []

    def train_step(*args: Any, **kwargs: Any) -> Any:
        if not times:
            idle.extend(dist.new_group() for _ in range(int(os.environ["ZORSE_IDLE_GROUPS"])))
        times.append(_now())
        return stock(*args, **kwargs)

    training.train_step = train_step
    main()
    times.append(_now())
    path = Path(os.environ["ZORSE_TIMES"], f"rank{os.environ['RANK']}.json")
    path.write_text(json.dumps(times))


if __name__ == "__main__":
    run()
