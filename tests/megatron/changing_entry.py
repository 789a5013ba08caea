"""`recording_entry`, which goes on under another plan, or with other counts, after some steps.

`$ZORSE_TEST_MOVES`, `$ZORSE_TEST_WISHES`: see `moving_entry` and `rebalancing_entry`. The request
is granted the first time.
"""

import os
from dataclasses import replace
from typing import Any

from tests.megatron.recording_entry import record


def change() -> None:
    """Let this process ask for what the environment says; by events, as on a GPU, it tells time."""
    from zorse_megatron.adapter import training
    from zorse_megatron.runtime.step_times import CudaClock

    training.HostClock = CudaClock  # type: ignore[assignment, misc]
    if "ZORSE_TEST_WISHES" in os.environ:
        from tests.megatron.rebalancing_entry import add
        from zorse_megatron.live.rebalance import Balancer

        Balancer.add = add  # type: ignore[method-assign]
    if "ZORSE_TEST_MOVES" in os.environ:
        from tests.megatron.moving_entry import asking_first
        from zorse_megatron.adapter.watching import RunWatch

        RunWatch.begin = asking_first(RunWatch.begin)  # type: ignore[method-assign]


def move_with_setup() -> None:
    """Let a run with a set-up of its own move, which else stays under its plan."""
    from zorse_megatron import pretrain

    stock: Any = pretrain._plan_run

    def plan_run(*args: Any) -> Any:
        *others, setup = args
        return replace(stock(*others, None), setup=setup)

    pretrain._plan_run = plan_run


def main() -> None:
    from zorse_megatron.adapter import cpu_mode

    cpu_mode.enable()
    change()
    record()


if __name__ == "__main__":
    main()
