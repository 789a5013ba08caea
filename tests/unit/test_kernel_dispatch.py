"""Triton or plain torch: each reason for plain torch is found, and said once."""

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from zorse_megatron.kernels import dispatch
from zorse_megatron.kernels.kernels import sum_parts_torch

GPU = torch.device("cuda", 0)
CPU = torch.device("cpu")
PROBE = dispatch._probe


@pytest.fixture(autouse=True)
def modern_gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A GPU that Triton serves and a Triton that works, as far as `dispatch` can tell."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "Some GPU")
    monkeypatch.setitem(sys.modules, "triton", SimpleNamespace())
    monkeypatch.setattr(dispatch, "_probe", lambda device: None)
    monkeypatch.delenv("RANK", raising=False)
    dispatch.why_not_triton.cache_clear()
    yield
    dispatch.why_not_triton.cache_clear()


def test_a_gpu_that_triton_serves(capsys: pytest.CaptureFixture[str]) -> None:
    assert dispatch.why_not_triton(GPU) is None
    assert capsys.readouterr().out == "zorse: kernels run in Triton on Some GPU\n"


def test_says_it_once_per_device(capsys: pytest.CaptureFixture[str]) -> None:
    for _ in range(3):
        assert dispatch.pick("sum_parts", CPU, print) is print
    assert capsys.readouterr().out == (
        "zorse: kernels run in plain torch (Triton needs a GPU) on cpu\n"
    )


@pytest.mark.parametrize(("rank", "local", "says"), [("8", "0", True), ("9", "1", False)])
def test_each_node_says_it(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    rank: str,
    local: str,
    says: bool,
) -> None:
    monkeypatch.setenv("RANK", rank)
    monkeypatch.setenv("LOCAL_RANK", local)
    dispatch.why_not_triton(GPU)
    assert bool(capsys.readouterr().out) == says


def test_each_kind_of_a_node_says_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    # A node with two GPUs of one kind and two of another; each asks as the rank of its number.
    names = ["New", "New", "Old", "Old"]
    monkeypatch.setattr(
        torch.cuda,
        "get_device_name",
        lambda device: names[device if isinstance(device, int) else device.index],
    )
    for number in range(4):
        monkeypatch.setenv("RANK", str(4 + number))
        monkeypatch.setenv("LOCAL_RANK", str(number))
        dispatch.why_not_triton(torch.device("cuda", number))
    assert capsys.readouterr().out.splitlines() == [
        "zorse: kernels run in Triton on New",
        "zorse: kernels run in Triton on Old",
    ]


@pytest.mark.parametrize("capability", [(7, 0), (7, 5)])
def test_volta_and_turing(capability: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    assert dispatch.why_not_triton(GPU) is None


def test_an_older_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (6, 1))
    assert dispatch.why_not_triton(GPU) == "compute capability 6.1; Triton serves 7.0 and later"


def test_rocm(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "hip", "6.2")
    assert dispatch.why_not_triton(GPU) == "they have not been tried on ROCm"


def test_no_triton(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setitem(sys.modules, "triton", None)
    assert dispatch.why_not_triton(GPU) == "no module triton"
    said = "zorse: kernels run in plain torch (no module triton) on Some GPU\n"
    assert capsys.readouterr().out == said


def test_a_triton_that_does_not_load(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "triton.py").write_text("raise OSError('libcuda is not here\\nat all')")
    monkeypatch.delitem(sys.modules, "triton")
    monkeypatch.syspath_prepend(tmp_path)
    reason = dispatch.why_not_triton(GPU)
    assert reason == "Triton does not load: OSError: libcuda is not here"


def test_a_triton_that_does_not_work(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(device: torch.device) -> None:
        raise RuntimeError("Failed to find C compiler.\nPlease specify via CC")

    monkeypatch.setattr(dispatch, "_probe", fails)
    reason = dispatch.why_not_triton(GPU)
    assert reason == "Triton does not work: RuntimeError: Failed to find C compiler."


def test_a_triton_that_counts_wrongly(monkeypatch: pytest.MonkeyPatch) -> None:
    kernels = {"sum_parts": sum_parts_torch}
    there = SimpleNamespace(KERNELS=kernels)
    monkeypatch.setitem(sys.modules, "zorse_megatron.kernels.on_triton", there)
    assert PROBE(CPU) is None
    kernels["sum_parts"] = lambda out, *_: out.fill_(7)
    assert PROBE(CPU) == "Triton found 3 + 2 * 4 to be [7.0, 7.0, 7.0]"


@pytest.mark.slow
def test_all_works_where_triton_is_absent() -> None:
    script = (
        "import sys; sys.modules['triton'] = None\n"
        "import torch\n"
        "from zorse_megatron.kernels.kernels import sum_parts\n"
        "out = torch.zeros(3); sum_parts(out, [torch.ones(3)] * 2); print(out.tolist())"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    )
    assert done.stdout.splitlines() == [
        "zorse: kernels run in plain torch (Triton needs a GPU) on cpu",
        "[2.0, 2.0, 2.0]",
    ]
