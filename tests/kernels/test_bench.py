"""The benchmark's dry run; and what it compares does the same work."""

import json
import sys
from importlib import import_module
from pathlib import Path
from types import ModuleType

import pytest
import torch

from tests.kernels.memory import IS_INTERPRETED

SCRIPTS = Path(__file__).resolve().parents[2] / "scripts"
pytestmark = pytest.mark.skipif(IS_INTERPRETED, reason="needs no Triton")


@pytest.fixture(autouse=True)
def scripts(monkeypatch: pytest.MonkeyPatch) -> None:
    """A script finds what lies beside it; as in a process of its own, which would import torch."""
    monkeypatch.syspath_prepend(str(SCRIPTS))


def bench(monkeypatch: pytest.MonkeyPatch, *words: str, name: str = "bench_kernels") -> ModuleType:
    """The script, as if it had been started with these words."""
    monkeypatch.setattr(sys, "argv", [f"{name}.py", *words])
    return import_module(name)


def test_the_dry_run_prints_json(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    status = bench(monkeypatch, "--dry", "--json").main()
    said = capsys.readouterr()
    assert status == 0, said.err
    found = json.loads(said.out)
    assert found["dry"] and found["in_plain_torch_because"] == "Triton needs a GPU"
    kernels = ["sum_parts", "adamw_shard", "norm_and_flag"]
    assert [row["kernel"] for row in found["rows"]] == kernels
    for row in found["rows"]:
        assert set(row["reached"]) == {"share_of_copy", "over_eager", "over_compiled"}
        assert min(row["eager_s"].values()) / row["kernel_s"] == pytest.approx(row["over_eager"])
        # As many bytes as asked for, up to a unit of each piece.
        assert abs(row["num_bytes"] / 400_000 - 1) < 0.2


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_says_so(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        bench(monkeypatch).main()
    assert ended.value.code == 2
    assert "found no GPU; expected one, or --dry" in capsys.readouterr().err


def test_the_alternatives_agree_with_the_kernels() -> None:
    cases = import_module("zorse_megatron.kernels.bench_cases")
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


def test_the_dry_run_of_grouped_products(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    grouped = bench(monkeypatch, "--dry", name="bench_grouped_gemm")
    monkeypatch.setattr(grouped, "MODELS", dict(list(grouped.MODELS.items())[:1]))
    assert grouped.main() == 0
    said = capsys.readouterr().out
    for model in grouped.MODELS:
        for way in ("picked", "loop", "torch grouped_mm"):
            assert f"{model + ' fc2':24} {way:18} forward" in said
