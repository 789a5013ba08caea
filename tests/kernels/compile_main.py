"""Compile the kernels for GPUs that need not be there; print what the machine code is made of.

    python -m tests.kernels.compile_main

Prints JSON: by kernel and compute capability, the PTX instructions and Triton's pointer additions.
"""

import json
import re
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from zorse_megatron.kernels.on_triton.adamw_shard import adamw_shard_kernel
from zorse_megatron.kernels.on_triton.blocks import BLOCK, NUM_WARPS
from zorse_megatron.kernels.on_triton.norm_and_flag import norm_and_flag_kernel
from zorse_megatron.kernels.on_triton.pieces import ALIGN, copy_pieces_kernel
from zorse_megatron.kernels.on_triton.sum_parts import sum_parts_kernel

BY_16 = [["tt.divisibility", 16]]
CAPABILITIES = (80, 90)


def compiled(
    kernel: Any, capability: int, types: dict[str, Any], constants: dict[str, Any], **options: Any
) -> dict[str, list[str]]:
    """As for large tensors at multiples of 16 bytes, of a multiple of 16 elements."""
    names = kernel.arg_names
    signature = {name: "constexpr" if name in constants else types[name] for name in names}
    aligned = {}
    for place, name in enumerate(names):
        kind = signature[name]
        if isinstance(kind, tuple):
            aligned |= {(place, i): BY_16 for i, one in enumerate(kind) if one.startswith("*")}
        elif kind.startswith("*") or name == "numel":
            aligned[(place,)] = BY_16
    source = ASTSource(
        fn=kernel,
        signature=signature,
        constexprs={(names.index(name),): value for name, value in constants.items()},
        attrs=aligned,
    )
    target = GPUTarget("cuda", capability, 32)
    assembly = triton.compile(
        source, target=target, options={"num_warps": NUM_WARPS, **options}
    ).asm
    lines = (line.split() for line in assembly["ptx"].splitlines())
    words = {word for line in lines for word in line[:2] if re.fullmatch(r"[a-z]\w*(\.\w+)+", word)}
    pointers = re.findall(r"tt\.addptr .* : (tensor<[^ ]*), (tensor<\S*>)", assembly["ttir"])
    return {"instructions": sorted(words), "offsets": sorted({offset for _, offset in pointers})}


def main() -> None:
    """Print all."""
    block = {"BLOCK": BLOCK.value}
    state = dict.fromkeys(("main_at", "exp_avg_at", "exp_avg_sq_at", "grad_at"), "*fp32")
    scales = dict.fromkeys(("inv_scale_at", "clip_at"), "*fp32")
    numbers = ("kept", "added", "new1", "beta2", "new2", "root_of_bias2", "eps", "step_size")
    exact = {"enable_fp_fusion": False}
    found = {}
    for capability in CAPABILITIES:
        found[f"sum_parts {capability}"] = compiled(
            sum_parts_kernel,
            capability,
            {
                "out": "*fp32",
                "parts": ("*bf16", "*fp16", "*fp32"),
                "weights": ("fp32",) * 3,
                "numel": "i64",
            },
            {"ADD": False, **block},
            **exact,
        )
        found[f"adamw_shard {capability}"] = compiled(
            adamw_shard_kernel,
            capability,
            state | scales | dict.fromkeys(numbers, "fp32") | {"copy_at": "*bf16", "numel": "i64"},
            {"IS_ADDED": True, "IS_MOSTLY_NEW": False, "HAS_COPY": True, **block},
            **exact,
        )
        found[f"norm_and_flag {capability}"] = compiled(
            norm_and_flag_kernel,
            capability,
            {"shard": "*fp32", "numel": "i64", "turns": "i32", "sums": "*fp64", "counts": "*fp64"},
            block,
        )
        found[f"pieces {capability}"] = compiled(
            copy_pieces_kernel,
            capability,
            {"target": "*bf16", "source": "*fp32", "blocks": "*i64"},
            {"TARGET_COLUMN": 0, "IS_ALIGNED": True, "ALIGN": ALIGN.value, **block},
        )
    print(json.dumps(found, indent=2))


if __name__ == "__main__":
    main()
