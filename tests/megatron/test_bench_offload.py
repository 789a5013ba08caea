"""The GPU benchmark's dry run: everything runs end to end on the CPU, and the arithmetic holds."""

import importlib
import json
from pathlib import Path
from types import ModuleType

import pytest

from tests.megatron.launch import REPOSITORY, run_ranks
from tests.megatron.small_run import TOKENIZER_FLAGS
from zorse_megatron.demo.jobs import DemoJob


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(REPOSITORY / "scripts")
    return importlib.import_module("bench_offload_gpu")


def test_dry_run(
    script: ModuleType, corpus_prefix: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The script's own runs, but for where ranks and text come from; the demo starts its own."""

    def run_job(job: DemoJob, _progress: object) -> None:
        run_ranks(job.arguments, job.num_ranks, timeout_s=120).check()

    def tokens(options: object, work: object) -> list[object]:
        return ["--data-path", corpus_prefix, *TOKENIZER_FLAGS]

    monkeypatch.setattr(script, "run_job", run_job)
    monkeypatch.setattr(script, "tokens", tokens)
    result_path = tmp_path / "offload.json"
    assert script.main(["--dry-run", "--json", str(result_path)]) == 0
    result = json.loads(result_path.read_text())
    # 6 layers of width 64, embedding, positions, head, final norm; 4 + 4 + 8 bytes a parameter.
    count = 6 * (12 * 64**2 + 13 * 64) + (256 + 64 + 256 + 2) * 64
    assert result["state_bytes"] == 16 * count
    assert result["peak_bytes"] < result["budget_bytes"] < result["state_bytes"]
    assert result["peak_bytes"] == pytest.approx(result["predicted_peak_bytes"], rel=0.05)
    assert result["peak_error"] == result["peak_bytes"] / result["predicted_peak_bytes"] - 1
    assert result["slowdown"] == result["offloaded_s"] / result["resident_s"] - 1
    assert len(result["losses"]) == 4
    assert result["reached"]["trains"] and result["reached"]["peak"]


def test_a_budget_that_would_show_nothing(
    script: ModuleType, capsys: pytest.CaptureFixture[str]
) -> None:
    assert script.main(["--budget", "1000"]) == 1
    assert "found 1,000,000,000,000 bytes" in capsys.readouterr().err
