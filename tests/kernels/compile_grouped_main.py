"""As `compile_main`, of the grouped products.

    python -m tests.kernels.compile_grouped_main CAPABILITY ...

Forward, gradient of the input, and weights' gradients added to fp32: in bf16, with each choice of
blocks, and in fp32.
"""

import json
import sys

import torch

from tests.kernels.compile_main import META, recorded
from zorse_megatron.kernels.grouped_gemm_on_triton import KERNELS

NUM_EXPERTS, HEIGHT, WIDTH = 4, 768, 2048


def launch(dtype: torch.dtype, rows_each: int) -> None:
    """Each product once."""
    num_rows = NUM_EXPERTS * rows_each
    x = torch.empty(num_rows, WIDTH, dtype=dtype, device=META)
    counts = torch.empty(NUM_EXPERTS, dtype=torch.int64, device=META)
    matrices = torch.empty(NUM_EXPERTS, HEIGHT, WIDTH, dtype=dtype, device=META).unbind()
    y = KERNELS["grouped_rows"](x, counts, matrices, transposed=True)
    KERNELS["grouped_rows"](y, counts, matrices, transposed=False)
    gradients = [torch.empty(HEIGHT, WIDTH, device=META) for _ in matrices]
    KERNELS["grouped_weights"](x, y, counts, gradients, add=True)


def launch_all() -> None:
    """In all types, and with each choice of blocks."""
    for rows_each in (1024, 64):
        launch(torch.bfloat16, rows_each)
    launch(torch.float32, 1024)


if __name__ == "__main__":
    capabilities = [int(word) for word in sys.argv[1:]]
    found = [row for each in capabilities for row in recorded(each, launch_all)]
    print(json.dumps(found))
