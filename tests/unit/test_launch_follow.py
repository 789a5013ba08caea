"""`zorse launch --follow`: another process beside rank 0, that ends with the job."""

import os
import shutil
import subprocess
import time
from pathlib import Path

import pytest

from tests.unit.cli_samples import FLAGS, runner_in

STATUS = ("--zorse-status", "my status")
# In place of Python: notes what it is given, and how it ends.
PYTHON = """\
#!/bin/bash
printf '%s\\n' "$@" >followed
trap 'echo ended >>followed; exit 0' TERM
echo ready >>"$PWD/ready"
for _ in {1..600}; do sleep 0.05; done
"""
RANKS = """\
#!/bin/bash
until [[ -e ready ]]; do sleep 0.05; done
exit 3
"""


def run_script(text: str, directory: Path) -> int:
    for name, lines in (("python", PYTHON), ("srun", RANKS), ("torchrun", RANKS)):
        (directory / name).write_text(lines)
        (directory / name).chmod(0o755)
    (directory / "scontrol").write_text("#!/bin/bash\nexit 1\n")
    (directory / "scontrol").chmod(0o755)
    done = subprocess.run(
        ["bash", "-c", text],
        cwd=directory,
        env={"PATH": f"{directory}:{os.environ['PATH']}", "SLURM_JOB_ID": "7"},
        check=False,
        timeout=60,
    )
    return done.returncode


def when_ended(path: Path) -> list[str]:
    """Its lines; it is told to end, and nobody waits for it."""
    for _ in range(200):
        if path.read_text().endswith("ended\n"):
            break
        time.sleep(0.05)
    return path.read_text().splitlines()


@pytest.mark.parametrize("saves", [True, False])
@pytest.mark.parametrize("where", ["--torchrun", "--slurm"])
def test_runs_beside_rank_0_and_ends_with_it(
    where: str, saves: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = runner_in(tmp_path, monkeypatch)
    training = [*FLAGS, *STATUS, *(("--save", "d") if saves else ())]
    words = ["launch", "plan.json", "--cluster", "cluster.yaml", "--follow", "--gain 0.1"]
    to = ["--slurm", "train.sh"] if where == "--slurm" else ["--torchrun"]
    result = run(*words, *to, "--", "pretrain_gpt.py", *training)
    assert result.exit_code == 0, result.output
    if where == "--slurm":
        text = (tmp_path / "train.sh").read_text()
        if shutil.which("shellcheck") is not None:
            subprocess.run(["shellcheck", "train.sh"], cwd=tmp_path, check=True)
    else:
        text, second = (
            line for line in result.stdout.splitlines() if line and not line.startswith("#")
        )
        assert "follow" not in second
    assert run_script(text, tmp_path) == 3
    given = when_ended(tmp_path / "followed")
    assert given[:6] == ["-m", "zorse_megatron", "follow", "my status", "--cluster", "cluster.yaml"]
    assert given[6:9] == ["--gain", "0.1", "--"]
    assert given[9:] == ["pretrain_gpt.py", *training, "ended"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--follow", "", "--", *FLAGS], "found no --zorse-status in the training command"),
        (["--follow", "--once", "--", *FLAGS, *STATUS], "found --once in it"),
        (["--follow", "'", "--", *FLAGS, *STATUS], "No closing quotation"),
        (["--follow", "--gains 0.1", "--", *FLAGS, *STATUS], "No such option"),
        (["--follow", "", "--elastic", "--", *FLAGS, *STATUS, "--save", "d"], "it with --elastic"),
    ],
)
def test_what_cannot_be_is_refused(
    words: list[str], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = runner_in(tmp_path, monkeypatch)
    result = run("launch", "plan.json", "--cluster", "cluster.yaml", "--slurm", "x.sh", *words)
    assert result.exit_code == 1
    assert message in " ".join(result.output.split())
    assert not (tmp_path / "x.sh").exists()
