"""The blocks of docs/tutorial.md run as they are printed, in their order and in one directory.

Its shell blocks are run by bash, with the real torchrun and the real sbatch of a Slurm whose nodes
are this machine (`tests/slurm`); where there can be none, lines with sbatch are left out. Only what
the page tells its reader to edit is edited: settings.sh. Of what takes long and is proved elsewhere
there is less: searches are short, and of the processes that discover and of those that train one
alone is started as the reader's is, the others are forked (`tests/slurm/forked_ranks`); one that
measures layers is started in `test_measure`.
"""

import contextlib
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.megatron.launch import REPOSITORY
from tests.megatron.stock_log import iterations
from tests.slurm import forked_ranks
from tests.slurm.local_slurm import LocalSlurm, local_slurm, why_not
from zorse_megatron.inputs.cluster_yaml import load_cluster
from zorse_megatron.inputs.profile import load_profile
from zorse_megatron.plan.plan_file import load_plan

BLOCK = re.compile(r"^```(yaml)?\n(.*?)^```", re.DOTALL | re.MULTILINE)
SBATCH = re.compile(r"^(\w+=\$\()?sbatch .*\n", re.MULTILINE)
# What Megatron and this package say, once each, however many ranks there are.
SAID_ONCE = re.compile(r"^.*/megatron/.*UserWarning: .*not installed.*$|^zorse: .*$", re.MULTILINE)
MARK = "ZORSE_TEST_JOB"
ASSIGNMENT = re.compile(r'^[A-Z]+=".*"$', re.MULTILINE)
FILES = ("cluster.yaml", "workstation.yaml")
PARTITIONS = {"new": {"new": 2}, "old": {"old": 2}}
NODES = [("new", "A6000", "A6000"), ("old", "V100-16", "V100-16")]
KINDS = {"A6000", "V100-16"}
TIMEOUT_S = 400.0
# The reader's training command, the least that there is to measure, all nodes, however fast they
# seem to be where all are this machine, and where GPUs are.
SETTINGS = """
TRAINING=({tiny} --save trained --save-interval 5)
DISCOVER=(--largest-mb 1 --time-limit 0.1)
MEASURE=(--max-micro-batch 1 --time-limit 0.5)
PLANNING=(--use-all)
LAUNCH=(--partition A6000=new --partition V100-16=old)
"""
# A node of Slurm says what it stands for.
PYTHON = f"""#!/bin/bash
case ${{SLURMD_NODENAME-}} in
    new) export ZORSE_GPU_KIND=A6000 ;;
    old) export ZORSE_GPU_KIND=V100-16 ;;
esac
if [[ "$*" == "-m zorse_megatron plan "* ]]; then
    exec {sys.executable} -m tests.megatron.short_search_entry "${{@:3}}"
fi
process=${{SLURM_PROCID:-${{RANK:-0}}}}
case "${{SLURM_PROCID:+srun}} $*" in
    "srun -m zorse_megatron."* | "srun -m zorse_megatron profile measure "*) process=any ;;
esac
if [[ "$*" == *"-m zorse_megatron"* && $process != 0 ]]; then
    exec {sys.executable} -S -E {forked_ranks.__file__} "$@"
fi
exec {sys.executable} "$@"
"""


def blocks() -> list[tuple[str, str]]:
    """(yaml or nothing, text) of every block of the page."""
    return BLOCK.findall((REPOSITORY / "docs" / "tutorial.md").read_text(encoding="utf-8"))


@contextmanager
def slurm_or_none(directory: Path) -> Iterator[LocalSlurm | None]:
    if why_not() is not None:
        yield None
        return
    with local_slurm(directory, PARTITIONS) as running:
        yield running


def write_programs(directory: Path) -> None:
    """`python`, `zorse` and `torchrun` of this tree and this environment."""
    directory.mkdir()
    module = {"zorse": "zorse_megatron", "torchrun": "torch.distributed.run"}
    texts = {name: f'#!/bin/bash\nexec python -m {m} "$@"\n' for name, m in module.items()}
    for name, text in {"python": PYTHON, **texts}.items():
        (directory / name).write_text(text)
        (directory / name).chmod(0o755)


def environment_of(slurm: LocalSlurm | None, programs: Path) -> dict[str, str]:
    environment = dict(os.environ if slurm is None else slurm.environment)
    return environment | {
        "PATH": os.pathsep.join((str(programs), environment["PATH"])),
        "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
        "PYTHON_EXEC": str(programs / "python"),  # with which torchrun starts ranks
        "OMP_NUM_THREADS": "1",
        "MASTER_ADDR": "127.0.0.1",  # where all nodes are
    }


