"""Compile what the launches ask for, for GPUs that need not be there, and print what comes out.

    python -m tests.kernels.compile_main

The launches are the real ones, up to the point where the GPU would be given the machine code. Their
tensors have no memory (device "meta"), so that they may have more than 2^31 elements. Prints a JSON
list of launches: kernel, compute capability, grid, registers of a thread, bytes that it spills and
that a program shares, types of the arguments, PTX instructions, types of the offsets that are
added to pointers.
"""

import json
import re
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from typing import Any

import torch
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import get_ptxas
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from zorse_megatron.kernels.kernels import AdamW
from zorse_megatron.kernels.on_triton import KERNELS

CAPABILITIES = (70, 75, 80, 86, 89, 90, 100, 120)
META = torch.device("meta")
LARGE = 2**31 + 64
"""A multiple of 16."""
ODD = LARGE + 1
"""So is all but the last element."""


class AbsentGpu:
    """What Triton asks its driver before it compiles; the device's number is its capability."""

    def __init__(self, capability: int) -> None:
        self.capability = capability

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", self.capability, 32)

    def get_current_device(self) -> int:
        return self.capability

    def get_current_stream(self, device: int) -> int:
        return 0


def new(numel: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """A tensor without memory."""
    return torch.empty(numel, dtype=dtype, device=META)


def launch_all() -> None:
    """Each kernel: a launch for the elements up to a multiple of 16, and one for the last."""
    bf16, fp16 = torch.bfloat16, torch.float16
    parts = (new(ODD, bf16), new(ODD, fp16), new(ODD))
    KERNELS["sum_parts"](new(ODD), parts, (1.0, 0.5, 0.25))
    numbers = AdamW(lr=1e-3, beta1=0.9, beta2=0.95, eps=1e-8, weight_decay=0.1, step=1)
    scales = (new(1).reshape(()), new(1).reshape(()))
    state = [new(ODD) for _ in range(4)]
    KERNELS["adamw_shard"](*state, numbers, scales=scales, copy=new(ODD, bf16))
    KERNELS["norm_and_flag"]([new(ODD)], META)


def recorded(capability: int, launch: Callable[[], None]) -> Iterator[dict[str, Any]]:
    """Compile all that `launch` launches for one kind of GPU."""
    driver.set_active(AbsentGpu(capability))
    run, found = JITFunction.run, []

    def compile_only(
        self: JITFunction, *arguments: Any, grid: tuple[int], warmup: bool, **options: Any
    ) -> None:
        found.append((grid, run(self, *arguments, grid=grid, warmup=True, **options)))

    JITFunction.run = compile_only
    try:
        launch()
    finally:
        JITFunction.run = run
    for grid, kernel in found:
        lines = (line.split() for line in kernel.asm["ptx"].splitlines())
        words = {word for line in lines for word in line[:2]}
        offsets = re.findall(r"tt\.addptr .* : tensor<[^ ]*, (tensor<\S*>)", kernel.asm["ttir"])
        yield {
            "kernel": kernel.name,
            "capability": capability,
            "grid": grid[0],
            **assembled(kernel.asm["ptx"], capability),
            "shared_bytes": kernel.metadata.shared,
            "types": {name: str(kind) for name, kind in kernel.src.signature.items()},
            "instructions": sorted(
                word for word in words if re.fullmatch(r"[a-z]\w*(\.\w+)+", word)
            ),
            "offsets": sorted(set(offsets)),
        }


def assembled(ptx: str, capability: int) -> dict[str, int]:
    """What Triton's assembler, which needs no GPU, says of the machine code."""
    target = re.findall(r"\.target (\w+)", ptx)[0]
    with tempfile.NamedTemporaryFile("w", suffix=".ptx") as file:
        file.write(ptx)
        file.flush()
        command = [get_ptxas(capability).path, "-v", "-o", "/dev/null", "--gpu-name", target]
        done = subprocess.run([*command, file.name], capture_output=True, text=True, check=True)
    (registers,) = re.findall(r"Used (\d+) registers", done.stderr)
    spilled = re.findall(r"(\d+) bytes spill", done.stderr)
    assert len(spilled) == 2, done.stderr  # stores and loads
    return {"registers": int(registers), "spilled_bytes": sum(map(int, spilled))}


if __name__ == "__main__":
    print(json.dumps([launch for each in CAPABILITIES for launch in recorded(each, launch_all)]))
