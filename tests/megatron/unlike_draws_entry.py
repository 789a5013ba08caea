"""`recording_entry`, on ranks that draw other numbers from one seed, as unlike GPUs do.

`$ZORSE_TEST_KINDS`: "unlike" where the ranks' GPUs have names of their own, else "alike".
"""

import dataclasses
import os
from typing import Any

import torch

from tests.megatron.recording_entry import record
from zorse_megatron.adapter import cpu_mode

RANK = int(os.environ["RANK"])
normal = torch.Tensor.normal_


def normal_of_rank(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    return normal(tensor, *args, **kwargs).mul_(1 + RANK)


if __name__ == "__main__":
    cpu_mode.enable()
    torch.Tensor.normal_ = normal_of_rank  # type: ignore[method-assign, assignment]
    if os.environ["ZORSE_TEST_KINDS"] == "unlike":
        seen = torch.cuda.get_device_properties(0)
        own = dataclasses.replace(seen, name=f"GPU {RANK}")
        torch.cuda.get_device_properties = lambda device=None: own
    record()