def run_block(text: str, directory: Path, environment: Mapping[str, str]) -> None:
    """Run it to its end, of which it must leave no process."""
    done = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", text],
        cwd=directory,
        env={**environment, MARK: str(directory)},
        check=False,
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
    )
    assert done.returncode == 0, f"{text}\n{done.stdout}{done.stderr}"
    assert "sbatch" in text or not left_over(str(directory))
    (directory / "said.txt").write_text(done.stdout + done.stderr)


def wait_for_jobs(slurm: LocalSlurm, directory: Path) -> None:
    """Until every job that was submitted has ended; all must have ended well."""
    for about in slurm.run("scontrol", "--oneliner", "show", "job").splitlines():
        (number,) = re.findall(r"^JobId=(\d+)", about)
        ended = slurm.wait(number, timeout_s=TIMEOUT_S)
        logs = "".join(path.read_text() for path in directory.glob(f"zorse*-{number}.txt"))
        assert "JobState=COMPLETED" in ended, f"{ended}\n{logs}"


def assert_trained(said: str, checkpoints: Path) -> None:
    """All iterations, each evaluation, and both checkpoints; the loss falls."""
    log = iterations(said)
    assert [line.iteration for line in log] == list(range(1, 11))
    first, last = log[0].lm_loss, log[-1].lm_loss
    assert first is not None and last is not None and last < first
    # Every fifth; then the last one again, on what is left for validation and for tests.
    assert said.count("validation loss at iteration ") == 4
    assert {path.name for path in checkpoints.glob("iter_*")} == {"iter_0000005", "iter_0000010"}


def assert_says_each_thing_once(said: str) -> None:
    lines = SAID_ONCE.findall(said)
    assert len(lines) > 5
    assert sorted(set(lines)) == sorted(lines)


def left_over(job: str) -> list[int]:
    """The processes that are still there of what was started with this mark."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if f"{MARK}={job}".encode() in (process / "environ").read_bytes().split(b"\0"):
                found.append(int(process.name))
    return found


@pytest.mark.timeout(1200)
def test_the_tutorial_runs_as_printed(tmp_path: Path) -> None:
    for job in (REPOSITORY / "scripts" / "slurm").iterdir():
        shutil.copy(job, tmp_path)
    write_programs(programs := tmp_path / "bin")
    files = iter(FILES)
    variables, submitted = "", 0
    with slurm_or_none(tmp_path) as slurm, forked_ranks.forking_server() as forks:
        environment = environment_of(slurm, programs) | forks
        for kind, text in blocks():
            if kind:
                (tmp_path / next(files)).write_text(text)
                continue
            if assigned := "\n".join(ASSIGNMENT.findall(text)):
                variables += assigned + "\n"
                settings = SETTINGS.format(tiny=re.findall(r'^TINY="(.*)"$', text, re.M)[0])
                with (tmp_path / "settings.sh").open("a") as file:
                    file.write(settings)
                continue
            shell = variables + (SBATCH.sub("", text) if slurm is None else text)
            run_block(shell, tmp_path, environment)
            if slurm is not None and (found := SBATCH.findall(text)):
                submitted += len(found)
                wait_for_jobs(slurm, tmp_path)
                nodes = load_cluster(tmp_path / "cluster.yaml").nodes
                assert [(node.name, *node.gpu_kinds) for node in nodes] == NODES
    assert next(files, None) is None
    plan = load_plan(tmp_path / "plan.json")
    layers = dict.fromkeys(KINDS, 0)
    for chunk in plan.chunks:
        kind = plan.cluster.gpu_kinds[plan.groups[chunk.group].ranks[0]]
        layers[kind] += chunk.layers[1] - chunk.layers[0]
    assert layers["A6000"] > layers["V100-16"] > 0
    if slurm is not None:
        assert submitted == 3
        assert load_plan(tmp_path / "tiny.json").world_size == 4
        assert {each.gpu_kind for each in load_profile(tmp_path / "profile.json").times} == KINDS
        (log,) = (path for path in tmp_path.glob("zorse-[0-9]*.txt"))
        assert_trained(log.read_text(), tmp_path / "tiny")
    said = (tmp_path / "said.txt").read_text()
    assert_trained(said, tmp_path / "trained-here")
    assert_says_each_thing_once(said)
    assert "zorse: no GPU found: Megatron runs on CPU over gloo\n" in said
