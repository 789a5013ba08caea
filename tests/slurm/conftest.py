"""A Slurm for each test, with three emulated nodes, and the command that is trained there."""

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.megatron.comparison import MODEL_FLAGS
from tests.megatron.conftest import corpus, megatron_server
from tests.megatron.small_run import TOKENIZER_FLAGS
from tests.slurm import forked_ranks
from tests.slurm.local_slurm import LocalSlurm, local_slurm, why_not
from tests.slurm.trained_job import SAVED_EVERY, STEPS
from zorse_megatron.launch.training_command import MODULE

__all__ = ["corpus", "megatron_server"]

# Partition -> node -> GPUs.
PARTITIONS = {"new": {"new0": 2, "new1": 1}, "old": {"old0": 1}}
# Each node says what it stands for; ranks have one thread, as in the run to compare with. Python
# starts what it starts by this script, too, and that has ranks forked where a test wants it so.
PYTHON = f"""\
#!/bin/bash
export OMP_NUM_THREADS=1 PYTHONPATH=SITE:{os.pathsep.join(filter(None, sys.path))}
case $SLURMD_NODENAME in
    new*) export ZORSE_GPU_KIND=L4 ;;
    old*) export ZORSE_GPU_KIND=T4 ;;
esac
if [[ ${{{forked_ranks.VARIABLE}-}} ]] &&
    [[ "$1 $2" == "-m {MODULE}" || "${{RANK-}} $1 $2" == [1-9]" -u "*.py ]]; then
    exec {sys.executable} -S -E {forked_ranks.__file__} "$@"
fi
exec {sys.executable} "$@"
"""


@pytest.fixture
def slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[LocalSlurm]:
    """Commands run in the directory of the job."""
    monkeypatch.chdir(tmp_path)
    reason = why_not()
    if reason is not None:
        pytest.skip(reason)
    python, site = tmp_path / "python", tmp_path / "site"
    site.mkdir()
    (site / "sitecustomize.py").write_text(f"import sys\nsys.executable = {str(python)!r}\n")
    python.write_text(PYTHON.replace("SITE", str(site)))
    python.chmod(0o755)
    with local_slurm(tmp_path, PARTITIONS) as running:
        yield running


@pytest.fixture
def training(corpus: Path) -> tuple[str, ...]:
    """What follows `--`: the loader's processes are Megatron's default, and so is a validation."""
    return (
        *(*MODEL_FLAGS, *TOKENIZER_FLAGS, "--train-iters", str(STEPS)),
        *("--data-path", str(corpus), "--split", "90,5,5"),
        *("--eval-interval", "1000", "--eval-iters", "2"),
        *("--save", "checkpoints", "--save-interval", str(SAVED_EVERY)),
        *("--zorse-metrics", "metrics.jsonl"),
    )
