"""Runs and times every kernel on this GPU: `... kernels_main ANSWER.json`."""

import json
import sys
from pathlib import Path
from typing import Any

import torch
from torch.utils.benchmark import Timer

from zorse_megatron.kernels.bench_cases import CASES, Work, copy_case
from zorse_megatron.kernels.dispatch import why_not_triton

SIZES_BYTES = (64_000_000, 512_000_000)
_MIN_RUN_TIME_S = 0.2


def main() -> None:
    """Compare each kernel with plain torch, and its speed with a copy of as many bytes."""
    device = torch.device("cuda", 0)
    answer = {
        "in_plain_torch_because": why_not_triton(device),
        "rows": [row for size in SIZES_BYTES for row in _rows(size, device)],
    }
    Path(sys.argv[1]).write_text(json.dumps(answer))


def _rows(num_bytes: int, device: torch.device) -> list[dict[str, Any]]:
    yardstick = copy_case(num_bytes, device)
    copy_bytes_per_s = yardstick.num_bytes / _median_s(yardstick.kernel)
    del yardstick
    rows = []
    for make in CASES:
        case = make(num_bytes, device)
        rows.append(
            {
                "kernel": case.name,
                "num_bytes": case.num_bytes,
                "share_of_copy": case.num_bytes / _median_s(case.kernel) / copy_bytes_per_s,
                "copy_bytes_per_s": copy_bytes_per_s,
                "disagrees": _disagreement(make, num_bytes, device),
            }
        )
        del case
    return rows


def _median_s(work: Work) -> float:
    work()  # which compiles
    timer = Timer("work()", globals={"work": work})
    return timer.blocked_autorange(min_run_time=_MIN_RUN_TIME_S).median


def _disagreement(make: Any, num_bytes: int, device: torch.device) -> str | None:
    """How the kernel's result differs from plain torch's on equal tensors; None if it does not."""
    found = []
    for of_kernel in (True, False):
        torch.manual_seed(0)
        case = make(num_bytes, device)
        returned = (case.kernel if of_kernel else next(iter(case.plain.values())))()
        found.append(case.written or (returned[0].float(),))
    try:
        for ours, theirs in zip(*found, strict=True):
            torch.testing.assert_close(ours, theirs)
    except AssertionError as error:
        return str(error)
    return None


if __name__ == "__main__":
    main()
