"""The commands of docs/tutorial.md run as they are printed, in their order and in one shell.

Replaced are `sbatch` and `srun` alone, where a job needs Slurm and GPUs: the script that is
submitted must be there and be a script. `tests/slurm` submits such jobs to a Slurm of its own.
"""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
BLOCK = re.compile(r"^```(yaml)?\n(.*?)^```", re.DOTALL | re.MULTILINE)
FILES = ("cluster.yaml", "workstation.yaml")
# The last word is the script; `afterok:1234` names a job that only a real Slurm has.
SUBMIT = """#!/bin/sh
for script; do :; done
echo "replaced: $0 $*"
exec bash -n "$script"
"""
TIMEOUT_S = 550
LOSS = re.compile(r"iteration +(\d+)/.* lm loss: (\S+) ")


@pytest.fixture
def shell(tmp_path: Path) -> Path:
    """A directory with the jobs of scripts/slurm, and programs of this interpreter in `bin`."""
    programs = tmp_path / "bin"
    programs.mkdir()
    for name, text in {
        "zorse": f'#!/bin/sh\nexec "{sys.executable}" -m zorse_megatron "$@"\n',
        "torchrun": f'#!/bin/sh\nexec "{sys.executable}" -m torch.distributed.run "$@"\n',
        "sbatch": SUBMIT,
        "srun": SUBMIT,
    }.items():
        (programs / name).write_text(text)
        (programs / name).chmod(0o755)
    for job in (ROOT / "scripts" / "slurm").iterdir():
        shutil.copy(job, tmp_path)
    return tmp_path


def script() -> str:
    """All blocks of the page: files are written, commands are run."""
    text = (ROOT / "docs" / "tutorial.md").read_text(encoding="utf-8")
    files = iter(FILES)
    lines = ["set -eo pipefail"]
    for kind, block in BLOCK.findall(text):
        lines.append(f"cat > {next(files)} <<'END'\n{block}END" if kind else block)
    assert next(files, None) is None
    return "\n".join(lines)


def test_the_tutorial_runs_as_printed(shell: Path) -> None:
    path = f"{shell / 'bin'}{os.pathsep}{os.environ['PATH']}"
    environment = os.environ | {
        "PATH": path,
        "PYTHONPATH": os.pathsep.join((str(ROOT), os.environ.get("PYTHONPATH", ""))),
        "OMP_NUM_THREADS": "1",
        "CUDA_VISIBLE_DEVICES": "",
    }
    done = subprocess.run(
        ["bash", "-c", script()],
        cwd=shell,
        env=environment,
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )
    assert done.returncode == 0, f"{done.stdout[-3000:]}\n{done.stderr[-6000:]}"
    losses = {int(step): float(loss) for step, loss in LOSS.findall(done.stdout)}
    assert max(losses, default=0) == 20
    assert losses[20] < losses[min(losses)]
    assert (shell / "trained-here" / "iter_0000020").is_dir()
    assert done.stdout.count("replaced: ") == 3
