"""Writes what this machine has: `... machine_main ANSWER.json`."""

import json
import sys
import time
from pathlib import Path
from typing import Any

import torch

from zorse_megatron.adapter.found_software import found_software
from zorse_megatron.software.gpu_flags import FUSED_ADAM

_COPIED_BYTES = 256 * 10**6
_REPEATS = 5


def main() -> None:
    """Look at every GPU that is visible."""
    found = found_software(0, 0, "here")
    count = torch.cuda.device_count() if found.gpu is not None else 0
    answer = {
        "gpus": [_gpu(number) for number in range(count)],
        "torch": found.torch,
        "nccl": found.nccl,
        "transformer_engine": found.transformer_engine,
        "apex": FUSED_ADAM in found.extensions,
    }
    Path(sys.argv[1]).write_text(json.dumps(answer))


def _gpu(number: int) -> dict[str, Any]:
    torch.cuda.set_device(number)
    properties = torch.cuda.get_device_properties(number)
    there = torch.empty(_COPIED_BYTES, dtype=torch.uint8, device="cuda")
    here = torch.empty(_COPIED_BYTES, dtype=torch.uint8, pin_memory=True)
    return {
        "name": properties.name,
        "capability": [properties.major, properties.minor],
        "total_bytes": properties.total_memory,
        "host_to_gpu_bytes_per_s": _bytes_per_s(there, here),
        "gpu_to_host_bytes_per_s": _bytes_per_s(here, there),
    }


def _bytes_per_s(target: torch.Tensor, source: torch.Tensor) -> float:
    target.copy_(source, non_blocking=True)
    torch.cuda.synchronize()
    started_s = time.perf_counter()
    for _ in range(_REPEATS):
        target.copy_(source, non_blocking=True)
    torch.cuda.synchronize()
    return _REPEATS * source.nbytes / (time.perf_counter() - started_s)


if __name__ == "__main__":
    main()
