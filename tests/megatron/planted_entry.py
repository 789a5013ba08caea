"""`recording_entry`, with one mistake in it that `$ZORSE_TEST_PLANT` names."""

import os
from collections.abc import Callable
from typing import Any

from tests.megatron.recording_entry import record
from zorse_megatron.adapter import cpu_mode


def plant_norm() -> None:
    """Count what a TP group holds whole on every rank of it."""
    from megatron.core import tensor_parallel

    tensor_parallel.param_is_not_tensor_parallel_duplicate = lambda *_args, **_kwargs: True


def plant_sum() -> None:
    """Sum over the TP group twice what its ranks have seen parts of."""
    from zorse_megatron.adapter.data_parallel import buckets

    once = buckets.sum_over_tp_group

    def twice(parameters: Any, group: Any) -> None:
        once(parameters, group)
        once(parameters, group)

    buckets.sum_over_tp_group = twice


PLANTS: dict[str, Callable[[], None]] = {"norm": plant_norm, "sum": plant_sum}

if __name__ == "__main__":
    if cpu_mode.needed():
        cpu_mode.enable()
    PLANTS[os.environ["ZORSE_TEST_PLANT"]]()
    record()
