"""The benchmark's dry run; and what it compares does the same work."""

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.kernels.memory import IS_INTERPRETED

SCRIPTS = Path(__file__).resolve().parents[2] / "scripts"
pytestmark = pytest.mark.skipif(IS_INTERPRETED, reason="needs no Triton")


def test_the_dry_run_prints_json() -> None:
    command = [sys.executable, SCRIPTS / "bench_kernels.py", "--dry", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout)
    assert found["dry"] and found["in_plain_torch_because"] == "Triton needs a GPU"
    kernels = ["sum_parts", "adamw_shard", "norm_and_flag", "pack"]
    assert [row["kernel"] for row in found["rows"]] == kernels
    for row in found["rows"]:
        assert set(row["reached"]) == {"share_of_copy", "over_eager", "over_compiled"}
        assert min(row["eager_s"].values()) / row["kernel_s"] == pytest.approx(row["over_eager"])
        # As many bytes as asked for, up to a unit of each piece.
        assert abs(row["num_bytes"] / 400_000 - 1) < 0.2


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_says_so() -> None:
    command = [sys.executable, SCRIPTS / "bench_kernels.py"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 2 and "found no GPU; expected one, or --dry" in done.stderr


def test_the_alternatives_agree_with_the_kernels() -> None:
    spec = importlib.util.spec_from_file_location("kernel_cases", SCRIPTS / "kernel_cases.py")
    assert spec is not None and spec.loader is not None
    cases = importlib.util.module_from_spec(spec)
    sys.modules["kernel_cases"] = cases  # dataclasses look their module up
    spec.loader.exec_module(cases)
    cpu = torch.device("cpu")
    for make in cases.CASES:
        names = list(make(40_000, cpu).plain)
        found = {}
        for name in [None, *names]:
            torch.manual_seed(0)
            case = make(40_000, cpu)
            returned = (case.kernel if name is None else case.plain[name])()
            found[name] = case.written or (returned[0].float(),)
        assert names
        for name in names:
            for ours, theirs in zip(found[None], found[name], strict=True):
                torch.testing.assert_close(theirs, ours)
