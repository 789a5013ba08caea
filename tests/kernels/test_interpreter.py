"""The tests of this folder again, in Triton's interpreter; and what Triton's compiler makes."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.kernels.memory import DEVICE, IS_INTERPRETED

HERE = Path(__file__).resolve().parent


@pytest.mark.skipif(IS_INTERPRETED, reason="this is that process")
def test_everything_in_the_interpreter() -> None:
    # A process of its own: Triton must see the variable before anything imports it.
    command = [sys.executable, "-m", "pytest", str(HERE), "-k", "triton or interpreter"]
    environment = os.environ | {"TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(
        command, env=environment, cwd=HERE.parents[1], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-2000:]
    assert " passed" in done.stdout


@pytest.mark.skipif(not IS_INTERPRETED, reason="test_everything_in_the_interpreter runs it")
def test_positions_have_64_bits() -> None:
    from tests.kernels.positions import positions
    from zorse_megatron.kernels.on_triton import BLOCK

    size = BLOCK.value
    for block in (0, 2**31 // size - 1, 2**31 // size, 2**32 // size + 1, 2**31 - 1):
        out = torch.zeros(size, dtype=torch.int64, device=DEVICE)
        positions[(1,)](out, block, BLOCK=size)
        assert out.tolist() == list(range(block * size, (block + 1) * size))


@pytest.mark.skipif(IS_INTERPRETED, reason="the interpreter compiles nothing")
def test_compiles_to_what_the_docstrings_promise() -> None:
    command = [sys.executable, "-m", "tests.kernels.compile_main"]
    done = subprocess.run(command, cwd=HERE.parents[1], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    launches = json.loads(done.stdout)
    kernels = ["sum_parts", "adamw_shard", "norm_and_flag"]
    # Of each the elements up to a multiple of 16, then the last one; from V100 to RTX 50.
    expected = [f"{name}_kernel" for name in kernels for _ in range(2)] * 8
    assert {launch["capability"] for launch in launches} == {70, 75, 80, 86, 89, 90, 100, 120}
    # All registers of a multiprocessor, 65,536, are enough for half its threads or more.
    assert all(launch["registers"] <= 64 for launch in launches)
    assert not any(launch["spilled_bytes"] for launch in launches)
    assert [launch["kernel"] for launch in launches] == expected
    for number, launch in enumerate(launches):
        instructions = set(launch["instructions"])
        if number % 2 == 0:
            # 16 bytes at a time, both ways (`norm_and_flag` writes one number per program).
            assert "ld.global.v4.b32" in instructions
            assert "st.global.v4.b32" in instructions or launch["kernel"].startswith("norm")
        # Nothing is fused (but exact squares in fp64), small numbers are not flushed to zero,
        # quotients and roots are correctly rounded.
        assert not [word for word in instructions if word.startswith("fma") and "f64" not in word]
        assert not [word for word in instructions if "ftz" in word or "approx" in word]
        if launch["kernel"] == "adamw_shard_kernel":
            assert {"div.rn.f32", "sqrt.rn.f32", "mul.rn.f32", "add.rn.f32"} <= instructions
        # More than 2^31 elements (`norm_and_flag` has fewer programs, which go round).
        assert launch["offsets"] == ["tensor<2048xi64>"]
        if launch["kernel"] != "norm_and_flag_kernel" and number % 2 == 0:
            assert launch["types"]["numel"] == "i64"
            assert (launch["grid"] - 1) * 2048 < 2**31 + 64 <= launch["grid"] * 2048
