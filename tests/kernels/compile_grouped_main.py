"""As `compile_main`, of the grouped products.

    python -m tests.kernels.compile_grouped_main CAPABILITY ...

Forward, gradient of the input, and weights' gradients added to fp32: in the 16-bit type that such a
GPU trains in, with each choice of blocks, and in fp32.
"""

import json
import sys
from functools import partial

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


def launch_all(capability: int) -> None:
    """In all types that a GPU of this compute capability is used with."""
    narrow = torch.bfloat16 if capability >= 80 else torch.float16
    for rows_each in (1024, 64):
        launch(narrow, rows_each)
    launch(torch.float32, 1024)


if __name__ == "__main__":
    capabilities = [int(word) for word in sys.argv[1:]]
    found = [row for each in capabilities for row in recorded(each, partial(launch_all, each))]
    print(json.dumps(found))
