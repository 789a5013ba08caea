"""The recording entry, which also writes what its one rank trains on, to `$ZORSE_TEST_BATCHES`.

A list of micro-batches in the order of their forwards, each with its tokens and labels.
"""

import os
from typing import Any

from tests.megatron.recording_entry import record
from zorse_megatron.adapter import cpu_mode


def main() -> None:
    if cpu_mode.needed():
        cpu_mode.enable()
    import torch

    from zorse_megatron.adapter import gpt_entry

    batches: list[dict[str, Any]] = []
    stock = gpt_entry.get_batch

    def get_batch(*args: Any, **kwargs: Any) -> Any:
        found = stock(*args, **kwargs)
        assert found["loss_mask"].all()
        batches.append({name: found[name].clone() for name in ("tokens", "labels")})
        return found

    gpt_entry.get_batch = get_batch
    record()
    torch.save(batches, os.environ["ZORSE_TEST_BATCHES"])


if __name__ == "__main__":
    main()
