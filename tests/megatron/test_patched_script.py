"""A script with the patch of patches/: our flags are taken, then the script runs as it was."""

from pathlib import Path

from tests.megatron.launch import run_ranks
from tests.unit.test_patches import apply, original_text

# What is below the patched lines; upstream's script would call pretrain() here.
REST = """
import sys
import megatron.core
print("the script runs", sys.argv[1:], __name__, flush=True)
"""


def test_the_script_runs_once_without_our_flags(tmp_path: Path) -> None:
    script = tmp_path / "pretrain_gpt.py"
    script.write_text(original_text() + REST, encoding="utf-8")
    apply(tmp_path)
    metrics = tmp_path / "metrics.jsonl"
    words = [str(script), "--num-layers", "2", "--zorse-metrics", str(metrics)]
    answer = run_ranks(words, 1, entry="tests.megatron.script_entry", timeout_s=60).check()
    lines = answer.outputs[0].splitlines()
    (line,) = [line for line in lines if line.startswith("the script runs")]
    assert line.startswith("the script runs ['--num-layers', '2'")
    assert "zorse" not in line
    assert line.endswith("__main__")
