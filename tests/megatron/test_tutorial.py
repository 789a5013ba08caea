"""The commands of docs/tutorial.md run as they are printed, in their order and in one directory.

Replaced are `sbatch`, where a job needs Slurm and GPUs (the script that is submitted must be there
and be a script; `tests/slurm` submits such jobs to a Slurm of its own), and `torchrun`: what it is
given is run as the ranks that it would start (`test_torchrun` starts the real one).
"""

import json
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.megatron.launch import REPOSITORY, MegatronServer
from tests.printed import each_search_once, run_zorse, words_of

BLOCK = re.compile(r"^```(yaml)?\n(.*?)^```", re.DOTALL | re.MULTILINE)
FILES = ("cluster.yaml", "workstation.yaml")
TORCHRUN = f"""#!{sys.executable}
import json, sys
print(json.dumps(sys.argv[1:]))
"""
LOSS = re.compile(r"iteration +(\d+)/.* lm loss: (\S+) ")


def commands(directory: Path) -> Iterator[str]:
    """The lines of all blocks; files are written on the way."""
    text = (REPOSITORY / "docs" / "tutorial.md").read_text(encoding="utf-8")
    files = iter(FILES)
    for kind, block in BLOCK.findall(text):
        if kind:
            (directory / next(files)).write_text(block)
        else:
            yield from block.splitlines()
    assert next(files, None) is None


def started_by(script: str, directory: Path) -> tuple[int, str, list[str]]:
    """What a script gives torchrun: the number of ranks, the module, and its flags."""
    programs = directory / "bin"
    programs.mkdir()
    (programs / "torchrun").write_text(TORCHRUN)
    (programs / "torchrun").chmod(0o755)
    path = f"{programs}:/usr/bin:/bin"
    done = subprocess.run(
        ["bash", script], cwd=directory, env={"PATH": path}, capture_output=True, check=True
    )
    words = json.loads(done.stdout)
    at = words.index("-m")
    assert words[:1] == ["--standalone"] or "localhost" in " ".join(words[:at])
    (ranks,) = (int(found) for found in re.findall(r"nproc-per-node[ =](\d+)", " ".join(words)))
    return ranks, words[at + 1], words[at + 2 :]


def losses_of(output: str) -> dict[int, float]:
    return {int(step): float(loss) for step, loss in LOSS.findall(output)}


def test_the_tutorial_runs_as_printed(
    tmp_path: Path, megatron_server: MegatronServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for job in (REPOSITORY / "scripts" / "slurm").iterdir():
        shutil.copy(job, tmp_path)
    variables: dict[str, str] = {}
    run = []
    with each_search_once():
        for line in commands(tmp_path):
            words = words_of(line, variables)
            run.append(words[0])
            if words[0] == "zorse":
                run_zorse(words)
            elif words[0] == "sbatch":
                subprocess.run(["bash", "-n", words[-1]], check=True)
            elif words[0] == "bash":
                ranks, module, flags = started_by(words[1], tmp_path)
                result = megatron_server.run_ranks(
                    flags, ranks, entry=module, directory=tmp_path, timeout_s=120
                ).check()
            else:
                name, _, value = shlex.split(line)[0].partition("=")
                variables[name] = value
    assert (run.count("sbatch"), run.count("bash"), set(variables)) == (3, 1, {"FLAGS"})
    losses = losses_of("\n".join(result.outputs))
    assert max(losses) == 5
    assert losses[5] < losses[min(losses)]
    assert (tmp_path / "trained-here" / "iter_0000005").is_dir()
